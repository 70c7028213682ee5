"""What the released models' image processor computes, without its imports.

`transformers` would cost every rank 2 s of CPU time at its start for a few lines of arithmetic. That these are the
same, to the last bit, is tested against `transformers.Qwen2VLImageProcessorPil` (tests/data/test_patchify.py).

Legend: P patches of one image, in merge-block order (grid_h/m, grid_w/m, m, m); D = 3 * temporal * patch * patch values
of a patch (channel, temporal, row, column).
"""

from __future__ import annotations

import functools
import math

import numpy as np
from PIL import Image

NORMALISATION = 0.5  # mean and standard deviation of every channel in the released models' preprocessor
LARGEST_ASPECT_RATIO = 200


def resized(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) near the given ones that are multiples of `factor`, with an area within the bounds.

    The aspect ratio is kept as far as rounding allows. An image thinner than `factor` after shrinking is as thick as
    that, which may exceed `max_pixels`.

    Raises:
        ValueError: when the aspect ratio is over `LARGEST_ASPECT_RATIO`.
    """
    if max(height, width) > LARGEST_ASPECT_RATIO * min(height, width):
        raise ValueError(f"the aspect ratio of {width}x{height} is over {LARGEST_ASPECT_RATIO}")
    sides = [round(side / factor) * factor for side in (height, width)]
    if math.prod(sides) > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
    elif math.prod(sides) < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


def patchify(rgb: Image.Image, grid: tuple[int, int], patch: int, merge: int, temporal: int) -> np.ndarray:
    """Patches float32 [P, D] of an RGB image that is resized to `grid`.

    Args:
        grid: patches (grid_h, grid_w), multiples of `merge`.
        patch: side of a patch in pixels.
        merge: patches a side that make one token.
        temporal: frames in a patch; the image fills all of them.
    """
    grid_h, grid_w = grid
    pixels_HWC = np.asarray(rgb.resize((grid_w * patch, grid_h * patch), Image.Resampling.BICUBIC))
    values = _values()[pixels_HWC].reshape(grid_h // merge, merge, patch, grid_w // merge, merge, patch, 3)
    values = values.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    values = np.broadcast_to(values, (*values.shape[:5], temporal, patch, patch))
    return values.reshape(grid_h * grid_w, 3 * temporal * patch * patch)


@functools.cache
def _values() -> np.ndarray:
    """float32 [256], what a byte becomes: scaled in double precision, normalised in single, as in the processor."""
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    return (scaled - np.float32(NORMALISATION)) / np.float32(NORMALISATION)
