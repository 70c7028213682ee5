"""Rules that need the world size, the machine or the run folder: one small function a rule.

They come in two stages, because the grids exist only when the parallel degrees divide the world: `DEGREE_RULES`, then
`GRID_RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from flagscale.config.errors import ConfigError
from flagscale.config.schema import Config, ModelConfig
from flagscale.plan.batch import grids_of, layout_of, vit_batch_ratio, world_size_of
from flagscale.plan.devices import visible_gpus
from flagscale.plan.images import CHAT_TOKENS, largest_image_tokens, largest_max_pixels
from flagscale.plan.layout import LANGUAGE, VISION, Grid
from flagscale.plan.pretrained import pretrained_weights_fit
from flagscale.plan.previous import architecture_differences

DegreeRule = Callable[[Config], Iterator[ConfigError]]
GridRule = Callable[[Config, dict[str, Grid]], Iterator[ConfigError]]
MOST_LISTED = 1_000_000


def world_holds_language_replicas(config: Config) -> Iterator[ConfigError]:
    """The world is a whole number of language replicas."""
    model, world = config.model, world_size_of(config)
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    if world % (tp * pp):
        yield ConfigError(
            "model.tensor_model_parallel_size",
            tp,
            f"tensor {tp} x pipeline {pp} = {tp * pp} ranks must divide the world size {world} "
            f"(nnodes {config.experiment.runner.nnodes} x nproc_per_node {config.experiment.runner.nproc_per_node})",
            f"change the degrees, or nproc_per_node to a multiple of {tp * pp}",
        )


def world_holds_vision_replicas(config: Config) -> Iterator[ConfigError]:
    """The world is a whole number of vision replicas."""
    tp, world = config.model.vision_tensor_model_parallel_size, world_size_of(config)
    if layout_of(config) == "colocated" and world % tp:
        yield ConfigError(
            "model.vision_tensor_model_parallel_size",
            tp,
            f"must divide the world size {world}",
            _use([n for n in range(1, world + 1) if world % n == 0], tp),
        )


def language_tp_divides_the_model(config: Config) -> Iterator[ConfigError]:
    """Tensor parallelism splits heads, MLP width and vocabulary evenly; KV groups may also be repeated."""
    model, tp = config.model, config.model.tensor_model_parallel_size
    for name in _language_split_names(model):
        size = getattr(model, name)
        if size % tp:
            fits = [
                n for n in range(1, size + 1) if all(getattr(model, s) % n == 0 for s in _language_split_names(model))
            ]
            yield ConfigError("model.tensor_model_parallel_size", tp, f"must divide {name} {size}", _use(fits, tp))
    groups = model.num_query_groups
    if groups % tp and tp % groups:
        yield ConfigError(
            "model.tensor_model_parallel_size",
            tp,
            f"must divide num_query_groups {groups}, or be a multiple of it",
            _use([n for n in range(1, 2 * tp) if groups % n == 0 or n % groups == 0], tp),
        )


def vision_tp_divides_the_encoder(config: Config) -> Iterator[ConfigError]:
    """The vision encoder's tensor parallelism splits its heads, MLP width and the merger evenly."""
    model = config.model
    unified = layout_of(config) == "unified"
    key = "tensor_model_parallel_size" if unified else "vision_tensor_model_parallel_size"
    tp = getattr(model, key)
    for name in ("vision_num_attention_heads", "vision_ffn_hidden_size"):
        size = getattr(model, name)
        if size % tp:
            fits = [
                n
                for n in range(1, size + 1)
                if model.vision_num_attention_heads % n == 0 and model.vision_ffn_hidden_size % n == 0
            ]
            why = ", which the vision encoder follows with use_mimo false" if unified else ""
            yield ConfigError(f"model.{key}", tp, f"must divide {name} {size}{why}", _use(fits, tp))


def pipeline_divides_layers(config: Config) -> Iterator[ConfigError]:
    """Every pipeline stage holds the same number of decoder layers."""
    layers, pp = config.model.num_layers, config.model.pipeline_model_parallel_size
    if layers % pp:
        yield ConfigError(
            "model.pipeline_model_parallel_size",
            pp,
            f"must divide num_layers {layers}",
            _use([n for n in range(1, layers + 1) if layers % n == 0], pp),
        )


def experts_fall_on_ranks(config: Config) -> Iterator[ConfigError]:
    """Every expert parallel rank holds as many experts, and a pipeline stage is a whole number of groups."""
    model, ep = config.model, config.model.expert_model_parallel_size
    stage = world_size_of(config) // model.pipeline_model_parallel_size
    if model.num_experts and (model.num_experts % ep or stage % ep):
        yield ConfigError(
            "model.expert_model_parallel_size",
            ep,
            f"must divide num_experts {model.num_experts} and the {stage} ranks of a pipeline stage",
            _use([n for n in range(1, stage + 1) if model.num_experts % n == 0 and stage % n == 0], ep),
        )


def sequence_parallel_divides_the_sequence(config: Config) -> Iterator[ConfigError]:
    """Sequence parallelism gives every tensor parallel rank an equal share of a sequence."""
    model, tp = config.model, config.model.tensor_model_parallel_size
    if model.sequence_parallel and model.seq_length % tp:
        yield ConfigError(
            "model.seq_length",
            model.seq_length,
            f"must be a multiple of tensor_model_parallel_size {tp} with sequence_parallel",
            f"use {model.seq_length // tp * tp or tp} or {(model.seq_length // tp + 1) * tp}",
        )


def images_fit_the_sequence(config: Config) -> Iterator[ConfigError]:
    """The largest image allowed, with a minimum of text, fits a sample."""
    tokens, seq_length = largest_image_tokens(config), config.model.seq_length
    if tokens + CHAT_TOKENS > seq_length:
        fits = largest_max_pixels(config)
        remedy = f"raise seq_length to {tokens + CHAT_TOKENS}"
        if fits >= config.data.min_pixels:
            remedy += f" or lower data.max_pixels to {fits}"
        yield ConfigError(
            "model.seq_length",
            seq_length,
            f"is too short for an image of data.max_pixels {config.data.max_pixels}: {tokens} tokens and {CHAT_TOKENS} "
            f"of text are {tokens + CHAT_TOKENS}",
            remedy,
        )


def processes_have_gpus(config: Config) -> Iterator[ConfigError]:
    """Every process of a machine has a GPU of its own on the cuda platform."""
    runner = config.experiment.runner
    if config.system.platform != "cuda" or runner.type != "local":
        return  # other machines are asked by the ssh runner's preflight, and by Slurm
    gpus = visible_gpus()
    if runner.nproc_per_node > gpus:
        yield ConfigError(
            "experiment.runner.nproc_per_node",
            runner.nproc_per_node,
            f"must be at most the number of visible GPUs, {gpus}",
            f"use {gpus}" if gpus else "set system.platform to cpu or auto",
        )


def exp_dir_holds_this_model(config: Config) -> Iterator[ConfigError]:
    """A run is continued only with the model it was started with."""
    exp_dir = Path(config.experiment.exp_dir)
    differences = architecture_differences(config, exp_dir)
    if differences:
        shown = ", ".join(f"{name} {old} there and {new} here" for name, (old, new) in list(differences.items())[:3])
        yield ConfigError(
            "experiment.exp_dir",
            str(exp_dir),
            f"holds a run of another model ({shown})",
            "choose another exp_dir, or remove that run",
        )


def global_batch_is_whole(config: Config, modules: dict[str, Grid]) -> Iterator[ConfigError]:
    """The global batch is a whole number of microbatches on every language replica."""
    model, dp = config.model, modules[LANGUAGE].dp
    unit = model.micro_batch_size * dp
    if model.global_batch_size % unit:
        below = model.global_batch_size // unit * unit
        yield ConfigError(
            "model.global_batch_size",
            model.global_batch_size,
            f"must be a multiple of micro_batch_size {model.micro_batch_size} x data parallel {dp} = {unit}",
            f"use {f'{below} or ' if below else ''}{below + unit}",
        )


def plan_can_be_listed(config: Config, modules: dict[str, Grid]) -> Iterator[ConfigError]:
    """The plan names every rank and macro batch; a few zeros too many would fill the memory before anything is said."""
    world, model = world_size_of(config), config.model
    microbatches = model.global_batch_size // (model.micro_batch_size * modules[LANGUAGE].dp)
    if world > MOST_LISTED:
        nproc = config.experiment.runner.nproc_per_node
        yield ConfigError(
            "experiment.runner.nproc_per_node",
            nproc,
            f"the world size {world} must be at most {MOST_LISTED}",
            "use the processes that a machine has GPUs for",
        )
    if microbatches > MOST_LISTED:
        yield ConfigError(
            "model.global_batch_size",
            model.global_batch_size,
            f"the {microbatches} microbatches of a step must be at most {MOST_LISTED}",
            "lower it, or raise micro_batch_size",
        )


def vit_batch_factor_is_whole(config: Config, modules: dict[str, Grid]) -> Iterator[ConfigError]:
    """A vision forward serves a whole number of language microbatches."""
    if layout_of(config) != "colocated":
        return
    model, ratio = config.model, vit_batch_ratio(config, modules)
    if ratio.denominator == 1:
        return
    vision_dp, language_dp = modules[VISION].dp, modules[LANGUAGE].dp
    needed = language_dp * model.micro_batch_size
    step = needed // math.gcd(needed, vision_dp)  # smallest vision_micro_batch_size with a whole factor
    below = model.vision_micro_batch_size // step * step
    choices = [below, below + step] if below else [step, 2 * step]
    yield ConfigError(
        "model.vision_micro_batch_size",
        model.vision_micro_batch_size,
        f"vit_batch_factor = (vision dp {vision_dp} x vision_micro_batch_size {model.vision_micro_batch_size}) / "
        f"(language dp {language_dp} x micro_batch_size {model.micro_batch_size}) = {float(ratio):g} must be a whole "
        "number of at least 1",
        "use vision_micro_batch_size "
        + " or ".join(f"{size} (factor {vision_dp * size // needed})" for size in choices),
    )


DEGREE_RULES: tuple[DegreeRule, ...] = (
    world_holds_language_replicas,
    world_holds_vision_replicas,
    language_tp_divides_the_model,
    vision_tp_divides_the_encoder,
    pipeline_divides_layers,
    experts_fall_on_ranks,
    sequence_parallel_divides_the_sequence,
    images_fit_the_sequence,
    processes_have_gpus,
    exp_dir_holds_this_model,
    pretrained_weights_fit,
)
GRID_RULES: tuple[GridRule, ...] = (global_batch_is_whole, plan_can_be_listed, vit_batch_factor_is_whole)


def world_errors(config: Config) -> list[ConfigError]:
    """Violations of the rules that need the world size; those about grids only when the grids exist."""
    errors = [error for rule in DEGREE_RULES for error in rule(config)]
    if any(True for rule in (world_holds_language_replicas, world_holds_vision_replicas) for _ in rule(config)):
        return errors
    return errors + [error for rule in GRID_RULES for error in rule(config, grids_of(config))]


def _language_split_names(model: ModelConfig) -> tuple[str, ...]:
    gdn = ("linear_num_key_heads", "linear_num_value_heads") if model.full_attention_interval > 1 else ()
    mlp = "moe_shared_expert_intermediate_size" if model.num_experts else "ffn_hidden_size"
    return ("num_attention_heads", *gdn, mlp, "vocab_size")


def _use(fits: list[int], near: int) -> str:
    """The remedy that names the values nearest to the one given, out of those that fit."""
    return f"use {' or '.join(str(n) for n in sorted(sorted(fits, key=lambda n: (abs(n - near), n))[:2]))}"
