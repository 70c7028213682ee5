"""Image files to patches, and their patch grid from the file header alone.

Legend: P patches of one image and D values of a patch, in the order of `patchify.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from flagscale.data.patchify import patchify, resized
from flagscale.data.records import SampleError, told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flagscale.config.schema import Config

_EXIF_ORIENTATION = 0x0112
_TRANSPOSED = frozenset({5, 6, 7, 8})  # EXIF orientations that exchange width and height


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSettings:
    """What decides on an image's grid; part of the index's key.

    Attributes:
        patch_size: side of a patch in pixels.
        merge_size: patches a side that make one token.
        temporal_patch_size: frames in a patch; a still image fills all of them.
        min_pixels, max_pixels: bounds of the area after resizing.
        video_fps: frames a second that are taken of a video.
        video_min_frames, video_max_frames: bounds of their number.
        video_max_pixels: bound of the area of all frames of a video together.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    video_fps: float = 2.0
    video_min_frames: int = 4
    video_max_frames: int = 768
    video_max_pixels: int = 1 << 27

    @classmethod
    def of(cls, config: Config) -> ImageSettings:
        """The settings a configuration states."""
        return cls(
            patch_size=config.model.vision_patch_size,
            merge_size=config.model.vision_spatial_merge_size,
            temporal_patch_size=config.model.vision_temporal_patch_size,
            min_pixels=config.data.min_pixels,
            max_pixels=config.data.max_pixels,
            video_fps=config.data.video_fps,
            video_min_frames=config.data.video_min_frames,
            video_max_frames=config.data.video_max_frames,
            video_max_pixels=config.data.video_max_pixels,
        )

    def of_frames(self, num_frames: int) -> ImageSettings:
        """Settings of a single frame of a video of which `num_frames` are taken."""
        share = max(self.video_max_pixels // num_frames, (self.patch_size * self.merge_size) ** 2)
        return dataclasses.replace(
            self, min_pixels=min(self.min_pixels, share), max_pixels=min(self.max_pixels, share)
        )

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Patches (grid_h, grid_w) of an image of this size, in pixels.

        Raises:
            SampleError: when the size is zero or its aspect ratio is over the processor's limit of 200.
        """
        if min(width, height) < 1:
            raise SampleError(f"has an image of {width}x{height} pixels; remove it")
        try:
            resized_h, resized_w = resized(
                height, width, self.patch_size * self.merge_size, self.min_pixels, self.max_pixels
            )
        except ValueError:
            raise SampleError(
                f"has an image of {width}x{height} pixels, whose aspect ratio is over 200; crop or remove it"
            ) from None
        return resized_h // self.patch_size, resized_w // self.patch_size


class ImageReader:
    """Opens images. `decoded` counts those whose pixels were read, `bytes_read` their files' bytes."""

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings
        self.decoded = 0
        self.bytes_read = 0

    def size(self, file: Path | bytes, name: str = "") -> tuple[int, int]:
        """(width, height) in pixels, upright, from the header. Raises SampleError.

        Here and below, `name` is what people are told when `file` is bytes.
        """
        with _opened(file, name) as image:
            return _upright_size(image)

    def grid(self, file: Path | bytes, name: str = "") -> tuple[int, int]:
        """Patches (grid_h, grid_w) of an image, from its header. Raises SampleError."""
        return self.settings.grid(*self.size(file, name))

    def verify(self, file: Path | bytes, name: str = "") -> None:
        """Decode an image and drop its pixels. Raises SampleError when that fails."""
        with _opened(file, name) as image:
            stated = _upright_size(image)
            found = _upright(image).size
            if found != stated:
                raise ValueError(f"its header states {stated[0]}x{stated[1]} pixels, it has {found[0]}x{found[1]}")

    def read(self, file: Path | bytes, name: str = "") -> tuple[np.ndarray, tuple[int, int]]:
        """Patches float32 [P, D] of an image, and its grid (grid_h, grid_w). Raises SampleError."""
        return patches(self.rgb(file, name), self.settings)

    def rgb(self, file: Path | bytes, name: str = "") -> Image.Image:
        """The image upright, in RGB. Raises SampleError."""
        with _opened(file, name) as image:
            rgb = _upright(image)
        self.decoded += 1
        self.bytes_read += len(file) if isinstance(file, bytes) else file.stat().st_size
        return rgb


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) of an opened image, upright, from its header."""
    width, height = image.size
    return (height, width) if _orientation(image) in _TRANSPOSED else (width, height)


def _upright(image: Image.Image) -> Image.Image:
    """An opened image upright, in RGB; of an animation its first picture, and white where it is transparent."""
    upright = ImageOps.exif_transpose(image) if _orientation(image) != 1 else image
    if upright.mode.startswith("I;16"):  # Pillow would cut 16 bits off at 255, which leaves a white picture
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    layers = upright.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")


def patches(rgb: Image.Image, settings: ImageSettings) -> tuple[np.ndarray, tuple[int, int]]:
    """Patches float32 [P, D] of an upright RGB image, and its grid (grid_h, grid_w). Raises SampleError."""
    grid = settings.grid(*rgb.size)
    return patchify(rgb, grid, settings.patch_size, settings.merge_size, settings.temporal_patch_size), grid


@contextlib.contextmanager
def _opened(file: Path | bytes, name: str) -> Iterator[Image.Image]:
    """An image opened by its header; a failure in the `with` block becomes a SampleError that names it."""
    shown = f"image {told(name)}" if isinstance(file, bytes) else f"image {told(file)}"
    try:
        if isinstance(file, Path) and not file.is_file():  # opening a pipe would wait for a writer
            what = "is no file" if file.exists() else "does not exist"
            raise SampleError(f"names the {shown}, which {what}; correct the name")
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            yield image
    except SampleError:
        raise
    except UnidentifiedImageError:
        raise SampleError(f"has the {shown}, which is not a readable image; replace or remove it") from None
    except OSError as error:
        if error.errno is None:  # Pillow's own, about the content
            raise SampleError(f"has the {shown}, which is damaged ({error}); replace or remove it") from None
        raise SampleError(f"names the {shown}, which cannot be read ({error.strerror}); correct that") from None
    except Exception as error:  # a damaged file may raise anything
        raise SampleError(f"has the {shown}, which is damaged ({error}); replace or remove it") from None


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 when upright. A PNG's counts only before the pixels: to look behind them is to decode all."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(_EXIF_ORIENTATION, 1))
