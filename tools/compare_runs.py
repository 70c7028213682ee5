"""Compares runs by their `metrics.jsonl`: a table for the terminal and for a pull request, and a figure.

    python tools/compare_runs.py outputs/unified outputs/colocated [--output FOLDER] [--skip N]

The first run is the reference. Writes `compare.md` and `compare.png` to the output folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from flagscale.config.errors import UserError  # noqa: E402
from flagscale.runner.compare import markdown, read_run, run_names, show, table_rows, write_figure  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description="Compare runs; the first one is the reference.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for compare.md and compare.png")
    parser.add_argument("--skip", type=int, default=5, help="first iterations left out of times (warm-up); default 5")
    arguments = parser.parse_args(argv)
    if arguments.skip < 0:
        parser.error(f"--skip {arguments.skip}: must be at least 0")
    try:
        names = run_names(arguments.runs)
        runs = [read_run(folder, name) for folder, name in zip(arguments.runs, names, strict=True)]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = table_rows(runs, arguments.skip)
    show(rows)
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "compare.md").write_text(markdown(rows), encoding="utf-8")
        write_figure(runs, arguments.output / "compare.png")
    except OSError as error:
        print(f"error: --output {arguments.output}: {error.strerror}; give a folder for the files", file=sys.stderr)
        return 2
    print(f"written: {arguments.output / 'compare.md'}, {arguments.output / 'compare.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
