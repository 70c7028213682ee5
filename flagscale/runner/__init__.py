"""Runs an experiment plan: render its scripts, then start, watch, query or stop the job.

`dispatch` (run, test), `attend` (query, stop) and `preview` (dryrun) are the whole interface. Rendering is pure
(`render`, `sbatch`), executing is apart (`local`, `ssh`, `slurm`). Nothing here imports torch.
"""

from __future__ import annotations

from flagscale.runner.actions import attend, dispatch, preview

__all__ = ["attend", "dispatch", "preview"]
