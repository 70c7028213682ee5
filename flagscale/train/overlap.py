"""Gradient reduction and the gathering of parameters beside computation.

Megatron-Core's DDP starts to reduce a bucket when its last gradient of a step is there, which its backward hooks
notice. A step here is many macro batches, and the two modules finish at different times: the language model before the
last macro batch goes back through the encoder, beside which its reduction then runs. So reductions are held back until
the last backward pass of a module, and every rank of a group starts them in one order, also one that has nothing to
encode.

Updated parameters are gathered from the optimizer step on, and waited for when their module is needed next: the
language model's beside the encoder's first forward pass. Megatron-Core would wait in forward hooks of the modules that
own parameters; those of a module that is read and not called (Gated DeltaNet's convolution) would be missed, so a whole
module is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from flagscale.config.schema import SystemConfig
from flagscale.platforms import Platform


def ddp_config(system: SystemConfig, platform: Platform) -> DistributedDataParallelConfig:
    """Reduction in fp32 into a distributed optimizer, overlapped where wanted; null means on a GPU."""
    reduce, gather = (
        platform.is_cuda if wanted is None else wanted
        for wanted in (system.overlap_grad_reduce, system.overlap_param_gather)
    )
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=reduce,
        overlap_param_gather=gather,
        bucket_size=system.ddp_bucket_size,
    )


def reduces_early(module: torch.nn.Module) -> bool:
    """Whether reductions of this module's gradients start before the end of the step."""
    return isinstance(module, DistributedDataParallel) and module.ddp_config.overlap_grad_reduce


def held_back(module: torch.nn.Module, *, unless: bool = False) -> AbstractContextManager[None]:
    """Backward passes inside start no reduction of this module's gradients."""
    return module.no_sync() if reduces_early(module) and not unless else nullcontext()


@torch.no_grad()
def start_gather(modules: Iterable[DistributedDataParallel]) -> None:
    """Starts to gather updated parameters, where that is overlapped; the optimizer has done it otherwise."""
    for module in modules:
        if module.ddp_config.overlap_param_gather:
            module.start_param_sync()


def finish_gather(module: torch.nn.Module) -> None:
    """Makes what comes next see this module's updated parameters; on a GPU without making the host wait."""
    if not isinstance(module, DistributedDataParallel):
        return
    for group in (*module.bucket_groups, *module.expert_parallel_bucket_groups):
        if group.param_gather_handle is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
