"""Ranks that do not see one folder are told before they train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from flagscale.config.errors import UserError
from flagscale.train.shared import require_shared
from tests.dist.pool import run_ranks


def check(folder: Path) -> None:
    require_shared(folder / "one")
    own = folder / f"own{dist.get_rank()}"
    if dist.get_rank() == 0:
        require_shared(own)
        return
    with pytest.raises(UserError, match="rank 1 does not see the folder of rank 0"):
        require_shared(own)


def test_shared_and_separate_folders(tmp_path: Path) -> None:
    run_ranks(2, check, tmp_path)
    assert list((tmp_path / "one").iterdir()) == [], "no trace"
