"""The training loop and what it is made of."""

from __future__ import annotations

from flagscale.cudnn import load_torch_cudnn

load_torch_cudnn()  # before anything here imports Transformer Engine
