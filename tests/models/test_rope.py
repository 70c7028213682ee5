"""Interleaved mRoPE: cosines and sines are transformers' own, also where time, height and width differ."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.rope import InterleavedMRope
from tests.models.tiny import hf_config, tiny_model

MODELS = {
    "released": tiny_model(kv_channels=256, rotary_percent=0.25, mrope_section=[11, 11, 10]),
    "tiny": tiny_model(),
}
POSITION = st.integers(0, 262_143)


def rope_of(model: ModelConfig) -> InterleavedMRope:
    return InterleavedMRope(model.kv_channels, model.rotary_percent, model.rotary_base, list(model.mrope_section))


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=50)
@given(places=st.lists(st.tuples(POSITION, POSITION, POSITION), min_size=2, max_size=12))
def test_cosines_and_sines_equal_the_library(name: str, places: list[tuple[int, int, int]]) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    model = MODELS[name]
    position_ids_3BS = torch.tensor(places[: len(places) // 2 * 2]).view(2, -1, 3).permute(2, 0, 1)
    angles_SBR = rope_of(model)(position_ids_3BS)[:, :, 0]
    cos_BSR, sin_BSR = Qwen3_5TextRotaryEmbedding(hf_config(model).text_config)(torch.zeros(1), position_ids_3BS)
    torch.testing.assert_close(angles_SBR.cos().transpose(0, 1), cos_BSR, rtol=0, atol=1e-6)
    torch.testing.assert_close(angles_SBR.sin().transpose(0, 1), sin_BSR, rtol=0, atol=1e-6)


def test_axes_take_turns_over_the_frequencies() -> None:
    """Of 32, height has 1, 4, .. 31 and width 2, 5, .. 29."""
    axes = rope_of(MODELS["released"]).axis_F.tolist()
    assert [n for n, axis in enumerate(axes) if axis == 1] == list(range(1, 32, 3))
    assert [n for n, axis in enumerate(axes) if axis == 2] == list(range(2, 30, 3))


def test_chunks_instead_of_turns_are_seen() -> None:
    """Negative control: with the axes in contiguous chunks text is the same, images are not."""
    model = MODELS["released"]
    right, wrong = rope_of(model), rope_of(model)
    wrong.axis_F = torch.arange(3).repeat_interleave(torch.tensor(model.mrope_section))
    text = torch.arange(5).expand(3, 1, 5)
    assert torch.equal(right(text), wrong(text))
    image = torch.stack((torch.full((1, 4), 7), torch.arange(4)[None], torch.arange(4)[None].flip(1)))
    assert not torch.allclose(right(image).cos(), wrong(image).cos(), atol=1e-3)
