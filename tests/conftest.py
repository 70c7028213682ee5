"""Settings common to all tests."""

from __future__ import annotations

import os

# Before anything imports torch: test processes share few cores, and thread pools that compete for them stall.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# A property is about values, not about how long a shared machine takes over one example.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
