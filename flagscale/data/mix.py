"""Global batches drawn from several sources, in shares that may change with the step and while the run goes on.

What has been drawn is a cursor a source. Shares are exact in the long run: what a batch cannot give a source in whole
samples is carried over. So the state after a step is a few numbers, and the same on every rank.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flagscale.config.errors import UserError
from flagscale.config.mix import ONLY, Points, weight_at
from flagscale.data.sampler import ShuffledSource, mixed_key, permute

KEPT_STEPS = 256  # states behind the newest that can be asked for without starting anew from the first one


@dataclass(frozen=True, slots=True)
class MixState:
    """What has been drawn before a step: samples of each source, and what each is owed (may be negative)."""

    cursors: tuple[int, ...]
    owed: tuple[float, ...]


@dataclass(kw_only=True, slots=True)
class MixSampler:
    """The sample ids of each step's global batch. An id counts over all sources, in their order.

    Several threads may ask: the one that reads ahead, and the one that trains.

    Attributes:
        names: of the sources.
        sizes: samples of each.
        weights: points of each one's weight (`flagscale.config.mix`).
        global_batch_size: samples of a batch.
        seed: decides on the orders.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    weights: tuple[Points, ...]
    global_batch_size: int
    seed: int
    _changes: list[tuple[int, tuple[Points, ...]]] = field(default_factory=list)
    _states: dict[int, MixState] = field(default_factory=dict)
    _first: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._changes = [(0, self.weights)]
        self._states = {0: MixState((0,) * len(self.names), (0.0,) * len(self.names))}

    def sample_ids(self, step: int) -> list[int]:
        """Sample ids of global batch `step`, in batch order."""
        state, counts = self._state(step), self.counts(step)
        ids, first = [], 0
        for name, size, cursor, count in zip(self.names, self.sizes, state.cursors, counts, strict=True):
            source = ShuffledSource(num_samples=size, seed=self._seed_of(name))
            ids += [first + source.sample_at(position) for position in range(cursor, cursor + count)]
            first += size
        if len(self.names) == 1:
            return ids
        key = mixed_key(self.seed, step)
        return [ids[permute(i, len(ids), key)] for i in range(len(ids))]

    def counts(self, step: int) -> tuple[int, ...]:
        """Samples of each source in global batch `step`."""
        return self._draw(step)[0]

    def shares(self, step: int) -> tuple[float, ...]:
        """Share of each source at a step; they add up to 1."""
        values = [weight_at(points, step) for points in self._weights(step)]
        total = sum(values)
        if not total:
            raise UserError(f"data.sources: the weights of {', '.join(self.names)} are all 0 at step {step}; raise one")
        return tuple(value / total for value in values)

    def change(self, step: int, weights: Mapping[str, Points]) -> None:
        """Use these weights from `step` on; sources that are not named keep theirs."""
        new = self._changed(step, weights)
        with self._lock:
            self._changes = [entry for entry in self._changes if entry[0] < step] + [(step, new)]
            self._states = {at: state for at, state in self._states.items() if at <= step}

    def first_empty_step(self, step: int, weights: Mapping[str, Points]) -> int | None:
        """The first step at which all weights would be 0 after `change(step, weights)`; None when there is none."""
        new = self._changed(step, weights)
        steps = {step, *(int(at) for points in new for at, _ in points if at > step)}
        return next((at for at in sorted(steps) if not any(weight_at(points, at) for points in new)), None)

    def _weights(self, step: int) -> tuple[Points, ...]:
        return next(weights for start, weights in reversed(self._changes) if start <= step)

    def _changed(self, step: int, weights: Mapping[str, Points]) -> tuple[Points, ...]:
        return tuple(weights.get(name, own) for name, own in zip(self.names, self._weights(step), strict=True))

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a checkpoint needs to go on at `step`."""
        state = self._state(step)
        current = self._weights(step)
        return {
            "step": step,
            "cursors": dict(zip(self.names, state.cursors, strict=True)),
            "owed": dict(zip(self.names, state.owed, strict=True)),
            "weights": dict(zip(self.names, current, strict=True)) if current != self.weights else None,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. A source that was not there starts at its beginning; weights are those of
        the configuration unless they had been changed while running."""
        step = int(saved["step"])
        cursors = tuple(int(saved["cursors"].get(name, 0)) for name in self.names)
        owed = tuple(float(saved["owed"].get(name, 0.0)) for name in self.names)
        self._first, self._states, self._changes = step, {step: MixState(cursors, owed)}, [(0, self.weights)]
        if saved["weights"] is not None:
            self.change(step, {name: points for name, points in saved["weights"].items() if name in self.names})

    def _seed_of(self, name: str) -> int:
        """Order of a source: its own, whatever the others are."""
        return self.seed if name == ONLY else self.seed ^ (zlib.crc32(name.encode()) << 20)

    def _state(self, step: int) -> MixState:
        """State before `step`; from the nearest one known."""
        with self._lock:
            return self._found_state(step)

    def _found_state(self, step: int) -> MixState:
        if step in self._states:
            return self._states[step]
        if step < self._first:
            raise IndexError(f"step {step} lies before {self._first}, where the run was resumed")
        if len(self.names) == 1:  # a single source gives every batch all of it
            base = self._states[self._first]
            return MixState((base.cursors[0] + (step - self._first) * self.global_batch_size,), base.owed)
        at = max(known for known in self._states if known <= step)
        while at < step:
            counts, owed = self._draw(at)
            cursors = tuple(map(sum, zip(self._states[at].cursors, counts, strict=True)))
            at += 1
            self._states[at] = MixState(cursors, owed)
        for old in [known for known in self._states if self._first < known < step - KEPT_STEPS]:
            del self._states[old]
        return self._states[step]

    def _draw(self, step: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Samples of each source at `step`, and what each is owed after it: largest remainders, ties by order."""
        shares, size = self.shares(step), self.global_batch_size
        if len(shares) == 1:
            return (size,), (0.0,)
        due = [owed + share * size for owed, share in zip(self._state(step).owed, shares, strict=True)]
        counts = [max(0, int(value)) if share else 0 for value, share in zip(due, shares, strict=True)]
        order = sorted((i for i, share in enumerate(shares) if share), key=lambda i: (counts[i] - due[i], i))
        place = 0
        while (missing := size - sum(counts)) != 0:
            i = order[place % len(order)] if missing > 0 else order[-1 - place % len(order)]
            counts[i] += 1 if missing > 0 else -min(1, counts[i])
            place += 1
        return tuple(counts), tuple(value - count for value, count in zip(due, counts, strict=True))


