"""A small Qwen3.5 with every part of the real one, here and in transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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


TINY_MOE: dict[str, Any] = {
    "ffn_hidden_size": 0,
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 32,
    "moe_aux_loss_coeff": 0.0,
}


def tiny_moe(**changes: Any) -> ModelConfig:
    """The small model with experts; without the balancing loss, which transformers defines over all layers at once."""
    return tiny_model(**{**TINY_MOE, **changes})


def tiny_model(**changes: Any) -> ModelConfig:
    """The small model's configuration."""
    return ModelConfig(**{**TINY, **changes})


def hf_config(model: ModelConfig) -> Any:
    """The same model's transformers configuration."""
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    from flagscale.plan.hf_config import hf_config_tree

    tree = hf_config_tree(model)
    config = (Qwen3_5MoeConfig if model.num_experts else Qwen3_5Config).from_dict(tree)
    config._attn_implementation = config.text_config._attn_implementation = "sdpa"
    return config


class NextTokenPredictor(torch.nn.Module):
    """Qwen3.5's MTP layer by its formula; transformers drops these weights.

    fc([norm(embedding of the next token), norm(hidden)]), one attention layer, norm; the caller applies the head.
    """

    def __init__(self, config: Any) -> None:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe

        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        decoder_layer = moe.Qwen3_5MoeDecoderLayer if hasattr(config, "num_experts") else dense.Qwen3_5DecoderLayer
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            dense.Qwen3_5RMSNorm(width, eps) for _ in range(3)
        )
        self.layers = torch.nn.ModuleList([decoder_layer(config, config.layer_types.index("full_attention"))])

    def forward(self, next_BSD: Tensor, hidden_BSD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[B, S, D] hidden states for the token after the next."""
        joined = torch.cat((self.pre_fc_norm_embedding(next_BSD), self.pre_fc_norm_hidden(hidden_BSD)), -1)
        return self.norm(self.layers[0](self.fc(joined), position_embeddings=rotary))


def pack_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the experts of a layer as transformers holds them: one tensor for all."""
    packed = {name: value for name, value in weights.items() if ".experts." not in name}
    for first in [name for name in weights if name.endswith(".experts.0.gate_proj.weight")]:
        layer = first.removesuffix("0.gate_proj.weight")
        parts = {part: [] for part in ("gate_proj", "up_proj", "down_proj")}
        while f"{layer}{len(parts['gate_proj'])}.gate_proj.weight" in weights:
            number = len(parts["gate_proj"])
            for part, values in parts.items():
                values.append(weights[f"{layer}{number}.{part}.weight"])
        gate, up, down = (torch.stack(values) for values in parts.values())
        packed[layer + "gate_up_proj"], packed[layer + "down_proj"] = torch.cat((gate, up), 1), down
    return packed


def unpack_experts(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `pack_experts`."""
    weights = {}
    for name, value in packed.items():
        if name.endswith(".experts.gate_up_proj"):
            for number, both in enumerate(value):
                gate, up = both.chunk(2)
                layer = name.removesuffix("gate_up_proj")
                weights[f"{layer}{number}.gate_proj.weight"], weights[f"{layer}{number}.up_proj.weight"] = gate, up
        elif name.endswith(".experts.down_proj"):
            for number, down in enumerate(value):
                weights[f"{name.removesuffix('down_proj')}{number}.down_proj.weight"] = down
        else:
            weights[name] = value
    return weights


class Reference(torch.nn.Module):
    """transformers' model, with the MTP layer beside it; parameters have their checkpoint names."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor]) -> None:
        from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

        super().__init__()
        config = hf_config(model)
        whole_model = Qwen3_5MoeForConditionalGeneration if model.num_experts else Qwen3_5ForConditionalGeneration
        whole = whole_model(config).float()
        self.model, self.lm_head = whole.model, whole.lm_head
        if model.mtp_num_layers:
            self.mtp = NextTokenPredictor(config.text_config)
        missing, unexpected = self.load_state_dict(pack_experts(weights), strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}, missing  # tied

    def forward(self, batch: Batch) -> dict[str, Tensor | None]:
        """Visual rows, logits, and the losses of the next token and of the one after it."""
        text = self.model.language_model
        embedding_BSD = text.embed_tokens(batch.input_ids_BS)
        rows_VD = None
        if batch.grid_hw:
            grid = torch.tensor([[1, h, w] for h, w in batch.grid_hw])
            rows_VD = self.model.visual(batch.pixels_PC, grid).pooler_output
            visual_BS1 = (batch.kind_BS > 0).unsqueeze(-1)
            embedding_BSD = embedding_BSD.masked_scatter(visual_BS1, rows_VD)
        hidden_BSD = text(
            inputs_embeds=embedding_BSD,
            position_ids=batch.position_ids_3BS,
            attention_mask=batch.attention_mask_BS.long(),
            use_cache=False,
        ).last_hidden_state
        logits = self.lm_head(hidden_BSD)
        lm_BS = functional.cross_entropy(logits.transpose(1, 2), batch.labels_BS, reduction="none")
        mtp_BS = None
        if hasattr(self, "mtp"):
            rotary = text.rotary_emb(hidden_BSD, batch.position_ids_3BS)
            ahead = self.lm_head(self.mtp(embedding_BSD.roll(-1, 1), hidden_BSD, rotary))
            mtp_BS = functional.cross_entropy(ahead.transpose(1, 2), batch.labels_BS.roll(-1, 1), reduction="none")
        return {"rows": rows_VD, "logits": logits, "lm": lm_BS, "mtp": mtp_BS}


def random_weights(model: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every canonical tensor, random also where training starts from constants, so that a swapped norm shows."""
    from flagscale.models.qwen35.canonical import canonical_tensors

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in canonical_tensors(model).items():
        noise = torch.randn(tensor.shape, generator=generator) * model.init_method_std
        weights[name] = noise + (1.0 if tensor.init in ("ones", "time_step") else 0.0)
    return weights


Piece = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Padded samples and their images.

    Attributes:
        kind_BS: 0 text and padding, 1 image, 2 video.
        grid_hw: patches of each item (image, or frame group of a video), sample by sample.
        row_of_V: row s * B + b of each visual token in the flattened [S, B, D] embedding.
        mtp_mask_BS: weight of the loss of the token after the next.
    """

    input_ids_BS: Tensor
    labels_BS: Tensor
    kind_BS: Tensor
    position_ids_3BS: Tensor
    attention_mask_BS: Tensor
    loss_mask_BS: Tensor
    mtp_mask_BS: Tensor
    pixels_PC: Tensor
    grid_hw: list[tuple[int, int]]
    row_of_V: Tensor


def make_batch(model: ModelConfig, samples: list[list[Piece]], *, left: bool = False, multiple: int = 1) -> Batch:
    """Random samples, padded at the end, or at the start with `left`, to a multiple of `multiple`.

    A number is that many text tokens; a pair an image of that patch grid between its marks; a triple a video of so
    many frame groups, each after a time stamp of two tokens.
    """
    generator = torch.Generator().manual_seed(0)
    rows, grids, videos = [], [], []
    for sample in samples:
        ids: list[int] = []
        for piece in sample:
            if isinstance(piece, int):
                ids += torch.randint(1, 240, (piece,), generator=generator).tolist()
                continue
            frames, token = (1, model.image_token_id) if len(piece) == 2 else (piece[0], model.video_token_id)
            h, w = piece[-2:]
            for _ in range(frames):
                ids += [7, 8] if len(piece) == 3 else []
                run = [token] * (h * w // model.vision_spatial_merge_size**2)
                ids += [model.vision_start_token_id, *run, model.vision_end_token_id]
                grids.append((h, w))
            if len(piece) == 3:
                videos.append(piece)
        rows.append(ids)
    length = -(-max(map(len, rows)) // multiple) * multiple
    pad = [0] * length
    ids_BS = torch.tensor([(pad + ids)[-length:] if left else (ids + pad)[:length] for ids in rows])
    real_BS = ids_BS != 0
    kind_BS = (ids_BS == model.image_token_id).int() + 2 * (ids_BS == model.video_token_id).int()
    loss_mask_BS = (real_BS & real_BS.roll(-1, 1)).float()
    loss_mask_BS[:, -1] = 0.0
    mtp_mask_BS = loss_mask_BS.roll(-1, 1) * 0.3
    mtp_mask_BS[:, -1] = 0.0
    columns = 3 * model.vision_temporal_patch_size * model.vision_patch_size**2
    b_V, s_V = (kind_BS > 0).nonzero(as_tuple=True)
    return Batch(
        input_ids_BS=ids_BS,
        labels_BS=ids_BS.roll(-1, 1),
        kind_BS=kind_BS,
        position_ids_3BS=positions(model, ids_BS, kind_BS, grids, videos),
        attention_mask_BS=real_BS,
        loss_mask_BS=loss_mask_BS,
        mtp_mask_BS=mtp_mask_BS,
        pixels_PC=torch.randn(sum(h * w for h, w in grids), columns, generator=generator),
        grid_hw=grids,
        row_of_V=s_V * len(samples) + b_V,
    )


def positions(
    model: ModelConfig,
    ids_BS: Tensor,
    kind_BS: Tensor,
    grids: list[tuple[int, int]],
    videos: list[tuple[int, int, int]],
) -> Tensor:
    """transformers' own [3, B, S] position index. A batch has either images, or videos of one sample after them."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    images = grids[: len(grids) - sum(frames for frames, _, _ in videos)]

    class Host:
        config = hf_config(model)
        get_vision_position_ids = Qwen3_5Model.get_vision_position_ids

    positions_3BS, _ = Qwen3_5Model.get_rope_index(
        Host(),
        input_ids=ids_BS,
        mm_token_type_ids=kind_BS,
        image_grid_thw=torch.tensor([[1, h, w] for h, w in images]) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        attention_mask=(ids_BS != 0).long(),
    )
    return positions_3BS
