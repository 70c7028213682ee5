"""Measure layouts against each other on the same data, in one go and one set of processes.

    torchrun --nproc_per_node 2 -m tools.bench.mimo --config-path examples/qwen35_mimo/conf --config-name 4b_h200x2 \
        --output outputs/bench --visual-share 0.5 --timeline

Variants (`variants.py`) run in turn, round by round. A round of a variant builds its layout, warms up, and times its
steps; the first thing a process does is to compile kernels, which is why all share processes. Rank 0 writes bench.md
(`report.py`), bench.json, losses.png and, where asked, a timeline of a step of each variant; with several shares of
visual tokens in a folder each. What is known is written after every round, so a run that is cut short leaves it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from flagscale.config.errors import UserError
from flagscale.config.loading import load
from flagscale.config.schema import ProfileConfig
from flagscale.data.image import ImageSettings
from flagscale.data.loader import DataPipeline
from flagscale.plan.flops import vision_item_training_flops
from flagscale.plan.plan import ExperimentPlan
from flagscale.platforms import Platform, get_platform
from flagscale.runner.compare import Run, write_figure
from flagscale.train.build import build
from flagscale.train.language import LossWeights
from flagscale.train.loop import max_over_mean
from flagscale.train.profile import IterationProfiler
from flagscale.train.step import StepReport, TrainStep
from flagscale.train.timeline import draw_timelines
from tools.bench import pictures
from tools.bench.fsdp2_peer import PeerStep
from tools.bench.report import Context, Measured, report
from tools.bench.variants import TEXT, Recipe, Variant, make_variants

DEFAULT = ["unified", "f2", "f4", "f8", "text"]


class Bench:
    """The variants of one data set on this rank, and what has been measured of them."""

    def __init__(self, variants: list[Variant], platform: Platform, options: argparse.Namespace, folder: Path) -> None:
        self._variants = variants
        self._platform = platform
        self._options = options
        self._folder = folder
        self._results = {
            variant.name: Measured(name=variant.name, layout=in_words(variant), kind=kind_of(variant))
            for variant in variants
        }
        self._context = Context(
            machine=platform.description,
            world=dist.get_world_size(),
            peak=peak_of(variants[0].plan, platform),
            measured_peak=measure_peak(platform),
        )

    def run(self, deadline: float) -> None:
        """All rounds; no further one starts after `deadline`, on the clock `time.monotonic`."""
        for number in range(self._options.rounds):
            for variant in self._variants:
                late = torch.tensor(float(time.monotonic() > deadline), device=self._platform.device)
                dist.all_reduce(late, op=dist.ReduceOp.MAX)
                if late.item():
                    return
                self._round(variant, profiled=self._options.timeline and number == 0 and not variant.peer)
                gc.collect()
                if self._platform.is_cuda:
                    torch.cuda.empty_cache()  # also the pool of the round's CUDA graph
                if dist.get_rank() == 0:
                    self._save()

    def _round(self, variant: Variant, *, profiled: bool) -> None:
        """Builds a variant, warms it up, times its steps, and with `profiled` records one more."""
        measured, plan, options = self._results[variant.name], variant.plan, self._options
        began = time.perf_counter()
        state = None if variant.peer else build(plan, self._platform)
        step = TrainStep(state) if state else PeerStep(plan, self._platform, variant.peer)
        measured.build_s.append(time.perf_counter() - began)
        data = DataPipeline(plan, "train", dist.get_rank(), pin=self._platform.is_cuda)
        if self._platform.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            measured.round_s.append([])
            for index in range(options.warm_up + options.steps):
                self._step(step, data, measured, plan, index)
            describe(measured, plan, data, options.warm_up)
            if profiled:
                last = options.warm_up + options.steps
                span = ProfileConfig(start=last + 1, stop=last + 1)
                profiler = IterationProfiler(span, self._timeline(variant), cuda=self._platform.is_cuda)
                profiler.before(last + 1)
                step.run(data.step(last), weights_of(plan, data, last))
                self._platform.synchronize()
                profiler.after(last + 1)
            if self._platform.is_cuda:
                # Reserved: what is allocated leaves out a CUDA graph's own pool.
                memory = torch.tensor(torch.cuda.max_memory_reserved() / 2**30, device=self._platform.device)
                dist.all_reduce(memory, op=dist.ReduceOp.MAX)
                measured.memory_gib = max(measured.memory_gib, memory.item())
        finally:
            data.close()
            if state:
                state.finish_gathers()  # a gather nobody waits for keeps its parameters alive
                state.topology.destroy()

    def _step(
        self, step: TrainStep | PeerStep, data: DataPipeline, measured: Measured, plan: ExperimentPlan, index: int
    ) -> None:
        """One step; what is seen of it counts after the warm-up."""
        waited = data.wait_s
        self._platform.synchronize()
        dist.barrier()
        began = time.perf_counter()
        found = step.run(data.step(index), weights_of(plan, data, index))
        self._platform.synchronize()
        seconds = time.perf_counter() - began
        measured.losses[index] = losses_of(found, data, index)
        if index >= self._options.warm_up:
            measured.round_s[-1].append(seconds)
            measured.phase_s.append(found.phase_s)
            measured.host_s.append(found.host_s)
            measured.load_max_over_mean.append(max_over_mean(found.loads))
            measured.data_wait_s.append(data.wait_s - waited)

    def _timeline(self, variant: Variant) -> Path:
        """Folder of a variant's traces."""
        return self._folder / "timeline" / variant.name.replace(":", "-").replace("/", "-")

    def _save(self) -> None:
        """Writes what is known so far."""
        known = [measured for measured in self._results.values() if measured.step_s]
        self._folder.mkdir(parents=True, exist_ok=True)
        text = report(known, self._context)
        (self._folder / "bench.md").write_text(text + "\n")
        content = {"context": asdict(self._context), "variants": [asdict(measured) for measured in known]}
        (self._folder / "bench.json").write_text(json.dumps(content, indent=1))
        trained = [measured for measured in known if measured.kind in ("homogeneous", "colocated")]
        if len(trained) > 1:
            write_figure([as_run(measured) for measured in trained], self._folder / "losses.png")
        traces = {v.name: folder for v in self._variants if (folder := self._timeline(v)).is_dir()}
        if traces:
            draw_timelines(traces, self._folder / "timeline.png")
        print(text, flush=True)


def in_words(variant: Variant) -> str:
    """The layout of a variant."""
    if variant.peer:
        return f"FSDP2 over {variant.plan.world_size}"
    vision, language = variant.plan.vision, variant.plan.language
    stages = f"/PP{language.pp}" if language.pp > 1 else ""
    return f"ViT TP{vision.tp}/DP{vision.dp}, LLM TP{language.tp}{stages}/DP{language.dp}"


def kind_of(variant: Variant) -> str:
    """As in `Measured`."""
    if variant.peer:
        return "peer"
    return TEXT if variant.head == TEXT else "homogeneous" if variant.is_homogeneous else "colocated"


def peak_of(plan: ExperimentPlan, platform: Platform) -> float | None:
    """FLOP/s of a GPU that the MFU is a share of."""
    given = plan.config.system.peak_tflops
    return platform.peak_flops if given is None else 1e12 * given


def measure_peak(platform: Platform, size: int = 8192, repeats: int = 20) -> float | None:
    """FLOP/s of a product of two random bf16 matrices on this rank's GPU; None on a CPU."""
    if not platform.is_cuda:
        return None
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=platform.device) for _ in range(2))
    for count in (3, repeats):  # the first is a warm-up
        platform.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right)
        platform.synchronize()
        seconds = time.perf_counter() - began
    return 2.0 * size**3 * repeats / seconds


def weights_of(plan: ExperimentPlan, data: DataPipeline, index: int) -> LossWeights:
    """Loss weights of a step."""
    return LossWeights.of_batch(
        num_loss_tokens=data.num_loss_tokens(index),
        num_mtp_loss_tokens=data.num_mtp_loss_tokens(index),
        mtp_loss_scaling_factor=plan.config.model.mtp_loss_scaling_factor,
    )


def losses_of(found: StepReport, data: DataPipeline, index: int) -> list[float]:
    """[lm, mtp] losses of a step."""
    lm, mtp = found.loss_sums.tolist()
    return [lm / max(data.num_loss_tokens(index), 1), mtp / max(data.num_mtp_loss_tokens(index), 1)]


def describe(measured: Measured, plan: ExperimentPlan, data: DataPipeline, index: int) -> None:
    """What a step of this data is made of."""
    items = [item for spec in data.specs(index) for item in spec.items]
    measured.vision_flops = sum(vision_item_training_flops(plan.config.model, i.grid_h, i.grid_w) for i in items)
    measured.flops = data.flops(index)
    measured.num_tokens = data.num_tokens(index)
    measured.visual_share = sum(item.num_tokens for item in items) / measured.num_tokens


def as_run(measured: Measured) -> Run:
    """Losses and times as those of a training run, for the figure."""
    times = dict(enumerate(measured.round_s[-1], start=len(measured.losses) - len(measured.round_s[-1])))
    lines = {
        index + 1: {"lm_loss": lm, "mtp_1_loss": mtp, "iteration_time_s": times.get(index)}
        for index, (lm, mtp) in measured.losses.items()
    }
    return Run(name=measured.name, lines=lines)


def write_data(options: argparse.Namespace) -> None:
    """Makes the data sets that the variants need, or finds them made."""
    config = load(options.config_name, options.config_path, options.overrides).config
    shares = [] if own_data(options) else options.visual_share
    texts = [0.0] if any(name.startswith(TEXT) for name in options.variants) else []
    for share in (*shares, *texts):
        wanted = pictures.Wanted(
            folder=data_folder(share, options),
            seq_length=config.model.seq_length,
            visual=share,
            seed=1,
            image=ImageSettings.of(config),
        )
        pictures.make(wanted, options.samples, workers=8)


def own_data(options: argparse.Namespace) -> bool:
    """Whether the command line names the data."""
    return any(text.startswith("data.train_path=") for text in options.overrides)


def data_folder(share: float, options: argparse.Namespace) -> Path:
    """Of the data set with this share of visual tokens."""
    return options.data.resolve() / f"{share:g}"


def recipe_at(share: float, options: argparse.Namespace) -> Recipe:
    """The recipe on the data with this share of visual tokens."""
    world = f"experiment.runner.nproc_per_node={dist.get_world_size()}"
    data = f"data.train_path={data_folder(share, options) / pictures.FILE}"
    return Recipe(
        name=options.config_name,
        folder=options.config_path,
        overrides=(world, data, f"experiment.exp_dir={options.output.resolve() / 'run'}", *options.overrides),
        texts=data_folder(0.0, options) / pictures.FILE,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config-name", default="qwen35_mimo")
    parser.add_argument("--config-path", type=Path, default=None)
    parser.add_argument("--variants", nargs="+", default=DEFAULT, help="see tools/bench/variants.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2, help="steps of a round that are not timed")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a round")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which no round starts")
    parser.add_argument("--visual-share", type=float, nargs="+", default=[0.5], help="of the tokens; a table each")
    parser.add_argument("--data", type=Path, default=Path("data/bench"), help="folder for the data sets it makes")
    parser.add_argument("--samples", type=int, default=256, help="of a data set")
    parser.add_argument("--timeline", action="store_true", help="draw a step of each variant")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    if not all(0 <= share <= pictures.MOST for share in options.visual_share):
        parser.error(f"--visual-share {options.visual_share}: must lie between 0 and {pictures.MOST}")
    return options


@contextmanager
def session(
    arguments: list[str] | None,
) -> Iterator[tuple[argparse.Namespace, Platform, dict[float, list[Variant]]]]:
    """What the command line asks for: options, the device, and variants by share of visual tokens; a world meanwhile.

    Raises:
        SystemExit: with a message, where a variant's configuration or the data breaks a rule.
    """
    options = parse(arguments)
    try:
        if os.environ["RANK"] == "0":
            write_data(options)  # before this process has a GPU, since it makes others
        platform = get_platform(os.environ.get("BENCH_PLATFORM", "auto"))
        platform.install()
        dist.init_process_group(platform.backend)
        yield (
            options,
            platform,
            {share: make_variants(options.variants, recipe_at(share, options)) for share in options.visual_share},
        )
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark on this rank."""
    began = time.monotonic()
    with session(arguments) as (options, platform, chosen):
        for share, variants in chosen.items():
            folder = options.output if len(chosen) == 1 else options.output / f"visual-{share:g}"
            Bench(variants, platform, options, folder).run(began + options.deadline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
