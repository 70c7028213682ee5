"""One cuDNN a process: PyTorch's own.

Transformer Engine is linked with parts of cuDNN that PyTorch loads late, so the system loads its own for it, if it has
some. PyTorch then runs with parts of both, and its attention, replayed in a CUDA graph, gave gradients that were NaN or
an illegal memory access (the system's cuDNN 9.14 under PyTorch 2.11 with 9.19, rows of 32 tokens; right with the latter
alone).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from contextlib import suppress
from pathlib import Path


def load_torch_cudnn() -> None:
    """Loads all parts of the cuDNN package that PyTorch came with, before Transformer Engine, where that is installed.

    Does nothing without such a package: then PyTorch uses the system's, as Transformer Engine does.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    with suppress(ModuleNotFoundError):
        package = importlib.util.find_spec("nvidia.cudnn")
        for folder in package.submodule_search_locations or [] if package else []:
            os.environ.setdefault("CUDNN_HOME", folder)
            for part in sorted(Path(folder).glob("lib/libcudnn*.so.*")):
                with suppress(OSError):  # `platforms.cuda.check_cudnn` says what is wrong
                    ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
