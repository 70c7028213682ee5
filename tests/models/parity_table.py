"""Writes docs/parity.md: what equals transformers, and by how much it differs, measured now.

python -m tests.models.parity_table
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.dist.pool import run_ranks
from tests.models.ranks import full_step
from tests.models.test_parity import (
    KINDS,
    LAYOUTS,
    LIMITS,
    MOE_LAYOUTS,
    SINGLE,
    differences,
    of_replica,
    reference,
)

TARGET = Path(__file__).resolve().parents[2] / "docs/parity.md"
NAMES = {"tp": "LLM TP", "pp": "PP", "ep": "EP", "vtp": "ViT TP"}
HEAD = """# Equal to transformers

Written by `python -m tests.models.parity_table`; the same comparisons are tests (`tests/models/test_parity.py`).

Small random models with every part of the real ones, fp32 on a CPU, the same weights here and in transformers
{version}; torch {torch}. The largest differences: absolute for visual rows, logits and token losses; relative to each
parameter's own gradient for gradients. Losses and gradients include multi-token prediction (not with left padding),
whose reference is written from its formula with transformers' own layer, because transformers drops these weights.
The layouts run with a batch of unequal images.

"""
COLUMNS = ("visual rows", "logits", "loss", "MTP loss", "gradients", "A_log, dt_bias")


def measure(kind: str, layout: dict[str, Any], *, moe: bool) -> dict[str, tuple[float, str]]:
    """Differences of a batch at a layout."""
    single = layout is SINGLE
    model, weights, batch, expected = reference(kind, tied=not single and not moe, mtp=kind != "left padding", moe=moe)
    model = dataclasses.replace(model, sequence_parallel=layout["sp"])
    world = max(layout["tp"], layout.get("ep", 1)) * layout["pp"]
    results = run_ranks(world, full_step, model, weights, batch, layout, timeout=300.0)
    return differences(of_replica(results, layout, 0), batch, expected, layout["tp"])


def table() -> str:
    """The table's rows."""
    lines = ["| model | case | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    lines.append("| | limit | " + " | ".join(f"{value:.0e}" for value in LIMITS.values()) + " |")
    for moe in (False, True):
        cases = [(kind, kind, SINGLE) for kind in KINDS]
        cases += [(_title(layout), "unequal images", layout) for layout in (MOE_LAYOUTS if moe else LAYOUTS)]
        for title, kind, layout in cases:
            found = measure(kind, layout, moe=moe)
            values = (f"{found[key][0]:.1e}" if key in found else "-" for key in LIMITS)
            lines.append(f"| {'experts' if moe else 'dense'} | {title} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def _title(layout: dict[str, Any]) -> str:
    degrees = [f"{name} {layout[key]}" for key, name in NAMES.items() if layout.get(key, 1) > 1]
    return ", ".join([*degrees, *(["SP"] if layout["sp"] else [])])


if __name__ == "__main__":
    TARGET.write_text(
        HEAD.format(version=transformers.__version__, torch=torch.__version__) + table(), encoding="utf-8"
    )
