"""Image sizes in patches and tokens, as far as the configuration alone tells them."""

from __future__ import annotations

import math

from flagscale.config.schema import Config, ModelConfig

CHAT_TOKENS = 16
"""Tokens that a sample needs beside one image: the chat template's own, vision start and end, a short answer."""


def pixel_step(model: ModelConfig) -> int:
    """Sides of a resized image are multiples of this: patch x merge, in pixels."""
    return model.vision_patch_size * model.vision_spatial_merge_size


def largest_image_tokens(config: Config) -> int:
    """Most tokens that one image can take: `max_pixels` divided by the area that a token stands for."""
    return max(1, config.data.max_pixels // pixel_step(config.model) ** 2)


def largest_max_pixels(config: Config) -> int:
    """Largest `max_pixels` whose images fit into `seq_length` with `CHAT_TOKENS` of text."""
    return max(0, config.model.seq_length - CHAT_TOKENS) * pixel_step(config.model) ** 2


def assumed_grid(config: Config) -> tuple[int, int]:
    """(grid_h, grid_w) in patches of the square image that estimates assume in every sample.

    Its area is the geometric mean of `min_pixels` and `max_pixels`, at most half of the sequence.
    """
    model, data = config.model, config.data
    tokens = math.sqrt(data.min_pixels * data.max_pixels) / pixel_step(model) ** 2
    side = max(1, round(math.sqrt(min(tokens, model.seq_length / 2))))
    return side * model.vision_spatial_merge_size, side * model.vision_spatial_merge_size
