"""What a user can change after a run has ended badly: keys with their values, for the place where it ended."""

from __future__ import annotations

from flagscale.config.schema import Config

VISION_PHASES = ("vision_forward", "vision_backward", "exchange")
LANGUAGE_PHASES = ("language",)


def memory_advice(config: Config, phase: str) -> str:
    """Keys that lower memory, those of the phase (a `PhaseClock` name, or another text) first."""
    vision, language, states = _vision_keys(config), _language_keys(config), _state_keys(config)
    if phase in VISION_PHASES:
        chosen = [*vision, *states]
    elif phase in LANGUAGE_PHASES:
        # What the encoder keeps for its backward pass lies beside the language model's activations.
        chosen = [*language, *vision, *states]
    else:
        chosen = [*states, *language]
    return "; ".join(chosen)


def peer_advice(config: Config) -> str:
    """What shows why a connection was lost, and what goes on after it."""
    restarts = config.experiment.runner.max_restarts
    chosen = [] if restarts else ["set experiment.runner.max_restarts to start again from the newest checkpoint"]
    if config.system.checkpoint.save_interval is None:
        chosen.append("set system.checkpoint.save_interval (now null) to have one")
    if config.system.platform != "cpu":
        chosen.append("experiment.envs={NCCL_DEBUG: INFO} shows how NCCL connects")
    return "; ".join(chosen)


def reader_advice(config: Config) -> str:
    """What gives the processes that read ahead room, or does without them."""
    workers, prefetch = config.data.workers, config.data.prefetch
    return (
        f"enlarge /dev/shm (docker run --shm-size), where {prefetch} macro batches a rank must fit, or lower "
        f"data.prefetch (now {prefetch}); if the host ran out of memory, lower data.workers (now {workers}); "
        "data.workers=0 reads in a thread of the trainer"
    )


def divergence_advice(config: Config) -> str:
    """Keys that keep values finite."""
    keys = config.model.optimizer
    chosen = [
        f"lower model.optimizer.lr (now {keys.lr:g})",
        f"raise model.optimizer.lr_warmup_iters (now {keys.lr_warmup_iters})",
    ]
    if keys.clip_grad == 0:
        chosen.append("set model.optimizer.clip_grad (now 0, off)")
    if config.system.bf16:
        chosen.append("system.bf16=false shows whether precision is the cause")
    chosen.append(f"model.optimizer.max_skipped_steps (now {keys.max_skipped_steps}) is how many steps may be skipped")
    return "; ".join(chosen)


def _vision_keys(config: Config) -> list[str]:
    model = config.model
    chosen = []
    if model.use_mimo:
        chosen.append(f"lower model.vision_micro_batch_size (now {model.vision_micro_batch_size})")
    else:
        chosen.append(f"lower model.micro_batch_size (now {model.micro_batch_size})")
    if not model.vision_recompute and not (model.freeze_vision and model.freeze_merger):
        chosen.append("set model.vision_recompute=true")
    chosen.append(f"lower data.max_pixels (now {config.data.max_pixels})")
    return chosen


def _language_keys(config: Config) -> list[str]:
    model = config.model
    return [
        f"lower model.micro_batch_size (now {model.micro_batch_size})",
        f"lower model.seq_length (now {model.seq_length})",
    ]


def _state_keys(config: Config) -> list[str]:
    """Weights, gradients and optimizer states."""
    model = config.model
    chosen = [f"raise model.tensor_model_parallel_size (now {model.tensor_model_parallel_size})"]
    if not config.system.bf16:
        chosen.append("set system.bf16=true")
    return chosen
