"""Analytic FLOPs against those that PyTorch counts in transformers' own small model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from flagscale.config.schema import ModelConfig
from flagscale.plan.flops import (
    GDN_CHUNK,
    language_flops,
    mtp_flops,
    utilisation,
    vision_item_flops,
    vision_item_training_flops,
)
from flagscale.plan.layout import LANGUAGE, VISION
from flagscale.plan.params import attention_layers, parameter_counts
from tests.dist.harness import build_state, make_plan
from tests.dist.pool import run_ranks

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=32,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    vocab_size=512,
    rotary_percent=0.5,
    mrope_section=[3, 3, 2],
    mtp_num_layers=0,
    vision_num_layers=2,
    vision_hidden_size=64,
    vision_ffn_hidden_size=128,
    vision_num_attention_heads=4,
    vision_num_position_embeddings=256,
)
TOKENS = 512


@pytest.fixture(scope="module")
def reference() -> Qwen3_5ForConditionalGeneration:
    """transformers' model of the same sizes."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5}
    text = {
        "hidden_size": MODEL.hidden_size,
        "num_hidden_layers": MODEL.num_layers,
        "intermediate_size": MODEL.ffn_hidden_size,
        "num_attention_heads": MODEL.num_attention_heads,
        "num_key_value_heads": MODEL.num_query_groups,
        "head_dim": MODEL.kv_channels,
        "linear_num_key_heads": MODEL.linear_num_key_heads,
        "linear_num_value_heads": MODEL.linear_num_value_heads,
        "linear_key_head_dim": MODEL.linear_key_head_dim,
        "linear_value_head_dim": MODEL.linear_value_head_dim,
        "vocab_size": MODEL.vocab_size,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": MODEL.vision_num_layers, "hidden_size": MODEL.vision_hidden_size,
        "intermediate_size": MODEL.vision_ffn_hidden_size, "num_heads": MODEL.vision_num_attention_heads,
        "out_hidden_size": MODEL.hidden_size, "num_position_embeddings": MODEL.vision_num_position_embeddings,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    return Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager")


def test_parameters_are_exact(reference: Qwen3_5ForConditionalGeneration) -> None:
    assert sum(parameter.numel() for parameter in reference.parameters()) == sum(parameter_counts(MODEL).values())


def test_language_flops(reference: Qwen3_5ForConditionalGeneration) -> None:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        reference(input_ids=torch.zeros(1, TOKENS, dtype=torch.long))
    # The library computes all of the causal score matrix, and PyTorch does not count its two triangular solves.
    full = attention_layers(MODEL)
    unused_half = full * 4 * MODEL.num_attention_heads * MODEL.kv_channels * TOKENS / 2
    widths = MODEL.linear_key_head_dim + MODEL.linear_value_head_dim
    solves = (MODEL.num_layers - full) * MODEL.linear_num_value_heads * 2 * GDN_CHUNK * widths
    expected = language_flops(MODEL, 1, TOKENS) + TOKENS * (unused_half - solves)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)


def test_vision_flops(reference: Qwen3_5ForConditionalGeneration) -> None:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        reference.model.visual(torch.zeros(24 * 16, 1536), grid_thw=torch.tensor([[1, 24, 16]]))
    assert counter.get_total_flops() == pytest.approx(vision_item_flops(MODEL, 24, 16), rel=1e-3)


def counted_training_flops(model: ModelConfig) -> tuple[float, float]:
    """What PyTorch counts in both passes of this project's language model and encoder. On a rank of the pool."""
    keys = {name: getattr(model, name) for name in ModelConfig.__dataclass_fields__ if name != "optimizer"}
    state = build_state(make_plan(1, **keys | {"seq_length": TOKENS}))
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    pixels = torch.zeros(24 * 16, 1536, requires_grad=True)  # a backward of three products everywhere
    try:
        # The one kernel of attention whose products are counted; it computes all of a causal score matrix.
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as counter:
                lm_BS, mtp_BS = state.raw[LANGUAGE](tokens, tokens.expand(3, 1, -1), tokens)
                (lm_BS.sum() + (0 if mtp_BS is None else mtp_BS.sum())).backward()
            language = counter.get_total_flops()
            with FlopCounterMode(display=False) as counter:
                state.raw[VISION](pixels, [(24, 16)]).sum().backward()
        return language, counter.get_total_flops()
    finally:
        state.topology.destroy()


def test_training_flops_of_vision_and_mtp() -> None:
    """Of this project's own modules, backward included."""
    with_mtp = dataclasses.replace(MODEL, mtp_num_layers=1)
    (without, vision), (language, _) = (run_ranks(1, counted_training_flops, m)[0] for m in (MODEL, with_mtp))
    unused_half = 4 * MODEL.num_attention_heads * MODEL.kv_channels * TOKENS / 2 * TOKENS
    assert language - without == pytest.approx(3 * (mtp_flops(with_mtp, 1, TOKENS) + unused_half), rel=1e-3)
    assert vision == pytest.approx(vision_item_training_flops(MODEL, 24, 16), rel=1e-3)


def test_utilisation() -> None:
    """By hand: 8 GPUs of 1000 TFLOP/s can do 16 PFLOP in 2 s; 4.8 PFLOP are 30 % of that."""
    assert utilisation(4.8e15, seconds=2.0, gpus=8, peak_flops=1e15) == pytest.approx(0.3)
