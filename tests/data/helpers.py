"""Small data sources and plans for the tests of the data path."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flagscale.config.build import build_config
from flagscale.config.schema import Config
from flagscale.data.tokenizer import BUILTIN_SPECIAL, BUILTIN_VOCAB_SIZE
from flagscale.plan.layout import LANGUAGE, VISION, Grid
from flagscale.plan.plan import BatchPlan, ExperimentPlan, MemoryPlan
from tools.data import make_digits

TINY_MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "linear_num_value_heads": 4,
    "vision_num_layers": 2,
    "vision_hidden_size": 32,
    "vision_ffn_hidden_size": 64,
    "vision_num_attention_heads": 4,
    "vocab_size": 128,
    "image_token_id": BUILTIN_SPECIAL.image,
    "video_token_id": BUILTIN_SPECIAL.video,
    "vision_start_token_id": BUILTIN_SPECIAL.vision_start,
    "vision_end_token_id": BUILTIN_SPECIAL.vision_end,
    "seq_length": 128,
    "train_iters": 100,
}
assert TINY_MODEL["vocab_size"] >= BUILTIN_VOCAB_SIZE



@functools.cache
def small_digits() -> Path:
    """The demo's data set with 200 training samples, made once a test process. Its files are not to be changed."""
    folder = Path(tempfile.mkdtemp(prefix="digits-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_digits.make(folder / "digits", seed=1, num_train=200)
    return folder / "digits"


def make_config(
    train: Path | None, *, valid: Path | None = None, model: dict[str, Any] | None = None, **data: Any
) -> Config:
    """A configuration whose data is `train`; `model` and `data` override single keys."""
    return build_config(
        {
            "model": {**TINY_MODEL, **(model or {})},
            "data": {
                "train_path": None if train is None else str(train),
                "valid_path": None if valid is None else str(valid),
                "min_pixels": 4096,
                "max_pixels": 25600,
                **data,
            },
        }
    )


def make_plan(config: Config, vision: Grid, language: Grid, macro_batches: tuple[int, ...]) -> ExperimentPlan:
    """A plan over the union of the two grids; the batch sizes are those of the configuration."""
    model = config.model
    batch = BatchPlan(
        micro_batch_size=model.micro_batch_size,
        vision_micro_batch_size=model.vision_micro_batch_size,
        global_batch_size=model.global_batch_size,
        vit_batch_factor=macro_batches[0],
        num_microbatches=sum(macro_batches),
        macro_batches=macro_batches,
    )
    assert model.global_batch_size == batch.num_microbatches * model.micro_batch_size * language.dp, batch
    return ExperimentPlan(
        config=config,
        layout="colocated" if model.use_mimo else "unified",
        world_size=max(vision.size, language.size),
        modules={VISION: vision, LANGUAGE: language},
        batch=batch,
        costs={},
        memory=MemoryPlan(weights=0, gradients=0, optimizer=0, activations=0),
        command=(),
    )


def save_image(path: Path, width: int, height: int, seed: int = 0) -> str:
    """Write a PNG of noise; returns its file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng((seed, width, height)).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path.name


def sharegpt(question: str, answer: str, images: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """A sample in ShareGPT form."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, "images": images or [], **more}


def write_jsonl(path: Path, samples: list[dict[str, Any] | str]) -> Path:
    """Write samples, a text being a raw line; returns the path."""
    lines = [sample if isinstance(sample, str) else json.dumps(sample) for sample in samples]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
    return path


def write_mixture(folder: Path, count: int, name: str = "train.jsonl", seed: int = 0) -> Path:
    """A source of `count` samples with 0 to 3 images of various sizes, every image a file of its own."""
    rng = np.random.default_rng(seed)
    samples: list[dict[str, Any] | str] = []
    for i in range(count):
        names = []
        for k in range(int(rng.integers(0, 4))):
            width, height = (int(side) for side in rng.integers(64, 161, size=2))
            names.append(save_image(folder / f"{name}-{i}-{k}.png", width, height, seed=i))
        answer = " ".join(map(str, range(len(names) + 1)))
        samples.append(sharegpt("<image>" * len(names) + "Which?", answer, names, id=i))
    return write_jsonl(folder / name, samples)
