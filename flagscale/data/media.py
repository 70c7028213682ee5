"""The images and videos of a source: where they lie, what is known of them before they are decoded, and their patches.

Legend: P patches of a visual item, D values of a patch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.data.chat import IMAGE_FRAME, Shape
from flagscale.data.image import ImageReader, ImageSettings
from flagscale.data.records import IMAGE, Media
from flagscale.data.video import VideoReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


class MediaFiles:
    """Finds the files of media. Relative names count from `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """Where the file of this name lies."""
        return self.root / name

    def open(self, media: Media) -> Path | bytes:
        """The medium's bytes when the source holds them, else its file. Raises SampleError."""
        return self.path(media.name) if media.load is None else media.load()


class MediaReader:
    """Reads media. `decoded` counts images and frames whose pixels were read, `bytes_read` the bytes of image files."""

    def __init__(self, root: Path, settings: ImageSettings) -> None:
        self._files = MediaFiles(root)
        self._images = ImageReader(settings)
        self._videos = VideoReader(self._files, self._images)

    @property
    def decoded(self) -> int:
        """Images and frames whose pixels were read."""
        return self._images.decoded

    @property
    def bytes_read(self) -> int:
        """Bytes of the image files that were decoded."""
        return self._images.bytes_read

    def shape(self, media: Media) -> Shape:
        """Grid, and times of frame groups, without decoding. Raises SampleError."""
        if media.kind == IMAGE:
            return Shape(*self._images.grid(self._files.open(media), media.name))
        grid, times = self._videos.grid(media)
        return Shape(*grid, tuple(times))

    def verify(self, media: Media) -> None:
        """Decode everything that training would. Raises SampleError when that fails."""
        if media.kind == IMAGE:
            self._images.verify(self._files.open(media), media.name)
        else:
            self._videos.verify(media)

    def read(self, media: Media, frames: Sequence[int]) -> dict[int, tuple[np.ndarray, tuple[int, int]]]:
        """Patches float32 [P, D] and grid of the frame groups `frames`; of an image there is one, `IMAGE_FRAME`.

        Raises:
            SampleError: when the medium cannot be read.
        """
        if media.kind == IMAGE:
            assert list(frames) == [IMAGE_FRAME], f"an image has no frame groups {frames}"
            return {IMAGE_FRAME: self._images.read(self._files.open(media), media.name)}
        return self._videos.read(media, frames)

    def shown(self, media: Media) -> Path | bytes:
        """An image for people."""
        return self._files.open(media)
