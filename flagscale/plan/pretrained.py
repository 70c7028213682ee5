"""Rule about the weights that training starts from, checked without reading a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flagscale.config.errors import ConfigError, UserError
from flagscale.config.schema import Config
from flagscale.plan.hf_config import check_hf_config
from flagscale.plan.safetensors import is_hf_folder, read_entries

KEY = "system.checkpoint.pretrained"
CONTENTS = ".metadata"  # torch.distributed.checkpoint's table of contents


def pretrained_weights_fit(config: Config) -> Iterator[ConfigError]:
    """The folder holds whole files, of the configured model; tensors are compared when the job starts."""
    value = config.system.checkpoint.pretrained
    if value is None:
        return
    folder = Path(value)
    if not folder.is_dir():
        yield ConfigError(KEY, value, "is no folder", "name the folder of the weights, or set it to null")
    elif is_hf_folder(folder):
        try:
            check_hf_config(folder, config.model)
            read_entries(folder)
        except UserError as error:
            yield ConfigError(KEY, value, "cannot be used", str(error))
    elif not (folder / CONTENTS).is_file():
        yield ConfigError(
            KEY,
            value,
            "holds neither safetensors files nor a checkpoint",
            "name a Hugging Face folder, an iter_ folder of a run, or what tools/checkpoint/convert.py wrote",
        )
