"""The benchmark of reading, in small: both ways on real processes, one of which reads everything on every rank."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"(\d) ranks, (.+?) *: +[\d.]+ samples/s, +[\d.]+ CPU s; a step: (\d+) images decoded, [\d.]+ MB read"
)


def test_images_decoded_by_ranks_that_read_everything_and_by_those_that_share() -> None:
    """In a process of its own, since it forks its ranks."""
    command = [sys.executable, "-m", "tools.bench.data", "--ranks", "2", "4", "--steps", "1", "--side", "64"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    decoded = {(int(ranks), way): int(images) for ranks, way, images in LINE.findall(done.stdout)}
    assert decoded == {
        (ranks, way): 64 * times for ranks in (2, 4) for way, times in (("plain DataLoader", ranks), ("sharded", 1))
    }, done.stdout
    assert len(re.findall(r"ranks, ratio: throughput [\d.]+, CPU seconds [\d.]+", done.stdout)) == 2
