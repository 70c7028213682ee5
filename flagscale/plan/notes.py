"""Keys that are set but have no effect in the chosen layout, and derived numbers that may surprise."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flagscale.config.loading import Loaded
from flagscale.plan.devices import visible_gpus
from flagscale.plan.plan import ExperimentPlan

Note = Callable[[Loaded, ExperimentPlan], Iterator[str]]
RUNNER_OF_KEY = {
    "hostfile": "ssh", "ssh_options": "ssh", "no_shared_fs": "ssh", "min_nnodes": "ssh", "master_addr": "local",
    "experiment.node_envs": "ssh",
}  # fmt: skip
VISION_LAYOUT_KEYS = ("vision_tensor_model_parallel_size", "vision_micro_batch_size", "vision_balance")


def unified_ignores_vision_layout(loaded: Loaded, plan: ExperimentPlan) -> Iterator[str]:
    """Without a layout of its own the vision encoder follows the language model's."""
    keys = [key for key in VISION_LAYOUT_KEYS if loaded.is_set(f"model.{key}")]
    if plan.layout == "unified" and keys:
        have = "have" if len(keys) > 1 else "has"
        yield f"model.use_mimo=false: {', '.join(keys)} {have} no effect, the vision encoder follows the language grid"


def sequence_parallel_needs_tp(loaded: Loaded, plan: ExperimentPlan) -> Iterator[str]:
    """Sequence parallelism works among tensor parallel ranks."""
    if plan.config.model.sequence_parallel and plan.language.tp == 1:
        yield "model.sequence_parallel=true: no effect with tensor_model_parallel_size 1"


def mtp_weight_needs_mtp(loaded: Loaded, plan: ExperimentPlan) -> Iterator[str]:
    """The weight of a loss that does not exist."""
    if plan.config.model.mtp_num_layers == 0 and loaded.is_set("model.mtp_loss_scaling_factor"):
        yield "model.mtp_loss_scaling_factor: no effect with mtp_num_layers 0"


def frozen_parts_ignore_their_lr(loaded: Loaded, plan: ExperimentPlan) -> Iterator[str]:
    """A frozen part has no learning rate; a frozen encoder has nothing to recompute for."""
    model = plan.config.model
    for frozen, key in (
        ("freeze_vision", "model.optimizer.vision_lr_mult"),
        ("freeze_merger", "model.optimizer.merger_lr_mult"),
        ("freeze_vision", "model.vision_recompute"),
    ):
        if getattr(model, frozen) and loaded.is_set(key):
            yield f"{key}: no effect with {frozen} true"


def builtin_tokenizer_ignores_path(loaded: Loaded, plan: ExperimentPlan) -> Iterator[str]:
    """The built-in tokenizer needs no folder."""
    tokenizer = plan.config.data.tokenizer
    if tokenizer.type == "builtin" and tokenizer.path is not None:
        yield "data.tokenizer.path: no effect with tokenizer.type builtin"


def validation_off(loaded: Loaded, plan: ExperimentPlan) -> Iterator[str]:
    """Validation keys without validation."""
    if plan.config.model.eval_interval is None and loaded.is_set("model.eval_iters"):
        yield "model.eval_iters: no effect with eval_interval null"


def factor_exceeds_step(loaded: Loaded, plan: ExperimentPlan) -> Iterator[str]:
    """A macro batch never reaches beyond its step."""
    batch = plan.batch
    if batch.vit_batch_factor > batch.num_microbatches:
        yield (
            f"vit_batch_factor {batch.vit_batch_factor} exceeds the {batch.num_microbatches} microbatches of a step: "
            f"one vision forward serves {batch.num_microbatches}"
        )


def auto_platform_lacks_gpus(loaded: Loaded, plan: ExperimentPlan) -> Iterator[str]:
    """GPUs are there and stay unused, because processes do not share one."""
    runner = plan.config.experiment.runner
    gpus, processes = 0, runner.nproc_per_node
    if plan.config.system.platform == "auto" and runner.type == "local":
        gpus = visible_gpus()
    if 0 < gpus < processes:
        yield f"system.platform=auto: {processes} processes and {gpus} visible GPUs, so the run is on the CPU"


def runner_keys_of_other_runners(loaded: Loaded, plan: ExperimentPlan) -> Iterator[str]:
    """Keys that only another runner reads."""
    runner = plan.config.experiment.runner
    for home in loaded.history:
        key = home.removeprefix("experiment.runner.")
        wanted = "slurm" if key.startswith("slurm.") else RUNNER_OF_KEY.get(key, RUNNER_OF_KEY.get(home))
        if wanted is not None and runner.type != wanted:
            yield f"{home}: no effect with runner.type {runner.type}, only with {wanted}"
    if runner.type == "slurm" and loaded.is_set("experiment.runner.stop_grace"):
        yield "experiment.runner.stop_grace: no effect with runner.type slurm, whose own KillWait it is"
    if runner.type == "ssh" and runner.min_nnodes is not None and not runner.max_restarts:
        yield "experiment.runner.min_nnodes: no effect with max_restarts 0"


def buckets_need_overlap(loaded: Loaded, plan: ExperimentPlan) -> Iterator[str]:
    """Without overlap a module's gradients are reduced as a whole."""
    system = plan.config.system
    if system.overlap_grad_reduce is False and loaded.is_set("system.ddp_bucket_size"):
        yield "system.ddp_bucket_size: no effect with overlap_grad_reduce false"


def data_keys_without_effect(loaded: Loaded, plan: ExperimentPlan) -> Iterator[str]:
    """Keys that packing or the list of sources makes idle, and a number that packing changes."""
    data = plan.config.data
    if data.language_balance and data.packing == "none":
        yield "data.language_balance: no effect with packing none, where every row is padded to seq_length"
    if data.packing != "none" and loaded.is_set("system.cuda_graph") and plan.config.system.cuda_graph:
        yield f"system.cuda_graph: no effect with packing {data.packing}, whose rows differ in length"
    if data.packing == "length_budget":
        count = plan.batch.num_microbatches
        yield f"data.packing=length_budget: the microbatches of a step follow from its lengths, {count} at most"
    if data.sources and data.train_path is not None:
        yield "data.train_path: no effect with data.sources"


NOTES: tuple[Note, ...] = (
    unified_ignores_vision_layout,
    sequence_parallel_needs_tp,
    mtp_weight_needs_mtp,
    frozen_parts_ignore_their_lr,
    builtin_tokenizer_ignores_path,
    validation_off,
    factor_exceeds_step,
    data_keys_without_effect,
    buckets_need_overlap,
    auto_platform_lacks_gpus,
    runner_keys_of_other_runners,
)


def notes(loaded: Loaded, plan: ExperimentPlan) -> list[str]:
    """Everything to tell the user once, beside the plan."""
    return loaded.notes + [text for note in NOTES for text in note(loaded, plan)]
