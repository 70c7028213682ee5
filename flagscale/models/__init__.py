"""The modules that are trained."""

from __future__ import annotations

from flagscale.cudnn import load_torch_cudnn

load_torch_cudnn()  # before anything here imports Transformer Engine
