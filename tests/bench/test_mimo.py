"""The benchmark as one command on two CPU ranks with a tiny model: every kind of variant, tables, curves, timeline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 900  # s
TINY = (
    "model.num_layers=2", "model.full_attention_interval=2", "model.hidden_size=32", "model.ffn_hidden_size=48",
    "model.vision_hidden_size=32", "model.vision_ffn_hidden_size=48", "model.linear_num_value_heads=4",
    "model.kv_channels=32",
    "model.tensor_model_parallel_size=2", "model.sequence_parallel=true", "model.micro_batch_size=1",
    "model.global_batch_size=4", "model.seq_length=192", "model.eval_interval=null", "data.valid_path=null",
    "data.packing=none", "data.min_pixels=1024", "data.max_pixels=180224", "data.prefetch=0",
    "system.peak_tflops=0.1",
)  # fmt: skip


SMALL = (
    "model.num_layers=4", "model.hidden_size=64", "model.ffn_hidden_size=96", "model.num_attention_heads=4",
    "model.kv_channels=32", "model.rotary_percent=0.5", "model.mrope_section=[3,3,2]", "model.linear_num_key_heads=4",
    "model.linear_num_value_heads=8", "model.linear_key_head_dim=16", "model.linear_value_head_dim=16",
    "model.vocab_size=128", "model.vision_num_layers=2", "model.vision_hidden_size=64",
    "model.vision_ffn_hidden_size=96", "model.vision_num_attention_heads=4", "model.init_method_std=0.06",
    "model.seq_length=192", "data.min_pixels=1024", "data.max_pixels=180224", "data.prefetch=0", "data.workers=0",
    "system.platform=cpu", "system.bf16=false",
)  # fmt: skip
"""A recipe of real size in small, with its layout and its batch."""


def bench(folder: Path, *arguments: str, world: int = 2, keys: tuple[str, ...] = TINY) -> dict[str, Any]:
    """Runs `tools.bench.mimo`; what it measured by variant."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world), "--local_addr", "127.0.0.1",
        "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", "-m", "tools.bench.mimo",
        "--output", str(folder / "out"), "--data", str(folder / "data"), "--samples", "8", *arguments, *keys,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "BENCH_PLATFORM": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {m["name"]: m for m in json.loads((folder / "out/bench.json").read_text())["variants"]}


@pytest.mark.timeout(LIMIT)
def test_every_kind_of_variant(tmp_path: Path) -> None:
    variants = ["unified", "f2", "text", "fsdp2:mb2+ac", "fsdp2:mb1+keep"]
    found = bench(tmp_path, "--variants", *variants, "--rounds", "1", "--warm-up", "1", "--steps", "1", "--timeline")
    out = tmp_path / "out"
    assert list(found) == variants
    assert [m["kind"] for m in found.values()] == ["homogeneous", "colocated", "text", "peer", "peer"]
    lm, mtp = found["unified"]["losses"]["0"]
    assert found["f2"]["losses"]["0"] == pytest.approx([lm, mtp], rel=1e-5)
    for peer in variants[3:]:
        # The same weights and batches: transformers computes the same loss. It steps without a warm-up.
        assert found[peer]["losses"]["0"][0] == pytest.approx(lm, rel=1e-5)
        assert found[peer]["losses"]["1"][0] < 0.98 * lm
    assert 0.5 < found["f2"]["visual_share"] < 0.7  # rows are shorter than a real recipe's
    assert found["text"]["visual_share"] == 0
    assert found["f2"]["flops"] == found["unified"]["flops"] > found["f2"]["vision_flops"] > 0
    for variant in ("unified", "f2"):
        assert len(list((out / "timeline" / variant).glob("rank*.json"))) == 2
    for picture in ("timeline.png", "losses.png"):
        assert Image.open(out / picture).width > 500
    table = (out / "bench.md").read_text()
    assert "| f2 (ViT TP1/DP2, LLM TP2/DP1) |" in table


@pytest.mark.long
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize(
    ("recipe", "variants"),
    [("4b_h200x8", ["unified", "f2", "f4", "f8"]), ("27b_h200x8", ["unified", "f8", "f32"])],
)
def test_recipes_of_eight_ranks_in_small(recipe: str, variants: list[str], tmp_path: Path) -> None:
    """What an eight-GPU host is to run, on eight CPU ranks: equal losses in every layout, before and after a step."""
    conf = ("--config-path", str(ROOT / "examples/qwen35_mimo/conf"), "--config-name", recipe)
    steps = ("--rounds", "1", "--warm-up", "1", "--steps", "1")
    found = bench(tmp_path, *conf, "--variants", *variants, *steps, world=8, keys=SMALL)
    for variant in variants[1:]:
        for step in ("0", "1"):
            assert found[variant]["losses"][step] == pytest.approx(found["unified"]["losses"][step], rel=1e-4)
        assert max(found[variant]["load_max_over_mean"]) < 1.2
