"""Analytic FLOPs against those that PyTorch counts in transformers' own small model."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from flagscale.config.schema import ModelConfig
from flagscale.plan.flops import GDN_CHUNK, language_flops, vision_item_flops
from flagscale.plan.params import attention_layers, parameter_counts

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
