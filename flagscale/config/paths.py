"""What a relative path means.

On the command line: relative to the working folder. In a YAML file: relative to the project folder of that file, the
nearest folder above it with a `.git` or `pyproject.toml`, or the file's own folder when there is none; so a YAML file
means the same from any working folder. A file shipped inside an installed package has no project: its paths start
where those of the chosen YAML file start, or at the working folder.
"""

from __future__ import annotations

from pathlib import Path

from flagscale.config.canonical import COMMAND_LINE
from flagscale.config.layers import shipped_folder

PACKAGE = Path(__file__).resolve().parents[1]
MARKERS = (".git", "pyproject.toml")


def project_folder(file: Path) -> Path:
    """The folder that relative paths in `file` start from."""
    for folder in file.resolve().parents:
        if any((folder / marker).exists() for marker in MARKERS):
            return folder
    return file.resolve().parent


def base_folder(source: str, primary: Path | None, cwd: Path) -> Path:
    """The folder that relative paths of a setting start from.

    Args:
        source: file of the setting, or `COMMAND_LINE`, or empty for a default of the schema.
        primary: the YAML file chosen by --config-name.
        cwd: the working folder.
    """
    shipped = shipped_folder()
    if source == COMMAND_LINE:
        return cwd
    if source and not _inside_package(Path(source)):
        return project_folder(Path(source))
    if shipped.parent != PACKAGE:
        return shipped.parent
    return project_folder(primary) if primary is not None and not _inside_package(primary) else cwd


def absolute(value: str, base: Path) -> str:
    """`value` as an absolute path.

    A path into the package, such as `./flagscale/train/megatron/train_qwen35.py`, is found in the package wherever
    it is installed when it does not exist below `base`.
    """
    path = Path(value).expanduser()
    if path.is_absolute():
        return str(path)
    found = base / path
    if not found.exists() and path.parts and path.parts[0] == PACKAGE.name:
        inside = PACKAGE.parent / path
        found = inside if inside.exists() else found
    return str(Path(*found.parts))


def _inside_package(file: Path) -> bool:
    return file.resolve().is_relative_to(PACKAGE)
