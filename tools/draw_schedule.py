"""Draws the three phases of a macro batch on a timeline: docs/images/schedule.svg.

    python tools/draw_schedule.py [--factor 4] [--stages 2] [--output docs/images/schedule.svg]

The durations are model units: forward 1, backward 2, encoder forward as long as one microbatch's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COLOURS = {"V": "#7fb3d5", "x": "#d0d3d4", "f": "#a9dfbf", "b": "#58b57b", "W": "#2e86c1", "": "none"}
FORWARD, BACKWARD, EXCHANGE = 1.0, 2.0, 0.4
UNIT, HEIGHT, LEFT, GAP = 34.0, 26.0, 84.0, 8.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A piece of work of one row: kind (a key of COLOURS), text, start and length in units."""

    kind: str
    text: str
    start: float
    length: float


def one_forward_one_backward(stages: int, microbatches: int, start: float) -> list[list[Bar]]:
    """The language phase: per stage its bars, each as early as its input and its stage allow."""
    done: dict[tuple[str, int, int], float] = {}
    orders = [_order(stage, stages, microbatches) for stage in range(stages)]
    free, rows = [start] * stages, [[] for _ in range(stages)]  # type: list[float], list[list[Bar]]
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, m = order[0]
                before = {"f": ("f", stage - 1, m), "b": ("b", stage + 1, m)}[kind]
                needed = before if 0 <= before[1] < stages else ("f", stage, m) if kind == "b" else None
                if needed is not None and needed not in done:
                    break
                begin = max(free[stage], done[needed] if needed else start)
                length = FORWARD if kind == "f" else BACKWARD
                rows[stage].append(Bar(kind, f"{kind}{m + 1}", begin, length))
                free[stage] = done[kind, stage, m] = begin + length
                order.pop(0)
    return rows


def _order(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """What a stage runs, in order: warm-up forwards, then one forward and one backward in turn, then backwards."""
    warm = min(stages - 1 - stage, microbatches)
    order = [("f", m) for m in range(warm)]
    for m in range(microbatches - warm):
        order += [("f", warm + m), ("b", m)]
    return order + [("b", m) for m in range(microbatches - warm, microbatches)]


def macro_batch(stages: int, factor: int) -> list[list[Bar]]:
    """All three phases, a row a stage."""
    encode = FORWARD * factor / 2
    language = one_forward_one_backward(stages, factor, encode + EXCHANGE)
    end = max(bar.start + bar.length for row in language for bar in row)
    ends = [Bar("x", "", end, EXCHANGE), Bar("W", "encoder backward", end + EXCHANGE, 2 * encode)]
    return [[Bar("V", "encoder forward", 0.0, encode), Bar("x", "", encode, EXCHANGE), *row, *ends] for row in language]


def svg(charts: Sequence[tuple[str, list[list[Bar]]]]) -> str:
    """The charts one below the other."""
    body, top, width = [], 10.0, 0.0
    for title, rows in charts:
        body.append(f'<text x="8" y="{top + 14:.0f}" font-weight="bold">{title}</text>')
        top += 24
        for stage, row in enumerate(rows):
            body.append(f'<text x="8" y="{top + 17:.0f}">stage {stage}</text>')
            for bar in row:
                x, length = LEFT + bar.start * UNIT, bar.length * UNIT
                width = max(width, x + length)
                body.append(
                    f'<rect x="{x:.1f}" y="{top:.1f}" width="{length:.1f}" height="{HEIGHT:.0f}" '
                    f'fill="{COLOURS[bar.kind]}" stroke="#555"/>'
                    f'<text x="{x + length / 2:.1f}" y="{top + 17:.0f}" text-anchor="middle">{bar.text}</text>'
                )
            top += HEIGHT + GAP
        top += 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 12:.0f}" height="{top:.0f}" '
    return head + 'font-family="sans-serif" font-size="12">\n' + "\n".join(body) + "\n</svg>\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    parser = argparse.ArgumentParser(prog="draw_schedule.py", description=__doc__.split("\n")[0])
    parser.add_argument("--factor", type=int, default=4, metavar="N", help="microbatches of the macro batch")
    parser.add_argument("--stages", type=int, default=2, metavar="N", help="pipeline stages of the second chart")
    parser.add_argument("--output", type=Path, default=Path("docs/images/schedule.svg"), metavar="FILE")
    arguments = parser.parse_args(argv)
    charts = [
        (f"PP = {stages}, vit_batch_factor {arguments.factor} (grey: exchange)", macro_batch(stages, arguments.factor))
        for stages in (1, arguments.stages)
    ]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(svg(charts), encoding="utf-8")
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
