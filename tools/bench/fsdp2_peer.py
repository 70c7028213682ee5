"""A peer to compare with: transformers' Qwen3.5 under FSDP2, on the batches of this project's data pipeline.

    torchrun --nproc_per_node 2 -m tools.bench.fsdp2_peer --config-path examples/qwen35_mimo/conf \
        --config-name 4b_h200x2 --settings mb8+ac mb4+ac mb4 --output outputs/peer

One replica of the whole model over all ranks; vision and language in one forward pass, a microbatch at a time. bf16
with fp32 master weights and reduction, fused AdamW. The gated delta rule is flash-linear-attention's where that can be
imported. What transformers would have from the packages `flash_attn` and `causal_conv1d`, which are built for one torch
and one CUDA, it is given where they are missing (`_give_kernels`): FlashAttention over packed images, and one kernel
for the convolution. Multi-token prediction is left out: transformers does not have it. Settings are micro batch size,
activation checkpointing (`+ac`), and parameters kept gathered from forward to backward (`+keep`); the benchmark
(`mimo.py`) runs them in its turns as `fsdp2:mb8+ac`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.ssm.gated_delta_net import gdn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from flagscale.data.assignment import VisualItem
from flagscale.data.macro import MacroBatch
from flagscale.models.qwen35.attention import PackedSequences, attend_packed
from flagscale.models.qwen35.canonical import canonical_tensors
from flagscale.models.qwen35.weights import initial_tensor
from flagscale.plan.hf_config import hf_config_tree
from flagscale.plan.plan import ExperimentPlan
from flagscale.platforms import Platform
from flagscale.platforms.transfer import to_device
from flagscale.train.clock import PhaseClock
from flagscale.train.language import LossWeights
from flagscale.train.step import StepReport
from tools.bench.variants import Settings

IGNORED = -100  # a label that is no target


class PeerStep:
    """Runs optimizer steps; stands where `TrainStep` stands for this project's own model.

    Args:
        plan: with the overrides of `peer_overrides`.
    """

    def __init__(self, plan: ExperimentPlan, platform: Platform, settings: Settings) -> None:
        assert plan.layout == "unified", "every rank encodes what it uses"
        assert plan.language.dp == plan.world_size, "the peer is data parallel only"
        self._plan = plan
        self._device = platform.device
        self.model = _build(plan, platform, settings)
        keys = plan.config.model.optimizer
        self._clip_grad = keys.clip_grad
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=keys.lr,
            betas=(keys.adam_beta1, keys.adam_beta2),
            eps=keys.adam_eps,
            weight_decay=keys.weight_decay,
            fused=platform.is_cuda,
        )
        self._clock = PhaseClock(self._device, lambda phase: None)

    def run(self, macro_batches: Iterable[MacroBatch], weights: LossWeights) -> StepReport:
        """One step over a global batch. Collective over the world.

        Returns:
            A report without an outcome: `loss_sums` of the world (no MTP), `loads`, `phase_s`, `host_s`.
        """
        report = StepReport()
        total = torch.zeros(2, device=self._device)
        self._optimizer.zero_grad()
        for macro in macro_batches:
            self.model.set_requires_gradient_sync(macro.spec.is_last)
            with self._clock.phase("forward_backward"):
                loss_sum = self.loss_sum(macro)
                # The loss is weighted by the tokens of the global batch, so ranks should add up; FSDP2 averages them.
                (loss_sum * weights.lm * self._plan.world_size).backward()
            total[0] += loss_sum.detach()
            report.count(macro, 0)
        with self._clock.phase("optimizer"):
            if self._clip_grad:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_grad)
            self._optimizer.step()
        dist.all_reduce(total)
        report.loss_sums = total.cpu()
        report.phase_s, report.host_s = self._clock.seconds(), self._clock.host_seconds()
        return report

    def loss_sum(self, macro: MacroBatch) -> torch.Tensor:
        """Sum of the token losses of this rank's microbatch."""
        batch = macro.microbatches[0].to(self._device)
        labels_BS = batch.labels_BS.masked_fill(batch.loss_mask_BS == 0, IGNORED)
        output = self.model(
            input_ids=batch.input_ids_BS,
            position_ids=batch.position_ids_3BS,
            use_cache=False,
            **self._pictures(macro),
        )
        logits = output.logits.float().flatten(0, 1)
        return functional.cross_entropy(logits, labels_BS.flatten(), ignore_index=IGNORED, reduction="sum")

    def _pictures(self, macro: MacroBatch) -> dict[str, torch.Tensor]:
        """Patches and grids of this rank's images, in the order of their placeholders."""
        items: list[VisualItem] = [macro.spec.items[index] for index in sorted(macro.pixels)]
        if not macro.spec.items:
            return {}
        assert items, "a rank without images would miss the collectives of the encoder: give every sample an image"
        grids = torch.tensor([[1, item.grid_h, item.grid_w] for item in items])
        pixels_PC = torch.cat([macro.pixels[item.index] for item in items])
        return {"pixel_values": to_device(pixels_PC, self._device), "image_grid_thw": to_device(grids, self._device)}


def _build(plan: ExperimentPlan, platform: Platform, settings: Settings) -> Any:
    """The sharded model with this project's initial weights. Collective over the world."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    model_keys, bf16 = plan.config.model, plan.config.system.bf16
    attention = "flash_attention_2" if platform.is_cuda and importlib.util.find_spec("flash_attn") else "sdpa"
    config = Qwen3_5Config.from_dict(hf_config_tree(model_keys))
    with platform.device:
        model = Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation=attention, dtype=torch.float32)
    _give_kernels(model)
    if settings.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh(platform.device.type, (plan.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shared = {"mesh": mesh, "reshard_after_forward": not settings.keep} | ({"mp_policy": policy} if bf16 else {})
    for block in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(block, **shared)
    fully_shard(model, **shared)
    tensors = canonical_tensors(model_keys)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            whole = initial_tensor(name, tensors[name], model_keys, model_keys.seed, platform.device)
            parameter.copy_(distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None))
    return model.train()


_PACKED = "flash_packed"
"""Name of an attention in transformers' register; one with "flash" in it is called once for all images."""


def _give_kernels(model: Any) -> None:
    """Packed attention of the encoder and a kernel for the convolution, where transformers would have slow ones."""
    from transformers import AttentionInterface
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.utils.generic import is_flash_attention_requested

    vision = model.model.visual.config
    if not is_flash_attention_requested(vision):
        AttentionInterface.register(_PACKED, _packed_attention)
        # Not the public key, which asks for the package that its name stands for.
        vision._attn_implementation_internal = _PACKED
        assert is_flash_attention_requested(vision), "the encoder would attend image by image"
    assert hasattr(modeling_qwen3_5, "causal_conv1d_fn"), "the convolution has another name"
    if importlib.util.find_spec("causal_conv1d") is None:
        modeling_qwen3_5.causal_conv1d_fn = _causal_conv1d


def _packed_attention(
    module: torch.nn.Module, q_1HTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, *, scaling: float,
    cu_seq_lens_q: Tensor, max_length_q: int, **unused: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention inside each image, as transformers calls it; [1, T, H, D]."""
    packed = PackedSequences(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seq_lens_q,
        max_seqlen_q=int(max_length_q),
        lengths=() if q_1HTD.is_cuda else tuple(cu_seq_lens_q.diff().tolist()),
    )
    q, k, v = (x[0].transpose(0, 1) for x in (q_1HTD, k_1HTD, v_1HTD))
    return attend_packed(q, k, v, packed, causal=False, scale=scaling)[None], None


def _causal_conv1d(
    x_BDT: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, **unused: object
) -> Tensor:
    """Depthwise convolution over T, as transformers calls it; [B, D, T]."""
    out_BTD, _ = gdn.causal_conv1d(x=x_BDT.transpose(1, 2), weight=weight, bias=bias, activation=activation)
    return out_BTD.transpose(1, 2)


def main() -> int:
    """The peer alone; the other arguments are the benchmark's."""
    from tools.bench import mimo

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", default=["mb8+ac", "mb4+ac", "mb4"], help="tried one after the other")
    options, rest = parser.parse_known_args()
    return mimo.main(["--variants", *(f"fsdp2:{text}" for text in options.settings), *rest])


if __name__ == "__main__":
    sys.exit(main())
