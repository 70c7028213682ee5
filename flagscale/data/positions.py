"""Three-dimensional rotary positions (mRoPE) of a sample: time, height and width of every token.

Text advances all three by one. The tokens of a visual item that starts at position p have time p, height p + row and
width p + column over the merged grid; what follows continues at p + max(rows, columns). A frame group of a video counts
as an item of its own (its timestamp text separates it from the one before).
Same values as `Qwen3_5Model.get_rope_index` of transformers 5.24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flagscale.data.chat import Placement


def rope_positions(length: int, placements: Sequence[Placement], merge_size: int) -> np.ndarray:
    """Positions [3, length] int64 of a sample.

    Args:
        length: tokens of the sample.
        placements: its visual items, in the order of their placeholders.
        merge_size: patches a side that make one token.
    """
    positions_3T = np.empty((3, length), dtype=np.int64)
    token, position = 0, 0
    for item in placements:
        text_length = item.start - token
        positions_3T[:, token : item.start] = np.arange(position, position + text_length)
        position += text_length
        rows, columns = item.grid_h // merge_size, item.grid_w // merge_size
        token = item.start + rows * columns
        positions_3T[0, item.start : token] = position
        positions_3T[1, item.start : token] = position + np.repeat(np.arange(rows), columns)
        positions_3T[2, item.start : token] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
    positions_3T[:, token:] = np.arange(position, position + length - token)
    return positions_3T
