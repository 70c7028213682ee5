"""Draws the timeline of profiled iterations again, from the Chrome traces that `experiment.profile` wrote.

    python tools/timeline.py outputs/RUN/profile
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from flagscale.config.errors import UserError  # noqa: E402
from flagscale.train.timeline import draw_timeline  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Draw, and say where."""
    parser = argparse.ArgumentParser(description="Draw the timeline of a profile.")
    parser.add_argument("folder", type=Path, help="folder with rank<r>.json")
    try:
        print(f"written: {draw_timeline(parser.parse_args(argv).folder)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
