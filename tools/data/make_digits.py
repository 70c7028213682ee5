"""Write the demo data set: scanned digits as PNG files of many sizes, and questions about them.

    python -m tools.data.make_digits data/digits

The scans are scikit-learn's `load_digits` (1797 real 8x8 scans, UCI Optical Recognition of Handwritten Digits). Each
becomes PNG files of 64 to 160 pixels a side. A scan is trained on or held out, never both. `valid.jsonl` asks for each
held-out scan once, alone; `valid_mixed.jsonl` asks about the same scans as training does: samples have no image, 1, 2
or 3, in one turn or one a turn. They are written in ShareGPT form, every fourth in OpenAI form.
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file: its folder comes first, and the inspect.py there would hide the standard one
    sys.path[0] = __file__.rsplit("/", 3)[0]

import argparse
import hashlib
import json
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

SMALLEST_SIDE, LARGEST_SIDE = 64, 160  # pixels
STRETCH = (0.95, 1.05)  # of each side, so that height and width differ
FILLED = (0.97, 1.0)  # share of each side that the digit takes
SMALL_OFTEN = 6  # power on a uniform draw: most pictures are near the smallest side, so that a run is quick
HELD_OUT = 297  # scans, of 1797
RENDERINGS = 3  # files of a training scan; a held-out one has a single file
MAX_IMAGE_TOKENS = 32  # of a sample, at 32 x 32 pixels a token: keeps every sample at 144 tokens or less
NUM_TRAIN = 6000
# Images of each turn of a sample, and how often among training samples. Most have a picture in each of three turns:
# three answers cost a step little more than one, and the model learns to read in a third of the steps.
SHARES = (((1, 1, 1), 0.7), ((1,), 0.1), ((2,), 0.05), ((3,), 0.1), ((0,), 0.05))
NUM_VALID_MIXED = {(1, 1, 1): 40, (1,): 20, (2,): 20, (3,): 20, (0,): 20}  # images of each turn, and samples
# Short, so that the pictures are a good part of what the one attention layer looks at.
ONE = ("Which digit?", "What is it?", "Read it.")
SEVERAL = ("Which digits, left to right?", "Read them.")
STAMP = "stamp.json"


@dataclass(frozen=True, slots=True)
class Picture:
    """A file of a scan: its name relative to the data set, its digit, and the tokens it takes."""

    name: str
    digit: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A question with an `<image>` mark for each of its pictures, and its answer."""

    text: str
    answer: str
    pictures: list[Picture]


def render(scan: np.ndarray, rng: np.random.Generator) -> Image.Image:
    """A scan (8x8, 0..16) as a grey picture of random size: the digit with some margin on an uneven background."""
    side = SMALLEST_SIDE * (LARGEST_SIDE / SMALLEST_SIDE) ** (rng.uniform() ** SMALL_OFTEN)
    sides = np.clip(np.rint(side * rng.uniform(*STRETCH, size=2)), SMALLEST_SIDE, LARGEST_SIDE)
    height, width = (int(side) for side in sides)
    digit_h, digit_w = (int(side * share) for side, share in zip(sides, rng.uniform(*FILLED, size=2), strict=True))
    ink = Image.fromarray((scan * (255 / 16)).astype(np.uint8)).resize((digit_w, digit_h), Image.Resampling.BICUBIC)
    top, left = int(rng.integers(0, height - digit_h + 1)), int(rng.integers(0, width - digit_w + 1))
    background = rng.uniform(0, 25)
    canvas = background + rng.normal(0, 5, size=(height, width))
    strength = np.asarray(ink, dtype=np.float64) / 255
    patch = canvas[top : top + digit_h, left : left + digit_w]
    patch += strength * (rng.uniform(225, 255) - background)
    return Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8)).convert("RGB")


def write_pictures(folder: Path, split: str, scans: np.ndarray, digits: np.ndarray, seed: int) -> list[Picture]:
    """Render every scan and write the files to `folder/images/split`."""
    target = folder / "images" / split
    target.mkdir(parents=True)
    pictures = []
    for number, (scan, digit) in enumerate(zip(scans, digits, strict=True)):
        for rendering in range(RENDERINGS if split == "train" else 1):
            rng = np.random.default_rng((seed, number, rendering, split == "train"))
            image = render(scan, rng)
            name = f"images/{split}/{number:04d}-{rendering}.png"
            image.save(folder / name, compress_level=1)
            tokens = round(image.width / 32) * round(image.height / 32)
            pictures.append(Picture(name, int(digit), tokens))
    return pictures


def text_turn(rng: random.Random) -> Turn:
    """A question about digits that needs no picture, and its answer."""
    digit = rng.randrange(10)
    if rng.random() < 0.5:
        return Turn(f"What comes after {digit}?", str(digit + 1), [])
    return Turn(f"What comes before {digit + 1}?", str(digit), [])


def picture_turn(pictures: list[Picture], rng: random.Random) -> Turn:
    """A question about these pictures, their marks before or after it, and its answer."""
    marks = "<image>" * len(pictures)
    question = rng.choice(ONE if len(pictures) == 1 else SEVERAL)
    text = f"{question}{marks}" if rng.random() < 0.8 else f"{marks}{question}"
    return Turn(text, " ".join(str(picture.digit) for picture in pictures), pictures)


class PictureDealer:
    """Hands out pictures so that all are used equally often."""

    def __init__(self, pictures: list[Picture], rng: random.Random) -> None:
        self._pictures, self._rng = pictures, rng
        self._left: list[Picture] = []

    def take(self, count: int) -> list[Picture]:
        """The next `count` pictures that together take at most `MAX_IMAGE_TOKENS` tokens."""
        while len(self._left) < count + len(self._pictures) // 4:
            fresh = list(self._pictures)
            self._rng.shuffle(fresh)
            self._left = fresh + self._left
        taken: list[Picture] = []
        budget = MAX_IMAGE_TOKENS
        position = len(self._left) - 1
        while len(taken) < count:
            if self._left[position].num_tokens <= budget - 4 * (count - len(taken) - 1):
                taken.append(self._left.pop(position))
                budget -= taken[-1].num_tokens
            position -= 1
        return taken


def as_line(number: int, split: str, turns: list[Turn]) -> str:
    """A sample as JSON: ShareGPT form, every fourth in OpenAI form."""
    sample_id = f"{split}-{number:05d}"
    if number % 4 != 3:
        said = [(who, text) for turn in turns for who, text in (("human", turn.text), ("gpt", turn.answer))]
        conversations = [{"from": who, "value": text} for who, text in said]
        names = [picture.name for turn in turns for picture in turn.pictures]
        return json.dumps({"id": sample_id, "conversations": conversations, "images": names})
    messages: list[dict[str, object]] = []
    for turn in turns:
        messages.append({"role": "user", "content": _parts(turn)})
        messages.append({"role": "assistant", "content": turn.answer})
    return json.dumps({"id": sample_id, "messages": messages})


def _parts(turn: Turn) -> list[dict[str, str]]:
    """The question in OpenAI form: a part for each piece of text and each picture."""
    parts: list[dict[str, str]] = []
    for piece in re.split("(<image>)", turn.text):
        if piece == "<image>":
            name = turn.pictures[sum(part["type"] == "image" for part in parts)].name
            parts.append({"type": "image", "image": name})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def write_samples(folder: Path, split: str, shapes: list[tuple[int, ...]], pictures: list[Picture], seed: int) -> None:
    """Write `split.jsonl`; `shapes[i]` is the number of images in each turn of sample i."""
    rng = random.Random(f"{seed}-{split}")
    dealer = PictureDealer(pictures, rng)
    lines = []
    for number, shape in enumerate(shapes):
        taken, turns = dealer.take(sum(shape)), []
        for count in shape:
            shown, taken = taken[:count], taken[count:]
            turns.append(picture_turn(shown, rng) if shown else text_turn(rng))
        lines.append(as_line(number, split, turns))
    (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_held_out(folder: Path, scans: np.ndarray, digits: np.ndarray, seed: int) -> None:
    """Write the pictures of the held-out scans, `valid.jsonl` and `valid_mixed.jsonl`."""
    pictures = write_pictures(folder, "valid", scans, digits, seed)
    write_samples(folder, "valid", [(1,)] * len(pictures), pictures, seed)
    mixed = [shape for shape, repeats in NUM_VALID_MIXED.items() for _ in range(repeats)]
    write_samples(folder, "valid_mixed", mixed, pictures, seed)


def make(folder: Path, seed: int, num_train: int) -> bool:
    """Write the data set to `folder` unless the same one is there. True when it was written.

    The folder appears whole or not at all: everything is written beside it and then moved.
    """
    stamp = {"seed": seed, "num_train": num_train, "tool": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}
    if _is_current(folder, stamp):
        return False
    building = folder.with_name(f".{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    from sklearn.datasets import load_digits  # takes a second

    scans, digits = load_digits(return_X_y=True)
    scans = scans.reshape(-1, 8, 8)
    order = np.random.default_rng(seed).permutation(len(scans))
    held_out, trained = order[:HELD_OUT], order[HELD_OUT:]
    rng = random.Random(seed)
    shapes = rng.choices([shape for shape, _ in SHARES], [share for _, share in SHARES], k=num_train)
    pictures = write_pictures(building, "train", scans[trained], digits[trained], seed)
    write_samples(building, "train", shapes, pictures, seed)
    write_held_out(building, scans[held_out], digits[held_out], seed)
    (building / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    building.rename(folder)
    return True


def _is_current(folder: Path, stamp: dict[str, object]) -> bool:
    """Whether the folder holds the data set of this stamp. A folder that holds anything else is refused."""
    if not folder.exists():
        return False
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / STAMP).is_file()):
        raise ValueError(f"{folder} exists and was not written by this tool; name an empty or new folder")
    try:
        return bool(json.loads((folder / STAMP).read_text(encoding="utf-8")) == stamp)
    except (OSError, json.JSONDecodeError):
        return False


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the demo data set of scanned digits.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("data/digits"), help="default: data/digits")
    parser.add_argument("--seed", type=int, default=1, help="decides on split, sizes and questions (default: 1)")
    parser.add_argument("--num-train", type=int, default=NUM_TRAIN, help=f"training samples (default: {NUM_TRAIN})")
    options = parser.parse_args(arguments)
    if options.num_train < 1:
        parser.error(f"--num-train {options.num_train}: at least 1 sample is needed")
    try:
        written = make(options.folder.absolute(), options.seed, options.num_train)
    except (ValueError, OSError) as error:
        print(f"make_digits: {error}", file=sys.stderr)
        return 2
    print(f"{options.folder}: {'written' if written else 'is up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
