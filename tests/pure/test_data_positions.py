"""mRoPE positions: the vector known from the public sources."""

from __future__ import annotations

import numpy as np

from flagscale.data.chat import Placement
from flagscale.data.positions import rope_positions


def test_known_vector() -> None:
    """3 text, image 1x4x6, 3 text, frame, 2 text, frame, 1 text; start and end tokens around each: 29 tokens."""
    placements = (Placement(4, 6, 4, 0), Placement(4, 4, 15, 1, 0), Placement(4, 4, 23, 1, 1))
    positions_3T = rope_positions(29, placements, merge_size=2)
    assert positions_3T[:, 4:10].tolist() == [[4] * 6, [4, 4, 4, 5, 5, 5], [4, 5, 6, 4, 5, 6]]
    assert positions_3T[:, 10].tolist() == [7, 7, 7]
    assert positions_3T[:, -1].tolist() == [21, 21, 21]
    assert positions_3T.max() + 1 - 29 == -7


def test_text_counts_on_all_axes() -> None:
    assert np.array_equal(rope_positions(5, (), 2), np.tile(np.arange(5), (3, 1)))


def test_two_images_without_text_between() -> None:
    positions_3T = rope_positions(8, (Placement(2, 4, 0, 0), Placement(4, 4, 2, 1)), 2)
    assert positions_3T.tolist() == [
        [0, 0, 2, 2, 2, 2, 4, 5],
        [0, 0, 2, 2, 3, 3, 4, 5],
        [0, 1, 2, 3, 2, 3, 4, 5],
    ]
