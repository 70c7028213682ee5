"""Write a data set of real JPEG files in a spread of sizes, with texts that give visual tokens a wanted share.

    python -m tools.bench.pictures FOLDER --samples 512 --seq-length 2048 --visual 0.5

Pictures are random crops of photographs (the two that scikit-learn ships), scaled to areas drawn from a log-normal
distribution, so that decoding costs what it costs on photographs. A sample has pictures until the wanted number of
visual tokens is reached, then text for the built-in tokenizer up to nearly the sequence length.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from flagscale.data.image import ImageSettings

SIDE_OF_TOKEN = 32  # pixels: 16 a patch, 2 x 2 patches merged
MEDIAN_TOKENS, SIGMA = 340, 0.6  # of a picture
SMALLEST, LARGEST = 64, 1024  # tokens of a picture
MOST = 0.9  # of a row's tokens that may be visual: the rest has room for the template and what pictures are enlarged by
FILE = "train.jsonl"
WORDS = ("the", "of", "near", "under", "red", "green", "small", "large", "tower", "roof", "leaf", "stone", "light")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a data set should hold."""

    folder: Path
    seq_length: int
    visual: float
    seed: int
    image: ImageSettings
    """How pictures are resized: a small one is enlarged, and has more tokens than were drawn for it."""

    def tokens(self, width: int, height: int) -> int:
        """Tokens of a picture of this size in pixels."""
        grid_h, grid_w = self.image.grid(width, height)
        return grid_h * grid_w // self.image.merge_size**2


def grid_of(tokens: float, rng: random.Random) -> tuple[int, int]:
    """Rows and columns of tokens of a picture with about this many, at an aspect ratio between 2:3 and 3:2."""
    aspect = rng.uniform(2 / 3, 3 / 2)
    rows = max(2, round((tokens * aspect) ** 0.5))
    return rows, max(2, round(tokens / rows))


def draw_grids(wanted: Wanted, rng: random.Random) -> list[tuple[int, int]]:
    """Grids of the pictures of one sample, in tokens."""
    budget = round(wanted.visual * wanted.seq_length)
    median = min(MEDIAN_TOKENS, max(budget / 3, 1))
    grids: list[tuple[int, int]] = []
    while budget >= SMALLEST // 2:
        tokens = min(max(rng.lognormvariate(np.log(median), SIGMA), SMALLEST), LARGEST, budget)
        rows, columns = grid_of(tokens, rng)
        if rows * columns > budget:
            rows = max(1, budget // columns)
        grids.append((rows, columns))
        budget -= rows * columns
    return grids


def make_sample(wanted: Wanted, number: int) -> str:
    """Writes the pictures of one sample and returns its JSON line."""
    from sklearn.datasets import load_sample_images  # half a second, which only those who write need

    rng = random.Random(f"{wanted.seed}/{number}")
    photographs = [Image.fromarray(array) for array in load_sample_images().images]
    names, used = [], 0
    for i, (rows, columns) in enumerate(draw_grids(wanted, rng)):
        photograph = rng.choice(photographs)
        box_w, box_h = rng.randrange(200, photograph.width + 1), rng.randrange(150, photograph.height + 1)
        left, top = rng.randrange(photograph.width - box_w + 1), rng.randrange(photograph.height - box_h + 1)
        crop = photograph.crop((left, top, left + box_w, top + box_h))
        picture = crop.resize((columns * SIDE_OF_TOKEN, rows * SIDE_OF_TOKEN), Image.Resampling.BILINEAR)
        names.append(f"images/{number:06d}-{i}.jpg")
        picture.save(wanted.folder / names[-1], quality=90)
        used += wanted.tokens(*picture.size) + 2
    question = "<image>" * len(names) + "Describe."
    room = wanted.seq_length - used - 60  # the template's own tokens
    answer = " ".join(rng.choices(WORDS, k=max(1, room // 3)))[: max(1, room - rng.randrange(0, 40))].strip()
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return json.dumps({"id": f"bench-{number}", "conversations": turns, "images": names})


def make(wanted: Wanted, samples: int, workers: int) -> Path:
    """Writes the data set and returns its JSONL file; nothing to do when it is there for the same request."""
    target, stamp = wanted.folder / FILE, wanted.folder / "stamp.txt"
    request = f"{samples} {wanted.seq_length} {wanted.visual} {wanted.seed} {wanted.image}"
    if target.is_file() and stamp.is_file() and stamp.read_text() == request:
        return target
    (wanted.folder / "images").mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        lines = list(pool.map(make_sample, [wanted] * samples, range(samples), chunksize=8))
    target.write_text("".join(f"{line}\n" for line in lines))
    stamp.write_text(request)
    return target


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--visual", type=float, default=0.5, help="share of a sample's tokens that is visual")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-pixels", type=int, default=65536, help="as data.min_pixels")
    parser.add_argument("--max-pixels", type=int, default=16777216, help="as data.max_pixels")
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    if not 0 <= options.visual <= MOST:
        parser.error(f"--visual {options.visual}: must lie between 0 and {MOST}")
    image = ImageSettings(
        patch_size=SIDE_OF_TOKEN // 2, merge_size=2, temporal_patch_size=2, min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
    )  # fmt: skip
    wanted = Wanted(
        folder=options.folder, seq_length=options.seq_length, visual=options.visual, seed=options.seed, image=image
    )
    print(make(wanted, options.samples, options.workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
