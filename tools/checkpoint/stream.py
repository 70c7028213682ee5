"""Checkpoints of the trainer written and read in one process, a parameter at a time.

The trainer saves with Megatron-Core's `dist_checkpointing`, whose files are torch.distributed.checkpoint's. Saving
there wants every tensor of the model in memory; here a plan that lists what will be written is made first, and the
tensors are fetched while the file is written.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from flagscale.config.errors import UserError
from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.stored import Stored, stored_parameters

COMMON = "common_state/shard_0_1"  # what Megatron-Core calls the state that is no tensor


def write_checkpoint(
    folder: Path,
    model: ModelConfig,
    get: Callable[[str], Tensor],
    dtype_of: Callable[[str], torch.dtype],
    done: Callable[[int], None],
) -> None:
    """Writes the weights of a model as a checkpoint that any layout loads.

    Args:
        folder: exists and is empty.
        get: Hugging Face name -> tensor; asked while the file is written, for one parameter at a time.
        dtype_of: dtype of what `get` will return.
        done: told the bytes of each parameter.

    Raises:
        Whatever `get`, `done`, or writing raises.
    """
    planner = _StreamingPlanner(list(stored_parameters(model)), get, dtype_of, done)
    with _one_process():
        dcp.save({}, storage_writer=_StreamingWriter(folder), planner=planner, no_dist=True)
    strategy = TorchDistSaveShardedStrategy()
    save_config(CheckpointingConfig(strategy.backend, strategy.version), str(folder))


@contextmanager
def _one_process() -> Iterator[None]:
    """Around calls of torch.distributed.checkpoint: what it wraps, an interrupt included, comes as it was raised."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is meant
        try:
            yield
        except CheckpointException as wrapped:
            raise next(error for error, _ in wrapped.failures.values()) from None


class CheckpointReader:
    """The tensors of a checkpoint folder, read a few at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader = folder, _Reader(folder)
        self._entries: dict[str, Any] = self._reader.read_metadata().state_dict_metadata

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._tensor(key).properties.dtype

    def read(self, keys: tuple[str, ...]) -> list[Tensor]:
        """Whole tensors.

        Raises:
            UserError: a file is missing or damaged.
        """
        state = {key: torch.empty(self._tensor(key).size, dtype=self.dtype(key)) for key in keys}
        try:
            with _one_process():
                dcp.load(state, storage_reader=self._reader, no_dist=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"{self._folder}: {keys[0]} cannot be read ({reason}); copy it again") from error
        return [state[key] for key in keys]

    def parameters(self, model: ModelConfig) -> Iterator[tuple[Stored, list[Tensor]]]:
        """Every parameter with the rows of its keys; a tensor that several parameters share is read once."""
        groups: dict[tuple[str, ...], list[Stored]] = {}
        for stored in stored_parameters(model):
            groups.setdefault(stored.keys, []).append(stored)
        for keys, group in groups.items():
            tensors = self.read(keys)
            for stored in group:
                number = None if stored.slot is None else stored.slot[0]
                yield stored, tensors if number is None else [tensor[number] for tensor in tensors]

    def _tensor(self, key: str) -> TensorStorageMetadata:
        entry = self._entries[key]
        assert isinstance(entry, TensorStorageMetadata), key
        return entry


class _Reader(FileSystemReader):
    """Reads the table of contents once; it grows with the number of parameters."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._contents: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._contents is None:
            self._contents = super().read_metadata(*args, **kwargs)
        return self._contents


class _StreamingWriter(FileSystemWriter):
    """Writes all items into one file and keeps none.

    The class above it remembers every tensor of a file until the file is closed, for a format that is not used here
    (torch 2.11 to 2.14, `tensor_dict` in `_write_files_from_queue`): the whole model would be in memory.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One file in the order of the plan; a result holds where an item lies in it."""
        name, results = "__0_0.distcp", []
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            for item in plan.items:
                start = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, Tensor):
                    torch.save(_compact(data), stream)
                else:
                    stream.write(data.getbuffer())
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            stream.flush()
            os.fsync(stream.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


class _StreamingPlanner(SavePlanner):
    """A plan of everything that will be written, and the tensors when their turn comes."""

    def __init__(
        self,
        parameters: list[Stored],
        get: Callable[[str], Tensor],
        dtype_of: Callable[[str], torch.dtype],
        done: Callable[[int], None],
    ) -> None:
        self._get, self._dtype_of, self._done = get, dtype_of, done
        self._sources: dict[MetadataIndex, tuple[Stored, int]] = {}
        self._parameters = parameters
        self._current: tuple[Stored | None, list[Tensor]] = (None, [])

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing depends on the state dict, which is empty."""

    def create_local_plan(self) -> SavePlan:
        """A write for each key of each parameter, and one for the state that is no tensor."""
        items = [WriteItem(index=MetadataIndex(COMMON), type=WriteItemType.BYTE_IO)]
        for stored in self._parameters:
            dtype = self._dtype_of(stored.mapping.names[0])
            for part, (key, rows) in enumerate(zip(stored.keys, stored.rows, strict=True)):
                size, offset = (rows, *stored.shape[1:]), (0,) * len(stored.shape)
                whole = size
                if stored.slot is not None:
                    size, offset, whole = (1, *size), (stored.slot[0], *offset), (stored.slot[1], *size)
                item = _write_item(key, whole, offset, size, dtype)
                self._sources[item.index] = (stored, part)
                items.append(item)
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The only rank's plan, and the table of contents."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As planned."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The data of an item, fetched now."""
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([{}], stream)  # a list: Megatron-Core keeps what one rank saved in each entry
            return stream
        index = write_item.index
        stored, part = self._sources[MetadataIndex(index.fqn, index.offset)]
        if self._current[0] is not stored:
            self._current = None, []  # so that two parameters are never held at once
            self._current = stored, stored.from_canonical(self._get)
            self._done(sum(tensor.nbytes for tensor in self._current[1]))
        tensor = self._current[1][part].contiguous()
        return tensor if stored.slot is None else tensor.unsqueeze(0)


def _compact(tensor: Tensor) -> Tensor:
    """The tensor with a storage of its own size: `torch.save` writes all of a storage, here a mapped file."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write_item(
    key: str, whole: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype
) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(key, torch.Size(offset)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size)),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(whole),
        ),
    )
