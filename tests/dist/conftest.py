"""Data sets that several multi-rank tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.helpers import write_mixture


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with 0 to 3 images of various sizes, every image a file of its own."""
    folder = tmp_path_factory.mktemp("mixture")
    write_mixture(folder, 40)
    write_mixture(folder, 16, "valid.jsonl", seed=1)
    return folder
