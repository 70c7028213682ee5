"""Print what a source of samples holds: counts, lengths, patches, the share of visual tokens, and its broken samples.

    python -m tools.data.inspect data/digits/train.jsonl --png lengths.png

Sizes come from image headers; `--decode` also decodes every image, to find damaged ones. The tokenizer and image
settings are those of a configuration: `--config-name qwen35_mimo` and the same overrides as run.py takes.
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file: its folder comes first, and the inspect.py there would hide the standard one
    sys.path[0] = __file__.rsplit("/", 3)[0]

import argparse
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flagscale.config.errors import UserError
from flagscale.config.loading import load
from flagscale.config.schema import Config
from flagscale.data.corpus import ENERGON_SPLIT, TRAIN
from flagscale.data.image import ImageSettings
from flagscale.data.index import SampleIndex
from flagscale.data.source import RAISE, SKIP, Policy, Source
from flagscale.data.tokenizer import load_tokenizer

BROKEN_SHOWN = 5
BARS = 12  # of a histogram on the terminal
BAR_WIDTH = 40  # characters


def open_index(config: Config, path: Path, split: str, decode: bool, cache: Path) -> SampleIndex:
    """An index of the source that leaves broken samples out. Raises UserError when no sample is usable."""
    policy = Policy(on_bad_sample=SKIP, on_too_long=RAISE, decode=decode)
    tokenizer = load_tokenizer(config.data.tokenizer, config.model)
    source = Source(
        path, tokenizer, ImageSettings.of(config), policy=policy, split=ENERGON_SPLIT[split],
        media_root=config.data.media_root,
    )  # fmt: skip
    return SampleIndex.open(source, cache)


def patches_of(index: SampleIndex) -> tuple[np.ndarray, np.ndarray]:
    """Patches of every visual item, and visual items of every sample."""
    items = index.items()
    return items["grid_h"].astype(np.int64) * items["grid_w"], index.column("num_items")


def summary(index: SampleIndex, patches: np.ndarray, counts: np.ndarray, seq_length: int) -> Table:
    """The numbers as a table."""
    lengths = index.column("num_tokens")
    visual = int(patches.sum()) // index.source.settings.merge_size**2
    table = Table(title=str(index.source.path), show_header=False)
    rows = {
        "samples": f"{len(index):,}",
        "broken samples": f"{len(index.bad_samples()):,}",
        "tokens": f"{int(lengths.sum()):,}",
        "loss tokens": f"{int(index.column('num_loss_tokens').sum()):,}",
        "visual tokens": f"{visual:,} ({100 * visual / lengths.sum():.1f} % of the tokens)",
        "visual items": f"{len(patches):,} (images and frame groups; {int((counts == 0).sum()):,} samples have none)",
        "tokens of a sample": percentiles(lengths),
        "too long": f"{int((lengths > seq_length).sum()):,} (over model.seq_length={seq_length})",
        "patches of an item": percentiles(patches) if len(patches) else "-",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def percentiles(values: np.ndarray) -> str:
    """The spread of numbers in a line."""
    low, middle, high, top = np.percentile(values, [0, 50, 99, 100])
    return f"{low:.0f} .. {top:.0f}, median {middle:.0f}, 99 % up to {high:.0f}"


def histogram(title: str, values: np.ndarray) -> list[str]:
    """Bars of text."""
    counts, edges = np.histogram(values, bins=min(BARS, max(1, len(np.unique(values)))))
    lines = [title]
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "#" * -(-int(count) * BAR_WIDTH // int(counts.max()))
        lines.append(f"{low:9.0f} .. {high:9.0f}  {count:9,}  {bar}")
    return lines


def draw(target: Path, lengths: np.ndarray, patches: np.ndarray) -> None:
    """Both histograms as a PNG."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots(1, 2)
    shown = ((lengths, "tokens of a sample"), (patches, "patches of a visual item"))
    for axis, (values, name) in zip(axes, shown, strict=True):
        axis.hist(values, bins=50)
        axis.set_xlabel(name)
        axis.set_ylabel("number")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Print what a source of samples holds.")
    parser.add_argument("source", type=Path, help="a JSON(L) or Parquet file, or a folder of such or of .tar files")
    parser.add_argument("overrides", nargs="*", help="configuration overrides, such as data.max_pixels=65536")
    parser.add_argument("--config-name", default="qwen35_mimo", help="configuration that gives tokenizer and settings")
    parser.add_argument("--config-path", default=None, help="its folder")
    parser.add_argument("--split", choices=sorted(ENERGON_SPLIT), default=TRAIN, help="of an energon folder")
    parser.add_argument("--decode", action="store_true", help="decode every image, to find damaged ones")
    parser.add_argument("--png", type=Path, default=None, help="also draw the histograms here")
    options = parser.parse_args(arguments)
    console = Console(width=110)
    try:
        config = load(options.config_name, options.config_path, options.overrides).config
        with tempfile.TemporaryDirectory() as cache:
            index = open_index(config, options.source, options.split, options.decode, Path(cache))
            with index:
                show(console, index, options.png, config.model.seq_length)
    except UserError as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 2
    return 0


def show(console: Console, index: SampleIndex, png: Path | None, seq_length: int) -> None:
    """Everything about an index."""
    patches, counts = patches_of(index)
    lengths = index.column("num_tokens")
    console.print(summary(index, patches, counts, seq_length))
    for line in histogram("tokens of a sample", lengths):
        console.print(line, markup=False)
    if len(patches):
        for line in histogram("patches of a visual item", patches):
            console.print(line, markup=False)
    for bad in index.bad_samples()[:BROKEN_SHOWN]:
        console.print(f"broken: {index.source.store.unit} {bad.line}: {bad.cause}", markup=False, soft_wrap=True)
    if png is not None:
        draw(png, lengths, patches)
        console.print(f"histograms: {png}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
