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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flagscale.data.image import ImageReader, ImageSettings, patches
from flagscale.data.records import Media, SampleError
from flagscale.data.stores import IMAGE_SUFFIXES

if TYPE_CHECKING:
    from flagscale.data.media import MediaFiles

FOLDER_FPS = 2.0


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
            return self._file_shape(video)
        width, height = self._images.size(self._files.open(frames[0]))
        return VideoShape(len(frames), self._fps(video), width, height)

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
        numbers, size = chosen_frames(self.shape(video), settings), settings.temporal_patch_size
        if max(groups) * size >= len(numbers):
            raise SampleError(f"has the video {video.name}, which changed after it was indexed; index it again")
        wanted = {number for group in groups for number in numbers[group * size : (group + 1) * size]}
        of_frames = settings.of_frames(len(numbers))
        found = {number: patches(frame, of_frames) for number, frame in self._decode(video, wanted)}
        result = {}
        for group in groups:
            parts = [found[number] for number in numbers[group * size : (group + 1) * size]]
            # A still image fills all frames of its patches; here each frame of the group fills its own.
            shaped = [part.reshape(len(part), 3, size, -1)[:, :, i] for i, (part, _) in enumerate(parts)]
            result[group] = (np.stack(shaped, axis=2).reshape(len(shaped[0]), -1), parts[0][1])
        return result

    def verify(self, video: Media) -> None:
        """Decode all frames that would be taken. Raises SampleError when that fails."""
        for _ in self._decode(video, set(chosen_frames(self.shape(video), self._images.settings))):
            pass

    def _decode(self, video: Media, wanted: set[int]) -> Iterator[tuple[int, Image.Image]]:
        """(number, RGB frame) of the wanted frames."""
        frames = self._frames(video)
        if frames is None:
            self._images.decoded += len(wanted)
            yield from self._decode_file(video, wanted)
            return
        for number in sorted(wanted):
            yield number, self._images.rgb(self._files.open(frames[number]))

    def _frames(self, video: Media) -> list[Media] | None:
        """The frames of a video that consists of images, in order; None for a file."""
        if video.frames:
            return list(video.frames)
        folder = self._folder(video)
        if folder is None:
            return None
        names = [path for path in sorted(folder.iterdir()) if path.suffix[1:].lower() in IMAGE_SUFFIXES]
        if not names:
            raise SampleError(f"has the video {folder}, a folder without frames; add them or remove the sample")
        return [Media("image", str(path)) for path in names]

    def _folder(self, video: Media) -> Path | None:
        """The video's folder of frames, if it is one."""
        if video.data is not None:
            return None
        path = self._files.path(video.name)
        return next((place for place in (path, path.with_suffix("")) if place.is_dir() and not path.is_file()), None)

    def _fps(self, video: Media) -> float:
        """Rate of a video that consists of images."""
        folder = self._folder(video)
        if folder is None or video.fps is not None:
            return video.fps or FOLDER_FPS
        file = folder.with_name(folder.name + ".json")
        if not file.is_file():
            return FOLDER_FPS
        try:
            fps = float(json.loads(file.read_text(encoding="utf-8"))["fps"])
        except (ValueError, KeyError, TypeError) as error:
            raise SampleError(f'has {file}, which states no rate ({error}); write {{"fps": 25}}') from None
        if not fps > 0:
            raise SampleError(f"has {file} with fps {fps:g}, which must be positive; correct it")
        return fps

    def _file_shape(self, video: Media) -> VideoShape:
        with _OpenedVideo(self._files.open(video), video.name) as container:
            stream = container.streams.video[0]
            count = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
            if not count or not stream.average_rate:
                raise SampleError(f"has the video {video.name}, which has no frames; replace or remove it")
            return VideoShape(count, float(stream.average_rate), stream.width, stream.height)

    def _decode_file(self, video: Media, wanted: set[int]) -> Iterator[tuple[int, Image.Image]]:
        """Frames of a file, decoded from its start to the last one wanted."""
        left = set(wanted)
        with _OpenedVideo(self._files.open(video), video.name) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in left:
                    left.remove(number)
                    yield number, frame.to_image()
                if not left:
                    return
        raise SampleError(f"has the video {video.name}, which ends before frame {min(left)}; replace or remove it")


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
        except (av.FFmpegError, OSError) as error:
            raise SampleError(f"has the video {self._name}, which cannot be read ({error}); replace it") from None
        return self._container

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._container.close()
        import av

        if isinstance(error, av.FFmpegError | IndexError):
            raise SampleError(f"has the video {self._name}, which is damaged ({error}); replace or remove it") from None
