"""Configuration -> checks -> plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from flagscale.config.errors import ConfigError, raise_all
from flagscale.config.loading import Loaded, located
from flagscale.config.rules import field_errors
from flagscale.config.schema import Config
from flagscale.plan.batch import batch_plan, grids_of, layout_of, world_size_of
from flagscale.plan.flops import encoder_flops, language_flops, merger_flops, mtp_flops, training_factors
from flagscale.plan.images import assumed_grid
from flagscale.plan.memory import memory_plan
from flagscale.plan.params import parameter_counts
from flagscale.plan.plan import ExperimentPlan, ModuleCost
from flagscale.plan.rules import world_errors

RenderCommand = Callable[[Config, Path], list[str]]
"""(configuration, experiment folder) -> the command that starts the processes. The runner has it, and imports plans."""


def checked_plan(loaded: Loaded, render_command: RenderCommand | None = None) -> ExperimentPlan:
    """The plan of a loaded configuration that breaks no rule.

    Raises:
        ConfigError, UserErrors: all rules that are broken, each with the place where its value was written.
    """
    errors = [*field_errors(loaded.config), *world_errors(loaded.config), *_errors_of_restarts(loaded.config)]
    raise_all([located(error, loaded.history) for error in errors])
    return make_plan(loaded.config, render_command)


def plan_on_nodes(config: Config, nnodes: int, render_command: RenderCommand) -> ExperimentPlan:
    """The plan of a restart on `nnodes` machines.

    Raises:
        ConfigError, UserErrors: the configuration breaks a rule with that many.
    """
    fewer = _with_nodes(config, nnodes)
    raise_all(world_errors(fewer))
    return make_plan(fewer, render_command)


def _errors_of_restarts(config: Config) -> Iterator[ConfigError]:
    """What a restart with the fewest machines allowed would break."""
    fewest = config.experiment.runner.min_nnodes
    if fewest is not None and fewest < config.experiment.runner.nnodes:
        for error in world_errors(_with_nodes(config, fewest)):
            yield ConfigError(
                "experiment.runner.min_nnodes",
                fewest,
                f"a restart with {fewest} nodes breaks a rule: {error}",
                "raise min_nnodes, or choose sizes that fit both numbers of nodes",
            )


def _with_nodes(config: Config, nnodes: int) -> Config:
    runner = replace(config.experiment.runner, nnodes=nnodes)
    return replace(config, experiment=replace(config.experiment, runner=runner))


def make_plan(config: Config, render_command: RenderCommand | None = None) -> ExperimentPlan:
    """The plan of a configuration that is known to break no rule; without `render_command` it has no command."""
    modules = grids_of(config)
    batch = batch_plan(config, modules)
    return ExperimentPlan(
        config=config,
        layout=layout_of(config),
        world_size=world_size_of(config),
        modules=modules,
        batch=batch,
        costs=_costs(config),
        memory=memory_plan(config, modules, batch),
        command=tuple(render_command(config, Path(config.experiment.exp_dir)) if render_command else ()),
    )


def _costs(config: Config) -> dict[str, ModuleCost]:
    """Parameters and FLOPs of a step of each part, with one image of the assumed size in every sample."""
    model = config.model
    grid_h, grid_w = assumed_grid(config)
    samples = model.global_batch_size
    forward = {
        "vision": samples * encoder_flops(model, grid_h * grid_w),
        "merger": samples * merger_flops(model, grid_h * grid_w),
        "language": language_flops(model, samples, model.seq_length),
        "mtp": mtp_flops(model, samples, model.seq_length),
    }
    factors, counts = training_factors(model), parameter_counts(model)
    return {
        part: ModuleCost(parameters=counts[part], flops_per_step=factors[part] * flops)
        for part, flops in forward.items()
    }
