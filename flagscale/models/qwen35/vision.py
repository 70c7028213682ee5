"""The Qwen3.5 vision encoder on Megatron-Core's transformer block, tensor parallel.

Shapes: P patches of all items, C values of a patch, V visual tokens (P / merge^2), D width of the language model.
Patches come in merge-block order: the merge x merge patches of one visual token are neighbours.
"""

from __future__ import annotations

import functools

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor
from torch.nn import functional

from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35 import spec
from flagscale.models.qwen35.attention import PackedSequences
from flagscale.models.qwen35.rope import vision_angles
from flagscale.platforms.transfer import to_device

CHANNELS = 3


class VisionEncoder(MegatronModule):
    """Pixels of images and video frame groups to rows for the language model.

    Replicated over the vision tensor parallel group at both ends; every rank of the group passes the same pixels.
    """

    def __init__(self, model: ModelConfig, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.model, self.tp_group = model, groups.tp
        self.side = round(model.vision_num_position_embeddings**0.5)
        values = CHANNELS * model.vision_temporal_patch_size * model.vision_patch_size**2
        like = {"dtype": config.params_dtype, "device": _device(config)}
        # The patch embedding is a convolution whose stride is its kernel: the same thing as a linear layer.
        self.patch_embed = torch.nn.Linear(values, config.hidden_size, **like)
        self.position_table = torch.nn.Parameter(
            torch.empty(model.vision_num_position_embeddings, config.hidden_size, **like)
        )
        self.blocks = TransformerBlock(config, spec.vision_block(config), post_layer_norm=False, pg_collection=groups)
        self.merger = PatchMerger(model, config, groups)

    def forward(self, pixels_PC: Tensor, grid_hw: list[tuple[int, int]]) -> Tensor:
        """Encodes items, each for itself.

        Args:
            pixels_PC: normalised patches of all items, one item after the other.
            grid_hw: rows and columns of patches of each item; multiples of the merge size. None at all is allowed: the
                rank returns no rows, and its parameters get gradients of zero, as the others in the group expect.

        Returns:
            rows_VD, items in the order given, tokens of an item row by row.
        """
        patches = sum(h * w for h, w in grid_hw)
        assert patches == pixels_PC.shape[0], f"{pixels_PC.shape[0]} patches for grids of {patches}"
        if not grid_hw:
            # Neither Megatron-Core nor GPU kernels take empty tensors: encode one blank token and keep none.
            merge = self.model.vision_spatial_merge_size
            return self.forward(pixels_PC.new_zeros(merge**2, pixels_PC.shape[1]), [(merge, merge)])[:0]
        # A frozen trunk keeps no activations, even though Megatron-Core's block marks its input as needing gradients.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._trunk_trains()):
            hidden_PE = self._trunk(pixels_PC, grid_hw)
        return self.merger(hidden_PE)

    def _trunk(self, pixels_PC: Tensor, grid_hw: list[tuple[int, int]]) -> Tensor:
        device, merge = self.position_table.device, self.model.vision_spatial_merge_size
        places = [_places(h, w, self.side, merge) for h, w in grid_hw]
        taps_P4, weights_P4, row_column_P2 = (
            to_device(torch.cat(parts), device) for parts in zip(*places, strict=True)
        )
        hidden_PE = self.patch_embed(pixels_PC.to(device, self.patch_embed.weight.dtype))
        hidden_PE = hidden_PE + self._position(taps_P4, weights_P4).to(hidden_PE.dtype)
        angles = vision_angles(
            row_column_P2[:, 0], row_column_P2[:, 1], self.config.kv_channels, self.model.vision_rotary_base
        )
        hidden_P1E = self.blocks(
            hidden_states=hidden_PE.unsqueeze(1),
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=PackedSequences.of([h * w for h, w in grid_hw], device),
        )
        return hidden_P1E.squeeze(1)

    def _position(self, taps_P4: Tensor, weights_P4: Tensor) -> Tensor:
        """[P, E] bilinear interpolation of the position table, in fp32; tap by tap, to store one copy and not four."""
        out = torch.zeros((), device=taps_P4.device)
        for tap in range(4):
            rows = functional.embedding(taps_P4[:, tap], self.position_table)
            out = out + rows.float() * weights_P4[:, tap, None]
        return out

    def _trunk_trains(self) -> bool:
        return any(p.requires_grad for name, p in self.named_parameters() if not name.startswith("merger."))


class PatchMerger(MegatronModule):
    """Joins merge x merge neighbouring patches into one row of the language model's width."""

    def __init__(self, model: ModelConfig, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.tp_group = groups.tp
        use = spec.parts(config.transformer_impl == "transformer_engine")
        self.width = config.hidden_size * model.vision_spatial_merge_size**2
        self.norm = use.layer_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        shared = {"config": config, "init_method": config.init_method, "bias": True, "is_expert": False}
        self.linear_fc1 = use.column(
            self.width, self.width, gather_output=False, skip_bias_add=False, tp_group=groups.tp, **shared
        )
        self.linear_fc2 = use.row(
            self.width, model.hidden_size, input_is_parallel=True, skip_bias_add=True, tp_group=groups.tp, **shared
        )

    def forward(self, hidden_PE: Tensor) -> Tensor:
        """[P, E] -> [V, D]."""
        merged = self.norm(hidden_PE).view(-1, self.width)
        merged, _ = self.linear_fc1(merged)
        merged, bias = self.linear_fc2(functional.gelu(merged))
        return merged + bias


@functools.lru_cache(maxsize=128)
def _places(grid_h: int, grid_w: int, side: int, merge: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where an item's patches lie: table rows [P, 4] and weights [P, 4] for the interpolation, row and column [P, 2].

    The table's corners coincide with the item's corners (align_corners). Patches in merge-block order.
    """
    index = torch.arange(grid_h * grid_w).view(grid_h // merge, merge, grid_w // merge, merge)
    order_P = index.transpose(1, 2).flatten()
    row_P, column_P = order_P // grid_w, order_P % grid_w
    (top, low), (left, right) = _taps(row_P, grid_h, side), _taps(column_P, grid_w, side)
    pairs = [(a, b) for a in (top, low) for b in (left, right)]
    taps_P4 = torch.stack([a[0] * side + b[0] for a, b in pairs], -1)
    weights_P4 = torch.stack([a[1] * b[1] for a, b in pairs], -1)
    return taps_P4, weights_P4, torch.stack((row_P, column_P), -1)


def _taps(index_P: Tensor, size: int, side: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The two table coordinates around each position of an axis, and their weights."""
    source_P = index_P.float() * (side - 1) / max(size - 1, 1)
    low_P = source_P.floor()
    high_weight_P = source_P - low_P
    return (low_P.long(), 1 - high_weight_P), ((low_P.long() + 1).clamp(max=side - 1), high_weight_P)


def _device(config: TransformerConfig) -> torch.device | int:
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
