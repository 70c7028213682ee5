"""Make a data set from a folder of pictures.

    python -m tools.data.from_folder pictures/ --out data/mine

What the pictures show is said by one of three layouts, which the tool finds out:

- captions in one file, `metadata.jsonl` (`{"file_name": "a.jpg", "text": "..."}`) or `captions.csv` (name, caption);
- a text file beside each picture, `a.jpg` and `a.txt`;
- a sub-folder for each class, `cats/1.jpg`: the class is the answer.

It writes `train.jsonl` and `valid.jsonl`, which name the pictures where they lie.
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file: its folder comes first, and the inspect.py there would hide the standard one
    sys.path[0] = __file__.rsplit("/", 3)[0]

import argparse
import csv
import io
import json
import random
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flagscale.config.errors import UserError
from flagscale.data.image import ImageReader, ImageSettings
from flagscale.data.records import SampleError
from flagscale.data.stores import IMAGE_SUFFIXES, files_below
from flagscale.data.tokenizer import BUILTIN_CHARACTERS

QUESTIONS = {"captions": "Describe the picture.", "classes": "What is in the picture?"}
METADATA, CAPTIONS = "metadata.jsonl", "captions.csv"
UNSAID = "has neither a caption nor a folder of its class"
SPLITS = {"train", "val", "valid", "validation", "test"}
SHOWN = 5  # pictures left out that are named
# Any that refuse what training would: sizes do not matter here.
SETTINGS = ImageSettings(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=1024, max_pixels=1 << 20)


@dataclass(frozen=True, slots=True)
class Made:
    """A data set that was written: samples by split, pictures left out with the reason, and answers that hold
    characters which the demo's tokenizer lacks."""

    train: int
    valid: int
    left_out: list[str]
    beyond_ascii: int


def pictures(folder: Path) -> list[Path]:
    """All pictures below a folder, in order."""
    found = [path for path in files_below(folder, "") if path.suffix[1:].lower() in IMAGE_SUFFIXES]
    if not found:
        raise UserError(f"{folder}: holds no picture ({', '.join(sorted(IMAGE_SUFFIXES))}); name a folder that does")
    return found


def answers(folder: Path) -> tuple[str, dict[Path, str]]:
    """The layout found (a key of `QUESTIONS`), and what is said about each picture; empty where nothing is.

    Raises:
        UserError: when no layout fits, or a caption names a picture that is not there.
    """
    found = pictures(folder)
    if (folder / METADATA).is_file() or (folder / CAPTIONS).is_file():
        said = dict(_listed(folder))
        return "captions", {path: said.pop(path, "") for path in found} | said
    beside = {path: path.with_suffix(".txt") for path in found if path.with_suffix(".txt").is_file()}
    if beside:
        return "captions", {path: _text(beside[path]).strip() if path in beside else "" for path in found}
    inside = {path: path.relative_to(folder).parts[0] for path in found if path.parent != folder}
    if not inside:
        raise UserError(
            f"{folder}: says nothing about its pictures; add {METADATA} or {CAPTIONS}, a text file beside each, "
            "or sort them into a folder for each class"
        )
    if set(inside.values()) <= SPLITS:
        part = min(inside.values())
        raise UserError(f"{folder}: its folders are splits ({part}), not classes; name that of one: {folder / part}")
    return "classes", {path: inside.get(path, "").replace("_", " ") for path in found}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not text in UTF-8 ({error}); save it as UTF-8") from None


def _listed(folder: Path) -> Iterator[tuple[Path, str]]:
    """Pictures and captions of the list that lies in the folder."""
    file = folder / METADATA
    rows = _metadata(file) if file.is_file() else _captions(file := folder / CAPTIONS)
    for number, name, caption in rows:
        if not (folder / name).is_file():
            raise UserError(f"{file} line {number}: names {name}, which is not in {folder}; correct it")
        yield folder / name, caption.strip()


def _metadata(file: Path) -> Iterator[tuple[int, str, str]]:
    """(line, name, caption) of `metadata.jsonl`."""
    for number, line in enumerate(_text(file).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            yield number, str(entry["file_name"]), "" if entry["text"] is None else str(entry["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} line {number}: has no file_name and text ({error!r}); correct it") from None


def _captions(file: Path) -> Iterator[tuple[int, str, str]]:
    """(line, name, caption) of `captions.csv`, its header left out; separated by commas, semicolons or tabs."""
    text = _text(file)
    table = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=text.partition("\n")[0].count))
    for number, row in ((table.line_num, row) for row in table):
        if row and len(row) != 2:
            raise UserError(
                f"{file} line {number}: is not 'file name,caption'; put captions that hold the separator in quotes"
            )
        if row and (number > 1 or (file.parent / row[0]).is_file()):  # a header names no file
            yield number, row[0], row[1]


def fault(path: Path, answer: str, reader: ImageReader) -> str | None:
    """Why a picture cannot be used; None when it can."""
    if not answer:
        return UNSAID
    try:
        reader.grid(path)
        reader.verify(path)
    except SampleError as error:
        return str(error)
    return None


def make(folder: Path, out: Path, question: str | None, valid_share: float, seed: int) -> Made:
    """Write the data set.

    Raises:
        UserError: when the folder cannot be used, or the target holds data.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder; name the folder of your pictures")
    for name in ("train.jsonl", "valid.jsonl"):
        if (out / name).exists():
            raise UserError(f"{out / name}: exists; name another --out or remove it")
    layout, said = answers(folder)
    reader = ImageReader(SETTINGS)
    faults = {path: fault(path, answer, reader) for path, answer in said.items()}
    good = [(path, answer) for path, answer in said.items() if faults[path] is None]
    if len(good) < 2:
        reason = next((f"; {path.name} {why}" for path, why in faults.items() if why), "")
        raise UserError(
            f"{folder}: has {len(good)} usable pictures, at least 2 are needed, the second to validate{reason}"
        )
    random.Random(seed).shuffle(good)
    held_out = min(len(good) - 1, max(1, round(len(good) * valid_share)))
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("valid", good[:held_out]), ("train", good[held_out:])):
        lines = []
        for path, answer in part:
            turns = [
                {"from": "human", "value": f"<image>{question or QUESTIONS[layout]}"},
                {"from": "gpt", "value": answer},
            ]
            name_inside = path.relative_to(folder).as_posix()
            sample = {"id": name_inside, "conversations": turns, "images": [str(path.absolute())]}
            lines.append(json.dumps(sample, ensure_ascii=False) + "\n")
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return Made(
        train=len(good) - held_out,
        valid=held_out,
        left_out=[f"{path.relative_to(folder)} {why}" for path, why in faults.items() if why],
        beyond_ascii=sum(bool(set(answer) - set(BUILTIN_CHARACTERS)) for _, answer in good),
    )


def override(key: str, path: Path) -> str:
    """`key=path` for a shell, quoted for it and for the configuration where need be."""
    text = str(path)
    if re.fullmatch(r"[\w./-]+", text, re.ASCII):
        return f"{key}={text}"
    if not set(text) & set("\"'\\$`!"):
        return f"\"{key}='{text}'\""
    escaped = text.replace("'", "\\'")
    return shlex.quote(f"{key}='{escaped}'")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make a data set from a folder of pictures.")
    parser.add_argument("folder", type=Path, help="pictures with captions, or a sub-folder for each class")
    parser.add_argument("--out", type=Path, default=Path("data/mine"), help="where to write (default: data/mine)")
    parser.add_argument("--question", default=None, help="what is asked about every picture")
    parser.add_argument("--valid-share", type=float, default=0.1, help="share that is held out (default: 0.1)")
    parser.add_argument("--seed", type=int, default=1, help="decides on what is held out (default: 1)")
    options = parser.parse_args(arguments)
    if not 0 < options.valid_share < 1:
        parser.error(f"--valid-share {options.valid_share}: must be between 0 and 1")
    try:
        made = make(options.folder, options.out, options.question, options.valid_share, options.seed)
    except (UserError, OSError) as error:
        print(f"from_folder: {error}", file=sys.stderr)
        return 2
    print(f"{made.train} train, {made.valid} valid, {len(made.left_out)} left out")
    for line in made.left_out[:SHOWN]:
        print(f"  left out: {line}")
    more = ""
    if made.beyond_ascii:
        more = " data.on_bad_sample=skip"
        print(
            f"  {made.beyond_ascii} answers hold characters that the demo's tokenizer lacks (it knows printable "
            "ASCII); they are skipped below"
        )
    paths = [override(f"data.{split}_path", options.out / f"{split}.jsonl") for split in ("train", "valid")]
    print(f"look into it:\n  python tools/data/inspect.py {shlex.quote(str(options.out / 'train.jsonl'))}")
    print(f"train on it:\n  python run.py --config-name qwen35_mimo {' '.join(paths)}{more}", end="")
    print(" experiment.exp_dir=outputs/mine")
    return 0


if __name__ == "__main__":
    sys.exit(main())
