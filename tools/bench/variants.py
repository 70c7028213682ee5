"""What the benchmark can run: names of variants, and the plans they make of a recipe.

    unified            ViT and LLM in the recipe's layout of the LLM
    unified:tp1        ViT and LLM in another layout; unified:tp2pp2 with pipeline stages
    homogeneous        every other unified:tpN that the model and the ranks allow
    f8                 colocated at vit_batch_factor 8
    text               unified on texts as long as the samples, without images, the encoder frozen
    fsdp2:mb8+ac       transformers and FSDP2 (fsdp2_peer.py)

After a name and a comma follow overrides of its own: `f8,system.overlap_grad_reduce=false`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flagscale.config.errors import UserError
from flagscale.config.loading import load
from flagscale.plan.build import checked_plan
from flagscale.plan.plan import ExperimentPlan

UNIFIED, TEXT, FSDP2, HOMOGENEOUS = "unified", "text", "fsdp2", "homogeneous"
_LAYOUT = re.compile(r"unified:tp(\d+)(?:pp(\d+))?")
_FACTOR = re.compile(r"f(\d+)")
_SETTINGS = re.compile(r"mb(\d+)(\+ac)?(\+keep)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What makes a peer fast or small."""

    micro_batch_size: int
    checkpointing: bool
    """Recompute every layer's activations in the backward pass."""
    keep: bool
    """Keep gathered parameters between forward and backward."""

    @classmethod
    def parse(cls, text: str) -> Settings:
        """`mb8+ac+keep`."""
        match = _SETTINGS.fullmatch(text)
        if match is None:
            raise UserError(f"settings {text!r}: are not of the form mb8, mb8+ac, mb8+keep or mb8+ac+keep")
        return cls(micro_batch_size=int(match[1]), checkpointing=bool(match[2]), keep=bool(match[3]))


def peer_overrides(settings: Settings) -> list[str]:
    """What a recipe becomes for the peer: one data parallel replica a rank, samples padded to rows."""
    return [
        "model.use_mimo=false", "model.tensor_model_parallel_size=1", "model.pipeline_model_parallel_size=1",
        "model.sequence_parallel=false", "model.mtp_num_layers=0", "data.packing=none",
        f"model.micro_batch_size={settings.micro_batch_size}",
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What all variants share.

    Attributes:
        name, folder: as `--config-name` and `--config-path` of run.py.
        overrides: of all variants.
        texts: data set for `text`.
    """

    name: str
    folder: Path | None
    overrides: tuple[str, ...]
    texts: Path

    def plan(self, overrides: Iterable[str]) -> ExperimentPlan:
        """The checked plan with further overrides, which win over those for all.

        Raises:
            UserError: the configuration breaks a rule.
        """
        chosen = {text.split("=", 1)[0]: text for text in (*self.overrides, *overrides)}
        return checked_plan(load(self.name, self.folder, list(chosen.values())))


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One thing to measure; `peer` is set for transformers and FSDP2."""

    name: str
    plan: ExperimentPlan
    peer: Settings | None = None

    @property
    def head(self) -> str:
        """The name without its overrides."""
        return self.name.split(",")[0]

    @property
    def is_homogeneous(self) -> bool:
        """Whether ViT and LLM share a layout, and images are trained on."""
        return self.plan.layout == UNIFIED and self.head != TEXT and self.peer is None


def make_variants(names: Iterable[str], recipe: Recipe) -> list[Variant]:
    """The variants of these names.

    Raises:
        UserError: a name is none, or its configuration breaks a rule.
    """
    found: list[Variant] = []
    for name in names:
        head, *extra = name.split(",")
        if head == HOMOGENEOUS:
            found += _homogeneous(recipe, extra)
        else:
            found.append(_variant(name, head, extra, recipe))
    return found


def _variant(name: str, head: str, extra: list[str], recipe: Recipe) -> Variant:
    layout, factor = _LAYOUT.fullmatch(head), _FACTOR.fullmatch(head)
    unified = "model.use_mimo=false"
    if head == UNIFIED:
        return Variant(name=name, plan=recipe.plan([unified, *extra]))
    if layout is not None:
        return Variant(name=name, plan=recipe.plan([unified, *_layout(int(layout[1]), int(layout[2] or 1)), *extra]))
    if factor is not None:
        return Variant(name=name, plan=_colocated(int(factor[1]), extra, recipe))
    if head == TEXT:
        frozen = ["model.freeze_vision=true", "model.freeze_merger=true"]
        return Variant(name=name, plan=recipe.plan([unified, *frozen, f"data.train_path={recipe.texts}", *extra]))
    if head.startswith(f"{FSDP2}:"):
        settings = Settings.parse(head.removeprefix(f"{FSDP2}:"))
        return Variant(name=name, plan=recipe.plan([*peer_overrides(settings), *extra]), peer=settings)
    raise UserError(f"variant {name!r}: is none of unified, unified:tp1, homogeneous, f8, text, fsdp2:mb8+ac")


def _layout(tp: int, pp: int) -> list[str]:
    return [
        f"model.tensor_model_parallel_size={tp}",
        f"model.pipeline_model_parallel_size={pp}",
        f"model.sequence_parallel={str(tp > 1).lower()}",
    ]


def _colocated(factor: int, extra: list[str], recipe: Recipe) -> ExperimentPlan:
    """vision_micro_batch_size follows from the factor and the layout."""
    any_factor = recipe.plan(["model.use_mimo=false", *extra])
    world, model = any_factor.world_size, any_factor.config.model
    samples = factor * any_factor.language.dp * model.micro_batch_size
    vision_dp = world // model.vision_tensor_model_parallel_size
    if samples % vision_dp:
        raise UserError(f"variant f{factor}: {samples} samples do not divide over {vision_dp} encoders")
    return recipe.plan(["model.use_mimo=true", f"model.vision_micro_batch_size={samples // vision_dp}", *extra])


def _homogeneous(recipe: Recipe, extra: list[str]) -> list[Variant]:
    """All tensor parallel sizes but the recipe's own that break no rule."""
    plan = recipe.plan(["model.use_mimo=false", *extra])
    found = []
    for tp in (size for size in range(1, plan.world_size + 1) if plan.world_size % size == 0):
        if tp == plan.language.tp:
            continue
        name = ",".join([f"unified:tp{tp}", *extra])
        try:
            found.append(_variant(name, f"unified:tp{tp}", extra, recipe))
        except UserError:
            continue  # heads or widths that tp does not divide, or a global batch that is too small
    return found
