"""The balancing loss of experts: of each sample apart, over its tokens and no padding, whatever shares its row.

For a layer and a sample of T tokens, each going to K of E experts, with router probabilities p (softmax over all E):

    E * sum over experts e of (tokens that go to e) / (K * T) * (sum over tokens of p_e) / T

which is 1 when experts are used evenly, and at most E / K (Switch Transformer, arXiv:2101.03961). An iteration's loss
has `moe_aux_loss_coeff` times its mean over the global batch's samples, added up over the layers.

Legend: M samples of a microbatch, N = S_local * B tokens that this rank has of it, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from flagscale.platforms.transfer import to_device


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Which of this rank's tokens count, and for which sample.

    Attributes:
        members_MN: 1.0 where a token is one of the sample, else 0.0; fp32.
        counts_M: tokens of each sample on all ranks, at least 1; fp32.
    """

    members_MN: Tensor
    counts_M: Tensor

    @classmethod
    def of(
        cls, samples: SampleTokens, *, shape: tuple[int, int], shard: tuple[int, int], device: torch.device
    ) -> RoutedTokens:
        """The tokens of a microbatch, flattened as the router sees them: row s_local * B + b.

        Args:
            shape: (B, S) of the microbatch.
            shard: (number, count) of this rank's part of the sequence.
        """
        size, length = shape
        number, count = shard
        borders_2M = to_device(torch.tensor([samples.starts, samples.ends]), device)
        rows_B = torch.arange(size, device=device) * length
        columns_S = torch.arange(number * length // count, (number + 1) * length // count, device=device)
        places_N = (columns_S[:, None] + rows_B).flatten()
        inside_MN = (places_N >= borders_2M[0, :, None]) & (places_N < borders_2M[1, :, None])
        return cls(inside_MN.float(), (borders_2M[1] - borders_2M[0]).clamp(min=1).float())


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Where the samples of a microbatch lie in its [B, S] tokens, counted through row after row; on the host."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, int], num_tokens: tuple[int, ...], lengths: tuple[int, ...]) -> SampleTokens:
        """From what a `TextBatch` says of itself.

        Args:
            shape: (B, S).
            num_tokens: of each sample, 0 where there is none; empty when there is no padding.
            lengths: tokens from the start of each sample to the next one's, packed into one row; empty when each sample
                has a row.
        """
        lengths = lengths or (shape[1],) * shape[0]
        starts = tuple(accumulate(lengths, initial=0))[:-1]
        counts = num_tokens or lengths
        return cls(starts, tuple(start + count for start, count in zip(starts, counts, strict=True)))

    def with_next(self) -> SampleTokens:
        """Without the last token of each sample: those that multi-token prediction has a next token for."""
        return SampleTokens(self.starts, tuple(map(max, self.starts, (end - 1 for end in self.ends))))


class BalancedRouter(TopKRouter):
    """Megatron-Core's router with the balancing loss above.

    Upstream's `seq_aux_loss` (0.19.2) takes a row for a sample, and with a padding mask all rows of a microbatch for
    equally long. Its weight is `config.moe_aux_loss_coeff`, which here is that of one sample.

    Attributes:
        tokens: of the microbatch that the next forward pass is about; without them a training step cannot be balanced.
        balance: sum over the samples so far of this rank's share of the loss above, not weighted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tokens: RoutedTokens | None = None
        self.balance: Tensor | None = None

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """`probs`, with the loss's gradient added to theirs in the backward pass.

        Args:
            scores_for_aux_loss: router probabilities [N, E].
            routing_map: [N, E], whether a token goes to an expert.
        """
        if self.get_aux_loss_coeff("seq_aux_loss") == 0:
            return probs
        assert self.tokens is not None, "the model's forward pass says which tokens count"
        members_MN, counts_M = self.tokens.members_MN, self.tokens.counts_M
        chosen_ME = members_MN @ routing_map.float()
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(chosen_ME, group=self.tp_cp_group)
        probs_ME = members_MN @ scores_for_aux_loss.float()
        shares_M = (chosen_ME * probs_ME).sum(1) / counts_M.square()
        balance = shares_M.sum() * (self.config.num_moe_experts / self.topk)
        self.balance = balance.detach() if self.balance is None else self.balance + balance.detach()
        return MoEAuxLossAutoScaler.apply(probs, self.config.moe_aux_loss_coeff * balance)

    def take_balance(self) -> Tensor:
        """`balance`, counted from zero again; 0 when no training step ran."""
        balance, self.balance = self.balance, None
        return self.weight.new_zeros((), dtype=torch.float32) if balance is None else balance
