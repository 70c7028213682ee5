"""What the launcher writes into the experiment folder before processes start."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from flagscale.config.errors import ConfigError
from flagscale.config.secrets import without_secrets
from flagscale.plan.plan import ExperimentPlan


def save_run_files(plan: ExperimentPlan) -> list[Path]:
    """Write `config.yaml`, the resolved configuration, and `plan.json`; each whole or not at all. Returns the files.

    Raises:
        ConfigError: when the folder cannot be written.
    """
    from omegaconf import OmegaConf

    config = without_secrets(plan.config)
    config_file, plan_file = plan.exp_dir / "config.yaml", plan.exp_dir / "plan.json"
    try:
        plan.exp_dir.mkdir(parents=True, exist_ok=True)
        temporary = config_file.with_name(f".config.yaml.{os.getpid()}")
        temporary.write_text(OmegaConf.to_yaml(dataclasses.asdict(config)), encoding="utf-8")
        temporary.replace(config_file)
        dataclasses.replace(plan, config=config).save(plan_file)
    except OSError as error:
        raise ConfigError(
            "experiment.exp_dir",
            str(plan.exp_dir),
            f"cannot be written ({error.strerror or error})",
            "choose a folder that you can write",
        ) from error
    return [config_file, plan_file]
