"""The CPU as a full platform: what Megatron-Core 0.19 asks of `torch.cuda`, answered on the CPU.

Megatron-Core names the device "cuda" in many places that a CPU run passes through. `install_cpu_shim` wraps the few
functions behind them. A TorchFunctionMode would be tidier but is not active inside `autograd.Function.backward`, where
recomputation runs. The wrappers are process-wide: a process on this platform does not use its GPU.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from flagscale.platforms import torch_kernels
from flagscale.platforms.cpu_adam import CpuFusedAdam
from flagscale.platforms.platform import CPU, Platform

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "full", "empty", "empty_like", "zeros_like", "ones_like")


def cpu_platform() -> Platform:
    """Gloo, plain torch kernels, fp32 or bf16."""
    return Platform(
        name=CPU,
        device=_CPU,
        backend="gloo",
        transformer_engine=False,
        delta_rule="torch",
        peak_flops=None,
        description=f"cpu: gloo, torch {torch.__version__} kernels, {torch.get_num_threads()} thread(s) a rank",
        install=install_cpu_shim,
    )


@functools.cache
def install_cpu_shim() -> None:
    """Makes this process able to build and train Megatron-Core models on the CPU; only the first call acts."""
    _disable_compilation()
    _redirect_torch_cuda()
    _redirect_tensors()
    _redirect_distributed()
    _patch_megatron()


def _disable_compilation() -> None:
    """Megatron-Core decorates small functions with torch.compile; a C++ build of each takes longer than a CPU run."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # read when torch._dynamo is imported
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")
        return
    # torch.optim's methods load Dynamo, 1 s of CPU time, to be left out by it; where nothing compiles they are called.
    for name, method in list(vars(torch.optim.Optimizer).items()):
        if getattr(method, "__globals__", {}).get("__name__") == "torch._compile":
            setattr(torch.optim.Optimizer, name, method.__wrapped__)


class IdleStream:
    """Stands in for a CUDA stream and for an event on it: on a CPU everything before has happened. All are equal."""

    def __init__(self, device: Any = None, **kwargs: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdleStream)

    def __hash__(self) -> int:
        return 0

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, other: IdleStream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: IdleStream) -> None:
        """Nothing to wait for."""

    def record_event(self, event: IdleStream | None = None) -> IdleStream:
        """An event that has happened."""
        return self


def _redirect_torch_cuda() -> None:
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    for module in (torch.cuda, torch.cuda.random):  # both bind the generator functions
        module.get_rng_state, module.set_rng_state, module.manual_seed = get_rng_state, set_rng_state, manual_seed
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.current_stream = IdleStream
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = IdleStream
    torch.cuda.stream = lambda stream: nullcontext()


def _redirect_tensors() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    plain_type = torch.Tensor.type

    def tensor_type(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        # clip_grads and the distributed optimizer compare this text with "torch.cuda.FloatTensor".
        if dtype is None:
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        return plain_type(self, dtype, **kwargs)

    torch.Tensor.type = tensor_type
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapped


def _redirect_distributed() -> None:
    plain = torch.distributed.new_subgroups_by_enumeration

    def new_subgroups(ranks: list[list[int]], *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        # Megatron-Core's colocated communicator hard-codes nccl.
        return plain(ranks, *args, backend=None if backend == "nccl" else backend, **kwargs)

    torch.distributed.new_subgroups_by_enumeration = new_subgroups
    _share_gloo_devices()


def _share_gloo_devices() -> None:
    """One set of gloo devices for all process groups of this process.

    A gloo device is a thread that wakes up every 10 ms. torch makes one for each group, and two grids are some twenty
    groups: four ranks on two cores spent an eighth of their time on that. The rest of a group is as torch makes it.
    """
    plain = torch.distributed.distributed_c10d.ProcessGroupGloo

    @functools.cache
    def devices(interfaces: str) -> list[Any]:
        if not interfaces:
            return [plain.create_default_device()]
        return [plain.create_device(interface=name) for name in interfaces.split(",")]

    class ProcessGroupGloo(plain):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **options: Any) -> None:
            chosen = plain._Options()
            chosen._devices = devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
            chosen._threads = 2 * len(chosen._devices)
            chosen._timeout = timeout
            for name, value in options.items():
                setattr(chosen, name, value)
            super().__init__(store, rank, size, chosen)

    torch.distributed.distributed_c10d.ProcessGroupGloo = ProcessGroupGloo


def _patch_megatron() -> None:
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
    import megatron.core.ssm.gated_delta_net.common as gdn_common
    import megatron.core.ssm.gated_delta_net.gdn as gdn
    import megatron.core.tensor_parallel.random as mcore_random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # The setter goes through torch.cuda's lazy queue, which without a GPU never runs: after a fork of the tracker the
    # default generator would silently keep the forked state.
    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    logging.getLogger(mcore_random.__name__).setLevel(logging.ERROR)  # "CPU RNG state changed" at every fork
    if not hasattr(mcore_random, "FP8GlobalStateManager"):  # selective recomputation reads these names without TE
        mcore_random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        mcore_random.activation_recompute_forward = lambda *args, **kwargs: nullcontext()
        mcore_random.fp8_autocast = lambda *args, **kwargs: nullcontext()

    # The constructor wants flash-linear-attention even where the kernels are not used.
    gdn_common.HAVE_FLA = True
    gdn.causal_conv1d = torch_kernels.causal_conv1d
    gdn.chunk_gated_delta_rule = torch_kernels.chunk_gated_delta_rule

    # The counts of tokens sent to experts are host numbers already; as tensors, all_to_all would refuse them.
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = CpuFusedAdam, False
    distrib_optimizer.Adam = CpuFusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    distrib_optimizer.USING_TE_OPTIMIZER = False


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
