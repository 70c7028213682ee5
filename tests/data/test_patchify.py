"""Our patches against the released models' own processor: the same sizes and, to the last bit, the same values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from flagscale.data.patchify import patchify, resized

SIDES = st.integers(1, 5000)


@given(SIDES, SIDES, st.sampled_from([28, 32, 64]), st.sampled_from([1024, 65536]), st.sampled_from([25600, 1 << 24]))
def test_sizes_equal_the_library(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> None:
    try:
        expected = smart_resize(height, width, factor, min_pixels, max_pixels)
    except ValueError:
        with pytest.raises(ValueError, match=f"{width}x{height} is over 200"):
            resized(height, width, factor, min_pixels, max_pixels)
    else:
        assert resized(height, width, factor, min_pixels, max_pixels) == expected


@pytest.mark.parametrize(("patch", "merge", "temporal"), [(16, 2, 2), (14, 2, 2), (8, 3, 1)])
@pytest.mark.parametrize(("height", "width"), [(20, 300), (131, 77), (400, 255)])
def test_values_equal_the_library(height: int, width: int, patch: int, merge: int, temporal: int) -> None:
    rgb = Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8))
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 1024, "longest_edge": 25600}, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        patch_size=patch, merge_size=merge, temporal_patch_size=temporal,
    )  # fmt: skip
    expected = processor(rgb, return_tensors="np")
    resized_h, resized_w = resized(height, width, patch * merge, 1024, 25600)
    grid = (resized_h // patch, resized_w // patch)
    pixels_PD = patchify(rgb, grid, patch, merge, temporal)
    assert (1, *grid) == tuple(expected["image_grid_thw"][0])
    assert pixels_PD.dtype == np.float32
    assert np.array_equal(pixels_PD, expected["pixel_values"])
