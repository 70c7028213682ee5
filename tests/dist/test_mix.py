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
WRITTEN = {
    1: b"", 2: b"digits: [0.1", 3: b"\xff\xfe\x00digits", 4: b"digits: .inf",
    5: b"texts: 0\ndigits: [[0, 1], [9, 3]]\n", 6: b"digits: 0", 7: b"unknown: 1",
}  # fmt: skip
"""What the control file holds from a step on: half written in three ways, no number, good (at step 5), one that leaves
nothing to draw from, and one with an unknown source."""

Seen = list[tuple[list[int], Any, dict[str, float], tuple[list[int], list[tuple[int, int]]]]]
"""Of every step: its sample ids, tokens and rows of its macro batches, its metrics, and what this rank trains on: the
samples that the language model computes (by one rank of a replica), and (sample, medium) that the encoder does."""


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
                (exp_dir / CONTROL).write_bytes(WRITTEN[step])
            lines += control.poll(step)
            macros = list(data.step(step))
            counts = [(m.spec.num_tokens, m.spec.num_microbatches * plan.language.dp) for m in macros]
            texts = [i for m in macros for text in m.microbatches for i, _, _ in text.spans()]
            pixels = [(m.spec.items[i].sample, m.spec.items[i].media) for m in macros for i in m.pixels]
            speaks = plan.language.coordinate(dist.get_rank())["tp"] == 0
            seen.append((data.sample_ids(step), counts, data.source_metrics(step), (texts * speaks, pixels)))
            if step + 1 == SAVED:
                state = data.state_dict(SAVED)
    finally:
        data.close()
    return seen, state, lines


def trained(results: list[tuple[Seen, Any, list[str]]], number: int) -> tuple[list[int], list[tuple[int, int]]]:
    """What all ranks together train on in a step, by module."""
    own = [seen[number][3] for seen, _, _ in results]
    return sorted(i for texts, _ in own for i in texts), sorted(item for _, pixels in own for item in pixels)


def test_a_changed_mix_is_reproduced_on_resume_at_another_layout(tmp_path: Path) -> None:
    """Killed at step 8 with a checkpoint of step 3: the change at step 5 is made again there, over ends of epochs."""
    write_mixture(tmp_path, 25)
    write_jsonl(tmp_path / "texts.jsonl", [{"text": "abc" * (i % 20 + 1)} for i in range(11)] + [sharegpt("?", "1")])
    four = plan_for(tmp_path, Grid(dp=4), Grid(tp=2, dp=2), (4,))
    two = plan_for(tmp_path, Grid(tp=2), Grid(dp=2), (2, 2))
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
    whole = run_ranks(4, follow, four, tmp_path / "unbroken", 0, STEPS, None, timeout=240)
    for rank in whole:
        assert [step[:3] for step in rank[0]] == [step[:3] for step in whole[0][0]], "ranks differ"
    said = "\n".join(whole[0][2])
    assert said.count("mix.yaml: is not valid YAML") == 2
    assert said.count("the mix stays as it is") == 5
    assert "digits must be a number >= 0" in said
    assert "leaves every source with weight 0 at step 6" in said
    assert "mix from iteration 6 on: texts 0, digits 2.11" in said
    assert "names unknown; sources are digits, texts" in said
    texts = [metrics["samples/texts"] for _, _, metrics, _ in whole[0][0]]
    assert all(texts[:5])
    assert not any(texts[5:])
    assert [sum(m[f"samples/{name}"] for name in ("digits", "texts")) for _, _, m, _ in whole[0][0]] == [16] * STEPS

    state = run_ranks(4, follow, four, tmp_path / "broken", 0, KILLED, None, timeout=240)[0][1]
    again = run_ranks(2, follow, two, tmp_path / "broken", SAVED, STEPS, state, timeout=240)
    for step, (ids, counts, metrics, _) in enumerate(again[0][0], start=SAVED):
        assert (ids, metrics) == (whole[0][0][step][0], whole[0][0][step][2]), f"step {step}"
        assert sum(tokens for tokens, _ in counts) == sum(tokens for tokens, _ in whole[0][0][step][1])
        language, vision = trained(again, step - SAVED)
        assert (language, vision) == trained(whole, step), f"step {step}"
        assert language == sorted(ids)
        assert vision
    (entry,) = [json.loads(line) for line in (tmp_path / "broken" / JOURNAL).read_text().splitlines()]
    assert entry["step"] == 5
