"""The index: what it holds, when it is built anew, and how it refuses samples."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from PIL import Image

from flagscale.config.errors import UserError
from flagscale.data import index_file
from flagscale.data.chat import Placement
from flagscale.data.image import ImageSettings
from flagscale.data.index import SampleIndex
from flagscale.data.index_build import build_index
from flagscale.data.source import Source
from flagscale.data.tokenizer import BuiltinTokenizer
from tests.data.helpers import save_image, sharegpt, write_jsonl, write_mixture
from tests.dist.pool import run_ranks

SETTINGS = ImageSettings(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=1024, max_pixels=25600)


def open_source(path: Path, settings: ImageSettings = SETTINGS) -> Source:
    return Source(path, BuiltinTokenizer(), settings)


def test_rows_say_what_the_samples_hold(tmp_path: Path) -> None:
    save_image(tmp_path / "pictures" / "a.png", 64, 96)
    save_image(tmp_path / "b.png", 128, 64)
    samples: list[dict[str, Any] | str] = [
        sharegpt("Hi", "yes"),
        "",
        sharegpt("<image><image>?", "3 1", ["pictures/a.png", str(tmp_path / "b.png")], id="two"),
    ]
    with SampleIndex.open(open_source(write_jsonl(tmp_path / "s.jsonl", samples))) as index:
        assert len(index) == 2
        assert index.placements(0) == ()
        assert index.placements(1) == (Placement(6, 4, 7, 0), Placement(4, 8, 15, 1))
        assert index.num_tokens(0) == len("suser\nHie\nsassistant\nyese\n")
        assert index.num_tokens(1) == len("suser\n?e\nsassistant\n3 1e\n") + 2 * 2 + 6 + 8
        assert [(index.num_loss_tokens(i), index.num_mtp_loss_tokens(i)) for i in (0, 1)] == [(4, 4), (4, 4)]
        text = index.read(1)
        assert text.record == index.record(1)
        assert text.record.id == "two"
        assert [media.name for media in text.record.media] == ["pictures/a.png", str(tmp_path / "b.png")]
        assert len(text.encoded.tokens_T) == index.num_tokens(1)


def test_only_headers_are_opened(tmp_path: Path) -> None:
    """An image cut off behind its header has a size, so it is indexed."""
    save_image(tmp_path / "whole.png", 100, 100)
    (tmp_path / "a.png").write_bytes((tmp_path / "whole.png").read_bytes()[:100])
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("<image>", "3", ["a.png"])])
    with SampleIndex.open(open_source(path)) as index:
        assert index.placements(0)[0].grid_h == 6


def test_rows_and_items_as_arrays_are_those_of_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "CHUNK", 5)
    with SampleIndex.open(open_source(write_mixture(tmp_path, 23))) as index:
        assert index.column("num_tokens").tolist() == [index.num_tokens(i) for i in range(23)]
        items = [dataclasses.astuple(item) for i in range(23) for item in index.placements(i)]
        assert len(items) > 20
        assert [tuple(item) for item in index.items().tolist()] == items


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    source = open_source(write_mixture(tmp_path, 4))
    path = build_index(source)
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole[:60], b"x" * len(whole)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"\.index: is a damaged index; remove it"):
            SampleIndex(source, path)
    path.write_bytes(whole)
    SampleIndex(source, path).close()


def test_a_full_disk_ends_the_build_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(index_file.shutil, "copyfileobj", full)
    with pytest.raises(UserError, match=r"data\.cache_path: .*\.flagscale \(No space left on device\)"):
        build_index(open_source(write_mixture(tmp_path, 4)))
    assert [path.name for path in (tmp_path / ".flagscale").iterdir()] == [".lock"]


def test_built_once_and_again_when_something_changes(tmp_path: Path) -> None:
    path = write_mixture(tmp_path, 4)
    first = build_index(open_source(path))
    assert first.parent == tmp_path / ".flagscale"
    written = first.stat().st_mtime_ns
    assert build_index(open_source(path)) == first
    assert first.stat().st_mtime_ns == written
    larger = ImageSettings(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=65536, max_pixels=1 << 20)
    other = build_index(open_source(path, larger))
    assert other != first
    os.utime(path, ns=(1, 1))
    again = build_index(open_source(path))
    assert again not in (first, other)
    assert not first.exists(), "the index of the earlier source was left"
    assert other.exists(), "an index of other settings was removed"
    assert sorted(p.name for p in first.parent.iterdir()) == sorted([".lock", again.name, other.name])


def build_with_others(path: str) -> tuple[int, int]:
    """Build at the same moment as the other ranks; the file that came of it, and its samples."""
    source = open_source(Path(path))
    dist.barrier()
    built = build_index(source)
    with SampleIndex(source, built) as index:
        return built.stat().st_ino, len(index)


def test_several_processes_build_one_index(tmp_path: Path) -> None:
    path = write_mixture(tmp_path, 40)
    found = set(run_ranks(4, build_with_others, str(path)))
    assert len(found) == 1
    assert found.pop()[1] == 40
    assert len(list((tmp_path / ".flagscale").glob("*.index*"))) == 1


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("a", "b"), "{"])
    with pytest.raises(UserError):
        build_index(open_source(path))
    assert [p.name for p in (tmp_path / ".flagscale").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("sample", "where", "cause"),
    [
        ("{", "line 2: ", "is not valid JSON"),
        (sharegpt("<image>", "3", ["none.png"], id="x7"), "line 2 (id x7): ", "none.png, which does not exist"),
        (sharegpt("<image>", "3", ["empty.png"]), "line 2: ", "empty.png, which is not a readable image"),
        (sharegpt("<image>", "3", ["thin.png"]), "line 2: ", "402x2 pixels, whose aspect ratio is over 200"),
        (sharegpt("caf\u00e9", "3"), "line 2: ", "the character '\u00e9'"),
        (sharegpt("<image>", "3"), "line 2: ", "1 '<image>' placeholder(s) and 0 image(s)"),
    ],
)
def test_a_bad_sample_is_named(tmp_path: Path, sample: Any, where: str, cause: str) -> None:
    (tmp_path / "empty.png").write_bytes(b"")
    Image.new("RGB", (402, 2)).save(tmp_path / "thin.png")
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("a", "b"), sample])
    with pytest.raises(UserError) as caught:
        build_index(open_source(path))
    assert f"{path} {where}the sample " in str(caught.value)
    assert cause in str(caught.value)


def test_sources_that_are_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: No such file"):
        open_source(tmp_path / "none.jsonl")
    (tmp_path / "s.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="holds no sample"):
        build_index(open_source(tmp_path / "s.jsonl"))


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("a", "b")])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_path: .*file"):
        build_index(open_source(path), tmp_path / "file")


def test_the_first_sample_that_is_too_long_is_named(tmp_path: Path) -> None:
    samples: list[dict[str, Any] | str] = [sharegpt("a" * n, "b", id=f"n{n}") for n in (5, 40, 60)]
    with SampleIndex.open(open_source(write_jsonl(tmp_path / "s.jsonl", samples))) as index:
        index.check_lengths(index.num_tokens(2))
        with pytest.raises(UserError, match=rf"line 2 \(id n40\).*=40;.*has {index.num_tokens(2)}"):
            index.check_lengths(40)


def test_a_line_that_changed_after_indexing_is_noticed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("abc", "1", id="k")])
    with SampleIndex.open(open_source(path)) as index:
        path.write_text(json.dumps(sharegpt("abcd", "1", id="k")) + "\n")
        with pytest.raises(UserError, match=r"line 1 \(id k\): the sample changed after it was indexed"):
            index.read(0)
        path.write_text("")
        with pytest.raises(UserError, match="line 1: the sample is not valid JSON"):
            index.record(0)
