"""A mix that is changed while a run goes on: the same on all ranks, and the same again after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from flagscale.data.loader import DataPipeline
from flagscale.plan.layout import Grid
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.mix_control import CONTROL, JOURNAL, MixControl
from tests.data.helpers import make_config, make_plan, sharegpt, write_jsonl, write_mixture
from tests.dist.pool import run_ranks

STEPS, SAVED, KILLED = 12, 3, 8
WRITTEN = {2: "digits: [0.1", 5: "texts: 0\ndigits: [[0, 1], [9, 3]]\n", 7: "unknown: 1"}
"""What stands in the control file from a step on: broken, good, and with an unknown source."""

Seen = list[tuple[list[int], Any, dict[str, float]]]


def plan_for(folder: Path, vision: Grid, language: Grid, macro_batches: tuple[int, ...]) -> ExperimentPlan:
    sources = {
        "digits": {"path": str(folder / "train.jsonl"), "weight": 1.0},
        "texts": {"path": str(folder / "texts.jsonl"), "weight": [[0, 1.0], [10, 0.5]]},
    }
    model = {"global_batch_size": 16, "micro_batch_size": 2, "train_iters": STEPS}
    data = {"sources": sources, "packing": "length_budget", "language_balance": True}
    config = make_config(None, model=model, **data)
    return make_plan(config, vision, language, macro_batches)


def follow(plan: ExperimentPlan, exp_dir: Path, first: int, last: int, saved: Any) -> tuple[Seen, Any, list[str]]:
    """Steps first .. last - 1 as the loop takes them: what was seen, the state at SAVED, the lines said."""
    data = DataPipeline(plan, "train", dist.get_rank())
    seen, lines, state = [], [], saved
    try:
        if saved is not None:
            data.load_state_dict(saved)
        control = MixControl(exp_dir, data, first)
        for step in range(first, last):
            if dist.get_rank() == 0 and first == 0 and step in WRITTEN:
                (exp_dir / CONTROL).write_text(WRITTEN[step])
            lines += control.poll(step)
            specs = [macro.spec for macro in data.step(step)]
            counts = [(spec.num_tokens, spec.num_microbatches * plan.language.dp) for spec in specs]
            seen.append((data.sample_ids(step), counts, data.source_metrics(step)))
            if step + 1 == SAVED:
                state = data.state_dict(SAVED)
    finally:
        data.close()
    return seen, state, lines


def test_a_changed_mix_is_reproduced_on_resume_at_another_layout(tmp_path: Path) -> None:
    """Killed at step 8 with a checkpoint of step 3: the change at step 5 is made again there, over ends of epochs."""
    write_mixture(tmp_path, 25)
    write_jsonl(tmp_path / "texts.jsonl", [{"text": "abc" * (i % 20 + 1)} for i in range(11)] + [sharegpt("?", "1")])
    four = plan_for(tmp_path, Grid(dp=4), Grid(tp=2, dp=2), (4,))
    two = plan_for(tmp_path, Grid(tp=2), Grid(dp=2), (2, 2))
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
    whole = run_ranks(4, follow, four, tmp_path / "unbroken", 0, STEPS, None, timeout=240)
    assert all(result[0] == whole[0][0] for result in whole), "ranks differ"
    said = "\n".join(whole[0][2])
    assert "mix.yaml: is not valid YAML" in said
    assert "mix from iteration 6 on: texts 0, digits 2.11" in said
    assert "names unknown; sources are digits, texts" in said
    texts = [metrics["samples/texts"] for _, _, metrics in whole[0][0]]
    assert all(texts[:5])
    assert not any(texts[5:])
    assert [sum(m[f"samples/{name}"] for name in ("digits", "texts")) for _, _, m in whole[0][0]] == [16] * STEPS

    state = run_ranks(4, follow, four, tmp_path / "broken", 0, KILLED, None, timeout=240)[0][1]
    again = run_ranks(2, follow, two, tmp_path / "broken", SAVED, STEPS, state, timeout=240)
    for step, (ids, counts, metrics) in enumerate(again[0][0], start=SAVED):
        assert (ids, metrics) == (whole[0][0][step][0], whole[0][0][step][2]), f"step {step}"
        assert sum(tokens for tokens, _ in counts) == sum(tokens for tokens, _ in whole[0][0][step][1])
    (entry,) = [json.loads(line) for line in (tmp_path / "broken" / JOURNAL).read_text().splitlines()]
    assert entry["step"] == 5
