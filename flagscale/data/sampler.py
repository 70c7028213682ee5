"""Which samples make up a global batch: functions of the step and of a few integers that a checkpoint holds.

An epoch's order is a permutation computed point by point (a Feistel network with cycle walking), not a shuffled list:
memory and start-up cost do not grow with the data set, and step n costs the same as step 0.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_SAMPLE = -1
_MASK64 = (1 << 64) - 1
_ROUNDS = 6  # four make a Feistel network a strong pseudo-random permutation; two more for the tiny domains of demos


def _mix(value: int) -> int:
    """splitmix64's finaliser: 64 bits in, 64 well mixed bits out (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def mixed_key(seed: int, number: int) -> int:
    """A key for `permute` from a seed and a number."""
    return _mix(_mix(seed & _MASK64) ^ number)


def permute(index: int, size: int, key: int) -> int:
    """Image of `index` under a pseudo-random permutation of 0..size-1 chosen by `key`.

    The network permutes the next power of four; walking its cycle until a value below `size` comes up restricts
    it to 0..size-1, at fewer than four evaluations on average.
    """
    if not 0 <= index < size:
        raise IndexError(f"index {index} is outside 0..{size - 1}")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    value = index
    while True:
        left, right = value >> half_bits, value & half_mask
        for round_number in range(_ROUNDS):
            left, right = right, left ^ (_mix(_mix(key ^ (round_number << 56)) ^ right) & half_mask)
        value = (left << half_bits) | right
        if value < size:
            return value


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffledSource:
    """Training order of one source: every sample once an epoch, a new order each epoch, without end."""

    num_samples: int
    seed: int

    def sample_at(self, position: int) -> int:
        """The sample at a position of the stream."""
        epoch, index = divmod(position, self.num_samples)
        return permute(index, self.num_samples, mixed_key(self.seed, epoch))


@dataclass(frozen=True, kw_only=True, slots=True)
class SequentialSampler:
    """Validation order: the samples as they stand in the file, each once; the last batch is filled with `NO_SAMPLE`."""

    num_samples: int
    global_batch_size: int

    @property
    def num_batches(self) -> int:
        """Batches until every sample has come up."""
        return -(-self.num_samples // self.global_batch_size)

    def sample_ids(self, step: int) -> list[int]:
        """Sample ids of global batch `step`; `NO_SAMPLE` after the last sample."""
        first = step * self.global_batch_size
        return [i if i < self.num_samples else NO_SAMPLE for i in range(first, first + self.global_batch_size)]
