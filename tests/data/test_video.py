"""Videos as frame groups: which frames, at which times, and their patches; from files and from folders of frames."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from flagscale.data.corpus import Corpus
from flagscale.data.image import ImageSettings
from flagscale.data.records import IMAGE, Media, Record
from flagscale.data.tokenizer import BUILTIN_SPECIAL
from flagscale.data.video import VideoShape, chosen_frames, group_times
from tests.data.helpers import make_config, save_image, sharegpt, write_jsonl

SETTINGS = ImageSettings(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=1024, max_pixels=25600)
FRAMES, FPS = 30, 10


def frame_folder(folder: Path, count: int = FRAMES, fps: int | None = FPS) -> None:
    for i in range(count):
        save_image(folder / "clip" / f"{i:03d}.png", 96, 64, seed=i)
    if fps is not None:
        (folder / "clip.json").write_text(json.dumps({"fps": fps}))


def video_file(folder: Path) -> None:
    """The frames of `clip/` as an uncompressed video, so that they come back as they were."""
    with av.open(str(folder / "film.avi"), "w") as container:
        stream = container.add_stream("ffv1", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "bgr0"
        for path in sorted((folder / "clip").iterdir()):
            with Image.open(path) as image:
                container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())


def corpus_of(folder: Path, name: str, **data: object) -> Corpus:
    path = write_jsonl(folder / f"{name}.jsonl", [sharegpt("<video>What?", "3", videos=[name])])
    return Corpus.open(make_config(path, model={"seq_length": 512}, min_pixels=1024, **data), "train")


@pytest.mark.parametrize(("num_frames", "fps"), [(30, 10.0), (300, 29.97), (3, 25.0), (1, 2.0), (5000, 24.0)])
def test_times_are_those_of_the_released_processor(num_frames: int, fps: float) -> None:
    numbers = chosen_frames(VideoShape(num_frames, fps, 96, 64), SETTINGS)
    assert len(numbers) % 2 == 0
    assert numbers == sorted(numbers)
    assert numbers[0] == 0
    assert numbers[-1] == num_frames - 1
    expected = Qwen3VLProcessor._calculate_timestamps(None, numbers, fps, 2)
    assert [f"{time / 10:.1f}" for time in group_times(numbers, fps, 2)] == [f"{time:.1f}" for time in expected]


def test_a_frame_folder_is_read_group_by_group(tmp_path: Path) -> None:
    frame_folder(tmp_path)
    corpus = corpus_of(tmp_path, "clip")
    placements, record = corpus.placements(0), corpus.record(0)
    assert [(item.frame, item.time) for item in placements] == [(0, 3), (1, 14), (2, 26)]
    tokens_T = corpus.read(0).encoded.tokens_T
    for item in placements:
        assert (tokens_T[item.start : item.start + item.num_tokens(2)] == BUILTIN_SPECIAL.video).all()
        assert tokens_T[item.start - 1] == BUILTIN_SPECIAL.vision_start
    text = corpus.indexes[0].source.tokenizer.decode(tokens_T.tolist())
    assert text.startswith("user\n<0.3 seconds><1.4 seconds><2.6 seconds>What?")
    wanted = [(item.media, item.frame, (item.grid_h, item.grid_w)) for item in placements]
    last, first = corpus.pixels(0, record, [wanted[2], wanted[0]])
    assert corpus.decoded == 4, "only the frames of the two groups are decoded"
    numbers = [int(n) for n in np.linspace(0, FRAMES - 1, 6).round()]
    for group_PD, pair in ((first, numbers[:2]), (last, numbers[4:])):
        by_time = group_PD.reshape(len(group_PD), 3, 2, 256)
        for place, number in enumerate(pair):
            (still_PD,) = Corpus.open(
                make_config(
                    write_jsonl(tmp_path / "i.jsonl", [sharegpt("<image>", "3", [f"clip/{number:03d}.png"])]),
                    min_pixels=1024, cache_path=str(tmp_path / f"cache{number}"),
                ),
                "train",
            ).pixels(0, Record("", (), (Media(IMAGE, f"clip/{number:03d}.png"),)), [(0, -1, (4, 6))])  # fmt: skip
            assert np.array_equal(by_time[:, :, place], still_PD.reshape(len(group_PD), 3, 2, 256)[:, :, 0])


def test_a_file_gives_what_its_frames_give(tmp_path: Path) -> None:
    frame_folder(tmp_path)
    video_file(tmp_path)
    folder, file = corpus_of(tmp_path, "clip"), corpus_of(tmp_path, "film.avi")
    assert folder.placements(0) == file.placements(0)
    wanted = [(item.media, item.frame, (item.grid_h, item.grid_w)) for item in file.placements(0)]
    one, other = (corpus.pixels(0, corpus.record(0), wanted) for corpus in (folder, file))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_frames_in_tar_files_have_the_rate_noted_with_them(tmp_path: Path) -> None:
    """As FlagScale prepares them: `videos` is a pickled list of lists of names, `second_per_grid_ts` is 1 / fps."""
    frame_folder(tmp_path)
    frames = [f"clip/{i:03d}.png" for i in range(FRAMES)]
    turns = [{"from": "human", "value": "<video>What?"}, {"from": "gpt", "value": "3"}]
    files = {
        "s.jpgs": pickle.dumps([]), "s.videos": pickle.dumps([frames]),
        "s.json": json.dumps({"conversations": turns, "second_per_grid_ts": [1 / FPS]}).encode(),
    }  # fmt: skip
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    config = make_config(tmp_path / "s.tar", model={"seq_length": 512}, min_pixels=1024)
    corpus, folder = Corpus.open(config, "train"), corpus_of(tmp_path, "clip")
    assert corpus.placements(0) == folder.placements(0)
    wanted = [(item.media, item.frame, (item.grid_h, item.grid_w)) for item in folder.placements(0)]
    one, other = (each.pixels(0, each.record(0), wanted) for each in (corpus, folder))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_frames_shrink_to_the_budget_of_the_video(tmp_path: Path) -> None:
    frame_folder(tmp_path)
    corpus = corpus_of(tmp_path, "clip", video_max_pixels=6 * 3000)
    assert [(item.grid_h, item.grid_w) for item in corpus.placements(0)] == [(2, 4)] * 3


def test_a_missing_file_whose_frames_are_there_is_read_from_them(tmp_path: Path) -> None:
    """As FlagScale's converters leave videos: `clip.mp4` is named, `clip/` and `clip.json` lie there."""
    frame_folder(tmp_path, count=5, fps=None)
    assert [item.time for item in corpus_of(tmp_path, "clip.mp4").placements(0)] == [2, 12, 20]
