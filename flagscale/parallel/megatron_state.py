"""The one border to Megatron-Core's global parallel state.

The language model's layout is registered there, because parts of Megatron-Core still look groups up globally: the
multi-token-prediction block, the attention gate when TP exceeds the KV groups, the global memory buffer. Everything
else in this project passes groups explicitly. The vision encoder's layout is never registered.
"""

from __future__ import annotations

from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from flagscale.plan.layout import Grid


def initialize(language: Grid, seed: int) -> ProcessGroupCollection:
    """Registers the language layout and seeds Megatron-Core's random number tracker.

    Args:
        language: the language model's grid; it must span the whole world.
        seed: seed of the tracker. Initial weights do not depend on it (see `models.qwen35.weights`).

    Returns:
        The language model's process groups.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=language.tp,
        pipeline_model_parallel_size=language.pp,
        context_parallel_size=language.cp,
        expert_model_parallel_size=language.ep,
        expert_tensor_parallel_size=1,  # experts are narrow: they are dealt to ranks, never split
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return ProcessGroupCollection.use_mpu_process_groups()


def destroy() -> None:
    """Forgets the layout and what routers recorded; the process groups themselves end with torch.distributed.

    The scale of the balancing loss belongs to the schedule that set it. A backward pass outside of one leaves a scale
    of shape [], into which no schedule of a later model in this process could copy its own of shape [1].
    """
    parallel_state.destroy_model_parallel()
    destroy_moe_metrics_tracker()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
