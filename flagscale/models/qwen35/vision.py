"""The Qwen3.5 vision encoder on Megatron-Core's transformer block, tensor parallel.

Shapes: P patches of all items, C values of a patch, V visual tokens (P / merge^2), D width of the language model.
Patches come in merge-block order: the merge x merge patches of one visual token are neighbours.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

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
        device = self.position_table.device
        places = Places.of(grid_hw, self.model.vision_spatial_merge_size, device)
        hidden_PE = self.patch_embed(pixels_PC.to(device, self.patch_embed.weight.dtype))
        hidden_PE = hidden_PE + self._position(places).to(hidden_PE.dtype)
        angles = vision_angles(places.row_P, places.column_P, self.config.kv_channels, self.model.vision_rotary_base)
        hidden_P1E = self.blocks(
            hidden_states=hidden_PE.unsqueeze(1),
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=PackedSequences.of([h * w for h, w in grid_hw], device),
        )
        return hidden_P1E.squeeze(1)

    def _position(self, places: Places) -> Tensor:
        """[P, E] bilinear interpolation of the position table, in fp32; tap by tap, to store one copy and not four.

        The table's corners coincide with the item's corners (align_corners).
        """
        rows = _taps(places.row_P, places.height_P, self.side)
        columns = _taps(places.column_P, places.width_P, self.side)
        out = torch.zeros((), device=places.row_P.device)
        for row_P, row_weight_P in rows:
            for column_P, column_weight_P in columns:
                taken_PE = functional.embedding(row_P * self.side + column_P, self.position_table)
                out = out + taken_PE.float() * (row_weight_P * column_weight_P)[:, None]
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


@dataclass(frozen=True, slots=True)
class Places:
    """Where patches lie, [P] each, in merge-block order: row and column in their item, and the item's size in patches.

    Worked out on the device, in as many operations for a thousand items as for one: on the host they took longer than
    the encoder's first layers.
    """

    row_P: Tensor
    column_P: Tensor
    height_P: Tensor
    width_P: Tensor

    @classmethod
    def of(cls, grid_hw: list[tuple[int, int]], merge: int, device: torch.device) -> Places:
        """Places of the patches of these items, one item after the other."""
        sizes = [h * w for h, w in grid_hw]
        first = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
        items_I4 = torch.tensor([(h, w, f, n) for (h, w), f, n in zip(grid_hw, first, sizes, strict=True)])
        items_I4 = to_device(items_I4, device)
        # The total is known: without it the host would wait for the device to add it up.
        height_P, width_P, first_P = items_I4[:, :3].repeat_interleave(items_I4[:, 3], 0, output_size=sum(sizes)).T
        patch_P = torch.arange(sum(sizes), device=device) - first_P
        block_P, inside_P = patch_P // merge**2, patch_P % merge**2
        across_P = width_P // merge
        row_P = block_P // across_P * merge + inside_P // merge
        column_P = block_P % across_P * merge + inside_P % merge
        return cls(row_P, column_P, height_P, width_P)


def _taps(index_P: Tensor, size_P: Tensor, side: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The two table coordinates around each position of an axis, and their weights."""
    source_P = index_P.float() * (side - 1) / (size_P - 1).clamp(min=1)
    low_P = source_P.floor()
    high_weight_P = source_P - low_P
    return (low_P.long(), 1 - high_weight_P), ((low_P.long() + 1).clamp(max=side - 1), high_weight_P)


def _device(config: TransformerConfig) -> torch.device | int:
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
