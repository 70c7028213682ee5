"""Settings common to all tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

# Before anything imports torch: test processes share few cores, and thread pools that compete for them stall.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from flagscale.light import light_imports

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker of `make test` imports all tests, and what they need
    with light_imports():
        import flagscale.train.loop  # noqa: F401
    gc.disable()

# A property is about values, not about how long a shared machine takes over one example.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

_SLOW = ("bench", "checkpoint", "dist", "models", "runner")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of the slow folders first, by name, which mixes those that compute with those that wait for processes:
    the workers of `make test` take files in this order, and none is left with a slow one at the end."""
    here = Path(__file__).parent
    items.sort(key=lambda item: (item.path.relative_to(here).parts[0] not in _SLOW, item.path.name))


def pytest_collection_finish() -> None:
    """Garbage is looked for again, but not among what has been imported."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
