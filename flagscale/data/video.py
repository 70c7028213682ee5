"""Videos as frame groups: which frames are taken, at what time they stand, and their patches.

A video is a file (decoded with PyAV, the extra `video`), a folder of frames, or a list of frames. A folder `clip/` has
its rate in `clip.json`, `{"fps": 25}`; without it, `FOLDER_FPS` is assumed. `videos/clip.mp4` may also be there as the
folder `videos/clip/`, as FlagScale's converters leave it.

Frames are chosen, and times rounded, as by transformers' Qwen3-VL processor: `video_fps` a second, evenly from the
first to the last frame; a group is `temporal_patch_size` of them, its time the mean of its first and last.
Legend: P patches of a group, D values of a patch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flagscale.data.image import ImageReader, ImageSettings, patches
from flagscale.data.records import Media, SampleError, told
from flagscale.data.stores import IMAGE_SUFFIXES, natural

if TYPE_CHECKING:
    from flagscale.data.media import MediaFiles

FOLDER_FPS = 2.0
LONGEST_S = 200_000_000  # of a video: the index holds tenths of seconds in 32 bits


@dataclass(frozen=True, slots=True)
class VideoShape:
    """What is known of a video before it is decoded: frames, frames a second, and their size in pixels."""

    num_frames: int
    fps: float
    width: int
    height: int


def chosen_frames(shape: VideoShape, settings: ImageSettings) -> list[int]:
    """Numbers of the frames that are taken, ascending, a multiple of the temporal patch size (the last is repeated)."""
    wanted = int(shape.num_frames / shape.fps * settings.video_fps)
    wanted = min(max(wanted, settings.video_min_frames), settings.video_max_frames, shape.num_frames)
    numbers = [int(n) for n in np.linspace(0, shape.num_frames - 1, wanted).round()]
    return numbers + numbers[-1:] * (-len(numbers) % settings.temporal_patch_size)


def group_times(numbers: Sequence[int], fps: float, group: int) -> list[int]:
    """Time of every frame group in tenths of a second, rounded as `f"{seconds:.1f}"` does."""
    times = [(numbers[i] / fps + numbers[i + group - 1] / fps) / 2 for i in range(0, len(numbers), group)]
    return [int(f"{time:.1f}".replace(".", "")) for time in times]


class VideoReader:
    """Opens videos through the files of a source; `images.decoded` counts the frames whose pixels were read."""

    def __init__(self, files: MediaFiles, images: ImageReader) -> None:
        self._files = files
        self._images = images

    def shape(self, video: Media) -> VideoShape:
        """Number, rate and size of the frames. Raises SampleError when there are none."""
        frames = self._frames(video)
        if frames is None:
            shape = self._file_shape(video)
        else:
            width, height = self._images.size(self._files.open(frames[0]), frames[0].name)
            shape = VideoShape(len(frames), self._fps(video), width, height)
        if not 0 < shape.fps < math.inf or shape.num_frames / shape.fps > LONGEST_S:
            raise SampleError(
                f"has the video {told(video.name)} of {shape.num_frames} frames at {shape.fps:g} a second; correct its "
                "rate (fps)"
            )
        return shape

    def grid(self, video: Media) -> tuple[tuple[int, int], list[int]]:
        """Patches (grid_h, grid_w) of a frame group, and the time of every group in tenths of a second.

        Raises:
            SampleError: when it has no frames, or they cannot be read.
        """
        shape = self.shape(video)
        numbers = chosen_frames(shape, self._images.settings)
        grid = self._images.settings.of_frames(len(numbers)).grid(shape.width, shape.height)
        return grid, group_times(numbers, shape.fps, self._images.settings.temporal_patch_size)

    def read(self, video: Media, groups: Sequence[int]) -> dict[int, tuple[np.ndarray, tuple[int, int]]]:
        """Patches float32 [P, D] and grid (grid_h, grid_w) of frame groups; only their frames are decoded.

        Raises:
            SampleError: when a frame cannot be read or the video has no such group.
        """
        settings = self._images.settings
        shape, size = self.shape(video), settings.temporal_patch_size
        numbers = chosen_frames(shape, settings)
        if max(groups) * size >= len(numbers):
            raise SampleError(f"has the video {video.name}, which changed after it was indexed; index it again")
        wanted = {number for group in groups for number in numbers[group * size : (group + 1) * size]}
        of_frames = settings.of_frames(len(numbers))
        found = {number: patches(frame, of_frames) for number, frame in self._decode(video, shape, wanted)}
        result = {}
        for group in groups:
            parts = [found[number] for number in numbers[group * size : (group + 1) * size]]
            # A still image fills all frames of its patches; here each frame of the group fills its own.
            shaped = [part.reshape(len(part), 3, size, -1)[:, :, i] for i, (part, _) in enumerate(parts)]
            result[group] = (np.stack(shaped, axis=2).reshape(len(shaped[0]), -1), parts[0][1])
        return result

    def verify(self, video: Media) -> None:
        """Decode all frames that would be taken. Raises SampleError when that fails."""
        shape = self.shape(video)
        for _ in self._decode(video, shape, set(chosen_frames(shape, self._images.settings))):
            pass

    def _decode(self, video: Media, shape: VideoShape, wanted: set[int]) -> Iterator[tuple[int, Image.Image]]:
        """(number, RGB frame) of the wanted frames. Raises SampleError, also when one has another size."""
        for number, frame in self._decoded(video, wanted):
            if frame.size != (shape.width, shape.height):
                raise SampleError(
                    f"has the video {told(video.name)}, whose frame {number} has {frame.width}x{frame.height} pixels, "
                    f"others {shape.width}x{shape.height}; write all frames in one size"
                )
            yield number, frame

    def _decoded(self, video: Media, wanted: set[int]) -> Iterator[tuple[int, Image.Image]]:
        frames = self._frames(video)
        if frames is None:
            self._images.decoded += len(wanted)
            yield from self._decode_file(video, wanted)
            return
        for number in sorted(wanted):
            yield number, self._images.rgb(self._files.open(frames[number]), frames[number].name)

    def _frames(self, video: Media) -> list[Media] | None:
        """The frames of a video that consists of images, in order; None for a file."""
        if video.frames:
            return list(video.frames)
        folder = self._folder(video)
        if folder is None:
            return None
        try:
            found = [path for path in folder.iterdir() if path.suffix[1:].lower() in IMAGE_SUFFIXES]
        except OSError as error:
            name = told(folder)
            raise SampleError(f"names the video {name}, which cannot be read ({error.strerror}); correct it") from None
        names = sorted((path for path in found if not path.name.startswith(".")), key=lambda path: natural(path.name))
        if not names:
            raise SampleError(f"has the video {folder}, a folder without frames; add them or remove the sample")
        return [Media("image", str(path)) for path in names]

    def _folder(self, video: Media) -> Path | None:
        """The video's folder of frames, if it is one."""
        if video.load is not None:
            return None
        path = self._files.path(video.name)
        try:
            places = (path, path.with_suffix(""))
            return next((place for place in places if place.is_dir() and not path.is_file()), None)
        except (OSError, ValueError) as error:
            name = told(video.name)
            raise SampleError(f"names the video {name}, which cannot be read ({error}); correct it") from None

    def _fps(self, video: Media) -> float:
        """Rate of a video that consists of images."""
        folder = self._folder(video)
        file = None if folder is None else folder.with_name(folder.name + ".json")
        if file is None or video.fps is not None or not file.is_file():
            return video.fps or FOLDER_FPS
        try:
            return float(json.loads(file.read_text(encoding="utf-8"))["fps"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise SampleError(f'has {file}, which states no rate ({error}); write {{"fps": 25}}') from None

    def _file_shape(self, video: Media) -> VideoShape:
        file, name = self._files.open(video), told(video.name)
        with _OpenedVideo(file, name) as container:
            stream = next(iter(container.streams.video), None)
            if stream is None:
                raise SampleError(f"has the video {name}, which has no pictures; replace or remove it")
            count, rate = stream.frames, stream.average_rate
            first = next((_upright(frame) for frame in container.decode(video=0)), None)
        if not count:  # the container does not say
            with _OpenedVideo(file, name) as container:
                count = sum(packet.size > 0 for packet in container.demux(video=0))
        if not count or not rate or first is None:
            raise SampleError(f"has the video {name}, which has no frames; replace or remove it")
        return VideoShape(count, float(rate), first.width, first.height)

    def _decode_file(self, video: Media, wanted: set[int]) -> Iterator[tuple[int, Image.Image]]:
        """Frames of a file, decoded from its start to the last one wanted."""
        left, name = set(wanted), told(video.name)
        with _OpenedVideo(self._files.open(video), name) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in left:
                    left.remove(number)
                    yield number, _upright(frame)
                if not left:
                    return
        raise SampleError(f"has the video {name}, which ends before frame {min(left)}; replace or remove it")


def _upright(frame: Any) -> Image.Image:
    """A frame of PyAV in RGB, turned as the camera was held."""
    image: Image.Image = frame.to_image()
    quarter_turns = round(frame.rotation / 90) % 4  # counter-clockwise
    return image.rotate(90 * quarter_turns, expand=True) if quarter_turns else image


class _OpenedVideo:
    """A video file opened by PyAV; a failure in the `with` block becomes a SampleError that names it."""

    def __init__(self, file: Path | bytes, name: str) -> None:
        self._file, self._name = file, name
        self._container: Any = None

    def __enter__(self) -> Any:
        try:
            import av
        except ImportError:
            raise SampleError(
                f"has the video {self._name}, which needs PyAV; install 'flagscale[video]' or give its frames"
            ) from None
        import io

        if isinstance(self._file, Path) and not self._file.is_file():
            raise SampleError(f"names the video {self._name}, which does not exist; correct the name")
        try:
            source = io.BytesIO(self._file) if isinstance(self._file, bytes) else str(self._file)
            self._container = av.open(source)
        except (av.FFmpegError, OSError, ValueError) as error:
            raise SampleError(f"has the video {self._name}, which cannot be read ({error}); replace it") from None
        return self._container

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._container.close()
        import av

        if isinstance(error, av.FFmpegError | IndexError):
            raise SampleError(f"has the video {self._name}, which is damaged ({error}); replace or remove it") from None
