"""Reading and decoding: this project's pipeline against a plain PyTorch DataLoader that reads everything on every rank.

    python -m tools.bench.data --ranks 2 4 8

Both see the same pictures, the same global batches and the same number of processes, each with one background worker.
The DataLoader's ranks read and decode the whole global batch and keep their part of it, as trainers do that split a
batch after reading it. Reported for each number of ranks, in one run, one after the other: samples a second by the
slowest rank, CPU seconds of all processes together (their start and the warm-up included), and what was read.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from flagscale.config.loading import load
from flagscale.data.corpus import Corpus
from flagscale.data.loader import DataPipeline
from flagscale.plan.batch import batch_plan, grids_of, layout_of, world_size_of
from flagscale.plan.plan import ExperimentPlan, MemoryPlan

NUM_SAMPLES, IMAGES_A_SAMPLE = 128, 2
WARM_UP = 1  # steps that are not timed: they start workers
LIMIT = 900  # seconds after which a rank that says nothing is taken for lost


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank reports: seconds of its timed steps, and what it read in all its steps."""

    seconds: float
    decoded: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """All ranks: seconds of the slowest one, CPU seconds of all, and what they read in a step together."""

    seconds: float
    cpu_s: float
    decoded_a_step: float
    bytes_a_step: float


def write_source(folder: Path, side: int) -> Path:
    """A JSONL file of samples with two JPEGs of about `side` pixels each."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(NUM_SAMPLES):
        names = []
        for k in range(IMAGES_A_SAMPLE):
            height, width = rng.integers(side * 3 // 4, side * 5 // 4, size=2)
            small = Image.fromarray(rng.integers(0, 256, size=(height // 8, width // 8, 3), dtype=np.uint8))
            names.append(f"{i}-{k}.jpg")
            small.resize((int(width), int(height)), Image.Resampling.BICUBIC).save(folder / names[-1], quality=90)
        turns = [{"from": "human", "value": "<image><image>Which?"}, {"from": "gpt", "value": str(i)}]
        lines.append(json.dumps({"conversations": turns, "images": names}) + "\n")
    path = folder / "train.jsonl"
    path.write_text("".join(lines))
    return path


def make_plan(source: Path, ranks: int, side: int, num_steps: int) -> ExperimentPlan:
    """Colocated: the ViT and the LLM data parallel over all ranks."""
    overrides = {
        "data.train_path": source, "data.valid_path": "null", "data.max_pixels": side * side, "data.min_pixels": 1024,
        "model.seq_length": 4096, "model.global_batch_size": 32, "model.micro_batch_size": 1,
        "model.vision_micro_batch_size": 4, "model.tensor_model_parallel_size": 1, "model.eval_interval": "null",
        "experiment.runner.nproc_per_node": ranks, "model.train_iters": num_steps,
    }  # fmt: skip
    config = load("qwen35_mimo", None, [f"{key}={value}" for key, value in overrides.items()]).config
    modules = grids_of(config)
    return ExperimentPlan(
        config=config, layout=layout_of(config), world_size=world_size_of(config), modules=modules,
        batch=batch_plan(config, modules), costs={}, command=(),
        memory=MemoryPlan(weights=0, gradients=0, optimizer=0, activations=0),
    )  # fmt: skip


class WholeBatches(Dataset[dict[str, Any]]):
    """Global batches as every rank of a plain trainer reads them: all texts, all pixels."""

    def __init__(self, plan: ExperimentPlan, num_steps: int) -> None:
        self._plan, self._num_steps = plan, num_steps
        self._corpus: Corpus | None = None  # opened in the worker

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> dict[str, Any]:
        if self._corpus is None:
            self._corpus = Corpus.open(self._plan.config, "train")
        tokens, pixels = [], []
        size = self._plan.batch.global_batch_size
        for sample_id in (i % NUM_SAMPLES for i in range(step * size, (step + 1) * size)):
            encoded = self._corpus.read(sample_id).encoded
            wanted = [(item.media, item.frame, (item.grid_h, item.grid_w)) for item in encoded.placements]
            tokens.append(torch.from_numpy(encoded.tokens_T))
            patches = self._corpus.pixels(sample_id, self._corpus.record(sample_id), wanted)
            pixels += [torch.from_numpy(one) for one in patches]
        read = (self._corpus.decoded, self._corpus.media_bytes + self._corpus.record_bytes)
        return {"tokens": tokens, "pixels": pixels, "read": read}


def read_sharded(plan: ExperimentPlan, rank: int, num_steps: int) -> Share:
    """One rank of this project's pipeline."""
    data = DataPipeline(plan, "train", rank)
    start = 0.0
    for step in range(WARM_UP + num_steps):
        if step == WARM_UP:
            start = time.perf_counter()
        for _ in data.step(step):
            pass
    seconds = time.perf_counter() - start
    data.close()
    return Share(seconds, data.decoded, data.corpus.media_bytes + data.corpus.record_bytes)


def read_everything(plan: ExperimentPlan, rank: int, num_steps: int) -> Share:
    """One rank of a DataLoader over whole batches."""
    batches = WholeBatches(plan, WARM_UP + num_steps)
    loader = DataLoader(batches, batch_size=None, num_workers=1, prefetch_factor=2, multiprocessing_context="fork")
    start, read = 0.0, (0, 0)
    for step, batch in enumerate(loader):
        if step == WARM_UP - 1:
            start = time.perf_counter()
        kept, read = batch["pixels"][rank :: plan.world_size], batch["read"]
        assert kept, "a rank keeps its part"
    return Share(time.perf_counter() - start, *read)


Reader = Callable[[ExperimentPlan, int, int], Share]


def _rank(read: Reader, plan: ExperimentPlan, rank: int, steps: int, results: Any) -> None:
    torch.set_num_threads(1)
    results.put(read(plan, rank, steps))


def measure(read: Reader, plan: ExperimentPlan, num_steps: int) -> Measured:
    """All ranks at once. They are forked, so that none of them imports anything."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    before = _children_s()
    ranks = [
        context.Process(target=_rank, args=(read, plan, rank, num_steps, results)) for rank in range(plan.world_size)
    ]
    for process in ranks:
        process.start()
    found = [results.get(timeout=LIMIT) for _ in ranks]
    for process in ranks:
        process.join()
    steps = WARM_UP + num_steps
    return Measured(
        seconds=max(share.seconds for share in found),
        cpu_s=_children_s() - before,
        decoded_a_step=sum(share.decoded for share in found) / steps,
        bytes_a_step=sum(share.num_bytes for share in found) / steps,
    )


def _children_s() -> float:
    """CPU seconds of all ended descendants."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare(source: Path, ranks: int, options: argparse.Namespace) -> None:
    """Both ways at one number of ranks, as lines."""
    plan = make_plan(source, ranks, options.side, WARM_UP + options.steps)
    Corpus.open(plan.config, "train").close()  # both find the index built and the image processor imported
    found = {}
    for name, read in (("plain DataLoader", read_everything), ("sharded", read_sharded)):
        one = found[name] = measure(read, plan, options.steps)
        samples = options.steps * plan.batch.global_batch_size
        print(
            f"{ranks} ranks, {name:16}: {samples / one.seconds:7.1f} samples/s, {one.cpu_s:6.1f} CPU s; a step: "
            f"{one.decoded_a_step:.0f} images decoded, {one.bytes_a_step / 1e6:.1f} MB read",
            flush=True,
        )
    plain, own = found["plain DataLoader"], found["sharded"]
    faster, cheaper = plain.seconds / own.seconds, plain.cpu_s / own.cpu_s
    print(f"{ranks} ranks, ratio: throughput {faster:.2f}, CPU seconds {cheaper:.2f}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Reading and decoding against a plain DataLoader.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of processes (default: 2 4 8)")
    parser.add_argument("--steps", type=int, default=5, help="timed global batches of 32 samples (default: 5)")
    parser.add_argument("--side", type=int, default=448, help="of a picture, in pixels (default: 448)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the ranks are forked, which threads would not survive
    with tempfile.TemporaryDirectory() as folder:
        source = write_source(Path(folder), options.side)
        for ranks in options.ranks:
            compare(source, ranks, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
