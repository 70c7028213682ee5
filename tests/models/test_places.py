"""Where the encoder's patches lie, for any merge size and grids of any form: transformers' own places and taps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from flagscale.models.qwen35.vision import Places, VisionEncoder

SIDES = st.integers(1, 40)


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=5), merge=st.integers(1, 4), side=st.integers(2, 48)
)
@example(blocks=[(1, 1), (1, 20), (20, 1), (1, 1)], merge=2, side=48)
@example(blocks=[(1, 1), (1, 7), (7, 1)], merge=1, side=4)
@example(blocks=[(1, 3), (3, 1), (2, 3)], merge=3, side=4)
def test_places_and_table_rows_equal_the_library(blocks: list[tuple[int, int]], merge: int, side: int) -> None:
    grids = [(height * merge, width * merge) for height, width in blocks]
    grid_thw = torch.tensor([(1, height, width) for height, width in grids])
    places = Places.of(grids, merge, torch.device("cpu"))
    found_P2 = torch.stack((places.row_P, places.column_P), -1)
    assert torch.equal(found_P2, get_vision_position_ids(grid_thw, merge))
    table = torch.randn(side**2, 3, generator=torch.Generator().manual_seed(side))
    index, weight = get_vision_interpolation_indices_and_weights(
        grid_thw, side, align_corners=True, spatial_merge_size=merge
    )
    encoder = cast("Any", SimpleNamespace(side=side, position_table=table))
    expected_PE = (table[index] * weight[..., None]).sum(1)
    torch.testing.assert_close(VisionEncoder._position(encoder, places), expected_PE, rtol=0, atol=1e-4)
