"""Attention: the gated self-attention of the language model, and the core that both modules share.

Shapes: S sequence, B batch, H query heads, G key/value heads, D head dim, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flagscale.platforms.transfer import to_device


@dataclass
class PackedSequences(PackedSeqParams):
    """Borders of sequences that lie one after the other in a [T, 1, ...] tensor.

    `qkv_format` stays `sbhd`: in the `thd` format Megatron-Core's rotary embedding reads every border back from the
    device, once a sequence, layer and tensor. Rotary angles here are per token, so borders do not matter to it.

    Attributes:
        lengths: tokens of each sequence, on the host.
    """

    lengths: tuple[int, ...] = field(default=())

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> PackedSequences:
        """Packs sequences of these lengths in this order."""
        borders = to_device(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
        longest = max(lengths, default=0)
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
        )


class CoreAttention(MegatronModule):
    """softmax(q k^T / sqrt(D)) v, causal or full, over padded batches or packed sequences, never storing S x S scores.

    Megatron-Core's local DotProductAttention materialises the scores and refuses packed input.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "context parallelism is not part of this attention"
        self.causal = attn_mask_type == AttnMaskType.causal
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Attends.

        Args:
            query: [S, B, H, D]; packed: B = 1.
            key, value: [S, B, G, D].
            attention_mask: [B, S] bool, True where a token is real. Only needed for padding on the left: padding on
                the right is behind every real token, so causality hides it.
            packed_seq_params: borders of packed sequences; tokens attend inside their own sequence.

        Returns:
            [S, B, H * D].
        """
        assert attention_bias is None, "no bias in this model"
        if packed_seq_params is not None:
            assert attention_mask is None, "packed sequences have no padding"
            q_THD, k_TGD, v_TGD = (x.squeeze(1) for x in (query, key, value))
            out = attend_packed(q_THD, k_TGD, v_TGD, packed_seq_params, causal=self.causal, scale=self.scale)
            return out.flatten(1).unsqueeze(1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [B, heads, S, D]
        mask = None if attention_mask is None else self._mask(attention_mask)
        out = _attend(q, k, v, mask, causal=self.causal, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _mask(self, real_BS: Tensor) -> Tensor:
        """[B, 1, S, S]; a padding token sees itself, since a row without any key has no softmax."""
        size = real_BS.shape[1]
        eye = torch.eye(size, dtype=torch.bool, device=real_BS.device)
        mask = real_BS[:, None, None, :] | eye
        return mask & torch.ones_like(eye).tril() if self.causal else mask


def attend_packed(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, packed: PackedSequences, *, causal: bool, scale: float | None
) -> Tensor:
    """Attention inside each of the packed sequences; [T, H, D].

    Args:
        scale: of the scores; None: 1 / sqrt(D).
    """
    if q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16):
        return _attend_packed_cuda(q_THD, k_TGD, v_TGD, packed, causal=causal, scale=scale)
    out = [
        _attend(*(x.transpose(0, 1).unsqueeze(0) for x in parts), None, causal=causal, scale=scale)[0].transpose(0, 1)
        for parts in zip(*(x.split(packed.lengths) for x in (q_THD, k_TGD, v_TGD)), strict=True)
    ]
    return torch.cat(out)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None) -> Tensor:
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _attend_packed_cuda(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, packed: PackedSequences, *, causal: bool, scale: float | None
) -> Tensor:
    """One FlashAttention call for all sequences; it has no CPU kernel and no fp32."""
    from torch.nn.attention.varlen import varlen_attn

    repeat = q_THD.shape[1] // k_TGD.shape[1]
    if repeat > 1:
        k_TGD, v_TGD = (x.repeat_interleave(repeat, dim=1) for x in (k_TGD, v_TGD))
    borders, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    window = (-1, 0 if causal else -1)
    return varlen_attn(q_THD, k_TGD, v_TGD, borders, borders, longest, longest, scale=scale, window_size=window)


class GatedSelfAttention(SelfAttention):
    """Megatron-Core's self-attention with the output gate split off correctly.

    Upstream (0.19.2) slices the gate by the rank in the global tensor parallel group when TP exceeds the KV groups,
    and the query by the rank in the group it was given. With a layout of its own the gate then belongs to other heads.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Projects, and splits per KV group [query heads | gate heads | key | value].

        Args:
            hidden_states: [S, B, hidden], or the sequence parallel shard of it.

        Returns:
            query, key, value and gate, [S, B, heads of this rank, D]; queries and keys are normalised.
        """
        assert output_gate, "this class is for gated attention"
        assert split_qkv, "the fused rotary kernel does not know the gate"
        assert key_value_states is None, "this class is for self-attention"
        tp_size, groups = self.world_size, self.config.num_query_groups
        mixed, _ = self.linear_qkv(hidden_states)
        ranks_per_group = max(1, tp_size // groups)
        if ranks_per_group > 1:
            # The rows of one KV group lie over several ranks: gather all, and keep this rank's group.
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.pg_collection.tp)
            mixed = mixed.chunk(groups, dim=-1)[self.pg_collection.tp.rank() // ranks_per_group]
        dim = self.hidden_size_per_attention_head
        heads = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        mixed = mixed.unflatten(-1, (self.num_query_groups_per_partition, (2 * heads + 2) * dim))
        query, gate, key, value = mixed.split((heads * dim, heads * dim, dim, dim), dim=-1)
        query, gate = (x.reshape(*x.shape[:2], -1, dim) for x in (query, gate))
        if ranks_per_group > 1:
            mine = self.pg_collection.tp.rank() % ranks_per_group
            query, gate = (x.chunk(ranks_per_group, dim=2)[mine] for x in (query, gate))
        return self.q_layernorm(query), self.k_layernorm(key), value, gate
