"""mRoPE positions against transformers, on random mixtures of text, images and videos."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

from flagscale.data.chat import Placement
from flagscale.data.positions import rope_positions

SIDES = st.integers(1, 6).map(lambda blocks: 2 * blocks)
TEXT = st.tuples(st.just("text"), st.integers(1, 7), st.just(0), st.just(0))
IMAGE = st.tuples(st.just("image"), st.just(1), SIDES, SIDES)
VIDEO = st.tuples(st.just("video"), st.integers(1, 3), SIDES, SIDES)


class Oracle:
    """`get_rope_index` needs of its model only the merge size and its own helper."""

    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    get_vision_position_ids = Qwen3_5Model.get_vision_position_ids
    get_rope_index = Qwen3_5Model.get_rope_index


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(TEXT, IMAGE, VIDEO), min_size=1, max_size=8), st.integers(1, 9))
def test_positions_equal_the_library(segments: list[tuple[str, int, int, int]], stamp: int) -> None:
    """The template's start token stands before each visual item, and a time stamp before each frame group."""
    types: list[int] = []
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    placements = []
    for media, (kind, count, grid_h, grid_w) in enumerate(segments):
        if kind == "text":
            types += [0] * count
            continue
        grids[kind].append([count, grid_h, grid_w])
        for frame in range(count):
            types += [0] * (1 if kind == "image" else 1 + stamp)
            placements.append(Placement(grid_h, grid_w, len(types), media, frame if kind == "video" else -1))
            types += [1 if kind == "image" else 2] * placements[-1].num_tokens(2)
    as_tensor = {kind: torch.tensor(value) if value else None for kind, value in grids.items()}
    expected, _ = Oracle().get_rope_index(
        torch.zeros((1, len(types)), dtype=torch.long),
        torch.tensor([types]),
        image_grid_thw=as_tensor["image"],
        video_grid_thw=as_tensor["video"],
    )
    assert np.array_equal(rope_positions(len(types), placements, 2), expected[:, 0].numpy())
