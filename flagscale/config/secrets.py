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
_OF_HOSTS = "experiment.node_envs"
_PLACES = ("experiment.envs", _OF_HOSTS)


def shown(home: str, value: Any) -> Any:
    """The value of a key as it may be shown: variables with secret names are hidden."""
    if not home.startswith(_PLACES):
        return value
    if home == _OF_HOSTS and isinstance(value, Mapping):  # a host's own name makes nothing a secret
        return {host: _shown(variables, is_secret=False) for host, variables in value.items()}
    return _shown(value, is_secret=_is_secret(home.rsplit(".", 1)[-1]))


def _shown(value: Any, *, is_secret: bool) -> Any:
    """What is below a secret name is secret too, however deep."""
    if isinstance(value, Mapping):
        return {name: _shown(below, is_secret=is_secret or _is_secret(str(name))) for name, below in value.items()}
    if isinstance(value, list):
        return [_shown(below, is_secret=is_secret) for below in value]
    return HIDDEN if is_secret else value


def _is_secret(name: str) -> bool:
    return _SECRET.search(name) is not None


def without_secrets(config: Config) -> Config:
    """The configuration as a run's files show it."""
    experiment = config.experiment
    envs, node_envs = (shown(f"experiment.{name}", getattr(experiment, name)) for name in ("envs", "node_envs"))
    return replace(config, experiment=replace(experiment, envs=envs, node_envs=node_envs))
