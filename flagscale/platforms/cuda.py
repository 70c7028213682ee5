"""NVIDIA GPUs: which of the optional kernel libraries are there and right."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.nn.attention import SDPBackend

from flagscale.config.errors import UserError
from flagscale.platforms.platform import CUDA, Platform

HOPPER = (9, 0)
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
}
"""Dense bf16 matrix TFLOP/s by the vendor's data sheets, by what the device's name contains; the first match counts."""


def cuda_platform() -> Platform:
    """NCCL on GPU number LOCAL_RANK; Transformer Engine and flash-linear-attention where installed.

    Raises:
        UserError: no GPU, no GPU for this local rank, or a version of flash-linear-attention, triton or cuDNN that is
            not known to be right.
    """
    # Read when this process first uses its GPU. Megatron-Core's tensor parallel overlap relies on kernels being issued
    # in one order; the launcher sets it too, other programs may not.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Triton keeps what tuning found beside its compiled kernels: flash-linear-attention's takes minutes.
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    if not torch.cuda.is_available():
        raise UserError("system.platform is cuda, but this process sees no GPU; set system.platform=cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU: this machine shows {torch.cuda.device_count()}; "
            "lower experiment.runner.nproc_per_node"
        )
    check_cudnn()
    device = torch.device(CUDA, local_rank)
    fla = _installed("fla-core") or _installed("flash-linear-attention")
    triton = _installed("triton")
    if fla is not None:
        check_delta_rule(fla)
        check_triton(fla, triton, torch.cuda.get_device_capability(device))
    engine = _installed("transformer-engine") if importlib.util.find_spec("transformer_engine") else None
    return Platform(
        name=CUDA,
        device=device,
        backend="nccl",
        transformer_engine=engine is not None,
        delta_rule="torch" if fla is None else "flash-linear-attention",
        peak_flops=peak_flops(torch.cuda.get_device_name(device)),
        description=(
            f"cuda: {torch.cuda.get_device_name(device)}, nccl, torch {torch.__version__}, "
            f"transformer engine {engine or 'absent'}, flash-linear-attention {fla or 'absent'}, triton {triton}, "
            f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} ({communication_settings(os.environ)})"
        ),
        install=_installer(device, fla is not None),
    )


def check_cudnn() -> None:
    """Refuses a process in which PyTorch finds a cuDNN other than the one it was built with (`flagscale/cudnn.py`).

    Raises:
        UserError: names both versions.
    """
    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        raise UserError(
            f"{str(error).split('. ')[0]}; gradients of attention in a CUDA graph are wrong with parts of two: set "
            "CUDNN_HOME, and LD_LIBRARY_PATH if need be, to PyTorch's own (site-packages/nvidia/cudnn)"
        ) from error


def communication_settings(environment: Mapping[str, str]) -> str:
    """The variables that are set and steer communication between GPUs, for the log."""
    names = sorted(name for name in environment if name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_DEVICE_MAX")))
    return ", ".join(f"{name}={environment[name]}" for name in names)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device, None for one that is not in the table."""
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def check_delta_rule(fla: str) -> None:
    """Refuses versions of flash-linear-attention that may take no raw decay and write strength: unknown keywords of its
    rule are dropped without a word, and what is projected would be used as if it were prepared.

    Raises:
        UserError: names the version.
    """
    if not (0, 6) <= _numbers(fla)[:2] < (0, 7):
        raise UserError(
            f"flash-linear-attention {fla}: its gated delta rule has not been checked with this project's layer; "
            "install flash-linear-attention==0.6.0"
        )


def check_triton(fla: str, triton: str | None, capability: tuple[int, int]) -> None:
    """Refuses the triton versions whose code for the gated delta rule gives wrong gradients on Hopper.

    flash-linear-attention 0.6.0 itself refuses 3.4.0 <= triton < 3.7.1 there; checking before the model is built turns
    a failure in the first backward pass of every rank into one message.
    """
    if capability != HOPPER or triton is None:
        return
    if (3, 4, 0) <= _numbers(triton) < (3, 7, 1):
        raise UserError(
            f"triton {triton} with flash-linear-attention {fla}: gradients of the gated delta rule are wrong on "
            "Hopper for 3.4.0 <= triton < 3.7.1; install triton>=3.7.1"
        )


def _installer(device: torch.device, fla: bool) -> Callable[[], None]:
    def install() -> None:
        torch.cuda.set_device(device)
        # Graph capture needs a stream other than the default one, and autograd runs a parameter's gradient
        # accumulation on the stream that was current when the parameter was wrapped: one stream for everything.
        torch.cuda.set_stream(torch.cuda.Stream(device))
        # Megatron-Core's torch.compile'd helpers fail in inductor with the triton that flash-linear-attention needs
        # (torch 2.11, triton 3.8); what they would fuse comes from kernel libraries instead.
        torch.compiler.set_stance("force_eager")
        _prefer_cudnn_attention()
        _keep_generators()
        if not fla:
            import megatron.core.ssm.gated_delta_net.common as gdn_common
            import megatron.core.ssm.gated_delta_net.gdn as gdn

            from flagscale.platforms import torch_kernels

            gdn_common.HAVE_FLA = True
            gdn.causal_conv1d = torch_kernels.causal_conv1d
            gdn.chunk_gated_delta_rule = torch_kernels.chunk_gated_delta_rule

    return install


def _prefer_cudnn_attention() -> None:
    """cuDNN's attention first (faster on Hopper), then FlashAttention, then what always works."""
    order = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    torch._C._set_sdp_priority_order([int(backend) for backend in order])
    torch.backends.cuda.enable_cudnn_sdp(True)


def _keep_generators() -> None:
    """Makes a fork of Megatron-Core's random number tracker leave the generator alone.

    It forks around dropout, and this model has none; but setting a generator's state is refused while a CUDA graph is
    captured. Initial weights come from generators of their own.
    """
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """`3.7.1+git1` -> (3, 7, 1)."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
