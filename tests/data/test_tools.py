"""The tools for one's own data: a folder of pictures becomes a data set, and a source is looked into."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flagscale.config.loading import load
from flagscale.data.corpus import Corpus
from tests.data.helpers import make_config, save_image, sharegpt, write_jsonl
from tools.data import from_folder, inspect

ROOT = Path(__file__).resolve().parents[2]


def classes(folder: Path) -> None:
    for name in ("cat", "big_dog"):
        for i in range(6):
            save_image(folder / name / f"{i}.png", 64 + i, 64, seed=i)


def beside(folder: Path) -> None:
    for i in range(12):
        save_image(folder / f"{i}.png", 64, 64, seed=i)
        (folder / f"{i}.txt").write_text(f"picture {i}\n")


def metadata(folder: Path) -> None:
    lines = [{"file_name": save_image(folder / f"{i}.png", 64, 64, seed=i), "text": f"picture {i}"} for i in range(12)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def captions(folder: Path) -> None:
    names = [save_image(folder / f"{i}.png", 64, 64, seed=i) for i in range(12)]
    (folder / "captions.csv").write_text("file,caption\n" + "".join(f'{name},"picture, {name}"\n' for name in names))


@pytest.mark.parametrize(
    ("layout", "answers"),
    [
        (classes, {"cat", "big dog"}),
        (beside, {f"picture {i}" for i in range(12)}),
        (metadata, {f"picture {i}" for i in range(12)}),
        (captions, {f"picture, {i}.png" for i in range(12)}),
    ],
)
def test_a_folder_becomes_a_data_set(
    tmp_path: Path, layout: Callable[[Path], None], answers: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes out is read without a mistake; every usable picture is in one of the splits, a damaged one in none."""
    folder, out = tmp_path / "pictures", tmp_path / "out"
    layout(folder)
    broken = sorted(folder.rglob("*.png"))[0]
    broken.write_bytes(broken.read_bytes()[:200])
    assert from_folder.main([str(folder), "--out", str(out), "--valid-share", "0.2"]) == 0
    shown = capsys.readouterr().out
    assert "9 train, 2 valid, 1 left out" in shown
    assert f"left out: {broken.relative_to(folder)} has the image {broken}, which is" in shown
    found = []
    for split in ("train", "valid"):
        corpus = Corpus.open(make_config(out / f"{split}.jsonl", on_bad_sample="raise"), "train")
        found += [corpus.record(i) for i in range(len(corpus))]
    assert len({record.id for record in found}) == 11
    assert {str(record.turns[1].parts[0]) for record in found} <= answers
    assert len({str(record.turns[1].parts[0]) for record in found}) in (2, 11)
    assert from_folder.main([str(folder), "--out", str(out)]) == 2, "written over"


def test_folders_that_say_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert from_folder.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "holds no picture" in capsys.readouterr().err
    save_image(tmp_path / "a.png", 64, 64)
    assert from_folder.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "says nothing about its pictures" in capsys.readouterr().err
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "b.png", "text": "x"}\n')
    assert from_folder.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "line 1: names b.png" in capsys.readouterr().err
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": null}\n')
    assert from_folder.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "a.png has neither a caption nor" in capsys.readouterr().err
    for split in ("train", "val"):
        save_image(tmp_path / "divided" / split / "cat" / "a.png", 64, 64)
    assert from_folder.main([str(tmp_path / "divided"), "--out", str(tmp_path / "out")]) == 2
    assert "its folders are splits (train), not classes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_people_stumble_over_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names with spaces, a table of a spreadsheet, characters beyond ASCII, pictures without a caption."""
    folder, out = tmp_path / "my (new) pictures", tmp_path / "it's mine"
    names = [save_image(folder / f"{i} a.png", 64, 64, seed=i) for i in range(6)]
    (folder / "._0 a.png").write_bytes(b"left by macOS")
    rows = [f'{name};"ein B\u00e4r; {i}"' for i, name in enumerate(names[:3])] + [f"{names[3]};a bear"]
    (folder / "captions.csv").write_text("\ufeffname;caption\r\n" + "\r\n".join(rows), encoding="utf-8")
    assert from_folder.main([str(folder), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "3 train, 1 valid, 2 left out" in shown
    assert "left out: 4 a.png has neither a caption nor" in shown
    assert "3 answers hold characters that the demo's tokenizer lacks" in shown
    words = shlex.split(shown.splitlines()[-1])
    assert words[:3] == ["python", "run.py", "--config-name"]
    config = load(words[3], None, words[4:]).config
    assert (config.data.train_path, config.data.on_bad_sample) == (str(out / "train.jsonl"), "skip")
    for name in ("plain", "a b", "a, (b) = c", "it's", 'a"b', "a\\b", "a$HOME", "\u732b"):
        (word,) = shlex.split(from_folder.override("data.train_path", tmp_path / name))
        assert load("qwen35_mimo", None, [word]).config.data.train_path == str(tmp_path / name)
    (folder / "captions.csv").write_bytes("name,B\u00e4r".encode("latin-1"))
    assert from_folder.main([str(folder), "--out", str(tmp_path / "other")]) == 2
    assert "captions.csv: is not text in UTF-8" in capsys.readouterr().err


def test_inspect_says_what_a_source_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_image(tmp_path / "a.png", 64, 96)
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:3000])
    samples = [sharegpt("<image>?", "3", ["a.png"]), sharegpt("?", "12"), "{", sharegpt("<image>?", "3", ["cut.png"])]
    path = write_jsonl(tmp_path / "s.jsonl", samples)
    assert inspect.main([str(path), "--png", str(tmp_path / "h.png")]) == 0
    shown = capsys.readouterr().out
    texts = ("samples │ 3", "broken samples │ 1", "visual tokens │ 12 (", "1 samples have none", "patches of an item",
             "too long │ 0 (over model.seq_length=")  # fmt: skip
    for text in texts:
        assert text.replace(" ", "") in shown.replace(" ", ""), text
    assert "line 3: the sample is not valid JSON" in shown
    assert (tmp_path / "h.png").read_bytes()[:4] == b"\x89PNG"
    assert inspect.main([str(path), "--decode"]) == 0
    assert "line 4: the sample has the image" in capsys.readouterr().out
    assert not (tmp_path / ".flagscale").exists(), "looking leaves nothing behind"
    assert inspect.main([str(tmp_path / "none.jsonl")]) == 2


def test_tools_run_as_files_although_one_is_named_like_a_standard_module() -> None:
    for name in ("make_digits", "from_folder", "inspect"):
        command = [sys.executable, str(ROOT / "tools" / "data" / f"{name}.py"), "--help"]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout
