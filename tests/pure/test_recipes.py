"""Every recipe in examples/ is a plan without an error, colocated and unified, with the layout that it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.config.loading import load
from flagscale.plan.build import checked_plan
from flagscale.plan.layout import Grid
from flagscale.plan.plan import ExperimentPlan
from tools.bench.variants import Recipe, make_variants

FOLDER = Path(__file__).resolve().parents[2] / "examples/qwen35_mimo/conf"


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """A file that is there; nothing reads it."""
    path = tmp_path / "samples.jsonl"
    path.write_text('{"messages": []}\n')
    return path


def plan_of(name: str, samples: Path, *overrides: str) -> ExperimentPlan:
    """The plan of a recipe on a machine without its data and GPUs."""
    files = (f"data.train_path={samples}", f"data.valid_path={samples}")
    data = (*files, "data.tokenizer.type=builtin", "system.platform=auto")
    return checked_plan(load(name, FOLDER, [*data, *overrides]))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
@pytest.mark.parametrize("use_mimo", [True, False])
def test_recipe_is_a_plan(name: str, use_mimo: bool, samples: Path) -> None:
    plan = plan_of(name, samples, f"model.use_mimo={str(use_mimo).lower()}")
    assert plan.layout == ("colocated" if use_mimo else "unified")
    assert sum(plan.batch.macro_batches) == plan.batch.num_microbatches
    if name.endswith(("h200x2", "h200x8")):
        assert plan.config.data.packing == "none", "packed rows are not replayed as a CUDA graph"


@pytest.mark.parametrize(
    ("name", "vision", "language", "factor", "unified_vision"),
    [
        ("4b_h200x2", Grid(dp=2), Grid(tp=2, dp=1), 8, Grid(tp=2, dp=1)),
        ("9b_h200x2", Grid(dp=2), Grid(tp=2, dp=1), 8, Grid(tp=2, dp=1)),
        ("4b_h200x8", Grid(dp=8), Grid(tp=2, dp=4), 4, Grid(tp=2, dp=4)),
        ("27b_h200x8", Grid(dp=8), Grid(tp=4, pp=2, dp=1), 32, Grid(tp=4, dp=1)),
    ],
)
def test_layout(
    name: str, vision: Grid, language: Grid, factor: int, unified_vision: Grid, samples: Path
) -> None:  # fmt: skip
    colocated, unified = (plan_of(name, samples, f"model.use_mimo={value}") for value in ("true", "false"))
    assert (colocated.vision, colocated.language) == (vision, language)
    assert colocated.batch.vit_batch_factor == factor
    assert (unified.vision, unified.language) == (unified_vision, language)
    assert colocated.batch.global_batch_size == unified.batch.global_batch_size == 64


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("4b_h200x2", ["unified", "homogeneous", "f2", "f4", "f8", "text", "fsdp2:mb8+ac"]),
        ("4b_h200x8", ["unified", "homogeneous", "f2", "f4", "f8", "text", "fsdp2:mb8+ac+keep"]),
        ("9b_h200x2", ["unified", "f8", "text", "fsdp2:mb4+ac"]),
        ("27b_h200x8", ["unified", "f8", "f32", "f32,model.vision_recompute=false"]),
    ],
)
def test_what_the_benchmark_runs_is_a_plan(name: str, variants: list[str], samples: Path) -> None:
    overrides = (f"data.train_path={samples}", "system.platform=auto")
    made = make_variants(variants, Recipe(name=name, folder=FOLDER, overrides=overrides, texts=samples))
    for variant in made:
        if variant.head.startswith("f") and variant.peer is None:
            assert variant.plan.batch.vit_batch_factor == int(variant.head[1:])
    homogeneous = {v.plan.language.tp for v in made if v.head.startswith("unified:")}
    if "homogeneous" in variants:
        assert homogeneous == ({1} if name.endswith("x2") else {1, 4, 8})
