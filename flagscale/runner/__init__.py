"""Runs an experiment plan: render its scripts, then start, watch, query or stop the job.

`dispatch` (run, test) and `attend` (query, stop) are the whole interface. Rendering is pure (`render`), executing is
apart (`local`), so that another executor starts the same text elsewhere. Nothing here imports torch.
"""

from __future__ import annotations

from flagscale.runner.actions import attend, dispatch

__all__ = ["attend", "dispatch"]
