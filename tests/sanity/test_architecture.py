"""Greps that keep the architecture: import directions, no torch in the launcher, one border file, sizes, no prints."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "flagscale").rglob("*.py"))
PROJECT = [*SOURCES, ROOT / "run.py", *sorted((ROOT / "tools").rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]
TORCH_FREE = ("config", "plan", "runner")
HEAVY = {"torch", "megatron", "transformers", "numpy", "pyarrow", "datasets", "wandb"}

# What a package of flagscale may import from the others; `flagscale.run` and the package itself may import all.
ALLOWED = {
    "config": set(),
    "plan": {"config"},
    "runner": {"config", "plan"},
    "platforms": {"config", "plan"},
    "data": {"config", "plan"},
    "models": {"config", "plan", "platforms"},
    "parallel": {"config", "plan", "platforms", "models", "data"},
    "train": {"config", "plan", "platforms", "parallel", "models", "data"},
}
# Launcher output; and the rank's message about a user's mistake, which belongs into its log file.
STREAMS = {"flagscale/run.py", "flagscale/plan/report.py", "flagscale/train/failure.py"}
RUNNER = "flagscale/runner/"
BORDER = "flagscale/parallel/megatron_state.py"
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 400, 60, 6
MANY_PARAMETERS = {
    "flagscale/models/qwen35/attention.py": "called by Megatron-Core with its signature of a core attention",
    "flagscale/models/qwen35/language.py": "called by Megatron-Core with its signatures",
    "flagscale/platforms/cpu_adam.py": "has the signature of the optimizer that it stands for",
    "flagscale/platforms/torch_kernels.py": "has the signature of the kernels that it stands for",
    "flagscale/parallel/exchange.py": "keyword-only parts of the layout, each used once",
}


def relative(path: Path) -> str:
    """The path inside the checkout."""
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    """The sub-package of flagscale that a file is in; empty for flagscale/run.py."""
    parts = path.relative_to(ROOT / "flagscale").parts
    return parts[0] if len(parts) > 1 else ""


def imported(tree: ast.AST) -> set[str]:
    """Dotted names that a module imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def check_imports(path: Path, text: str) -> list[str]:
    """What a file imports against the architecture."""
    package, wrong = package_of(path), []
    for name in sorted(imported(ast.parse(text))):
        first, _, rest = name.partition(".")
        if first in ("tools", "tests"):
            wrong.append(name)
        if package in TORCH_FREE and first in HEAVY:
            wrong.append(name)
        other = rest.split(".")[0]
        if first == "flagscale" and package and other in ALLOWED and other != package and other not in ALLOWED[package]:
            wrong.append(name)
    return wrong


def check_calls(path: Path, text: str) -> list[str]:
    """Prints outside the launcher's output, and uses of Megatron-Core's global state outside the border file."""
    wrong = []
    name = relative(path)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            wrong.append(f"line {node.lineno}: print")
        stream = isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr")
        if stream and name not in STREAMS and not name.startswith(RUNNER):
            wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
    if name != BORDER and any("parallel_state" in part.split(".") for part in imported(ast.parse(text))):
        wrong.append("parallel_state")
    return wrong


def check_sizes(text: str, many_parameters: bool = False) -> list[str]:
    """Files, functions and, unless they may be, parameter lists that are too long."""
    wrong = []
    lines = len(text.splitlines())
    if lines > MAX_FILE:
        wrong.append(f"{lines} lines")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nested = [child for child in ast.walk(node) if isinstance(child, ast.FunctionDef) and child is not node]
        length = _lines(node) - sum(_lines(child) for child in nested)
        if length > MAX_FUNCTION:
            wrong.append(f"{node.name}: {length} lines")
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls") for argument in named)
        if count > MAX_PARAMETERS and not many_parameters:
            wrong.append(f"{node.name}: {count} parameters")
    return wrong


def _lines(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_go_one_way_and_the_launcher_is_free_of_torch(path: Path) -> None:
    assert check_imports(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_prints_and_one_border_to_megatrons_globals(path: Path) -> None:
    assert check_calls(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_and_functions_stay_small(path: Path) -> None:
    assert check_sizes(path.read_text(encoding="utf-8"), relative(path) in MANY_PARAMETERS) == []


def test_exceptions_are_needed() -> None:
    for name in MANY_PARAMETERS:
        assert check_sizes((ROOT / name).read_text(encoding="utf-8")), f"{name} needs no exception any more"


def test_every_module_states_its_purpose_and_postpones_annotations() -> None:
    for path in PROJECT:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if tree.body:
            assert ast.get_docstring(tree), f"{relative(path)} has no docstring"
            assert len(tree.body) == 1 or "from __future__ import annotations" in text, relative(path)


def test_signatures_are_typed() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
                assert not bare, f"{relative(path)}: {node.name} leaves {bare} without a type"
                assert node.returns is not None, f"{relative(path)}: {node.name} has no return type"


def test_the_entrypoint_and_the_step_are_short() -> None:
    entry = ROOT / "flagscale/train/megatron/train_qwen35.py"
    assert len(entry.read_text(encoding="utf-8").splitlines()) < 60


class TestTheChecksThemselves:
    """Each check finds the fault that it is for."""

    config_file = ROOT / "flagscale/config/x.py"
    train_file = ROOT / "flagscale/train/x.py"

    @pytest.mark.parametrize(
        "text",
        [
            "import torch.nn", "def f():\n    import torch\n", "from flagscale.plan import layout", "import tests.pure",
            "from flagscale import runner",
        ],
    )  # fmt: skip
    def test_imports(self, text: str) -> None:
        assert check_imports(self.config_file, text)

    @pytest.mark.parametrize(
        "text",
        [
            "print(1)", "import sys\nsys.stdout.write('x')", "from megatron.core import parallel_state",
            "from megatron.core.parallel_state import get_x",
        ],
    )  # fmt: skip
    def test_calls(self, text: str) -> None:
        assert check_calls(self.train_file, text)

    @pytest.mark.parametrize(
        "text", ["\n" * 401, "def f():\n" + "    x\n" * 60, "def f(a, b, c, d, e, f, *, g): ...\n"], ids=len
    )
    def test_sizes(self, text: str) -> None:
        assert check_sizes(text)
