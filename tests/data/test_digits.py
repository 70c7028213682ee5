"""The demo data set: what `tools/data/make_digits.py` writes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from flagscale.data.corpus import open_source
from flagscale.data.index import SampleIndex
from flagscale.data.records import Record, parse_record
from tests.data.helpers import make_config
from tools.data import make_digits


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "digits"
    assert make_digits.main([str(folder)]) == 0
    return folder


def scan_of(name: str) -> int:
    """Number of the scan within its split that a file shows."""
    return int(name.split("/")[-1].split("-")[0])


def names(record: Record) -> list[str]:
    return [media.name for media in record.media]


def lines(digits: Path, split: str) -> list[bytes]:
    return (digits / f"{split}.jsonl").read_bytes().splitlines()


def test_splits_share_no_scan_and_have_enough_questions(digits: Path) -> None:
    for split, folder, num_scans in (("train", "train", 1500), ("valid", "valid", 297), ("valid_mixed", "valid", 140)):
        images = {name for line in lines(digits, split) for name in names(parse_record(line))}
        assert all(name.startswith(f"images/{folder}/") for name in images)
        assert len({scan_of(name) for name in images}) >= num_scans
    for split in ("train", "valid_mixed"):
        assert {len(parse_record(line).media) for line in lines(digits, split)} == {0, 1, 2, 3}
    assert len(lines(digits, "train")) == make_digits.NUM_TRAIN


def test_validation_asks_for_each_held_out_scan_once_and_alone(digits: Path) -> None:
    """What `eval_accuracy` of the demo counts: single digits."""
    records = [parse_record(line) for line in lines(digits, "valid")]
    assert [len(record.media) for record in records] == [1] * 297
    assert sorted(scan_of(names(record)[0]) for record in records) == list(range(297))
    assert {record.turns[-1].parts[0] for record in records} == set("0123456789")


def test_held_out_scans_are_the_first_of_the_shuffled_order(digits: Path) -> None:
    """The files' numbers count along one permutation of all scans, so no scan is in both splits."""
    target = load_digits().target
    order = np.random.default_rng(1).permutation(len(target))
    answers = {}
    for line in lines(digits, "valid"):
        record = parse_record(line)
        answers[scan_of(names(record)[0])] = record.turns[-1].parts[0]
    assert all(str(target[order[number]]) == answer for number, answer in answers.items())


def test_pictures_have_many_sizes_within_bounds(digits: Path) -> None:
    sizes = set()
    for path in (digits / "images" / "valid").iterdir():
        with Image.open(path) as image:
            sizes.add(image.size)
    assert all(64 <= side <= 160 for size in sizes for side in size)
    assert len(sizes) > 100
    assert len({round(width / 32) * round(height / 32) for width, height in sizes}) >= 6  # visual tokens


def test_both_forms_are_written_and_every_sample_fits(digits: Path) -> None:
    forms = {"messages" in json.loads(line) for line in lines(digits, "train")[:20]}
    assert forms == {True, False}
    for split in ("train", "valid", "valid_mixed"):
        config = make_config(digits / f"{split}.jsonl")
        with SampleIndex.open(open_source(config, config.data.train_path)) as index:
            index.check_lengths(144)
            read = [index.read(i) for i in range(0, len(index), 97)]
        assert all(text.encoded.num_loss_tokens >= 2 for text in read)


def test_same_seed_same_files(digits: Path, tmp_path: Path) -> None:
    scans, targets = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(scans))[: make_digits.HELD_OUT]
    make_digits.write_held_out(tmp_path, scans.reshape(-1, 8, 8)[order], targets[order], seed=1)
    pictures = sorted((tmp_path / "images").rglob("*.png"))
    assert len(pictures) == make_digits.HELD_OUT
    for name in ["valid.jsonl", "valid_mixed.jsonl", *(path.relative_to(tmp_path) for path in pictures)]:
        assert (tmp_path / name).read_bytes() == (digits / name).read_bytes(), name


def test_nothing_is_written_twice_or_over_something_else(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = (digits / "train.jsonl").stat().st_mtime_ns
    assert make_digits.main([str(digits)]) == 0
    assert (digits / "train.jsonl").stat().st_mtime_ns == written
    (tmp_path / "mine.txt").write_text("mine")
    assert make_digits.main([str(tmp_path)]) == 2
    assert "was not written by this tool" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_pictures_are_used_equally_often() -> None:
    pictures = [make_digits.Picture(f"{i}.png", i % 10, 4 + i % 13) for i in range(50)]
    dealer = make_digits.PictureDealer(pictures, random.Random(0))
    taken = [dealer.take(count) for count in [3, 2, 1] * 100]
    assert all(sum(picture.num_tokens for picture in group) <= make_digits.MAX_IMAGE_TOKENS for group in taken)
    uses = [sum(picture in group for group in taken) for picture in pictures]
    assert max(uses) <= min(uses) + 3
