"""How a rank tells the launcher that the user, not the program, has to change something."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flagscale.config.errors import UserError


def report_user_error(exp_dir: Path, rank: int, error: UserError) -> None:
    """Writes logs/user-error.json, which the launcher shows instead of a traceback; the first rank's stays."""
    target = exp_dir / "logs" / "user-error.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    try:
        with target.open("x") as file:
            json.dump({"rank": rank, "message": str(error)}, file)
    except FileExistsError:
        pass  # another rank was first
