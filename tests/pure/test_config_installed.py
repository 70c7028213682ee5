"""The package as pip installs it, outside the checkout: shipped YAML is found, paths start at the user's files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flagscale.config.layers import shipped_folder
from flagscale.config.loading import load

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder into which pip has installed the package from a copy of the checkout."""
    source, target = tmp_path / "source", tmp_path / "site-packages"
    for name in ("flagscale", "configs"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(CHECKOUT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(target)]
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
    done = subprocess.run([*pip, *offline, str(source)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert (target / "flagscale/_configs/qwen35_mimo.yaml").is_file()
    return target


def run(site: Path, cwd: Path, *arguments: str, action: str = "dryrun") -> subprocess.CompletedProcess[str]:
    """The installed program, started in `cwd`."""
    program = "import sys; from flagscale.run import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, f"action={action}", *arguments],
        capture_output=True, text=True, cwd=cwd, timeout=120, check=False, env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip


def test_an_installed_package_needs_no_checkout(site: Path, tmp_path: Path) -> None:
    user, elsewhere = tmp_path / "user", tmp_path / "elsewhere"
    (user / "conf").mkdir(parents=True)
    elsewhere.mkdir()
    (user / "pyproject.toml").touch()
    (user / "conf/mine.yaml").write_text("model: {global_batch_size: 16}\ndata: {valid_path: here.jsonl}\n")
    (user / "here.jsonl").write_text("{}\n")
    (user / "data/digits").mkdir(parents=True)
    (user / "data/digits/train.jsonl").write_text("{}\n")

    mine = ("--config-path", str(user / "conf"), "--config-name", "mine")
    done = run(site, elsewhere, *mine)
    assert done.returncode == 0, done.stderr
    plan = json.loads((user / "outputs/qwen35_mimo/plan.json").read_text())
    assert plan["config"]["data"]["train_path"] == str(user / "data/digits/train.jsonl")
    assert plan["config"]["data"]["valid_path"] == str(user / "here.jsonl")
    assert str(site / "flagscale/train/megatron/train_qwen35.py") in plan["command"]

    alone = run(site, elsewhere, "--config-name", "qwen35_mimo")
    assert alone.returncode == 2
    assert str(elsewhere / "data/digits/train.jsonl") in alone.stderr
    assert "Traceback" not in alone.stderr

    (user / "rank.py").write_text("import os, flagscale\nprint(flagscale.__file__, 'from', os.getcwd())\n")
    done = run(site, elsewhere, *mine, f"experiment.task.entrypoint={user}/rank.py", action="run")
    assert done.returncode == 0, done.stdout + done.stderr
    said = {(user / f"outputs/qwen35_mimo/logs/rank{rank}.out").read_text() for rank in range(4)}
    assert said == {f"{site}/flagscale/__init__.py from {elsewhere}\n"}, "the ranks find the installed package"


@pytest.mark.parametrize("path", sorted((CHECKOUT / "examples").rglob("conf/*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_composes_and_breaks_no_rule_but_missing_data(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with the GPUs it asks for; tokenizer and data are the user's."""
    from flagscale.config.rules import field_errors
    from flagscale.plan.rules import world_errors

    monkeypatch.setattr("flagscale.plan.rules.visible_gpus", lambda: 8)
    loaded = load(path.stem, path.parent)
    errors = [*field_errors(loaded.config), *world_errors(loaded.config)]
    assert [str(error) for error in errors if not error.key.endswith("path")] == []
    assert Path(loaded.config.experiment.exp_dir).name == path.stem, "a recipe writes into a folder of its own name"


def test_the_shipped_groups() -> None:
    assert {path.name for path in shipped_folder().iterdir() if path.is_dir()} == {
        "data",
        "model",
        "optimizer",
        "runner",
    }
