"""What the ranks of the parity tests run: one forward and backward of both modules, at any layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flagscale.config.errors import UserError
from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.attention import PackedSequences
from flagscale.models.qwen35.build import build_language, build_vision, tp_sum_params
from flagscale.models.qwen35.language import LanguageModel, VisualRows
from flagscale.models.qwen35.vision import VisionEncoder
from flagscale.models.qwen35.weights import gather_canonical, load_canonical
from flagscale.parallel.groups import Topology
from flagscale.plan.layout import LANGUAGE, VISION, Grid
from flagscale.platforms import get_platform
from tests.models.tiny import Batch


@contextmanager
def built(
    model: ModelConfig, layout: dict[str, int], weights: dict[str, Tensor] | None = None
) -> Iterator[tuple[LanguageModel, VisionEncoder, Topology]]:
    """Both modules on this rank.

    Args:
        layout: tp, pp, ep (default 1) of the language model, vtp of the vision encoder, bf16 (default fp32).
        weights: by Hugging Face name; None leaves the initial ones.
    """
    platform = get_platform("cpu")
    platform.install()
    world = dist.get_world_size()
    grids = {
        LANGUAGE: Grid(
            tp=layout["tp"], pp=layout["pp"], dp=world // layout["tp"] // layout["pp"], ep=layout.get("ep", 1)
        ),
        VISION: Grid(tp=layout["vtp"], dp=world // layout["vtp"]),
    }
    topology = Topology.build(grids, seed=1)
    try:
        groups = topology.groups
        language = build_language(
            model, grids[LANGUAGE], groups[LANGUAGE], bf16=layout.get("bf16", False), platform=platform
        )
        vision = build_vision(model, grids[VISION], groups[VISION], bf16=layout.get("bf16", False), platform=platform)
        if weights is not None:
            for module in (language, vision):
                load_canonical(module, model, weights.__getitem__)
        yield language, vision, topology
    finally:
        topology.destroy()


def full_step(
    model: ModelConfig,
    weights: dict[str, Tensor],
    batch: Batch,
    layout: dict[str, int],
    sum_over_tp: bool = True,
    lengths: list[int] | None = None,
) -> dict[str, Any]:
    """Vision, language, loss = sum(lm * mask) + sum(mtp * mtp_mask), backward through both.

    Args:
        sum_over_tp: whether gradients that are sums over tensor parallel ranks are summed; False breaks them.
        lengths: of samples packed into the batch's one row.

    Returns:
        rows, logits and losses (last stage), balance (summed over layers and samples) and gradients by
        Hugging Face name, as this rank has them.
    """
    with built(model, layout, weights) as (language, vision, topology):
        groups = topology.groups
        rows_VD = vision(batch.pixels_PC, batch.grid_hw)
        leaf_VD = rows_VD.detach().requires_grad_()
        visual = visual_rows(leaf_VD, batch, groups[LANGUAGE].tp, language.config.sequence_parallel)
        packed = None if lengths is None else PackedSequences.of(lengths, torch.device("cpu"))
        losses = _language_step(language, batch, visual, packed)
        _collect_row_gradient(leaf_VD, groups[LANGUAGE], language.config.sequence_parallel)
        rows_VD.backward(leaf_VD.grad)
        gradients = {}
        for module in (language, vision):
            for param in tp_sum_params(module) if sum_over_tp else []:
                dist.all_reduce(param.grad, group=module.tp_group)
            _complete_expert_gradients(module, groups[LANGUAGE])
            gradients.update(gather_canonical(module, model, "grad"))
        logits = _logits(language, batch, visual, packed)
        found = {"rows": rows_VD.detach(), "logits": logits, "losses": losses, "gradients": gradients}
        return {**found, "balance": float(language.take_balance())}


def _complete_expert_gradients(module: torch.nn.Module, groups: Any) -> None:
    """Sums what every rank of a stage has found for its copy of an expert; each data parallel replica ran the batch."""
    for param in module.parameters():
        if not getattr(param, "allreduce", True):
            dist.all_reduce(param.grad, group=groups.expt_dp)
            param.grad /= groups.dp.size()


def visual_rows(rows_VD: Tensor, batch: Batch, tp_group: dist.ProcessGroup, sequence_parallel: bool) -> VisualRows:
    """The index lists of one rank, from the rows of the whole [S, B] batch."""
    size = batch.input_ids_BS.shape[0]
    source = torch.arange(len(batch.row_of_V))
    first, last = 0, batch.input_ids_BS.numel()
    if sequence_parallel:
        share = last // tp_group.size()
        first, last = tp_group.rank() * share, (tp_group.rank() + 1) * share
    lists = []
    for target in (batch.row_of_V, batch.row_of_V - size):  # MTP sees the next token: one step earlier
        here = (target >= first) & (target < last)
        lists += [source[here], target[here] - first]
    return VisualRows(rows_VD, *lists)


def _language_step(
    language: LanguageModel, batch: Batch, visual: VisualRows, packed: PackedSequences | None
) -> tuple[Tensor, Tensor | None] | None:
    """Forward and backward over the pipeline stages, one microbatch, by hand."""
    before, after = _neighbours(language)
    leaf = _received(language, batch)
    num_tokens = tuple(batch.attention_mask_BS.sum(1).tolist()) if packed is None else packed.lengths
    out = language(
        batch.input_ids_BS, batch.position_ids_3BS, batch.labels_BS, visual, packed, _mask(batch), num_tokens=num_tokens
    )
    if language.post_process:
        lm_BS, mtp_BS = out
        loss = (lm_BS * batch.loss_mask_BS).sum()
        if mtp_BS is not None:
            loss = loss + (mtp_BS * batch.mtp_mask_BS).sum()
        loss.backward()
        losses = (lm_BS.detach(), None if mtp_BS is None else mtp_BS.detach())
    else:
        losses = None
        dist.send(out.detach(), after)
        gradient = torch.empty_like(out)
        dist.recv(gradient, after)
        out.backward(gradient)
    if leaf is not None:
        dist.send(leaf.grad, before)
    return losses


def _logits(language: LanguageModel, batch: Batch, visual: VisualRows, packed: PackedSequences | None) -> Tensor | None:
    """Forward alone over the pipeline stages; the last one's logits."""
    with torch.no_grad():
        _received(language, batch)
        out = language(batch.input_ids_BS, batch.position_ids_3BS, None, visual, packed, _mask(batch))
        if language.post_process:
            return out
        dist.send(out, _neighbours(language)[1])
        return None


def _neighbours(language: LanguageModel) -> tuple[int, int]:
    """Ranks of the stages before and after this one."""
    pipeline = language.pp_group
    stages = dist.get_process_group_ranks(pipeline)
    before, after = (stages[(pipeline.rank() + step) % len(stages)] for step in (-1, 1))
    return before, after


def _received(language: LanguageModel, batch: Batch) -> Tensor | None:
    """What the stage before sends, set as this one's input; None on the first."""
    if language.pre_process:
        return None
    ranks = language.tp_group.size() if language.config.sequence_parallel else 1
    size, length = batch.input_ids_BS.shape
    leaf = torch.empty(length // ranks, size, language.config.hidden_size)
    dist.recv(leaf, _neighbours(language)[0])
    language.set_input_tensor(leaf.requires_grad_())
    return leaf


def _collect_row_gradient(leaf_VD: Tensor, groups: Any, sequence_parallel: bool) -> None:
    """Sums what each stage, and with sequence parallelism each rank, contributes."""
    if leaf_VD.grad is None:
        leaf_VD.grad = torch.zeros_like(leaf_VD)
    dist.all_reduce(leaf_VD.grad, group=groups.pp)
    if sequence_parallel:
        dist.all_reduce(leaf_VD.grad, group=groups.tp)


def _mask(batch: Batch) -> Tensor | None:
    """Only padding on the left needs a mask."""
    return None if batch.attention_mask_BS[:, 0].all() else batch.attention_mask_BS


def held_weights(
    model: ModelConfig, weights: dict[str, Tensor] | None, layout: dict[str, int]
) -> dict[str, Tensor] | str:
    """What this rank's tensor parallel group holds, loaded or initial; the message when loading refuses."""
    try:
        with built(model, layout, weights) as (language, vision, _):
            return {**gather_canonical(language, model), **gather_canonical(vision, model)}
    except UserError as error:
        return str(error)


def vision_alone(model: ModelConfig, batch: Batch) -> dict[str, Any]:
    """A step of the vision encoder: gradients, how many tensors its forward kept, what the language model trains."""
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with built(model, {"tp": 1, "pp": 1, "vtp": 1}) as (language, vision, _):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            rows_VD = vision(batch.pixels_PC, batch.grid_hw)
        rows_VD.square().sum().backward()
        return {
            "gradients": gather_canonical(vision, model, "grad"),
            "kept": len(kept),
            "language": sum(p.requires_grad for p in language.parameters()),
        }
