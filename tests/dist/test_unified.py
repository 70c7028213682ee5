"""The unified baseline is not handicapped: same code, kernels, settings and reading; only grids and batches differ."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.utils import get_model_config

from flagscale.data.corpus import TRAIN, VALID, Corpus
from flagscale.data.loader import DataPipeline
from flagscale.plan.layout import VISION
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.build import TrainState
from flagscale.train.step import TrainStep
from tests.dist.harness import build_state, make_plan
from tests.dist.pool import run_ranks
from tests.dist.test_training import plan_of, validated

FLAGSCALE = Path(__file__).parents[2] / "flagscale"
RANKS_RUN = ("data", "models", "parallel", "platforms", "train")  # packages of what a rank does
LAYOUT_WORDS = {"use_mimo", "layout_of", "layout"}
BATCH = {"tensor_model_parallel_size": 2, "global_batch_size": 16, "micro_batch_size": 2, "sequence_parallel": True}


def names_used(path: Path) -> set[str]:
    """Names and attributes that a file reads; modules it imports from are not among them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
    }


def test_no_code_of_a_rank_asks_for_the_layout() -> None:
    """What a rank runs follows from the grids and the batch plan, but for the line that says which layout it is."""
    asking = {
        path.relative_to(FLAGSCALE).as_posix(): LAYOUT_WORDS & names_used(path)
        for package in RANKS_RUN
        for path in (FLAGSCALE / package).rglob("*.py")
        if LAYOUT_WORDS & names_used(path)
    }
    assert asking == {"train/loop.py": {"layout"}}
    assert LAYOUT_WORDS & names_used(FLAGSCALE / "plan" / "batch.py"), "negative control: the plan does ask"


def settings(config: Any) -> dict[str, Any]:
    """The fields of a dataclass, functions by their names."""
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: getattr(value, "__qualname__", repr(value)) for name, value in found.items()}


def facts(plan: ExperimentPlan) -> dict[str, Any]:
    """What this rank's training state is made of, by kind."""
    state = build_state(plan)
    try:
        step = TrainStep(state)
        modules = {name: list(raw.named_modules()) for name, raw in state.raw.items()}
        parameters = {name: list(raw.named_parameters()) for name, raw in state.raw.items()}
        return {
            "platform": settings(state.platform),
            "classes": {name: [(n, type(m).__qualname__) for n, m in own] for name, own in modules.items()},
            "config": {name: settings(get_model_config(raw)) for name, raw in state.raw.items()},
            "ddp": {name: settings(module.ddp_config) for name, module in state.wrapped.items()},
            "optimizer": optimizer_facts(state),
            "encoder": {key: step._encoder.__dict__[key] for key in ("_width", "_dtype", "_trainable", "_recompute")},
            "graph": step.language._graph is not None,
            "schedule": step.language._run.__qualname__,
            "sizes": {name: [(n, tuple(p.shape)) for n, p in own] for name, own in parameters.items()},
        }
    finally:
        state.topology.destroy()


def optimizer_facts(state: TrainState) -> dict[str, Any]:
    """Settings of the optimizers, and of their parameter groups."""
    found = {}
    for name, optimizer in state.optimizer.optimizers.items():
        for number, part in enumerate(optimizer.chained_optimizers):
            groups = [
                {key: repr(value) for key, value in group.items() if key != "params"} for group in part.param_groups
            ]
            found[name, number] = (type(part).__qualname__, settings(part.config), groups)
    return found


def test_both_layouts_are_made_of_the_same_parts() -> None:
    """Kernels, schedules, gradient buffers and optimizers have equal settings; with equal grids everything is equal."""
    unified = make_plan(4, **BATCH, use_mimo=False)
    alike = make_plan(4, **BATCH, vision_tensor_model_parallel_size=2, vision_micro_batch_size=2)
    other = make_plan(4, **BATCH, vision_micro_batch_size=2)
    assert alike.modules == unified.modules != other.modules
    assert (alike.batch, other.batch.vit_batch_factor) == (unified.batch, 2)
    found, same, apart = (run_ranks(4, facts, plan)[0] for plan in (unified, alike, other))
    assert same == found
    differing = {key for key in found if apart[key] != found[key]}
    assert differing == {"config", "sizes"}, "negative control: the encoder's grid shows"
    of_vision = found["config"][VISION].items() ^ apart["config"][VISION].items()
    assert {name for name, _ in of_vision} == {"tensor_model_parallel_size", "expert_tensor_parallel_size"}
    assert {name for name in found["config"] if found["config"][name] != apart["config"][name]} == {VISION}


_opened: list[str] = []  # images that this process has opened
_watching: list[bool] = []  # whether its hook is there


def watch_files() -> None:
    """Notes every image that this process opens from now on, whoever opens it."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".png"):
            _opened.append(str(arguments[0]))

    _opened.clear()
    if not _watching:  # a hook cannot be taken away again
        sys.addaudithook(hook)
        _watching.append(True)


def reading(plan: ExperimentPlan) -> dict[str, Any]:
    """What this rank reads for the only step: samples, texts, images opened and decoded, and whether it reads ahead."""
    watch_files()
    pipeline = DataPipeline(plan, TRAIN, dist.get_rank())
    try:
        steps = pipeline.step(0)
        batches = [next(steps)]
        ahead = pipeline._prefetcher is not None and pipeline._prefetcher._depth
        batches += steps
        texts = [sample for batch in batches for text in batch.microbatches for sample in text.sample_ids]
        return {
            "samples": pipeline.sample_ids(0),
            "texts": texts,
            "opened": list(_opened),
            "decoded": pipeline.decoded,
            "ahead": ahead,
            "items": sum(len(batch.spec.items) for batch in batches),
        }
    finally:
        pipeline.close()


@pytest.mark.parametrize("packing", ["none", "length_budget"])
def test_both_layouts_read_alike(mixture: Path, tmp_path: Path, packing: str) -> None:
    """The same samples; every image opened and decoded once in the job, in the background; the same bytes."""
    keys = ("model.train_iters=1", *validated(mixture, 1), f"data.packing={packing}")
    plans = {
        "unified": plan_of(mixture, tmp_path / "a", *keys, "model.use_mimo=false"),
        "colocated": plan_of(mixture, tmp_path / "b", *keys),
    }
    for split in (TRAIN, VALID):  # the indexes first: building one opens every image for its size
        Corpus.open(plans["unified"].config, split).close()
    found = {name: run_ranks(4, reading, plan) for name, plan in plans.items()}
    seen = {}
    for name, ranks in found.items():
        opened = Counter(path for rank in ranks for path in rank["opened"])
        assert set(opened.values()) == {1}, f"{name} opens a file twice"
        assert sum(rank["decoded"] for rank in ranks) == len(opened) == ranks[0]["items"] > 8
        assert all(rank["decoded"] > 0 for rank in ranks), f"{name} leaves the reading to a part of the ranks"
        assert {rank["ahead"] for rank in ranks} == {plans[name].config.data.prefetch}
        bytes_read = sum(Path(path).stat().st_size for path in opened)
        seen[name] = (ranks[0]["samples"], [sorted(rank["texts"]) for rank in ranks], sorted(opened), bytes_read)
    assert seen["unified"] == seen["colocated"]
