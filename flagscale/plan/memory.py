"""Memory of the fullest rank, estimated before anything is started. Activations are a rough upper estimate."""

from __future__ import annotations

from flagscale.config.schema import Config
from flagscale.plan.images import assumed_grid
from flagscale.plan.layout import LANGUAGE, VISION, Grid
from flagscale.plan.params import expert_parameters, parameter_counts
from flagscale.plan.plan import BatchPlan, MemoryPlan


def memory_plan(config: Config, modules: dict[str, Grid], batch: BatchPlan) -> MemoryPlan:
    """Bytes on the fullest rank: weights, fp32 gradients, Adam states divided over data parallel ranks, activations."""
    model, language, vision = config.model, modules[LANGUAGE], modules[VISION]
    counts = parameter_counts(model)
    tables = model.vocab_size * model.hidden_size * (2 if model.untie_embeddings_and_output_weights else 1)
    experts = (model.num_layers // language.pp + model.mtp_num_layers) * expert_parameters(model)
    stage = (counts["language"] - tables) // language.pp + tables + counts["mtp"] - experts
    expert_dp = language.tp * language.dp // language.ep
    parts = (
        (stage // language.tp, language.dp, model.freeze_language),
        (experts // language.ep, expert_dp, model.freeze_language),
        (counts["vision"] // vision.tp, vision.dp, model.freeze_vision),
        (counts["merger"] // vision.tp, vision.dp, model.freeze_merger),
    )
    weight_bytes, state_bytes = (2, 12) if config.system.bf16 else (4, 8)
    return MemoryPlan(
        weights=sum(weight_bytes * size for size, _, _ in parts),
        gradients=sum(4 * size for size, _, frozen in parts if not frozen),
        optimizer=sum(state_bytes * size // dp for size, dp, frozen in parts if not frozen),
        activations=_language_activations(config, language, batch) + _vision_activations(config, vision, batch),
    )


def _language_activations(config: Config, language: Grid, batch: BatchPlan) -> int:
    """Saved tensors of a token in a layer: 10 of the hidden size; 3 of the MLP and 4 of the heads divided by TP."""
    model, number = config.model, 2 if config.system.bf16 else 4
    tokens = batch.micro_batch_size * model.seq_length
    heads = max(
        model.num_attention_heads * model.kv_channels, model.linear_num_value_heads * model.linear_value_head_dim
    )
    replicated = 10 * model.hidden_size // (language.tp if model.sequence_parallel else 1)
    mlp = model.ffn_hidden_size + model.moe_shared_expert_intermediate_size
    layer = replicated + (3 * mlp + 4 * heads) // language.tp
    # A token's copies at its experts: input, output and three of the expert's width.
    copies = 2 * model.hidden_size + 3 * model.moe_ffn_hidden_size
    layer += model.moe_router_topk * copies // (language.tp if model.sequence_parallel else 1)
    in_flight = min(language.pp, batch.num_microbatches)
    logits = (1 + model.mtp_num_layers) * 2 * 4 * model.vocab_size // language.tp
    return tokens * (number * layer * -(-model.num_layers // language.pp) * in_flight + logits)


def _vision_activations(config: Config, vision: Grid, batch: BatchPlan) -> int:
    """Saved tensors of the patches of a macro batch, or of one sample's when the backward pass recomputes them."""
    model, number = config.model, 2 if config.system.bf16 else 4
    if model.freeze_vision:
        return 0
    grid_h, grid_w = assumed_grid(config)
    samples = 1 if model.vision_recompute else batch.vision_micro_batch_size
    layer = (
        8 * model.vision_hidden_size + (4 * model.vision_hidden_size + 2 * model.vision_ffn_hidden_size) // vision.tp
    )
    return number * samples * grid_h * grid_w * layer * model.vision_num_layers
