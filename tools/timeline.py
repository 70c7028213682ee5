"""Draws the timeline of profiled iterations again, from the Chrome traces that `experiment.profile` wrote.

    python tools/timeline.py outputs/RUN/profile
    python tools/timeline.py outputs/UNIFIED/profile outputs/COLOCATED/profile --output both.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from flagscale.config.errors import UserError  # noqa: E402
from flagscale.train.timeline import draw_timeline, draw_timelines  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Draw, and say where."""
    parser = argparse.ArgumentParser(description="Draw the timeline of a profile.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="folder", help="folder with rank<r>.json")
    parser.add_argument("--output", type=Path, help="one picture of all folders; without it each gets its own")
    options = parser.parse_args(argv)
    try:
        if options.output is not None:
            written = [draw_timelines({str(folder): folder for folder in options.folders}, options.output)]
        else:
            written = [draw_timeline(folder) for folder in options.folders]
        print(f"written: {', '.join(map(str, written))}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
