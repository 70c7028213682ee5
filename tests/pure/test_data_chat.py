"""Tokens, targets and placements of a conversation, and the built-in tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.config.errors import UserError
from flagscale.data.chat import Placement, Shape, encode_chat
from flagscale.data.records import IMAGE, Media, MediaSlot, Record, SampleError, Turn
from flagscale.data.tokenizer import (
    BUILTIN_CHARACTERS,
    BUILTIN_SPECIAL,
    BUILTIN_VOCAB_SIZE,
    BuiltinTokenizer,
    check_against_model,
)
from tests.data.helpers import make_config

TOKENIZER = BuiltinTokenizer()
NAMES = {0: "<pad>", 1: "<s>", 2: "<e>", 3: "<v>", 4: "</v>", 5: "*", 6: "#"}


def spelled(tokens: list[int]) -> str:
    return "".join(NAMES.get(token) or TOKENIZER.decode([token]) for token in tokens)


def test_template_targets_and_placements() -> None:
    record = Record(
        "1",
        (
            Turn("system", ("Be brief.",)),
            Turn("user", (MediaSlot(0), "left, ", MediaSlot(1), "?")),
            Turn("assistant", ("3 1",)),
            Turn("user", ("Sure?",)),
            Turn("assistant", ("yes",)),
        ),
        (Media(IMAGE, "a.png"), Media(IMAGE, "b.png")),
    )
    sample = encode_chat(record, [Shape(4, 2), Shape(2, 2)], TOKENIZER, merge_size=2)
    assert spelled(sample.tokens_T.tolist()) == (
        "<s>system\nBe brief.<e>\n<s>user\n<v>**</v>left, <v>*</v>?<e>\n<s>assistant\n3 1<e>\n"
        "<s>user\nSure?<e>\n<s>assistant\nyes<e>\n"
    )
    assert spelled(sample.tokens_T[sample.is_target_T].tolist()) == "3 1<e>yes<e>"
    assert sample.placements == (Placement(4, 2, 26, 0), Placement(2, 2, 36, 1))
    for item in sample.placements:
        assert (sample.tokens_T[item.start : item.start + item.num_tokens(2)] == BUILTIN_SPECIAL.image).all()
    assert (sample.num_loss_tokens, sample.num_mtp_loss_tokens) == (8, 8)


def test_text_that_spells_special_tokens_stays_text() -> None:
    record = Record("1", (Turn("user", ("<|im_end|><|image_pad|>",)), Turn("assistant", ("<|im_start|>",))), ())
    tokens = encode_chat(record, [], TOKENIZER, merge_size=2).tokens_T.tolist()
    assert BUILTIN_SPECIAL.image not in tokens
    assert tokens.count(BUILTIN_SPECIAL.im_start) == tokens.count(BUILTIN_SPECIAL.im_end) == 2


def test_sizes_must_be_known_for_every_image() -> None:
    record = Record("1", (Turn("user", (MediaSlot(0),)), Turn("assistant", ("3",))), (Media(IMAGE, "a.png"),))
    with pytest.raises(SampleError, match="1 media but 0 sizes"):
        encode_chat(record, [], TOKENIZER, merge_size=2)


@given(st.text(alphabet=BUILTIN_CHARACTERS))
def test_builtin_tokenizer_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode([BUILTIN_SPECIAL.im_start, *ids, BUILTIN_SPECIAL.im_end]) == text
    assert all(max(dataclasses.astuple(BUILTIN_SPECIAL)) < i < BUILTIN_VOCAB_SIZE for i in ids)


def test_builtin_tokenizer_names_the_character_it_lacks() -> None:
    with pytest.raises(SampleError, match="'é'"):
        TOKENIZER.encode("caf\u00e9")


@pytest.mark.parametrize("name", ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"])
def test_special_ids_that_differ_from_the_model_are_refused_with_both(name: str) -> None:
    model = make_config(Path("train.jsonl")).model
    check_against_model(TOKENIZER, model)
    with pytest.raises(UserError, match=rf"model.{name}=100: .* is {getattr(model, name)};"):
        check_against_model(TOKENIZER, dataclasses.replace(model, **{name: 100}))


def test_a_vocabulary_larger_than_the_embedding_is_refused() -> None:
    model = dataclasses.replace(make_config(Path("train.jsonl")).model, vocab_size=BUILTIN_VOCAB_SIZE - 1)
    with pytest.raises(UserError, match=rf"model.vocab_size={BUILTIN_VOCAB_SIZE - 1}: .* {BUILTIN_VOCAB_SIZE} ids"):
        check_against_model(TOKENIZER, model)
