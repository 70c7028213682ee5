"""Samples that cannot be used: named with source, line, id and cause, or left out by all ranks alike."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from flagscale.config.errors import UserError
from flagscale.data.corpus import Corpus
from flagscale.data.loader import DataPipeline
from flagscale.plan.layout import Grid
from tests.data.helpers import make_config, make_plan, save_image, sharegpt, write_jsonl
from tests.dist.pool import run_ranks

Sample = dict[str, Any] | str


def image_sample(name: str, kind: str = "image") -> Sample:
    return sharegpt(f"<{kind}>Which?", "3", **{"id": "bad", "images": [], f"{kind}s": [name]})


def truncated(folder: Path, suffix: str) -> Sample:
    """An image whose header is whole and whose pixels are not."""
    save_image(folder / "whole.png", 200, 200)
    with Image.open(folder / "whole.png") as image:
        image.save(folder / f"whole{suffix}", **({"quality": 95} if suffix == ".jpg" else {}))
    data = (folder / f"whole{suffix}").read_bytes()
    (folder / f"cut{suffix}").write_bytes(data[: len(data) // 2])
    return image_sample(f"cut{suffix}")


def written(name: str, data: bytes) -> Callable[[Path], Sample]:
    def make(folder: Path) -> Sample:
        (folder / name).write_bytes(data)
        return image_sample(name)

    return make


def zero_sized(folder: Path) -> Sample:
    """A PNG whose header says 0 x 5 pixels."""
    header = struct.pack(">IIBBBBB", 0, 5, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    data = b"".join(struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return written("zero.png", b"\x89PNG\r\n\x1a\n" + data)(folder)


def thin(folder: Path) -> Sample:
    Image.new("RGB", (402, 2)).save(folder / "thin.png")
    return image_sample("thin.png")


def frames(folder: Path, count: int, cut: bool = False, fps: str | None = None) -> Sample:
    """A folder of frames as a video."""
    (folder / "clip").mkdir()
    for i in range(count):
        save_image(folder / "clip" / f"{i:03d}.png", 64, 64, seed=i)
    if cut:
        data = (folder / "clip" / "001.png").read_bytes()
        (folder / "clip" / "001.png").write_bytes(data[: len(data) // 2])
    if fps is not None:
        (folder / "clip.json").write_text(fps)
    return image_sample("clip", "video")


def special(name: str, make: Callable[[Path], None]) -> Callable[[Path], Sample]:
    """A sample whose image is no plain file."""

    def sample(folder: Path) -> Sample:
        make(folder / name)
        return image_sample(name)

    return sample


def loop(path: Path) -> None:
    path.symlink_to(path.name + "2")
    path.with_name(path.name + "2").symlink_to(path.name)


def sound(folder: Path) -> Sample:
    """A video file without pictures."""
    with av.open(str(folder / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        silence.sample_rate = 44100
        container.mux(stream.encode(silence))
        container.mux(stream.encode())
    return image_sample("sound.mp4", "video")


def uneven(folder: Path) -> Sample:
    """Frames of two sizes."""
    sample = frames(folder, 4)
    save_image(folder / "clip" / "003.png", 96, 64)
    return sample


def part(**keys: Any) -> Callable[[Path], Sample]:
    """A sample whose first turn holds this part."""
    return lambda folder: {"messages": [{"role": "user", "content": [keys]}, {"role": "assistant", "content": "3"}]}


CASES: dict[str, tuple[Callable[[Path], Sample], str]] = {
    "broken JSON": (lambda f: '{"conversations": [', "is not valid JSON"),
    "no object": (lambda f: "[1, 2]", "is a JSON list"),
    "no known form": (lambda f: {"id": "bad", "question": "?"}, "has none of"),
    "unknown role": (lambda f: {"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
    "more placeholders than images": (lambda f: sharegpt("<image><image>?", "3", ["good.png"]), "2 '<image>' placeh"),
    "fewer placeholders than images": (lambda f: sharegpt("?", "3", ["good.png"]), "0 '<image>' placeholder(s) and 1"),
    "image in an answer": (lambda f: sharegpt("?", "<image>3", ["good.png"]), "outside the user's turns"),
    "empty answer": (lambda f: sharegpt("?", "  "), "assistant turn without text"),
    "no answer": (lambda f: {"conversations": [{"from": "human", "value": "?"}]}, "no assistant turn"),
    "empty document": (lambda f: {"id": "bad", "text": "\n"}, "empty text"),
    "unknown character": (lambda f: sharegpt("caf\u00e9", "3", id="bad"), "the character"),
    "missing image": (lambda f: image_sample("none.png"), "none.png, which does not exist"),
    "no image": (written("text.png", b"no pixels here"), "not a readable image"),
    "empty file": (written("empty.png", b""), "not a readable image"),
    "zero-sized image": (zero_sized, "zero.png"),
    "aspect ratio": (thin, "402x2 pixels, whose aspect ratio is over 200"),
    "broken data URI": (lambda f: image_sample("data:image/png;base64,@@"), "data URI that is no base64"),
    "data URI without image": (
        lambda f: image_sample("data:image/png;base64," + base64.b64encode(b"x").decode()), "not a readable image",
    ),
    "missing video": (lambda f: image_sample("none.mp4", "video"), "none.mp4, which does not exist"),
    "video without frames": (lambda f: frames(f, 0), "a folder without frames"),
    "damaged video": (
        lambda f: (written("clip.mp4", b"no video")(f), image_sample("clip.mp4", "video"))[1], "clip.mp4, which cannot",
    ),
    "text that is not UTF-8": (lambda f: '{"text": "\udcff"}', "is not valid JSON"),
    "half a character": (lambda f: sharegpt("\ud83d?", "3"), "half a character ('\\ud83d')"),
    "half a character in a name": (lambda f: image_sample("\ud83d.png"), "\\ud83d.png, which does not exist"),
    "nested without end": (lambda f: '{"text": ' + "[" * 100_000, "is not valid JSON"),
    "a number of 5000 digits": (lambda f: '{"text": "a", "id": ' + "1" * 5000 + "}", "is not valid JSON"),
    "role that is a list": (lambda f: {"messages": [{"role": ["user"], "content": "x"}]}, "role ['user']"),
    "part of an unknown type": (part(type=["text"], text="x"), "a part of type ['text']"),
    "nested list of images": (lambda f: sharegpt("<image>?", "3", [["good.png"]]), "not a list of file names"),
    "null among the images": (lambda f: sharegpt("<image>?", "3", [None]), "null among its images"),
    "image on the web": (
        part(type="image_url", image_url={"url": "https://example.com/a.png"}), "a.png, which is on the web",
    ),
    "base64 in place of a name": (lambda f: image_sample("iVBORw0K" * 3000), " characters), which cannot be read"),
    "folder in place of an image": (special("a.png", Path.mkdir), "a.png, which is no file"),
    "pipe in place of an image": (special("a.png", os.mkfifo), "a.png, which is no file"),
    "links in a circle": (special("a.png", loop), "a.png, which does not exist"),
    "zero byte in a name": (lambda f: image_sample("a\0.png"), "which does not exist"),
    "video without pictures": (sound, "sound.mp4, which has no pictures"),
    "endless video": (lambda f: frames(f, 4, fps='{"fps": 1e-12}'), "4 frames at 1e-12 a second"),
    "infinite frame rate": (lambda f: frames(f, 4, fps='{"fps": Infinity}'), "4 frames at inf a second"),
    "broken frame rate": (lambda f: frames(f, 4, fps='{"rate": 3}'), "clip.json, which states no rate"),
}  # fmt: skip
LATE: dict[str, tuple[Callable[[Path], Sample], str]] = {
    "truncated PNG": (lambda f: truncated(f, ".png"), "cut.png, which is damaged"),
    "truncated JPEG": (lambda f: truncated(f, ".jpg"), "cut.jpg, which is damaged"),
    "frames of two sizes": (uneven, "frame 3 has 96x64 pixels, others 64x64"),
    "truncated frame": (lambda f: frames(f, 4, cut=True), "001.png, which is damaged"),
}
"""Found where pixels are decoded: when the index is built to skip bad samples, else when they are read."""


def source_with(folder: Path, make: Callable[[Path], Sample]) -> Path:
    """A good sample and, on line 2, the bad one."""
    save_image(folder / "good.png", 64, 64)
    return write_jsonl(folder / "s.jsonl", [sharegpt("<image>?", "1", ["good.png"], id="good"), make(folder)])


@pytest.mark.parametrize("name", [*CASES, *LATE])
def test_skip_leaves_the_sample_out_and_names_it(tmp_path: Path, name: str) -> None:
    make, cause = (CASES | LATE)[name]
    path = source_with(tmp_path, make)
    corpus = Corpus.open(make_config(path, on_bad_sample="skip"), "train")
    assert len(corpus) == 1
    assert corpus.record(0).id == "good"
    (bad,) = corpus.bad_samples()
    assert (bad.source, bad.line) == (str(path), 2)
    assert cause in bad.cause


@pytest.mark.parametrize("name", CASES)
def test_raise_names_source_line_id_and_cause(tmp_path: Path, name: str) -> None:
    make, cause = CASES[name]
    path = source_with(tmp_path, make)
    with pytest.raises(UserError) as caught:
        Corpus.open(make_config(path), "train")
    assert str(caught.value).startswith(f"{path} line 2")
    assert cause in str(caught.value)


@pytest.mark.parametrize("name", LATE)
def test_raise_finds_damaged_pixels_when_they_are_read(tmp_path: Path, name: str) -> None:
    make, cause = LATE[name]
    config = make_config(source_with(tmp_path, make), model={"global_batch_size": 2})
    pipeline = DataPipeline(make_plan(config, Grid(), Grid(), (1, 1)), "train", 0)
    with pytest.raises(UserError, match=rf"line 2 \(id bad\): the sample .*{cause}"):
        list(pipeline.step(0))
    pipeline.close()


LONG = {
    "text": sharegpt("?" * 40, "abc" * 40, id="long"),
    "image at the end": sharegpt("a" * 100 + "<image>", "3", ["good.png"], id="long"),
    "question": sharegpt("a" * 200, "3", id="long"),
}


@pytest.mark.parametrize(("name", "policy", "kept"), [
    ("text", "skip", 1), ("text", "truncate_text", 2), ("image at the end", "skip", 1),
    ("image at the end", "truncate_text", 1), ("question", "truncate_text", 1),
])  # fmt: skip
def test_samples_that_are_too_long(tmp_path: Path, name: str, policy: str, kept: int) -> None:
    """Skipped, or cut at the end; one that would lose a visual token or its whole answer counts as bad."""
    path = source_with(tmp_path, lambda folder: LONG[name])
    config = make_config(path, model={"seq_length": 110}, on_too_long=policy, on_bad_sample="skip")
    corpus = Corpus.open(config, "train")
    assert len(corpus) == kept
    assert [bad.id for bad in corpus.bad_samples()] == ["long"] * (2 - kept)
    if kept == 2:
        assert corpus.num_tokens(1) == 110
        encoded = corpus.read(1).encoded
        assert encoded.num_loss_tokens == corpus.num_loss_tokens([1]) > 0
    else:
        assert "model.seq_length=110" in corpus.bad_samples()[0].cause


def test_too_long_is_an_error_by_default_and_untouched_by_the_policy_on_bad_samples(tmp_path: Path) -> None:
    path = source_with(tmp_path, lambda folder: LONG["text"])
    for policy in ("raise", "skip"):
        with pytest.raises(UserError, match=r"line 2 \(id long\).*more than model.seq_length=110.*data.on_too_long"):
            Corpus.open(make_config(path, model={"seq_length": 110}, on_bad_sample=policy), "train")
    with pytest.raises(UserError, match=r"line 2 \(id long\).*never cut"):
        Corpus.open(
            make_config(
                source_with(tmp_path, lambda folder: LONG["image at the end"]),
                model={"seq_length": 110}, on_too_long="truncate_text",
            ),
            "train",
        )  # fmt: skip


def test_an_index_that_is_built_anew_lists_the_samples_bad_now(tmp_path: Path) -> None:
    """It is removed by hand after an image was mended: the source's time does not show that."""
    path = source_with(tmp_path, lambda folder: truncated(folder, ".png"))
    corpus = Corpus.open(make_config(path, on_bad_sample="skip"), "train")
    assert len(corpus.bad_samples()) == 1
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes())
    corpus.indexes[0].path.unlink()
    again = Corpus.open(make_config(path, on_bad_sample="skip"), "train")
    assert len(again) == 2
    assert again.bad_samples() == []


def test_a_source_of_bad_samples_only_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "s.jsonl", ["{", "["])
    with pytest.raises(UserError, match=r"all 2 samples are bad.*not valid JSON"):
        Corpus.open(make_config(path, on_bad_sample="skip"), "train")


def usable(path: str) -> tuple[list[int], list[int], int]:
    """What a rank takes for the samples of two steps, its bad samples, and what it decoded."""
    import torch.distributed as dist

    config = make_config(Path(path), model={"global_batch_size": 8, "micro_batch_size": 1}, on_bad_sample="skip")
    pipeline = DataPipeline(make_plan(config, Grid(dp=4), Grid(tp=2, dp=2), (4,)), "train", dist.get_rank())
    try:
        lengths = [len(list(pipeline.step(step))) for step in range(2)]
        assert lengths == [1, 1]
        return pipeline.sample_ids(1), [bad.line for bad in pipeline.bad_samples()], pipeline.num_loss_tokens(1)
    finally:
        pipeline.close()


def test_all_ranks_agree_on_what_is_left(tmp_path: Path) -> None:
    truncated(tmp_path, ".png")
    samples: list[Sample] = []
    for i in range(20):
        save_image(tmp_path / f"{i}.png", 64 + i, 64, seed=i)
        samples.append(sharegpt("<image>?", str(i), ["cut.png" if i % 5 == 3 else f"{i}.png"], id=i))
    results = run_ranks(4, usable, str(write_jsonl(tmp_path / "s.jsonl", samples)))
    assert all(result == results[0] for result in results)
    assert results[0][1] == [4, 9, 14, 19]
