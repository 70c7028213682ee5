"""The set-up's search for an interpreter: one that runs, not one that is merely there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "find_python.sh"


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def search(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The script with nothing but `tmp_path/bin` on PATH and `tmp_path/pyenv` as pyenv's folder."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("ls", "cat"):
        if not (tools / name).exists():
            (tools / name).symlink_to(f"/bin/{name}")
    environment = {"PATH": str(tools), "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "pyenv")}
    return subprocess.run(["/bin/bash", str(SCRIPT)], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def real() -> str:
    """What runs this test, outside of its virtual environment."""
    return os.path.realpath(sys.executable)


def test_nothing_found_says_what_to_install(tmp_path: Path) -> None:
    answer = search(tmp_path)
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert all(word in answer.stderr for word in ("apt-get install python3.12", "pyenv install", "uv python install"))


def test_name_that_does_not_run_is_passed_over(tmp_path: Path, real: str) -> None:
    program(tmp_path / "bin", "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    program(tmp_path / "bin", "python3", f'exec {real} "$@"')
    answer = search(tmp_path)
    assert (answer.returncode, os.path.realpath(answer.stdout.strip())) == (0, real)


def test_too_old_is_passed_over(tmp_path: Path) -> None:
    program(tmp_path / "bin", "python3", "exit 1")
    assert search(tmp_path).returncode == 1


def test_pyenvs_and_uvs_are_found(tmp_path: Path, real: str) -> None:
    program(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin", "python", f'exec {real} "$@"')
    assert os.path.realpath(search(tmp_path).stdout.strip()) == real
    (tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python").unlink()
    program(tmp_path / "bin", "uv", f"echo {real}")
    assert os.path.realpath(search(tmp_path).stdout.strip()) == real
