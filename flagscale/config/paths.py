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
LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes that Linux allows."""


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

    Raises:
        ValueError: when it can be no path; the text says why.
    """
    if not value.strip():
        raise ValueError("is empty")
    if any(ord(character) < 32 for character in value):
        raise ValueError("holds a line break or another control character")
    if any(len(name.encode()) > LONGEST_NAME for name in value.split("/")) or len(value.encode()) > LONGEST_PATH:
        raise ValueError(f"is longer than names ({LONGEST_NAME} bytes) and paths ({LONGEST_PATH}) can be")
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise ValueError("starts at the home of a user whom this machine does not know") from None
    if path.is_absolute():
        return str(path)
    found = base / path
    if not found.exists() and path.parts and path.parts[0] == PACKAGE.name:
        inside = PACKAGE.parent / path
        found = inside if inside.exists() else found
    return str(Path(*found.parts))


def _inside_package(file: Path) -> bool:
    return file.resolve().is_relative_to(PACKAGE)
