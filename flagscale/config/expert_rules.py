"""Rules about the keys of mixture-of-experts models, before the world size is looked at."""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.config.errors import ConfigError
from flagscale.config.schema import Config

EXPERT_KEYS = ("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")


def mlp_is_dense_or_experts(config: Config) -> Iterator[ConfigError]:
    """A layer has either a dense MLP or experts, and what it has is described completely."""
    model = config.model
    if not model.num_experts:
        if not model.ffn_hidden_size:
            yield ConfigError(
                "model.ffn_hidden_size", 0, "must be at least 1 in a model without experts", "set it, or num_experts"
            )
        for name in (*EXPERT_KEYS, "expert_model_parallel_size"):
            value, without = getattr(model, name), 1 if name == "expert_model_parallel_size" else 0
            if value != without:
                yield ConfigError(
                    f"model.{name}",
                    value,
                    "has no effect with num_experts 0",
                    f"set num_experts, or {name} to {without}",
                )
        return
    if model.ffn_hidden_size:
        yield ConfigError(
            "model.ffn_hidden_size",
            model.ffn_hidden_size,
            f"has no effect with num_experts {model.num_experts}",
            "set it to 0; the experts' widths are moe_ffn_hidden_size and moe_shared_expert_intermediate_size",
        )
    for name in EXPERT_KEYS:
        if not getattr(model, name):
            yield ConfigError(f"model.{name}", 0, f"must be at least 1 with num_experts {model.num_experts}", "set it")


def token_goes_to_existing_experts(config: Config) -> Iterator[ConfigError]:
    """There are as many experts as a token goes to; with one, normalised weights would not train the router."""
    model = config.model
    if model.num_experts and model.moe_router_topk and not 2 <= model.moe_router_topk <= model.num_experts:
        yield ConfigError(
            "model.moe_router_topk",
            model.moe_router_topk,
            f"must be at least 2 and at most num_experts {model.num_experts}",
            f"use 2 to {model.num_experts}",
        )


def experts_need_sequence_parallel(config: Config) -> Iterator[ConfigError]:
    """With tensor parallelism every rank routes tokens of its own, or each token would be routed several times."""
    model = config.model
    if model.num_experts and model.tensor_model_parallel_size > 1 and not model.sequence_parallel:
        yield ConfigError(
            "model.sequence_parallel",
            False,
            f"must be true with num_experts {model.num_experts} and tensor_model_parallel_size "
            f"{model.tensor_model_parallel_size}",
            "set it to true, or tensor_model_parallel_size to 1",
        )


EXPERT_RULES = (mlp_is_dense_or_experts, token_goes_to_existing_experts, experts_need_sequence_parallel)
