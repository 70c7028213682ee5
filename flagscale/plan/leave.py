"""The two files of exp_dir through which a batch job and the trainer agree to leave before the time limit."""

from __future__ import annotations

LEAVE_REQUEST = "leave.request"
"""The batch script makes it: save a checkpoint and leave."""
LEFT = "leave.done"
"""What the trainer renames the request to once it has saved: the run is not finished."""
