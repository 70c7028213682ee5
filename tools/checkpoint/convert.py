"""Weights between Hugging Face folders and the trainer's checkpoints, bit for bit.

    python tools/checkpoint/convert.py hf-to-mcore --config-name NAME --hf FOLDER --out FOLDER [model=qwen35_4b ...]
    python tools/checkpoint/convert.py mcore-to-hf --config-name NAME --mcore FOLDER --out FOLDER [--hf ORIGINAL]
    python tools/checkpoint/convert.py verify --config-name NAME --hf FOLDER --mcore FOLDER

The configuration is the one of the run: its model section says what the weights have to fit. A checkpoint has no layout
of its own; `system.checkpoint.pretrained` loads it at any. Exit code: 0; 1 when `verify` finds a difference; 2 for a
mistake, which is one message on stderr, with nothing written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.config.errors import ConfigError, UserError, raise_all
from flagscale.config.loading import load, located
from flagscale.config.rules import field_errors
from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.canonical import canonical_shapes
from flagscale.models.qwen35.hf_files import PACKED, HFWeights, ShardWriter, stored_form
from flagscale.models.qwen35.stored import check_stored, stored_parameters
from flagscale.plan.hf_config import check_hf_config, hf_config_tree, read_hf_config
from flagscale.plan.previous import ARCHITECTURE
from flagscale.plan.safetensors import INDEX, is_hf_folder, read_entries
from flagscale.train.pretrained import checkpoint_sizes
from tools.checkpoint.stream import CheckpointReader, write_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp"}
GIB = 2**30
SHOWN = 5

Report = Callable[[int], None]  # told the bytes of what was just converted


class Cast:
    """What becomes of dtypes: kept, or changed to one; never losing precision unless that was asked for."""

    def __init__(self, dtype: str | None, may_lose: bool) -> None:
        self._dtype = DTYPES[dtype] if dtype else None
        self._may_lose = may_lose

    def of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a tensor will have.

        Raises:
            UserError: values would be rounded, or leave the range.
        """
        target = self._dtype or dtype
        if torch.promote_types(dtype, target) != target and not self._may_lose:
            raise UserError(
                f"{name}: --dtype would turn {_short(dtype)} into {_short(target)}, which cannot hold all its values; "
                "leave --dtype out to keep dtypes, or add --allow-precision-loss"
            )
        return target

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.to(self.of(name, tensor.dtype))


def hf_to_mcore(model: ModelConfig, hf: Path, out: Path, cast: Cast) -> str:
    """Writes the checkpoint `out` from the Hugging Face folder `hf`."""
    with HFWeights(hf, model) as weights:
        dtypes = {name: cast.of(name, weights.dtype(name)) for name in weights.places}
        _check_joined(model, dtypes)
        total = _bytes(model, dtypes)
        with _new_folder(out, total) as folder, _progress("hf-to-mcore", total) as report:
            write_checkpoint(folder, model, lambda name: cast(name, weights.get(name)), dtypes.__getitem__, report)
    return f"{len(dtypes)} tensors, {total / GIB:.2f} GiB: {out}"


def mcore_to_hf(model: ModelConfig, mcore: Path, out: Path, original: Path | None, cast: Cast, shard_bytes: int) -> str:
    """Writes the Hugging Face folder `out` from a checkpoint; what is no weight is copied from `original`."""
    check_stored(str(mcore), checkpoint_sizes(mcore), model)
    if original is not None:
        check_hf_config(original, model)
    reader, shapes = CheckpointReader(mcore), canonical_shapes(model)
    dtypes = {
        name: cast.of(name, reader.dtype(stored.keys[0]))
        for stored in stored_parameters(model)
        for name in stored.mapping.names
    }
    total, packed = _bytes(model, dtypes), _packed_layers(model, original)
    with _new_folder(out, total) as folder, _progress("mcore-to-hf", total) as report:

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for stored, parts in reader.parameters(model):
                canonical = stored.to_canonical(parts, shapes)
                del parts  # what follows may write a shard; the rows need not wait for it
                for name, tensor in canonical.items():
                    report(tensor.nbytes)
                    yield name, cast(name, tensor)

        writer = ShardWriter(folder, shard_bytes)
        for name, tensor in stored_form(tensors(), packed):
            writer.add(name, tensor)
        writer.close()
        _write_other_files(folder, model, original, dtypes)
    return f"{len(dtypes)} tensors, {total / GIB:.2f} GiB: {out}"


def verify(model: ModelConfig, hf: Path, mcore: Path) -> list[str]:
    """Compares every tensor of both bit for bit; the lines name what differs."""
    check_stored(str(mcore), checkpoint_sizes(mcore), model)
    reader, shapes, wrong = CheckpointReader(mcore), canonical_shapes(model), []
    with HFWeights(hf, model) as weights:
        total = _bytes(model, {name: weights.dtype(name) for name in weights.places})
        with _progress("verify", total) as report:
            for stored, parts in reader.parameters(model):
                for name, tensor in stored.to_canonical(parts, shapes).items():
                    other = weights.get(name)
                    report(other.nbytes)
                    if tensor.dtype != other.dtype:
                        wrong.append(f"{name}: {_short(other.dtype)} there, {_short(tensor.dtype)} in the checkpoint")
                    elif not torch.equal(_bits(tensor), _bits(other)):
                        wrong.append(f"{name}: differs by up to {(tensor.double() - other.double()).abs().max():.3g}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one conversion and returns the exit code."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return _run(arguments)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        sys.stderr.write(f"error: {error.filename}: {error.strerror}; correct the path, its permissions, or the disk\n")
        return 2


def _run(arguments: argparse.Namespace) -> int:
    model = _model(arguments)
    if arguments.command == "verify":
        wrong = verify(model, arguments.hf, arguments.mcore)
        for line in wrong[:SHOWN]:
            print(line)
        count = len(canonical_shapes(model))
        print(f"{len(wrong)} of {count} tensors differ" if wrong else f"all {count} tensors are equal, bit for bit")
        return 1 if wrong else 0
    cast = Cast(arguments.dtype, arguments.allow_precision_loss)
    if arguments.command == "hf-to-mcore":
        print(hf_to_mcore(model, arguments.hf, arguments.out, cast))
    else:
        shard_bytes = arguments.shard_size * GIB
        if not 0 < shard_bytes < math.inf:
            raise UserError(f"--shard-size {arguments.shard_size}: must be a number above 0; use 5")
        print(mcore_to_hf(model, arguments.mcore, arguments.out, arguments.hf, cast, int(shard_bytes)))
    return 0


def _model(arguments: argparse.Namespace) -> ModelConfig:
    """The model section of the configuration; only what decides about tensors is checked, no data, layout or batch."""
    loaded = load(arguments.config_name, arguments.config_path, arguments.overrides)
    errors = [error for error in field_errors(loaded.config) if isinstance(error, ConfigError)]
    keys = {f"model.{name}" for name in ARCHITECTURE}
    raise_all([located(error, loaded.history) for error in errors if error.key in keys])
    return loaded.config.model


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("hf-to-mcore", "mcore-to-hf", "verify"):
        command = commands.add_parser(name)
        command.add_argument("--config-name", default="qwen35_mimo", help="YAML file of the run")
        command.add_argument("--config-path", type=Path, help="folder of the YAML file; the shipped ones by default")
        command.add_argument(
            "--hf",
            type=Path,
            required=name != "mcore-to-hf",
            help="Hugging Face folder; for mcore-to-hf the original, whose tokenizer, processor and config are copied",
        )
        if name != "hf-to-mcore":
            command.add_argument("--mcore", type=Path, required=True, help="checkpoint: an iter_ folder, or converted")
        if name != "verify":
            command.add_argument("--out", type=Path, required=True, help="new folder")
            command.add_argument("--dtype", choices=sorted(DTYPES), help="of all tensors; by default they are kept")
            command.add_argument("--allow-precision-loss", action="store_true", help="let --dtype round")
        if name == "mcore-to-hf":
            command.add_argument("--shard-size", type=float, default=5.0, metavar="GIB", help="largest file")
        command.add_argument("overrides", nargs="*", help="as for run.py, such as model=qwen35_4b")
    return parser


@contextmanager
def _new_folder(target: Path, needed: int) -> Iterator[Path]:
    """A folder that gets its name when it is complete, and vanishes when it is not.

    Raises:
        UserError: the name is taken, or the disk is too small or fails.
    """
    partial = target.with_name(f".partial-{target.name}-{os.getpid()}")
    above: list[Path] = []  # folders that are made for this one, the innermost first
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"--out {target}: exists and is not empty; choose another folder or remove it")
        above = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise UserError(f"--out {target}: needs {needed / GIB:.1f} GiB, the disk has {free / GIB:.1f} GiB free")
        partial.mkdir()
        yield partial
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except OSError as error:
        raise UserError(f"--out {target}: {error.strerror or error}; nothing was left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in above:
            with suppress(OSError):  # it holds the finished one
                folder.rmdir()


@contextmanager
def _progress(task: str, total: int) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        number = progress.add_task(task, total=total)
        yield lambda size: progress.advance(number, size)


def _check_joined(model: ModelConfig, dtypes: dict[str, torch.dtype]) -> None:
    """Tensors that a checkpoint stores as one have one dtype."""
    first: dict[str, str] = {}
    for stored in stored_parameters(model):
        for name in stored.mapping.names:
            other = first.setdefault(stored.keys[0], name)
            if dtypes[other] != dtypes[name]:
                raise UserError(
                    f"{name} is {_short(dtypes[name])} and {other} {_short(dtypes[other])}, but a checkpoint has "
                    "one tensor for both; choose a dtype with --dtype"
                )


def _packed_layers(model: ModelConfig, original: Path | None) -> dict[str, int]:
    """Layers whose experts are packed: those of the original, else the decoder's, as in the released files."""
    if original is not None and is_hf_folder(original):
        packed = {match[1] for name in read_entries(original) if (match := PACKED.fullmatch(name))}
    else:
        prefixes = {name.split("experts.")[0] + "experts." for name in canonical_shapes(model) if ".experts." in name}
        packed = {prefix for prefix in prefixes if not prefix.startswith("mtp.")}
    return dict.fromkeys(packed, model.num_experts)


def _write_other_files(folder: Path, model: ModelConfig, original: Path | None, dtypes: dict[str, torch.dtype]) -> None:
    for path in sorted(original.iterdir()) if original is not None else []:
        if path.is_file() and path.suffix not in WEIGHT_FILES and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    most = _short(max(set(dtypes.values()), key=list(dtypes.values()).count))
    if original is None:
        tree = {**hf_config_tree(model), "dtype": most}
    else:
        copied = read_hf_config(original)
        tree = _with_dtype(copied, most)
        if tree == copied:
            return
    (folder / "config.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _with_dtype(tree: dict[str, Any], dtype: str) -> dict[str, Any]:
    """`config.json` with another dtype where it states one: `from_pretrained` rounds the weights to what it finds."""
    changed = dict(tree)
    for key, value in tree.items():
        if key in ("dtype", "torch_dtype") and value is not None:
            changed[key] = dtype
        elif key in ("text_config", "vision_config") and isinstance(value, dict):
            changed[key] = _with_dtype(value, dtype)
    return changed


def _bytes(model: ModelConfig, dtypes: dict[str, torch.dtype]) -> int:
    return sum(torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in canonical_shapes(model).items())


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, so that NaNs and signed zeros count."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
