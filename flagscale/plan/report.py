"""The plan as a table for a person."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from flagscale.plan.images import assumed_grid
from flagscale.plan.layout import LANGUAGE, VISION, Grid
from flagscale.plan.plan import ExperimentPlan

FILES = (
    "config.yaml", "plan.json", "metrics.jsonl", "logs/", "checkpoints/", "tensorboard/", "wandb/", "plots/",
)  # fmt: skip


def show_plan(plan: ExperimentPlan, notes: Sequence[str]) -> None:
    """Print the plan and the notes on stdout, once."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table(
        title=f"Plan of {plan.config.experiment.exp_name}: {plan.layout}", title_justify="left", show_header=False
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in plan_rows(plan):
        table.add_row(name, text)
    console.print(table, markup=False)
    console.print(f"command: {shlex.join(plan.command)}", markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def plan_rows(plan: ExperimentPlan) -> list[tuple[str, str]]:
    """(what, value) of every line of the table."""
    model, batch = plan.config.model, plan.batch
    runner = plan.config.experiment.runner
    tokens = batch.global_batch_size * model.seq_length
    precision = "bf16" if plan.config.system.bf16 else "fp32"
    rows = [
        ("world", f"{plan.world_size} processes = {runner.nnodes} x {runner.nproc_per_node}, {runner.type}, "
                  f"platform {plan.config.system.platform}, {precision}"),
        ("vision grid", _grid(plan.modules[VISION])),
        ("language grid", _grid(plan.modules[LANGUAGE])),
        ("vit_batch_factor", _factor(plan)),
        ("microbatches", f"{batch.num_microbatches} = {batch.global_batch_size} / ({batch.micro_batch_size} x "
                         f"{plan.language.dp})"),
        ("macro batches", f"{len(batch.macro_batches)}, of {_counted(batch.macro_batches)} microbatches"),
        ("a step", f"{batch.global_batch_size} samples, {tokens:,} tokens (padded to {model.seq_length})"),
    ]  # fmt: skip
    rows += _cost_rows(plan)
    memory = plan.memory
    rows += [
        ("memory a rank", f"about {_bytes(memory.total)}: weights {_bytes(memory.weights)}, gradients "
                          f"{_bytes(memory.gradients)}, optimizer {_bytes(memory.optimizer)}, activations "
                          f"{_bytes(memory.activations)}"),
        ("length", _length(plan)),
        ("folder", str(plan.exp_dir)),
        ("files", " ".join(_files(plan))),
    ]  # fmt: skip
    return rows


def _cost_rows(plan: ExperimentPlan) -> list[tuple[str, str]]:
    costs = plan.costs
    visual = {part: costs[part] for part in ("vision", "merger")}
    spoken = {part: costs[part] for part in ("language", "mtp")}
    grid_h, grid_w = assumed_grid(plan.config)
    side = plan.config.model.vision_patch_size
    rows = []
    for title, parts in (("ViT", visual), ("LLM", spoken)):
        parameters = sum(cost.parameters for cost in parts.values())
        flops = sum(cost.flops_per_step for cost in parts.values())
        detail = ", ".join(f"{part} {cost.parameters:,}" for part, cost in parts.items())
        share = flops / plan.flops_per_step
        rows.append((title, f"{parameters:,} parameters ({detail}), {flops:.3g} FLOPs a step ({share:.0%})"))
    rows.append(("assumed", f"one image of {grid_w * side} x {grid_h * side} pixels a sample, for FLOPs and memory"))
    return rows


def _grid(grid: Grid) -> str:
    degrees = " ".join(f"{axis}{getattr(grid, axis)}" for axis in ("tp", "cp", "dp", "pp"))
    if grid.ep > 1:
        degrees += f" ep{grid.ep}"
    groups = ", ".join(f"{axis} groups {_groups(grid, axis)}" for axis in ("tp", "dp"))
    return f"{degrees}, ranks {grid.offset}..{grid.offset + grid.size - 1}; {groups}"


def _length(plan: ExperimentPlan) -> str:
    every, saved = plan.config.model.eval_interval, plan.config.system.checkpoint.save_interval
    return (
        f"{plan.config.model.train_iters} iterations, {f'validation every {every}' if every else 'no validation'}, "
        f"checkpoint {f'every {saved} and ' if saved else ''}at the end"
    )


def _groups(grid: Grid, axis: str, most: int = 4) -> str:
    groups = grid.groups(axis)
    shown = " ".join(str(group).replace(" ", "") for group in groups[:most])
    return shown + (f" .. ({len(groups)})" if len(groups) > most else "")


def _factor(plan: ExperimentPlan) -> str:
    batch = plan.batch
    if plan.layout == "unified":
        when = "a microbatch" if plan.language.pp == 1 else "a step, before the pipeline"
        return f"{batch.vit_batch_factor} (unified: one vision forward {when})"
    vision = f"vision dp {plan.vision.dp} x vision_micro_batch_size {batch.vision_micro_batch_size}"
    language = f"language dp {plan.language.dp} x micro_batch_size {batch.micro_batch_size}"
    return f"{batch.vit_batch_factor} = ({vision}) / ({language})"


def _counted(sizes: Sequence[int]) -> str:
    kinds = dict.fromkeys(sizes)
    return " + ".join(f"{sizes.count(size)} x {size}" for size in kinds)


def _files(plan: ExperimentPlan) -> list[str]:
    logging = plan.config.system.logging
    unwanted = [
        name for name, wanted in (("tensorboard/", logging.tensorboard), ("wandb/", logging.wandb)) if not wanted
    ]
    return [name for name in FILES if name not in unwanted]


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
