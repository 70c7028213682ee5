"""Macro batches read ahead by processes of their own, and the form in which they come from there.

A thread that tokenizes, plans and cuts patches holds the interpreter lock, and so holds up the host that launches a GPU's
kernels. Here the trainer's process only unpacks.
"""

from __future__ import annotations

import ctypes
import math
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from flagscale.config.errors import UserError
from flagscale.data.macro import MacroBatch, MacroBatchSpec
from flagscale.data.text import TextSamples

Key = tuple[int, int]
"""(step, number of the macro batch in it)"""

_PR_SET_PDEATHSIG = 1
_DTYPES = (torch.int64, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """A macro batch on its way from a worker: a tensor in shared memory costs a file descriptor, so there are two.

    Attributes:
        spec: of the macro batch.
        samples: of every microbatch what is no tensor.
        items: visual items whose pixels are there.
        forms: dtype and shape of its tensors, in the order of `MacroBatch.tensors`.
        joined: the int64 and the float32 ones, each joined to one of one dim.
        decoded: images and frames that were decoded for it.
    """

    spec: MacroBatchSpec
    samples: tuple[TextSamples, ...]
    items: tuple[int, ...]
    forms: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    joined: tuple[torch.Tensor, ...]
    decoded: int

    @classmethod
    def of(cls, macro: MacroBatch, decoded: int) -> Parcel:
        """A macro batch joined, in shared memory.

        It is put there now: an error of the queue that sends it would reach a log only, and the trainer wait for ever.
        """
        tensors = macro.tensors()
        return cls(
            spec=macro.spec,
            samples=tuple(batch.samples for batch in macro.microbatches),
            items=tuple(macro.pixels),
            forms=tuple((one.dtype, tuple(one.shape)) for one in tensors),
            joined=tuple(_joined([one for one in tensors if one.dtype == dtype], dtype) for dtype in _DTYPES),
            decoded=decoded,
        )

    def pin_memory(self) -> Parcel:
        """The same in page-locked memory; DataLoader's pinning thread calls it."""
        return replace(self, joined=tuple(one.pin_memory() for one in self.joined))

    def opened(self) -> MacroBatch:
        """The macro batch; its tensors are views of the joined ones."""
        parts = {}
        for dtype, joined in zip(_DTYPES, self.joined, strict=True):
            sizes = [math.prod(shape) for own, shape in self.forms if own == dtype]
            parts[dtype] = iter(joined.split(sizes))
        tensors = (next(parts[dtype]).view(shape) for dtype, shape in self.forms)
        return MacroBatch.of_tensors(self.spec, self.samples, self.items, tensors)


def _joined(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Tensors one after the other in shared memory, allocated there first as DataLoader does: else all is copied twice."""
    size = sum(one.numel() for one in tensors)
    storage = torch.UntypedStorage._new_shared(size * dtype.itemsize, device="cpu")
    target = torch.empty(0, dtype=dtype).set_(storage, 0, (size,))
    return torch.cat([one.reshape(-1) for one in tensors], out=target)


class Parcels(Dataset[Parcel | UserError]):
    """The macro batches of a rank by key. A UserError is a value here: DataLoader would give it another text.

    Args:
        specs: the macro batches of a step; asked for once in a row of keys of the same step.
        read: a macro batch in pageable memory: a forked process must not touch the GPU.
        decoded: images and frames that this process has decoded so far.
    """

    def __init__(
        self,
        specs: Callable[[int], list[MacroBatchSpec]],
        read: Callable[[MacroBatchSpec], MacroBatch],
        decoded: Callable[[], int],
    ) -> None:
        self._specs = lru_cache(maxsize=1)(specs)
        self._read = read
        self._decoded = decoded

    def __getitem__(self, key: Key) -> Parcel | UserError:
        step, number = key
        before = self._decoded()
        try:
            macro = self._read(self._specs(step)[number])
        except UserError as error:
            return UserError(str(error))  # a subclass with more arguments could not be sent
        return Parcel.of(macro, self._decoded() - before)


class WorkerReader:
    """Reads the keys, in their order, in `workers` processes; takes the place of a `Prefetcher`.

    Keys are dealt to the processes in turn, and as many are under way or ready as `prefetch` says, rounded up to a
    multiple of `workers`. An exception is raised by the `get` for its key, and by all after it.

    Args:
        parcels: what is read; forked as it is now.
        keys: taken as far as there is room.
        pin: hand out page-locked memory; a thread of this process copies it there.
        on_decoded: told how many images and frames were decoded for each macro batch that has arrived.
    """

    def __init__(
        self,
        parcels: Parcels,
        keys: Iterator[Key],
        *,
        workers: int,
        prefetch: int,
        pin: bool,
        on_decoded: Callable[[int], None],
    ) -> None:
        loader = DataLoader(
            parcels,
            batch_size=None,
            sampler=cast("Iterable[Any]", keys),
            num_workers=workers,
            prefetch_factor=-(-prefetch // workers),
            pin_memory=pin,
            multiprocessing_context="fork",
            worker_init_fn=_end_with_the_trainer,
            generator=torch.Generator(),  # the workers' seed; else it is drawn from the trainer's own generator
        )
        self._results: Iterator[Parcel | UserError] = iter(loader)
        self._on_decoded = on_decoded
        self._error: Exception | None = None

    def get(self) -> MacroBatch:
        """The next macro batch.

        Raises:
            UserError: when it cannot be read.
            RuntimeError: when a worker has ended, or another error was raised in one.
            StopIteration: behind the last key.
        """
        if self._error is None:
            try:
                return self._next()
            except Exception as error:
                self._error = error
        raise self._error

    def _next(self) -> MacroBatch:
        parcel = next(self._results)
        if isinstance(parcel, UserError):
            raise parcel
        self._on_decoded(parcel.decoded)
        return parcel.opened()

    def close(self) -> None:
        """End the processes; returns when they have finished what they are at, or are killed after some seconds."""
        # What DataLoader has for that is not public; garbage would be collected late where a traceback holds it.
        cast("Any", self._results)._shutdown_workers()


def _end_with_the_trainer(worker: int) -> None:
    """In a fresh worker: be killed when the thread that started it ends, however it ends.

    A worker has the trainer's connections as well: while it lives, other ranks do not see that the trainer is gone.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
