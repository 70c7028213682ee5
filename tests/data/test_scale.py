"""Ten million samples: opening their index, drawing from it and reading batches takes no time and little memory.

Measured is the peak of all that is resident, pages of files included, over what the process had before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flagscale.data.corpus import open_source
from flagscale.data.index_build import build_index
from flagscale.data.index_file import HEADER, MAGIC, IndexFile
from tests.data.helpers import make_config, save_image, sharegpt, write_jsonl

MANY = 10_000_000
SIZES = [400_000, pytest.param(MANY, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
PROGRAM = """
import json, sys, time
from pathlib import Path

def resident(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024

from flagscale.data.loader import DataPipeline
from flagscale.data.image import ImageReader, ImageSettings
from flagscale.data.tokenizer import load_tokenizer
from flagscale.plan.layout import Grid
from tests.data.helpers import make_config, make_plan

model = {"global_batch_size": 256, "micro_batch_size": 8, "train_iters": 10**9}
config = make_config(Path(sys.argv[1]), model=model, packing="length_budget", language_balance=True)
plan = make_plan(config, Grid(dp=8), Grid(tp=2, dp=4), (4, 4))
load_tokenizer(config.data.tokenizer, config.model)
ImageReader(ImageSettings.of(config))  # what is imported only now
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
start = time.perf_counter()
data = DataPipeline(plan, "train", 3)
opened = time.perf_counter() - start
steps = [10**6 + i for i in range(20)]
ids = [i for step in steps for i in data.sample_ids(step)]
tokens = [data.num_tokens(step) for step in steps]
specs = [data.specs(step) for step in steps[:4]]
size = len(data.corpus)
places = range(1, size, size // 20_000)  # all over the file: when mapped, the system would map 64 KB around each
touched = sum(len(data.corpus.placements(i)) for i in places)
read = [macro for step in steps[:2] for macro in data.step(step)]
data.close()
print(json.dumps({"samples": size, "open_s": opened, "distinct": len(set(ids)), "batches": len(read),
                  "items": touched / len(places), "texts": sum(len(m.microbatches) for m in read),
                  "pixels": sum(len(m.pixels) for m in read), "grown_mb": resident("VmHWM") - before,
                  "state": len(json.dumps(data.state_dict(10**6)))}))
"""


def tile_index(path: Path, count: int) -> None:
    """Writes the index of `path` anew, its samples over and over until there are `count`."""
    file = IndexFile(path)
    rows, items = np.concatenate(list(file.chunks())), file.all_items()
    file.close()
    rounds = -(-count // len(rows))
    longest = int(rows["num_tokens"].max())
    with path.open("wb") as target:
        target.write(HEADER.pack(MAGIC, rounds * len(rows), rounds * len(items), longest))
        for first in range(0, rounds, 1000):
            number = np.arange(first, min(first + 1000, rounds))
            block = np.tile(rows, len(number))
            block["first_item"] += np.repeat(number * len(items), len(rows))
            block.tofile(target)
        for first in range(0, rounds, 1000):
            np.tile(items, min(1000, rounds - first)).tofile(target)


def run(program: str, *arguments: object) -> dict[str, Any]:
    """What the program printed as JSON in a process of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("count", SIZES)
def test_many_samples_open_in_two_seconds_and_little_memory(tmp_path: Path, count: int) -> None:
    """Lengths of 20 to 100 tokens, every second sample with an image; batches are read for real."""
    for i in range(10):
        save_image(tmp_path / f"{i}.png", 64 + 8 * i, 64, seed=i)
    images = [[f"{i % 10}.png"] * (i % 2) for i in range(100)]
    samples = [sharegpt("<image>" * len(own) + "?" * (i % 50), "3", own) for i, own in enumerate(images)]
    source = write_jsonl(tmp_path / "s.jsonl", list(samples))
    tile_index(build_index(open_source(make_config(source), str(source))), count)
    found = run(PROGRAM, source)
    assert found["samples"] == count
    assert found["open_s"] < 2, found
    assert found["grown_mb"] < 100, found
    assert found["distinct"] == 20 * 256
    assert found["items"] == 1, "samples of odd number have an image"
    assert found["batches"] >= 2
    assert found["texts"] >= 2 * 4
    assert found["pixels"] > 0
    assert found["state"] < 200, found


PARQUET = """
import json, sys, time
from pathlib import Path
from flagscale.data.parquet import ParquetStore
from flagscale.data.stores import Locator

def resident(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024

source, copy, batches = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
start = time.perf_counter()
store = ParquetStore(source, (source,))
store.attach(copy)
opened = time.perf_counter() - start
records = [store.record(Locator(i * 7919 % batches, i % 256, 1, 1)) for i in range(4000)]
sizes = [len(record.media[0].load()) for record in records]
print(json.dumps({"open_s": opened, "bytes": sum(sizes), "grown_mb": resident("VmHWM") - before}))
"""


@pytest.mark.parametrize("count", SIZES)
def test_many_rows_of_parquet_likewise(tmp_path: Path, count: int) -> None:
    """The rows' copy is mapped, but what was read of it is given back."""
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "3"}]
    row = {"conversations": turns, "images": [{"bytes": b"x" * 50, "path": "a.png"}]}
    table = pa.Table.from_pylist([row] * 256)
    pq.write_table(table, tmp_path / "s.parquet")
    (batch,) = table.to_batches()
    batches = -(-count // 256)
    with pa.OSFile(str(tmp_path / "rows"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    found = run(PARQUET, tmp_path / "s.parquet", tmp_path / "rows", batches)
    assert found["open_s"] < 2, found
    assert found["bytes"] == 4000 * 50
    assert found["grown_mb"] < 100, found
