"""`experiment.profile`: some iterations as a Chrome trace a rank, and a timeline of their phases as a picture."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from flagscale.config.schema import ProfileConfig
from flagscale.train.timeline import draw_timeline


class IterationProfiler:
    """Records the iterations `start` to `stop`, both included; the loop calls it around every iteration.

    Args:
        config: first and last iteration, counted from 1; None records nothing.
        folder: `exp_dir/profile`, which receives `rank<r>.json` and `timeline.png`.
        cuda: whether kernels on a GPU are recorded too.
    """

    def __init__(self, config: ProfileConfig, folder: Path, *, cuda: bool) -> None:
        self._config = config
        self._folder = folder
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        self._profile: profile | None = None

    def before(self, iteration: int) -> None:
        """Start recording when it is time; a run that resumes in the middle of the span starts there."""
        start, stop = self._config.start, self._config.stop
        if start is not None and stop is not None and start <= iteration <= stop and self._profile is None:
            self._profile = profile(activities=self._activities)
            self._profile.start()

    def after(self, iteration: int) -> Path | None:
        """Write the traces after the last iteration; the picture on rank 0. Collective over the world then."""
        if self._profile is None or iteration != self._config.stop:
            return None
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / f"rank{dist.get_rank()}.json"))
        self._profile = None
        dist.barrier()  # all traces are there
        if dist.get_rank() != 0:
            return None
        return draw_timeline(self._folder)
