"""Batch arithmetic: how a global batch falls into microbatches and macro batches."""

from __future__ import annotations

from fractions import Fraction

from flagscale.config.schema import Config
from flagscale.plan.layout import LANGUAGE, VISION, Grid
from flagscale.plan.plan import BatchPlan, Layout


def world_size_of(config: Config) -> int:
    """Processes of the job."""
    return config.experiment.runner.nnodes * config.experiment.runner.nproc_per_node


def layout_of(config: Config) -> Layout:
    """Colocated when the vision encoder has a layout of its own."""
    return "colocated" if config.model.use_mimo else "unified"


def grids_of(config: Config) -> dict[str, Grid]:
    """The grid of each module, for a world size that the parallel degrees divide.

    Unified with pipeline stages: the vision encoder lives on the ranks of the first stage.
    """
    model, world = config.model, world_size_of(config)
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    language = Grid(tp=tp, pp=pp, dp=world // (tp * pp), ep=model.expert_model_parallel_size)
    if layout_of(config) == "unified":
        return {VISION: Grid(tp=tp, dp=language.dp), LANGUAGE: language}
    vision_tp = model.vision_tensor_model_parallel_size
    return {VISION: Grid(tp=vision_tp, dp=world // vision_tp), LANGUAGE: language}


def vit_batch_ratio(config: Config, modules: dict[str, Grid]) -> Fraction:
    """(vision_dp * vision_micro_batch_size) / (language_dp * micro_batch_size), which the rules want whole."""
    model = config.model
    return Fraction(modules[VISION].dp * model.vision_micro_batch_size, modules[LANGUAGE].dp * model.micro_batch_size)


def batch_plan(config: Config, modules: dict[str, Grid]) -> BatchPlan:
    """The batch plan of a configuration that passed the rules.

    Unified: a vision forward a microbatch, or one a step when the language model has pipeline stages, because
    the pipeline schedule takes all microbatches in one call.
    """
    model = config.model
    num_microbatches = model.global_batch_size // (model.micro_batch_size * modules[LANGUAGE].dp)
    if layout_of(config) == "colocated":
        factor = int(vit_batch_ratio(config, modules))
        vision_micro_batch_size = model.vision_micro_batch_size
    else:
        factor = 1 if modules[LANGUAGE].pp == 1 else num_microbatches
        vision_micro_batch_size = factor * model.micro_batch_size
    return BatchPlan(
        micro_batch_size=model.micro_batch_size,
        vision_micro_batch_size=vision_micro_batch_size,
        global_batch_size=model.global_batch_size,
        vit_batch_factor=factor,
        num_microbatches=num_microbatches,
        macro_batches=macro_batches(num_microbatches, factor),
    )


def macro_batches(num_microbatches: int, factor: int) -> tuple[int, ...]:
    """Sizes of the macro batches of a step, e.g. 6 microbatches with factor 4 -> (4, 2)."""
    whole, rest = divmod(num_microbatches, factor)
    return (factor,) * whole + ((rest,) if rest else ())
