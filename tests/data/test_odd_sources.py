"""Sources as they come from elsewhere: unusual, but usable; or unusable as a whole, which is said in one message."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from flagscale.config.errors import UserError
from flagscale.data import image as image_module
from flagscale.data.corpus import Corpus
from flagscale.data.image import ImageReader, ImageSettings
from tests.data.helpers import make_config, save_image, sharegpt, write_jsonl

SETTINGS = ImageSettings(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=1024, max_pixels=25600)


def open_corpus(path: Path, **data: Any) -> Corpus:
    return Corpus.open(make_config(path, model={"seq_length": 512}, **data), "train")


def rgb(path: Path, image: Image.Image, **options: Any) -> np.ndarray:
    """What is read of an image that was saved so."""
    image.save(path, **options)
    reader = ImageReader(SETTINGS)
    reader.verify(path)
    return np.asarray(reader.rgb(path))


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    lines = [json.dumps(sharegpt("?", str(i), id=f"s{i}")) for i in range(3)]
    listed = "[\r\n" + ",\r\n".join(lines) + "\r\n]\r\n"
    for text in ("\r\n".join(lines) + "\r\n", "\r\n" + "\r\n\r\n".join(lines), listed):
        path = tmp_path / f"{len(text)}.json"
        path.write_bytes(codecs.BOM_UTF8 + text.encode())
        corpus = open_corpus(path)
        assert [corpus.read(i).record.id for i in range(len(corpus))] == ["s0", "s1", "s2"]


def test_names_in_any_script_and_ids_that_occur_twice(tmp_path: Path) -> None:
    names = ["b\u00e4r.png", "\u732b \u72ac.png", "\U0001f408.png", "e\u0301.png", "  .png"]
    for i, name in enumerate(names):
        save_image(tmp_path / name, 64 + 32 * i, 64)
    path = write_jsonl(tmp_path / "\u732b.jsonl", [sharegpt("<image>?", "3", [name], id="same") for name in names])
    corpus = open_corpus(path, on_bad_sample="skip")
    assert [corpus.placements(i)[0].grid_w for i in range(len(corpus))] == [4, 6, 8, 10, 12]
    assert {corpus.record(i).id for i in range(len(corpus))} == {"same"}


def test_modes_of_images(tmp_path: Path) -> None:
    """CMYK, 16 bits, palettes, animations, turned cameras, transparency: what a viewer shows, on white."""
    red = Image.new("RGB", (40, 20), (200, 30, 30))
    assert abs(rgb(tmp_path / "cmyk.jpg", red.convert("CMYK"))[10, 20].astype(int) - (200, 30, 30)).max() < 20
    grey = Image.fromarray(np.full((20, 40), 0x8040, dtype=np.uint16))
    assert (rgb(tmp_path / "grey16.png", grey) == 0x80).all()
    assert (rgb(tmp_path / "palette.png", red.quantize(4))[10, 20] == (200, 30, 30)).all()
    blue = Image.new("RGB", (40, 20), (0, 0, 250))
    assert (rgb(tmp_path / "moving.gif", red, save_all=True, append_images=[blue])[10, 20] == (200, 30, 30)).all()
    clear = red.convert("RGBA")
    clear.putalpha(Image.fromarray(np.pad(np.full((20, 20), 255, dtype=np.uint8), ((0, 0), (20, 0)))))
    for name, image in (("rgba.png", clear), ("la.png", clear.convert("LA")), ("pa.png", clear.quantize(8))):
        seen = rgb(tmp_path / name, image)
        assert (seen[10, 5] == 255).all(), f"{name}: what is transparent is white"
        assert (seen[10, 35] != 255).any(), name
    exif = Image.Exif()
    exif[0x0112] = 6
    assert rgb(tmp_path / "turned.jpg", red, exif=exif).shape == (40, 20, 3)


def test_a_header_that_states_another_size_than_the_pixels_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_image(tmp_path / "a.png", 64, 96)
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("<image>", "1", ["a.png"]), sharegpt("?", "1")])
    monkeypatch.setattr(image_module, "_upright", lambda image: Image.new("RGB", (48, 48)))
    (bad,) = open_corpus(path, on_bad_sample="skip").bad_samples()
    assert "a.png, which is damaged (its header states 64x96 pixels, it has 48x48)" in bad.cause


def test_a_video_of_one_frame_is_a_group(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    frame = Image.open(tmp_path / "clip" / save_image(tmp_path / "clip" / "1.png", 96, 64))
    with av.open(str(tmp_path / "one.avi"), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "bgr0"
        container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    samples = [sharegpt("<video>?", "3", videos=[name]) for name in ("clip", "one.avi")]
    corpus = open_corpus(write_jsonl(tmp_path / "s.jsonl", list(samples)), on_bad_sample="skip", min_pixels=1024)
    (of_folder,), (of_file,) = corpus.placements(0), corpus.placements(1)
    assert (of_folder.grid_h, of_folder.grid_w, of_folder.frame) == (4, 6, 0) == of_file_shape(of_file)
    one, other = (corpus.pixels(i, corpus.record(i), [(0, 0, (4, 6))])[0] for i in range(2))
    assert np.array_equal(one, other)


def of_file_shape(item: Any) -> tuple[int, int, int]:
    return item.grid_h, item.grid_w, item.frame


def test_a_video_is_turned_as_the_camera_was_held(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.set_display_rotation(90)  # counter-clockwise
        picture = np.zeros((64, 96, 3), dtype=np.uint8)
        picture[:, 64:] = 255
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("<video>?", "3", videos=["a.mp4"])])
    corpus = open_corpus(path, on_bad_sample="skip", min_pixels=1024)
    (item, *_) = corpus.placements(0)
    assert (item.grid_h, item.grid_w) == (6, 4)
    (pixels_PD,) = corpus.pixels(0, corpus.record(0), [(0, 0, (6, 4))])
    blocks = pixels_PD.mean(axis=1).reshape(3, 2, 4)  # rows of blocks from top to bottom, columns, patches of a block
    assert (blocks[0] > 0.9).all(), "the right third of the picture lies on top"
    assert (blocks[1:] < -0.9).all()


def test_frames_follow_the_numbers_in_their_names(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    for i in range(12):
        Image.new("RGB", (64, 64), (20 * i, 0, 0)).save(tmp_path / "clip" / f"frame{i}.png")
        (tmp_path / "clip" / f"._frame{i}.png").write_bytes(b"left by macOS")
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("<video>?", "3", videos=["clip"])])
    corpus = open_corpus(path, video_min_frames=12, min_pixels=1024)
    grids = [(0, item.frame, (item.grid_h, item.grid_w)) for item in corpus.placements(0)]
    reds = [pixels_PD[0].reshape(3, 2, 256)[0, :, 0] for pixels_PD in corpus.pixels(0, corpus.record(0), grids)]
    np.testing.assert_allclose(np.concatenate(reds), [20 * i / 127.5 - 1 for i in range(12)], atol=1e-5)


def test_tables_with_empty_cells_and_without_their_suffix(tmp_path: Path) -> None:
    """Rows of both forms in one table leave each other's columns empty; one image is null."""
    image = {"bytes": (tmp_path / save_image(tmp_path / "a.png", 64, 64)).read_bytes(), "path": None}
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "3"}]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]
    rows = [
        {"id": "a", "conversations": turns, "messages": None, "images": [image]},
        {"id": None, "conversations": None, "messages": messages, "images": None},
        {"id": "c", "conversations": turns, "messages": None, "images": [{"bytes": None, "path": None}]},
        {"id": "d", "conversations": turns, "messages": None, "images": [None]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table")
    corpus = open_corpus(tmp_path / "table", on_bad_sample="skip")
    assert [corpus.read(i).record.id for i in range(len(corpus))] == ["a", ""]
    assert len(corpus.pixels(0, corpus.record(0), [(0, -1, (4, 4))])) == 1
    bad = corpus.bad_samples()
    assert [(sample.line, sample.id) for sample in bad] == [(3, ""), (4, "")]
    assert all("null among its images" in sample.cause for sample in bad)
    with pytest.raises(UserError, match=r"table row 3: the sample has null among its images"):
        open_corpus(tmp_path / "table")


def test_files_of_a_table_with_their_columns_in_another_order(tmp_path: Path) -> None:
    image = (tmp_path / save_image(tmp_path / "a.png", 64, 64)).read_bytes()
    table = pa.Table.from_pylist([{"id": "a", "text": "a cat", "image": image}])
    (tmp_path / "t").mkdir()
    pq.write_table(table, tmp_path / "t" / "0.parquet")
    pq.write_table(table.select(["image", "text", "id"]), tmp_path / "t" / "1.parquet")
    corpus = open_corpus(tmp_path / "t")
    assert len(corpus) == 2
    assert corpus.record(0) == corpus.record(1)
    pq.write_table(table.select(["id", "text"]), tmp_path / "t" / "2.parquet")
    with pytest.raises(UserError, match="no readable Parquet"):
        open_corpus(tmp_path / "t")


def tar_of(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def samples_of(folder: Path, count: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for i in range(count):
        files[f"s{i}.png"] = (folder / save_image(folder / "x.png", 64, 64, seed=i)).read_bytes()
        files[f"s{i}.txt"] = b"a b"
    return files


def test_a_tar_file_that_breaks_off(tmp_path: Path) -> None:
    """The sample in which it ends is bad, those before it and the other files are used."""
    for name in ("a.tar", "b.tar"):
        (tmp_path / "w").mkdir(exist_ok=True)
        tar_of(tmp_path / "w" / name, samples_of(tmp_path, 4))
    whole = (tmp_path / "w" / "a.tar").read_bytes()
    place = whole.index(b"s2.png") + 600
    (tmp_path / "w" / "a.tar").write_bytes(whole[:place])
    corpus = open_corpus(tmp_path / "w", on_bad_sample="skip")
    assert [corpus.record(i).id for i in range(len(corpus))] == ["s0", "s1", "s0", "s1", "s2", "s3"]
    (bad,) = corpus.bad_samples()
    assert bad.line == 3
    assert "has the file s2.png, in which" in bad.cause
    with pytest.raises(UserError, match=r"w sample 3: the sample has the file s2\.png, in which .*a\.tar ends"):
        open_corpus(tmp_path / "w")
    assert len(open_corpus(tmp_path / "w" / "b.tar")) == 4, "a single tar file is a source"


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({"s.json": b"3", "s.png": b""}, "holds a int; it must be"),
        ({"s.json": b"{", "s.png": b""}, "a json file that is not valid"),
        ({"s.txt": b"\xff", "s.png": b""}, "a txt file that is not valid"),
        ({"s.json": b'{"conversations": [], "second_per_grid_ts": 3}'}, "second_per_grid_ts that is no list"),
        ({"s.json": b'{"conversations": [], "second_per_grid_ts": ["0"]}', "s.mp4": b""}, "no list of numbers"),
        ({"s.png": b""}, "neither a json nor a txt file"),
        ({"s.txt": b"a", "s.png": b""}, "the image png, which is not a readable image"),
        ({"s.txt": b"a", "s.jpgs": b"\x80\x04."}, "'jpgs' that is no pickled list"),
    ],
)
def test_samples_of_tar_files_that_cannot_be_used(tmp_path: Path, files: dict[str, bytes], cause: str) -> None:
    good = {"a.txt": b"a"}
    corpus = open_corpus(tar_of(tmp_path / "s.tar", good | files), on_bad_sample="skip")
    assert len(corpus) == 1
    (bad,) = corpus.bad_samples()
    assert bad.line == 2
    assert cause in bad.cause


def test_two_files_of_one_name_in_a_sample_are_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for name, data in (("s.txt", b"a"), ("s.txt", b"b")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    with pytest.raises(UserError, match=r"sample 1: the sample has two files s\.txt"):
        open_corpus(tmp_path / "s.tar")


def written(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def zipped(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "s.zip", "w") as archive:
        archive.writestr("s.jsonl", "{}")
    return folder / "s.zip"


def arrow(folder: Path) -> Path:
    table = pa.table({"text": ["a"]})
    with pa.OSFile(str(folder / "s.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return folder / "s.arrow"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "s.jsonl")
    return folder / "s.jsonl"


def circle(folder: Path) -> Path:
    (folder / "s.jsonl").symlink_to("t.jsonl")
    (folder / "t.jsonl").symlink_to("s.jsonl")
    return folder / "s.jsonl"


def only_json(folder: Path) -> Path:
    (folder / "d").mkdir()
    (folder / "d" / "s.jsonl").write_text("{}")
    return folder / "d"


def of_two_kinds(folder: Path) -> Path:
    (folder / "d").mkdir()
    pq.write_table(pa.table({"text": ["a"]}), folder / "d" / "a.parquet")
    pq.write_table(pa.table({"caption": ["a"]}), folder / "d" / "b.parquet")
    return folder / "d"


LINE = b'{"text": "a"}'


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (written("s.jsonl", b""), "holds no sample"),
        (written("s.jsonl", codecs.BOM_UTF8 + b"\r\n"), "holds no sample"),
        (written("s.json", b"[]"), "holds no sample"),
        (written("s.jsonl.gz", gzip.compress(LINE)), "is compressed with gzip; unpack it"),
        (written("s.jsonl", gzip.compress(LINE)), "is compressed with gzip; unpack it"),
        (written("s.jsonl", codecs.BOM_UTF16_LE + LINE.decode().encode("utf-16-le")), "UTF-16; save it as UTF-8"),
        (written("s.json", b"[" + LINE + b","), "not a valid JSON list (it ends without ])"),
        (written("s.json", b"[" + LINE + b"]\n[" + LINE + b"]"), "not a valid JSON list (something follows"),
        (written("s.json", b"[" + b"[" * 100_000), "not a valid JSON list"),
        (written("s.tar", b"x" * 5000), "not a readable tar file"),
        (written("s.tar", gzip.compress(b"x" * 5000)), "is compressed with gzip"),
        (zipped, "is a zip archive"),
        (arrow, "is an Arrow file; write it as Parquet"),
        (pipe, "is neither a file nor a folder"),
        (circle, "No such file"),
        (only_json, "name a file in it, such as"),
        (of_two_kinds, "is no readable Parquet"),
    ],
)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_sources_that_are_something_else(
    tmp_path: Path, make: Callable[[Path], Path], cause: str, policy: str
) -> None:
    path = make(tmp_path)
    with pytest.raises(UserError) as caught:
        open_corpus(path, on_bad_sample=policy)
    assert str(path) in str(caught.value)
    assert cause in str(caught.value)


def test_a_source_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("?", "1")])
    whole = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == path:
            raise PermissionError(13, "Permission denied")
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"s\.jsonl: Permission denied; make it readable"):
        open_corpus(path)


def test_a_folder_of_frames_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not taken for a cache folder that cannot be written."""
    save_image(tmp_path / "clip" / "0.png", 64, 64)
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("<video>", "1", videos=["clip"], id="k")])

    def refuse(self: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=r"line 1 \(id k\): .*clip, which cannot be read \(Permission denied\)"):
        open_corpus(path)


def test_an_image_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_image(tmp_path / "a.png", 64, 64)
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("<image>", "1", ["a.png"], id="k"), sharegpt("?", "1")])

    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(UserError, match=r"line 1 \(id k\): .*a\.png, which cannot be read \(Permission denied\)"):
        open_corpus(path)
    assert len(open_corpus(path, on_bad_sample="skip")) == 1
