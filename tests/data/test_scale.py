"""Ten million samples: opening the index and drawing from it takes no time and little memory.

Pages of the mapped file that were touched count to a process' resident memory, but they are there once for all ranks of
a machine and give way to anything else; what a rank costs is its anonymous memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from flagscale.data.corpus import open_source
from flagscale.data.index_build import BATCH_ROWS, ITEM, SCHEMA
from tests.data.helpers import make_config, sharegpt, write_jsonl

SAMPLES = 10_000_000
PROGRAM = """
import json, os, sys, time
from pathlib import Path

def resident():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile")]

from flagscale.data.loader import DataPipeline
from flagscale.data.tokenizer import load_tokenizer
from flagscale.plan.layout import Grid
from tests.data.helpers import make_config, make_plan

model = {"global_batch_size": 256, "micro_batch_size": 8, "train_iters": 10**9}
config = make_config(Path(sys.argv[1]), model=model, packing="length_budget", language_balance=True)
plan = make_plan(config, Grid(dp=8), Grid(tp=2, dp=4), (4, 4))
load_tokenizer(config.data.tokenizer, config.model)
from flagscale.data.image import ImageReader, ImageSettings
ImageReader(ImageSettings.of(config))  # imports the image processor
own, mapped = resident()
start = time.perf_counter()
data = DataPipeline(plan, "train", 3)
opened = time.perf_counter() - start
start = time.perf_counter()
steps = [10**6 + i for i in range(100)]
ids = [i for step in steps for i in data.sample_ids(step)]
specs = [data.specs(step) for step in steps[:20]]
drawn = time.perf_counter() - start
own_after, mapped_after = resident()
print(json.dumps({"samples": len(data.corpus), "open_s": opened, "steps_s": drawn, "distinct": len(set(ids)),
                  "own_mb": own_after - own, "mapped_mb": mapped_after - mapped,
                  "state": len(json.dumps(data.state_dict(10**6)))}))
"""


def write_index(path: Path) -> None:
    """An index of `SAMPLES` samples of 40 to 120 tokens, every second with an image."""
    path.parent.mkdir(parents=True)
    rng = np.random.default_rng(1)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        for first in range(0, SAMPLES, BATCH_ROWS):
            rows = min(BATCH_ROWS, SAMPLES - first)
            tokens = rng.integers(40, 121, size=rows).astype(np.int32)
            offsets = np.concatenate([[0], np.cumsum(np.arange(rows) % 2)]).astype(np.int32)
            values = [np.full(offsets[-1], value, dtype=np.int32) for value in (4, 6, 8, 0, -1, 0)]
            items = pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(values, fields=list(ITEM)))
            numbers = np.arange(first, first + rows)
            columns = [np.zeros(rows, dtype=np.int32), 100 * numbers, np.full(rows, 100, dtype=np.int32), numbers + 1]
            columns += [tokens, tokens // 4, tokens // 4]
            arrays = [pa.array(column, type=field.type) for column, field in zip(columns, SCHEMA, strict=False)]
            writer.write_batch(pa.RecordBatch.from_arrays([*arrays, items], schema=SCHEMA))


@pytest.mark.long
def test_ten_million_samples_open_in_two_seconds_and_little_memory(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "s.jsonl", [sharegpt("?", "1")])
    write_index(open_source(make_config(source), str(source)).index_path(None))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(source)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["samples"] == SAMPLES
    assert found["open_s"] < 2, found
    assert found["own_mb"] < 100, found
    assert found["mapped_mb"] < 400, found
    assert found["distinct"] == 100 * 256
    assert found["steps_s"] < 20, found
    assert found["state"] < 200, found
