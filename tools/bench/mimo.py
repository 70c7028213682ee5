"""Measure unified against colocated on the same data, in one go and one set of processes.

    torchrun --nproc_per_node 2 -m tools.bench.mimo --config-path examples/qwen35_mimo/conf --config-name 4b_h200x2 \
        --output outputs/bench

Variants run in turn, round by round: unified, then colocated at each factor. A round of a variant builds its layout,
warms up, and times its steps; the first thing a process does is to compile kernels, which is why all share processes.
Rank 0 prints the table and writes bench.json and bench.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flagscale.config.loading import load
from flagscale.data.loader import DataPipeline
from flagscale.plan.build import make_plan
from flagscale.plan.flops import language_training_flops, vision_item_training_flops
from flagscale.plan.plan import ExperimentPlan
from flagscale.platforms import Platform, get_platform
from flagscale.train.build import build
from flagscale.train.language import LossWeights
from flagscale.train.step import StepReport, TrainStep

UNIFIED = "unified"


@dataclass(kw_only=True, slots=True)
class Measured:
    """What was seen of one variant, over all its rounds."""

    name: str
    layout: str
    step_s: list[float] = field(default_factory=list)
    phase_s: list[dict[str, float]] = field(default_factory=list)
    losses: dict[int, list[float]] = field(default_factory=dict)
    load_max_over_mean: list[float] = field(default_factory=list)
    data_wait_s: list[float] = field(default_factory=list)
    memory_gib: float = 0.0
    flops: float = 0.0
    vision_flops: float = 0.0
    visual_share: float = 0.0
    num_tokens: int = 0

    @property
    def median_s(self) -> float:
        """Median step time."""
        return statistics.median(self.step_s)


def variant_overrides(name: str) -> list[str]:
    """Overrides of a variant: `unified`, `fN` for colocated at factor N, then any `,key=value`."""
    head, *extra = name.split(",")
    if head == UNIFIED:
        return ["model.use_mimo=false", *extra]
    if head.startswith("f") and head[1:].isdigit():
        return ["model.use_mimo=true", f"vit_batch_factor={head[1:]}", *extra]
    raise SystemExit(f"variant {name!r}: is neither {UNIFIED} nor fN, such as f8")


def plan_of(options: argparse.Namespace, name: str) -> ExperimentPlan:
    """The plan of a variant; vision_micro_batch_size follows from the factor."""
    # A variant's own overrides win over those for all; given twice, a key would be refused.
    chosen = {text.split("=", 1)[0]: text for text in [*options.overrides, *variant_overrides(name)]}
    overrides = list(chosen.values())
    factor = [int(text.split("=")[1]) for text in overrides if text.startswith("vit_batch_factor=")]
    overrides = [text for text in overrides if not text.startswith("vit_batch_factor=")]
    config = load(options.config_name, options.config_path, overrides).config
    if factor:
        world = config.experiment.runner.nproc_per_node * config.experiment.runner.nnodes
        model = config.model
        language_dp = world // (model.tensor_model_parallel_size * model.pipeline_model_parallel_size)
        vision_dp = world // model.vision_tensor_model_parallel_size
        samples = factor[0] * language_dp * model.micro_batch_size // vision_dp
        overrides.append(f"model.vision_micro_batch_size={samples}")
        config = load(options.config_name, options.config_path, overrides).config
    return make_plan(config)


def run_round(measured: Measured, plan: ExperimentPlan, platform: Platform, options: argparse.Namespace) -> None:
    """Builds a variant, warms it up, and times its steps."""
    state = build(plan, platform)
    data = DataPipeline(plan, "train", dist.get_rank())
    try:
        step = TrainStep(state)
        if platform.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        for index in range(options.warm_up + options.steps):
            waited = data.wait_s
            platform.synchronize()
            dist.barrier()
            began = time.perf_counter()
            report = step.run(data.step(index), weights_of(plan, data, index))
            platform.synchronize()
            seconds = time.perf_counter() - began
            note_losses(measured, report, data, index)
            if index >= options.warm_up:
                measured.step_s.append(seconds)
                measured.phase_s.append(report.phase_s)
                measured.load_max_over_mean.append(max(report.loads) * len(report.loads) / max(sum(report.loads), 1))
                measured.data_wait_s.append(data.wait_s - waited)
        describe(measured, plan, data, options.warm_up)
        if platform.is_cuda:
            measured.memory_gib = max(measured.memory_gib, torch.cuda.max_memory_allocated() / 2**30)
    finally:
        data.close()
        state.topology.destroy()


def weights_of(plan: ExperimentPlan, data: DataPipeline, index: int) -> LossWeights:
    """Loss weights of a step."""
    return LossWeights.of_batch(
        num_loss_tokens=data.num_loss_tokens(index),
        num_mtp_loss_tokens=data.num_mtp_loss_tokens(index),
        mtp_loss_scaling_factor=plan.config.model.mtp_loss_scaling_factor,
    )


def note_losses(measured: Measured, report: StepReport, data: DataPipeline, index: int) -> None:
    """Keeps [lm, mtp] losses of a step."""
    lm, mtp = report.loss_sums.tolist()
    counts = (max(data.num_loss_tokens(index), 1), max(data.num_mtp_loss_tokens(index), 1))
    measured.losses[index] = [lm / counts[0], mtp / counts[1]]


def describe(measured: Measured, plan: ExperimentPlan, data: DataPipeline, index: int) -> None:
    """What a step of this data is made of."""
    model = plan.config.model
    items = [item for spec in data.specs(index) for item in spec.items]
    measured.vision_flops = sum(vision_item_training_flops(model, item.grid_h, item.grid_w) for item in items)
    measured.flops = measured.vision_flops + language_training_flops(model, model.global_batch_size, model.seq_length)
    measured.num_tokens = data.num_tokens(index)
    measured.visual_share = sum(item.num_tokens for item in items) / measured.num_tokens


def free() -> None:
    """Gives a finished round's memory back, its CUDA graph's pool included, before the next one is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(results: list[Measured], platform: Platform, world: int, peak: float | None) -> str:
    """The reference table and what explains it, as Markdown."""
    first = results[0]
    lines = [
        "| variant | step ms (median, min-max) | TFLOP/s a GPU | against first | MFU | ViT fwd+bwd ms | exchange ms "
        "| LLM ms | reduce+optimizer ms | data wait ms | load max/mean | memory GiB | LM loss diff mean/max % |",
        "|" + "---|" * 13,
    ]
    for m in results:
        lines.append(row(m, first, world, peak))
    lines += [
        "",
        f"{platform.description}; {world} ranks; visual tokens {100 * first.visual_share:.1f} %, ViT "
        f"{100 * first.vision_flops / first.flops:.1f} % of the model FLOPs, {first.num_tokens} tokens a step",
    ]
    return "\n".join(lines)


def row(m: Measured, first: Measured, world: int, peak: float | None) -> str:
    """One variant's line of the table."""
    rate = m.flops / m.median_s / world
    phases = {name: 1e3 * statistics.median(p.get(name, 0.0) for p in m.phase_s) for name in m.phase_s[-1]}
    encoder, rest = (
        phases.get("vision_forward", 0) + phases.get("vision_backward", 0),
        phases.get("reduce", 0) + phases.get("optimizer", 0),
    )
    cells = [
        m.name,
        f"{1e3 * m.median_s:.0f} ({1e3 * min(m.step_s):.0f}-{1e3 * max(m.step_s):.0f})",
        f"{rate / 1e12:.1f}",
        f"{100 * (first.median_s / m.median_s - 1):+.1f} %",
        f"{100 * rate / peak:.1f} %" if peak else "-",
        *(f"{value:.0f}" for value in (encoder, phases.get("exchange", 0), phases.get("language", 0), rest)),
        f"{1e3 * statistics.median(m.data_wait_s):.1f}",
        f"{max(m.load_max_over_mean):.3f}",
        f"{m.memory_gib:.1f}",
        loss_difference(m, first),
    ]
    return f"| {' | '.join(cells)} |"


def loss_difference(measured: Measured, first: Measured) -> str:
    """Mean and largest relative difference of the LM loss from the first variant's, in percent."""
    common = sorted(set(measured.losses) & set(first.losses))
    relative = [abs(measured.losses[i][0] / first.losses[i][0] - 1) for i in common if first.losses[i][0]]
    return f"{100 * statistics.mean(relative):.4f} / {100 * max(relative):.4f}" if relative else "-"


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config-name", default="qwen35_mimo")
    parser.add_argument("--config-path", type=Path, default=None)
    parser.add_argument("--variants", nargs="+", default=[UNIFIED, "f2", "f4", "f8"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2, help="steps of a round that are not timed")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a round")
    parser.add_argument("--deadline", type=float, default=None, help="seconds after which no further round starts")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args()


def main() -> int:
    """Runs the benchmark on this rank."""
    options = parse()
    began = time.monotonic()
    platform = get_platform(os.environ.get("BENCH_PLATFORM", "auto"))
    platform.install()
    dist.init_process_group(platform.backend)
    world = dist.get_world_size()
    options.overrides = [f"experiment.runner.nproc_per_node={world}", *options.overrides]
    results = {name: Measured(name=name, layout=plan_of(options, name).layout) for name in options.variants}
    for _ in range(options.rounds):
        for name in options.variants:
            late = torch.tensor(float(options.deadline is not None and time.monotonic() - began > options.deadline))
            late = late.to(platform.device)
            dist.all_reduce(late, op=dist.ReduceOp.MAX)
            if not late.item():
                run_round(results[name], plan_of(options, name), platform, options)
                free()
                if dist.get_rank() == 0:
                    save([m for m in results.values() if m.step_s], platform, world, options)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def save(results: list[Measured], platform: Platform, world: int, options: argparse.Namespace) -> None:
    """Writes what is known so far, so that a run that is cut short leaves its results."""
    options.output.mkdir(parents=True, exist_ok=True)
    text = table(results, platform, world, platform.peak_flops)
    (options.output / "bench.md").write_text(text + "\n")
    content: list[dict[str, Any]] = [asdict(m) for m in results]
    (options.output / "bench.json").write_text(json.dumps(content, indent=1))
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
