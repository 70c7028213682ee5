"""What the encoder beside the language model would bring: how much of its forward pass hides behind microbatches.

    CUDA_DEVICE_MAX_CONNECTIONS=8 torchrun --nproc_per_node 2 -m tools.bench.beside --config-path \
        examples/qwen35_mimo/conf --config-name 4b_h200x2 --variants f2 f4 --output outputs/beside

The schedule encodes a macro batch, then runs its microbatches. Here the next macro batch is encoded on a second stream
while the microbatches of this one run, without keeping activations, and compared with one after the other. What does
not hide cannot be gained by a schedule that encodes ahead; what does, is an upper bound, since such a schedule keeps
two macro batches of activations. On a GPU the microbatches have to be a graph: launched one kernel after the other
they would keep the host, and the encoder would wait for that.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flagscale.config.errors import UserError
from flagscale.data.loader import DataPipeline
from flagscale.data.macro import MacroBatch
from flagscale.platforms import Platform
from flagscale.train.build import build
from flagscale.train.language import LossWeights
from flagscale.train.step import TrainStep
from tools.bench import mimo
from tools.bench.variants import Variant

REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Medians: the encoder with its exchange alone, a macro batch of microbatches alone, and both at once."""

    encoder: float
    language: float
    both: float

    @property
    def hidden(self) -> float:
        """Share of the encoder's time that the language model's covers; 0: as long as one after the other."""
        return (self.encoder + self.language - self.both) / self.encoder

    def __str__(self) -> str:
        encoder, language, both = (f"{1e3 * seconds:.1f} ms" for seconds in (self.encoder, self.language, self.both))
        return f"encoder {encoder}, language model {language}, at once {both}: {self.hidden:.0%} of the encoder hidden"


def measure(
    step: TrainStep, macros: tuple[MacroBatch, MacroBatch], weights: LossWeights, platform: Platform
) -> Seconds:
    """Times the second macro batch's encoding beside the first one's microbatches, after a warm-up each.

    Gradients pile up in the buffers, and no optimizer step follows. Collective over the world.
    """
    current, following = macros
    batches = step.on_device(current)
    with torch.no_grad():
        _, rows = step.encode(current)
    second = torch.cuda.Stream()

    def encode() -> None:
        with torch.no_grad():
            step.encode(following)

    def train() -> None:
        step.language.train(batches, rows, weights, is_last=False)

    def both() -> None:
        second.wait_stream(torch.cuda.current_stream())
        train()  # only launched here, on a GPU
        with torch.cuda.stream(second):
            encode()

    return Seconds(
        encoder=_median(encode, platform), language=_median(train, platform), both=_median(both, platform)
    )  # fmt: skip


def _median(run: Callable[[], None], platform: Platform) -> float:
    times = []
    for _ in range(1 + REPEATS):
        platform.synchronize()
        dist.barrier()
        began = time.perf_counter()
        run()
        platform.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure_variant(variant: Variant, platform: Platform) -> None:
    """Measures a variant, after a step of training, and prints it on rank 0.

    Raises:
        UserError: the variant is a peer, has no two macro batches a step, or replays no graph of its microbatches.
    """
    plan = variant.plan
    if variant.peer:
        raise UserError(f"variant {variant.name}: has no macro batches; name unified or a factor such as f4")
    if len(plan.batch.macro_batches) < 2:
        raise UserError(f"variant {variant.name}: has no two macro batches a step; raise model.global_batch_size")
    state = build(plan, platform)
    data = DataPipeline(plan, "train", dist.get_rank(), pin=platform.is_cuda)
    try:
        step = TrainStep(state)
        if platform.is_cuda and not step.language.is_graphed:
            raise UserError(f"variant {variant.name}: the language model is no CUDA graph; set system.cuda_graph=true")
        step.run(data.step(0), mimo.weights_of(plan, data, 0))
        state.finish_gathers()
        current, following, *_ = data.step(1)
        found = measure(step, (current, following), mimo.weights_of(plan, data, 1), platform)
    finally:
        data.close()
        state.topology.destroy()
    if dist.get_rank() == 0:
        print(f"{variant.name}, {len(current.microbatches)} microbatches: {found}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measures each variant on the benchmark's data; the arguments are the benchmark's."""
    with mimo.session(arguments) as (_, platform, chosen):
        for variant in itertools.chain.from_iterable(chosen.values()):
            measure_variant(variant, platform)
            gc.collect()
            if platform.is_cuda:
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
