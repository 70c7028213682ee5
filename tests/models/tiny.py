"""A small Qwen3.5 with every part of the real one, here and in transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flagscale.config.schema import ModelConfig

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "rotary_percent": 0.5,
    "mrope_section": [3, 3, 2],
    "init_method_std": 0.1,
    "vision_num_layers": 2,
    "vision_hidden_size": 32,
    "vision_ffn_hidden_size": 48,
    "vision_num_attention_heads": 4,
    "vision_patch_size": 4,
    "vision_num_position_embeddings": 64,
    "image_token_id": 250,
    "video_token_id": 251,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
}


def tiny_model(**changes: Any) -> ModelConfig:
    """The small model's configuration."""
    return ModelConfig(**{**TINY, **changes})


def hf_config(model: ModelConfig) -> Any:
    """The same model's transformers configuration."""
    from transformers import Qwen3_5Config

    return Qwen3_5Config(
        text_config={
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_query_groups,
            "head_dim": model.kv_channels,
            "rms_norm_eps": model.norm_epsilon,
            "max_position_embeddings": model.max_position_embeddings,
            "linear_conv_kernel_dim": model.linear_conv_kernel_dim,
            "linear_key_head_dim": model.linear_key_head_dim,
            "linear_value_head_dim": model.linear_value_head_dim,
            "linear_num_key_heads": model.linear_num_key_heads,
            "linear_num_value_heads": model.linear_num_value_heads,
            "full_attention_interval": model.full_attention_interval,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": model.rotary_base,
                "partial_rotary_factor": model.rotary_percent,
                "mrope_section": list(model.mrope_section),
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": model.vision_num_layers,
            "hidden_size": model.vision_hidden_size,
            "intermediate_size": model.vision_ffn_hidden_size,
            "num_heads": model.vision_num_attention_heads,
            "patch_size": model.vision_patch_size,
            "temporal_patch_size": model.vision_temporal_patch_size,
            "spatial_merge_size": model.vision_spatial_merge_size,
            "num_position_embeddings": model.vision_num_position_embeddings,
            "out_hidden_size": model.hidden_size,
        },
        image_token_id=model.image_token_id,
        video_token_id=model.video_token_id,
        vision_start_token_id=model.vision_start_token_id,
        vision_end_token_id=model.vision_end_token_id,
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
    )


def hf_model(model: ModelConfig, weights: dict[str, Tensor]) -> Any:
    """transformers' model in fp32 with these weights (it has no MTP layer)."""
    from transformers import Qwen3_5ForConditionalGeneration

    config = hf_config(model)
    config._attn_implementation = "sdpa"
    reference = Qwen3_5ForConditionalGeneration(config).float().train()
    missing, unexpected = reference.load_state_dict(
        {name: value for name, value in weights.items() if not name.startswith("mtp.")}, strict=False
    )
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    reference.tie_weights()
    return reference


def random_weights(model: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every canonical tensor, random also where training starts from constants, so that a swapped norm shows."""
    from flagscale.models.qwen35.canonical import canonical_tensors

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in canonical_tensors(model).items():
        noise = torch.randn(tensor.shape, generator=generator) * model.init_method_std
        weights[name] = noise + (1.0 if tensor.init == "ones" else 0.0)
    return weights


@dataclasses.dataclass(frozen=True)
class Batch:
    """Padded samples and their images.

    Attributes:
        grid_hw: patches of each image, sample by sample.
        row_of_V: row s * B + b of each visual token in the flattened [S, B, D] embedding.
    """

    input_ids_BS: Tensor
    labels_BS: Tensor
    position_ids_3BS: Tensor
    attention_mask_BS: Tensor
    loss_mask_BS: Tensor
    pixels_PC: Tensor
    grid_hw: list[tuple[int, int]]
    row_of_V: Tensor


def make_batch(
    model: ModelConfig, samples: list[list[int | tuple[int, int]]], *, left: bool = False, multiple: int = 1
) -> Batch:
    """Random samples; a number is that many text tokens, a pair an image of that patch grid between its marks.

    Padded at the end, or at the start with `left`, to a multiple of `multiple`.
    """
    generator = torch.Generator().manual_seed(0)
    merge = model.vision_spatial_merge_size
    rows, grids = [], []
    for sample in samples:
        ids: list[int] = []
        for piece in sample:
            if isinstance(piece, int):
                ids += torch.randint(1, 240, (piece,), generator=generator).tolist()
            else:
                tokens = piece[0] * piece[1] // merge**2
                ids += [model.vision_start_token_id] + [model.image_token_id] * tokens + [model.vision_end_token_id]
                grids.append(piece)
        rows.append(ids)
    length = -(-max(map(len, rows)) // multiple) * multiple
    pad = [0] * length
    ids_BS = torch.tensor([(pad + ids)[-length:] if left else (ids + pad)[:length] for ids in rows])
    mask_BS = ids_BS != 0
    labels_BS = ids_BS.roll(-1, 1)
    loss_mask_BS = (mask_BS & mask_BS.roll(-1, 1)).float()
    loss_mask_BS[:, -1] = 0.0
    columns = 3 * model.vision_temporal_patch_size * model.vision_patch_size**2
    pixels = torch.randn(sum(h * w for h, w in grids), columns, generator=generator)
    b_V, s_V = (ids_BS == model.image_token_id).nonzero(as_tuple=True)
    return Batch(
        ids_BS, labels_BS, positions(model, ids_BS, mask_BS, grids), mask_BS, loss_mask_BS, pixels, grids,
        s_V * len(samples) + b_V,
    )


def positions(model: ModelConfig, ids_BS: Tensor, mask_BS: Tensor, grid_hw: list[tuple[int, int]]) -> Tensor:
    """transformers' own position index; 1 in the padding."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    merge = model.vision_spatial_merge_size

    class Host:
        config = hf_config(model)
        get_vision_position_ids = Qwen3_5Model.get_vision_position_ids

    grid = torch.tensor([[1, h, w] for h, w in grid_hw]) if grid_hw else None
    assert merge == Host.config.vision_config.spatial_merge_size
    positions_3BS, _ = Qwen3_5Model.get_rope_index(
        Host(), input_ids=ids_BS, mm_token_type_ids=(ids_BS == model.image_token_id).int(), image_grid_thw=grid,
        attention_mask=mask_BS.long(),
    )
    return positions_3BS
