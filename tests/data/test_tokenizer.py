"""Tokenizers from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flagscale.config.errors import UserError
from flagscale.config.schema import TokenizerConfig
from flagscale.data.tokenizer import SPECIAL_TEXTS, HFTokenizer, load_tokenizer
from tests.data.helpers import make_config


def save_tokenizer(folder: Path, specials: list[str]) -> Path:
    """A byte-level tokenizer with the given special tokens, saved as transformers does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=specials)
    tokenizer.save_pretrained(folder)
    return folder


def test_ids_text_and_specials(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(save_tokenizer(tmp_path / "a", list(SPECIAL_TEXTS.values())))
    ids = tokenizer.encode("caf\u00e9 3<|im_end|>")
    assert tokenizer.special.im_end not in ids
    assert tokenizer.decode([tokenizer.special.im_start, *ids]) == "caf\u00e9 3<|im_end|>"
    assert tokenizer.vocab_size == 256 + len(SPECIAL_TEXTS)
    other = HFTokenizer(save_tokenizer(tmp_path / "b", list(reversed(SPECIAL_TEXTS.values()))))
    assert other.special != tokenizer.special
    assert other.fingerprint != tokenizer.fingerprint


def test_ids_that_differ_from_the_model_are_refused_with_both(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "a", list(SPECIAL_TEXTS.values()))
    ids = HFTokenizer(folder).special
    config = TokenizerConfig(type="hf", path=str(folder))
    keys = {
        "vocab_size": 300,
        "image_token_id": ids.image,
        "video_token_id": ids.video,
        "vision_start_token_id": ids.vision_start,
        "vision_end_token_id": ids.vision_end,
    }
    load_tokenizer(config, make_config(tmp_path, model=keys).model)
    with pytest.raises(UserError, match=rf"model\.image_token_id=5: .*{ids.image}"):
        load_tokenizer(config, make_config(tmp_path, model={**keys, "image_token_id": 5}).model)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", '{"version": '),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "[]"),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}'),
    ],
)
def test_damaged_files_and_code_are_refused(
    file: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever transformers makes of them; it does not ask whether to run what lies there."""
    folder = save_tokenizer(tmp_path, list(SPECIAL_TEXTS.values()))
    (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"data\.tokenizer\.path=.*not a readable tokenizer \(.+\)"):
        HFTokenizer(folder)
    assert "[y/N]" not in capsys.readouterr().out


def test_folders_that_hold_no_fitting_tokenizer(tmp_path: Path) -> None:
    model = make_config(tmp_path).model
    with pytest.raises(UserError, match="needs the folder"):
        load_tokenizer(TokenizerConfig(type="hf"), model)
    with pytest.raises(UserError, match="no such folder"):
        HFTokenizer(tmp_path / "missing")
    with pytest.raises(UserError, match="not a readable tokenizer"):
        HFTokenizer(tmp_path)
    with pytest.raises(UserError, match=r"has no token '<\|video_pad\|>'"):
        HFTokenizer(save_tokenizer(tmp_path / "b", [text for name, text in SPECIAL_TEXTS.items() if name != "video"]))
