"""Adam for the CPU with the state layout of the fused GPU optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class CpuFusedAdam(torch.optim.Optimizer):
    """AdamW whose step count is one integer of the parameter group, as in Transformer Engine and Apex.

    Megatron-Core 0.19.2's distributed optimizer is broken on load with torch's own AdamW, which keeps a step tensor a
    parameter: a fresh state fails an assertion, a loaded one misses the key, and afterwards one tensor is shared by all
    parameters, so that it advances many times a step (2.9674 against 2.9962 on the second step of a run).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert not capturable, "CUDA graphs need a GPU"
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One update of every parameter that has a gradient."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        grads = [p.grad.to(p.dtype) for p in params]
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        beta1, beta2 = group["betas"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        if decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1.0 - lr * decay)
        elif decay:
            grads = torch._foreach_add(grads, params, alpha=decay)
        torch._foreach_lerp_(first, grads, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1.0 - beta2)
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, (1.0 - beta2 ** group["step"]) ** 0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, first, denominator, value=-lr / (1.0 - beta1 ** group["step"]))
