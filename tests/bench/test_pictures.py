"""The benchmark's pictures: samples of the wanted share of visual tokens that fit in a row."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from flagscale.data.image import ImageSettings
from flagscale.data.index import SampleIndex
from flagscale.data.source import Source
from flagscale.data.tokenizer import BuiltinTokenizer
from tools.bench.pictures import SIDE_OF_TOKEN, Wanted, draw_grids, make_sample

ROW = 2048
DRAWN, WRITTEN = 300, 6
# Pictures under 64 tokens are enlarged to as many.
SETTINGS = ImageSettings(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=65536, max_pixels=1048576)


def enlarged(wanted: Wanted, number: int) -> int:
    """Tokens of a sample's pictures over those that were drawn for them."""
    grids = draw_grids(wanted, random.Random(f"{wanted.seed}/{number}"))
    return sum(wanted.tokens(c * SIDE_OF_TOKEN, r * SIDE_OF_TOKEN) - r * c for r, c in grids)


@pytest.mark.parametrize("visual", [0.15, 0.5, 0.8])
def test_samples_fit_in_a_row_and_nearly_fill_it(visual: float, tmp_path: Path) -> None:
    """Those of many whose pictures are enlarged most."""
    wanted = Wanted(folder=tmp_path, seq_length=ROW, visual=visual, seed=1, image=SETTINGS)
    worst = sorted(range(DRAWN), key=lambda number: enlarged(wanted, number))[-WRITTEN:]
    (tmp_path / "images").mkdir()
    lines = [make_sample(wanted, number) + "\n" for number in worst]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    with SampleIndex.open(Source(tmp_path / "train.jsonl", BuiltinTokenizer(), SETTINGS)) as index:
        lengths = [index.num_tokens(number) for number in range(WRITTEN)]
        seen = sum(place.num_tokens(2) for number in range(WRITTEN) for place in index.placements(number))
    assert max(lengths) <= ROW
    assert min(lengths) >= 0.94 * ROW
    assert seen / (WRITTEN * ROW) == pytest.approx(visual, abs=0.05)
