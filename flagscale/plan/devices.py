"""GPUs of this machine, without torch."""

from __future__ import annotations

import os
import subprocess


def visible_gpus() -> int:
    """GPUs that processes started here can use: those the driver lists, less what CUDA_VISIBLE_DEVICES hides."""
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    present = sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    count = 0
    for entry in (part.strip() for part in chosen.split(",")):
        known = int(entry) < present if entry.isdigit() else entry.startswith(("GPU-", "MIG-"))
        if not known:
            break  # CUDA ignores everything after the first entry that names no device
        count += 1
    return count
