"""Grids: every rank has one place, and groups partition the ranks as Megatron-Core's order does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.plan.layout import AXES, Grid

small = st.integers(1, 3)
grids = st.builds(Grid, tp=small, cp=small, dp=small, pp=small, offset=st.integers(0, 5))


@given(grid=grids)
def test_rank_and_coordinate_are_inverse(grid: Grid) -> None:
    coordinates = [grid.coordinate(rank) for rank in grid.ranks]
    assert [grid.rank(**coordinate) for coordinate in coordinates] == grid.ranks
    assert len({tuple(coordinate.items()) for coordinate in coordinates}) == grid.size


@given(grid=grids, axes=st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_ranks_and_hold_the_other_axes_fixed(grid: Grid, axes: set[str]) -> None:
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == grid.ranks
    for group in groups:
        assert group == sorted(group)
        for axis in set(AXES) - axes:
            assert len({grid.coordinate(rank)[axis] for rank in group}) == 1
        for axis in axes:
            assert len({grid.coordinate(rank)[axis] for rank in group}) == getattr(grid, axis)


def test_megatrons_order_tp_fastest_then_dp_then_pp() -> None:
    grid = Grid(tp=2, dp=2, pp=2)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("tp", "pp") == [[0, 1, 4, 5], [2, 3, 6, 7]]


@given(ep=st.integers(1, 3), groups=st.integers(1, 3), tp=small)
def test_expert_groups_partition_the_ranks(ep: int, groups: int, tp: int) -> None:
    grid = Grid(tp=tp, dp=ep * groups, ep=ep)
    found = grid.expert_groups()
    assert sorted(rank for group in found for rank in group) == grid.ranks
    assert {len(group) for group in found} == {ep}


def test_mistakes_are_named() -> None:
    grid = Grid(tp=2, offset=4)
    with pytest.raises(ValueError, match=r"rank 3 is outside the grid's ranks 4\.\.5"):
        grid.coordinate(3)
    with pytest.raises(ValueError, match=r"unknown axes \['xp'\]"):
        grid.groups("xp")
