"""Parallel layouts as values: which rank sits where, in pure integers.

A grid places ranks on the axes (tp, cp, dp, pp), the first varying fastest, which is Megatron-Core's order
"tp-cp-ep-dp-pp". Experts are never split: expert parallelism divides tp x cp x dp. No torch here: process groups are
made from these lists in `flagscale.parallel.groups`.
"""

from __future__ import annotations

from dataclasses import dataclass

VISION = "vision"
LANGUAGE = "language"
AXES = ("tp", "cp", "dp", "pp")  # from the fastest to the slowest varying


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The ranks of one module: `offset .. offset + size - 1`, seen as tp x cp x dp x pp."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    offset: int = 0

    @property
    def size(self) -> int:
        """Ranks in the grid."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def ranks(self) -> list[int]:
        """World ranks of the grid, ascending."""
        return list(range(self.offset, self.offset + self.size))

    def __contains__(self, rank: int) -> bool:
        return self.offset <= rank < self.offset + self.size

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """World rank at a coordinate."""
        return self.offset + tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Index of `rank` on every axis; the inverse of `rank()`.

        Raises:
            ValueError: when `rank` is not in the grid.
        """
        if rank not in self:
            raise ValueError(f"rank {rank} is outside the grid's ranks {self.offset}..{self.offset + self.size - 1}")
        rest, coordinate = rank - self.offset, {}
        for axis in AXES:
            rest, coordinate[axis] = divmod(rest, getattr(self, axis))
        return coordinate

    def groups(self, *axes: str) -> list[list[int]]:
        """Rank lists of all groups that span `axes`, in ascending order inside a group and between groups.

        `groups("dp")` are the data parallel groups; `groups("tp", "pp")` the model parallel groups of one replica.
        Every rank of the grid is in exactly one list.
        """
        unknown = set(axes) - set(AXES)
        if unknown:
            raise ValueError(f"unknown axes {sorted(unknown)}, the axes are {AXES}")
        families: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            coordinate = self.coordinate(rank)
            fixed = tuple(coordinate[axis] for axis in AXES if axis not in axes)
            families.setdefault(fixed, []).append(rank)
        return sorted(families.values())

    def expert_groups(self) -> list[list[int]]:
        """Rank lists of the expert parallel groups: `ep` neighbouring ranks of a pipeline stage each."""
        stages = self.groups("tp", "cp", "dp")
        return [stage[i : i + self.ep] for stage in stages for i in range(0, len(stage), self.ep)]
