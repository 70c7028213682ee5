"""A shim: the metadata is in `pyproject.toml`; this adds the shipped YAML to built packages."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies `configs/` to `flagscale/_configs`, where an installed package looks for it.

    An editable install uses the checkout's own folder, so nothing is copied there.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "flagscale" / "_configs"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(Path(__file__).parent / "configs", target)


setup(cmdclass={"build_py": BuildWithConfigs})
