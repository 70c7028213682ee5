"""Variables whose values are nobody's business.

They reach the launch scripts, which only their owner reads, and neither the terminal nor the other files of a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flagscale.config.schema import Config

HIDDEN = "<hidden>"
_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_PLACES = ("experiment.envs", "experiment.node_envs")


def shown(home: str, value: Any) -> Any:
    """The value of a key as it may be shown: variables with secret names are hidden."""
    if not home.startswith(_PLACES):
        return value
    if isinstance(value, Mapping):
        return {name: shown(f"{home}.{name}", below) for name, below in value.items()}
    return HIDDEN if _SECRET.search(home.rsplit(".", 1)[-1]) else value


def without_secrets(config: Config) -> Config:
    """The configuration as a run's files show it."""
    experiment = config.experiment
    envs, node_envs = (shown(f"experiment.{name}", getattr(experiment, name)) for name in ("envs", "node_envs"))
    return replace(config, experiment=replace(experiment, envs=envs, node_envs=node_envs))
