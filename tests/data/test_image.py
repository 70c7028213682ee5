"""Images to patches: sizes and order as in the released models' processor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from flagscale.data.image import ImageReader, ImageSettings
from flagscale.data.records import SampleError
from tests.data.helpers import save_image

RELEASED = ImageSettings(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=65536, max_pixels=16777216)
SMALL = ImageSettings(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=1024, max_pixels=25600)


@pytest.mark.parametrize(
    ("width", "height", "resized_w", "resized_h", "tokens"),
    [
        (224, 224, 256, 256, 64),
        (480, 640, 480, 640, 300),
        (720, 1280, 704, 1280, 880),
        (1080, 1920, 1088, 1920, 2040),
        (80, 48, 352, 224, 77),
        (2000, 10, 3648, 32, 114),
        (4100, 4100, 4096, 4096, 16384),
        (1001, 333, 992, 320, 310),
    ],
)
def test_known_sizes(width: int, height: int, resized_w: int, resized_h: int, tokens: int) -> None:
    grid_h, grid_w = RELEASED.grid(width, height)
    assert (grid_w * 16, grid_h * 16) == (resized_w, resized_h)
    assert grid_h * grid_w // 4 == tokens


@pytest.mark.parametrize(("width", "height"), [(201, 1), (1, 2010)])
def test_an_aspect_ratio_over_200_is_refused(width: int, height: int) -> None:
    with pytest.raises(SampleError, match=f"{width}x{height}.*over 200"):
        RELEASED.grid(width, height)


def test_patches_equal_the_library_and_keep_merge_block_order(tmp_path: Path) -> None:
    path = tmp_path / save_image(tmp_path / "a.png", width=150, height=70)
    reader = ImageReader(SMALL)
    pixels_PD, grid = reader.read(path)
    assert grid == reader.grid(path) == (4, 10)
    assert (pixels_PD.shape, pixels_PD.dtype, reader.decoded) == ((40, 1536), np.float32, 1)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 1024, "longest_edge": 25600}, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    with Image.open(path) as image:
        expected = processor(image, return_tensors="np")
        resized = np.asarray(image.resize((160, 64), Image.Resampling.BICUBIC), dtype=np.float32)
    assert np.array_equal(pixels_PD, expected["pixel_values"])
    # The order by hand: block row, block column, row and column in the block; then channel, frame, row, column.
    blocks = (resized / 127.5 - 1).reshape(2, 2, 16, 5, 2, 16, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    by_hand = np.repeat(blocks[:, :, :, :, :, None], 2, axis=5).reshape(40, 1536)
    np.testing.assert_allclose(pixels_PD, by_hand, atol=1e-5)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_a_camera_that_was_turned(tmp_path: Path, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees: width and height change places
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (96, 64)).save(path, exif=exif)
    reader = ImageReader(SMALL)
    assert reader.grid(path) == reader.read(path)[1] == (6, 4)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK"])
def test_every_colour_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new("RGB", (64, 64), "white").convert(mode).save(path)
    pixels_PD, _ = ImageReader(SMALL).read(path)
    assert pixels_PD.shape == (16, 1536)
    np.testing.assert_allclose(pixels_PD, 1.0, atol=0.02)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    reader = ImageReader(SMALL)
    with pytest.raises(SampleError, match=r"missing\.png, which does not exist"):
        reader.grid(tmp_path / "missing.png")
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(SampleError, match=r"text\.png, which is not a readable image"):
        reader.grid(tmp_path / "text.png")
    with pytest.raises(SampleError, match="which is no file"):
        reader.grid(tmp_path)
    save_image(tmp_path / "whole.png", 100, 100)
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:2000])
    assert reader.grid(tmp_path / "cut.png") == (6, 6)
    with pytest.raises(SampleError, match=r"cut\.png, which is damaged"):
        reader.read(tmp_path / "cut.png")
