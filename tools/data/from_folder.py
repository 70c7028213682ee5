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
import json
import random
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from flagscale.config.errors import UserError
from flagscale.data.stores import IMAGE_SUFFIXES

QUESTIONS = {"captions": "Describe the picture.", "classes": "What is in the picture?"}
METADATA, CAPTIONS = "metadata.jsonl", "captions.csv"


def pictures(folder: Path) -> list[Path]:
    """All pictures below a folder, in order."""
    found = sorted(path for path in folder.rglob("*") if path.suffix[1:].lower() in IMAGE_SUFFIXES and path.is_file())
    if not found:
        raise UserError(f"{folder}: holds no picture ({', '.join(sorted(IMAGE_SUFFIXES))}); name a folder that does")
    return found


def answers(folder: Path) -> tuple[str, dict[Path, str]]:
    """The layout found (a key of `QUESTIONS`), and the answer for each picture.

    Raises:
        UserError: when no layout fits, or a caption names a picture that is not there.
    """
    if (folder / METADATA).is_file() or (folder / CAPTIONS).is_file():
        return "captions", dict(_listed(folder))
    found = pictures(folder)
    beside = {path: path.with_suffix(".txt") for path in found if path.with_suffix(".txt").is_file()}
    if beside:
        return "captions", {path: text.read_text(encoding="utf-8").strip() for path, text in beside.items()}
    inside = {path: path.relative_to(folder).parts[0] for path in found if path.parent != folder}
    if not inside:
        raise UserError(
            f"{folder}: says nothing about its pictures; add {METADATA} or {CAPTIONS}, a text file beside each, "
            "or sort them into a folder for each class"
        )
    return "classes", {path: name.replace("_", " ") for path, name in inside.items()}


def _listed(folder: Path) -> Iterator[tuple[Path, str]]:
    """Pictures and captions of the list that lies in the folder."""
    if (folder / METADATA).is_file():
        file = folder / METADATA
        rows = []
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                entry = json.loads(line)
                rows.append((number, str(entry["file_name"]), str(entry["text"])))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{file} line {number}: has no file_name and text ({error}); correct it") from None
    else:
        file = folder / CAPTIONS
        with file.open(encoding="utf-8", newline="") as text:
            table = [(number, *row) for number, row in enumerate(csv.reader(text), start=1) if row]
        if any(len(row) != 3 for row in table):
            raise UserError(f"{file}: has a line that is not 'file name,caption'; put captions with commas in quotes")
        rows = [row for row in table if row[0] > 1 or (folder / row[1]).is_file()]  # a header names no file
    for number, name, caption in rows:
        if not (folder / name).is_file():
            raise UserError(f"{file} line {number}: names {name}, which is not in {folder}; correct it")
        yield folder / name, caption.strip()


def usable(path: Path, answer: str) -> bool:
    """Whether the picture can be decoded and something is said about it."""
    try:
        with Image.open(path) as image:
            image.load()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
        return False
    return bool(answer)


def make(folder: Path, out: Path, question: str | None, valid_share: float, seed: int) -> dict[str, int]:
    """Write the data set; the numbers of samples by split, and of pictures left out.

    Raises:
        UserError: when the folder cannot be used, or the target holds data.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder; name the folder of your pictures")
    for name in ("train.jsonl", "valid.jsonl"):
        if (out / name).exists():
            raise UserError(f"{out / name}: exists; name another --out or remove it")
    layout, said = answers(folder)
    good = [(path, answer) for path, answer in said.items() if usable(path, answer)]
    if len(good) < 2:
        raise UserError(f"{folder}: has {len(good)} usable pictures; at least 2 are needed, the second to validate")
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
    return {"train": len(good) - held_out, "valid": held_out, "left out": len(said) - len(good)}


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
        counts = make(options.folder, options.out, options.question, options.valid_share, options.seed)
    except (UserError, OSError) as error:
        print(f"from_folder: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    print(
        f"train on it:\n  python run.py --config-name qwen35_mimo data.train_path={options.out}/train.jsonl "
        f"data.valid_path={options.out}/valid.jsonl experiment.exp_dir=outputs/mine"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
