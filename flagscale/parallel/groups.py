"""Process groups of both modules, made from the grids in one place and destroyed there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from flagscale.parallel import megatron_state
from flagscale.parallel.routes import stays_in_replica
from flagscale.plan.layout import LANGUAGE, VISION, Grid


@dataclass(kw_only=True)
class Topology:
    """This rank's place in both grids, and the groups it belongs to.

    Attributes:
        grids: the grid of each module.
        groups: process groups of each module this rank takes part in; a rank outside a grid has no entry.
        rank: this rank in the world.
    """

    grids: dict[str, Grid]
    groups: dict[str, ProcessGroupCollection]
    rank: int
    _owned: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def build(cls, grids: dict[str, Grid], seed: int) -> Topology:
        """Makes all groups. Collective: every rank of the world calls it with the same grids."""
        topology = cls(grids=grids, groups={}, rank=dist.get_rank())
        try:
            topology.groups[LANGUAGE] = megatron_state.initialize(grids[LANGUAGE], seed)
            vision = topology._vision_groups(grids[VISION])
            if topology.rank in grids[VISION]:
                topology.groups[VISION] = vision
        except BaseException:
            topology.destroy()
            raise
        return topology

    def coordinate(self, module: str) -> dict[str, int]:
        """This rank's index on every axis of a module's grid."""
        return self.grids[module].coordinate(self.rank)

    def has(self, module: str) -> bool:
        """Whether this rank holds a part of the module."""
        return module in self.groups

    def exchange_group(self, balance: str) -> dist.ProcessGroup:
        """The ranks among which embeddings travel: the world, or this rank's language replica where none leaves it.

        So that replicas without anything to exchange, as in the unified layout, do not wait for each other.

        Args:
            balance: as in `data.assignment.assign`.
        """
        alone = stays_in_replica(self.grids[VISION], self.grids[LANGUAGE], balance)
        group = self.groups[LANGUAGE].mp if alone else dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup), "torch.distributed is not initialised"
        return group

    def destroy(self) -> None:
        """Ends the groups made here, in the order they were made."""
        for group in self._owned:
            dist.destroy_process_group(group)
        self._owned.clear()
        megatron_state.destroy()

    def _vision_groups(self, grid: Grid) -> ProcessGroupCollection:
        """Groups of the vision encoder (cp = pp = ep = 1).

        `new_group` is collective over the world, so every rank makes every group, in the same order.
        """
        tp = self._group(grid.groups("tp"))
        dp = self._group(grid.groups("dp"))
        alone = self._group([[rank] for rank in grid.ranks])
        everyone = self._group([grid.ranks])
        members = {
            "tp": tp, "tp_cp": tp, "mp": tp, "tp_ep": tp, "tp_ep_pp": tp, "expt_tp": tp,
            "dp": dp, "dp_cp": dp, "intra_dp_cp": dp, "expt_dp": dp, "intra_expt_dp": dp,
            "cp": alone, "pp": alone, "ep": alone, "embd": alone, "pos_embd": alone,
            "tp_dp_cp": everyone, "intra_dist_opt": everyone,
        }  # fmt: skip
        return ProcessGroupCollection(**members)

    def _group(self, rank_lists: list[list[int]]) -> dist.ProcessGroup | None:
        mine = None
        for ranks in rank_lists:
            group = dist.new_group(ranks)
            if self.rank in ranks:
                assert isinstance(group, dist.ProcessGroup), "a member of a group got none"
                mine = group
                self._owned.append(group)
        return mine
