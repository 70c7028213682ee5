"""Training steps on synthetic samples at any layout, and their gradients in a layout-independent form.

The samples of a global batch are drawn from a seed alone, so every layout, and one process, sees the same batch.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flagscale.config.schema import Config, DataConfig, ExperimentConfig, ModelConfig, RunnerConfig
from flagscale.data import text
from flagscale.data.chat import EncodedSample, Placement
from flagscale.data.macro import Costs, MacroBatch, split_step
from flagscale.data.sampler import NO_SAMPLE
from flagscale.data.text import TextBatch
from flagscale.models.qwen35.weights import gather_canonical
from flagscale.plan.batch import batch_plan, grids_of, layout_of, world_size_of
from flagscale.plan.flops import vision_item_flops
from flagscale.plan.plan import ExperimentPlan, MemoryPlan
from flagscale.platforms import get_platform
from flagscale.train.build import TrainState, build
from flagscale.train.language import LossWeights
from flagscale.train.step import TrainStep

VOCAB, IMAGE, SEQ = 64, 5, 32

TINY = {
    # A layer of each kind, and the MTP layer; more only make every case slower.
    "num_layers": 2, "full_attention_interval": 2,
    "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "vocab_size": VOCAB, "rotary_percent": 0.5, "mrope_section": [2, 1, 1],
    "rotary_base": 1e4, "vision_num_layers": 2, "vision_hidden_size": 32, "vision_ffn_hidden_size": 48,
    "vision_num_attention_heads": 4, "vision_patch_size": 4, "vision_num_position_embeddings": 16,
    "image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4,
    "seq_length": SEQ, "init_method_std": 0.1, "mtp_loss_scaling_factor": 0.3,
}  # fmt: skip


def make_plan(world_size: int, **keys: Any) -> ExperimentPlan:
    """A plan of the tiny model on `world_size` ranks; `keys` are ModelConfig's."""
    config = Config(
        experiment=ExperimentConfig(runner=RunnerConfig(nproc_per_node=world_size)),
        model=ModelConfig(**(TINY | keys)),
        data=DataConfig(train_path="unused"),
    )
    modules = grids_of(config)
    assert world_size_of(config) == world_size
    return ExperimentPlan(
        config=config,
        layout=layout_of(config),
        world_size=world_size,
        modules=modules,
        batch=batch_plan(config, modules),
        costs={},
        memory=MemoryPlan(weights=0, gradients=0, optimizer=0, activations=0),
        command=(),
    )


@dataclass(frozen=True)
class Sample:
    """A synthetic sample: tokens, which are loss targets, and its images."""

    tokens: tuple[int, ...]
    targets: tuple[bool, ...]
    placements: tuple[Placement, ...]


class Samples:
    """Synthetic samples by id; stands in for the data set's index.

    Args:
        seed: everything is drawn from it and the sample's id.
        images: numbers of images a sample may have.
        without_images: ids of samples that have none in any case.
    """

    def __init__(self, seed: int, images: Sequence[int] = (0, 1, 2, 3), without_images: Sequence[int] = ()) -> None:
        self._seed, self._images, self._without = seed, tuple(images), frozenset(without_images)

    def sample(self, i: int) -> Sample:
        """Sample number i: text, images of 1 to 6 merged tokens between text, and a target tail of uneven length."""
        draw = random.Random(f"{self._seed}/{i}")
        tokens, placements = [draw.randrange(7, VOCAB) for _ in range(draw.randrange(1, 4))], []
        for media in range(0 if i in self._without else draw.choice(self._images)):
            h, w = draw.choice([(2, 2), (2, 4), (4, 2), (4, 4), (2, 6), (4, 6)])
            if len(tokens) + h * w // 4 + 10 > SEQ:
                break
            placements.append(Placement(grid_h=h, grid_w=w, start=len(tokens) + 1, media=media))
            tokens += [3, *[IMAGE] * (h * w // 4), 4, draw.randrange(7, VOCAB)]
        prompt = len(tokens)
        tokens += [draw.randrange(7, VOCAB) for _ in range(draw.randrange(1, 7))]
        return Sample(tuple(tokens), tuple(j >= prompt for j in range(len(tokens))), tuple(placements))

    def placements(self, i: int) -> tuple[Placement, ...]:
        """As SampleIndex.placements."""
        return self.sample(i).placements

    def num_tokens(self, i: int) -> int:
        """As Corpus.num_tokens."""
        return len(self.sample(i).tokens)

    def encoded(self, i: int) -> EncodedSample:
        """Sample number i as the data path encodes one."""
        sample = self.sample(i)
        return EncodedSample(np.array(sample.tokens), np.array(sample.targets), sample.placements)

    def pixels(self, i: int, media: int, num_patches: int, values: int) -> torch.Tensor:
        """Random patches [num_patches, values] of one image."""
        generator = torch.Generator().manual_seed(hash((self._seed, i, media)) % 2**31)
        return torch.randn(num_patches, values, generator=generator)


def text_batch(samples: Samples, ids: Sequence[int], length: int = SEQ, packed: bool = False) -> TextBatch:
    """The microbatch of these samples."""
    encoded = {i: samples.encoded(i) for i in ids if i != NO_SAMPLE}
    return text.text_batch(ids, encoded, text.RowForm(length=length, packed=packed, pad=0, merge_size=2))


def macro_batches(plan: ExperimentPlan, samples: Samples, rank: int, step: int = 0) -> list[MacroBatch]:
    """The macro batches of a step for one rank."""
    size = plan.batch.global_batch_size
    return _read(plan, samples, rank, list(range(step * size, (step + 1) * size)))


class HeldOut:
    """Stands in for the held-out split's pipeline: one global batch of `filled` samples, its other slots empty."""

    def __init__(self, plan: ExperimentPlan, samples: Samples, filled: int) -> None:
        self._plan, self._samples = plan, samples
        self._ids = [i if i < filled else NO_SAMPLE for i in range(plan.batch.global_batch_size)]

    def step(self, step: int) -> list[MacroBatch]:
        """As DataPipeline.step."""
        assert step == 0
        return _read(self._plan, self._samples, dist.get_rank(), self._ids)


def _read(plan: ExperimentPlan, samples: Samples, rank: int, ids: list[int]) -> list[MacroBatch]:
    model = plan.config.model
    costs = Costs(item=lambda h, w: int(vision_item_flops(model, h, w)), tokens=lambda n: n)
    specs = split_step(0, ids, samples, plan, costs)
    replica = plan.language.coordinate(rank)["dp"]
    batches = []
    for spec in specs:
        texts = tuple(
            text_batch(samples, replicas[replica], lengths[replica], spec.packed)
            for replicas, lengths in zip(spec.sample_ids, spec.row_lengths, strict=True)
        )
        pixels = {}
        for index in spec.reads.get(rank, ()):
            item = spec.items[index]
            values = 3 * model.vision_temporal_patch_size * model.vision_patch_size**2
            pixels[index] = samples.pixels(spec.sample_of(item), item.media, item.num_patches, values)
        batches.append(MacroBatch(spec, texts, pixels))
    return batches


def loss_weights(plan: ExperimentPlan, samples: Samples, step: int = 0) -> LossWeights:
    """Weights of a step's global batch."""
    size = plan.batch.global_batch_size
    drawn = [samples.sample(i).targets for i in range(step * size, (step + 1) * size)]
    return LossWeights.of_batch(
        num_loss_tokens=sum(sum(targets[1:]) for targets in drawn),
        num_mtp_loss_tokens=sum(sum(targets[2:]) for targets in drawn),
        mtp_loss_scaling_factor=plan.config.model.mtp_loss_scaling_factor,
    )


def build_state(plan: ExperimentPlan) -> TrainState:
    """The training state on this rank of the pool."""
    return build(plan, get_platform("cpu"))


def full_gradients(state: TrainState) -> dict[str, torch.Tensor]:
    """Complete gradients of both modules by Hugging Face name, on rank 0; {} elsewhere. Collective over the world.

    The distributed optimizer leaves each data parallel rank a shard of every reduced bucket; they are gathered first.
    """
    found: dict[str, torch.Tensor] = {}
    for name, module in state.wrapped.items():
        for buffer in (*module.buffers, *module.expert_parallel_buffers):
            for bucket in buffer.buckets:
                group = buffer.data_parallel_group
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
        found.update(gather_canonical(state.raw[name], state.plan.config.model, "grad"))
    return _merged(found)


def full_parameters(state: TrainState) -> dict[str, torch.Tensor]:
    """All parameters by Hugging Face name, on rank 0; {} elsewhere. Collective over the world."""
    model = state.plan.config.model
    return _merged({k: v for module in state.raw.values() for k, v in gather_canonical(module, model).items()})


def _merged(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What all ranks hold, on rank 0, which checks that copies agree."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    # As arrays: Megatron-Core has every tensor that is read from a pickle checked, which took a fifth of these tests.
    dist.gather_object({key: value.detach().numpy() for key, value in found.items()}, everyone)
    merged: dict[str, torch.Tensor] = {}
    for part in everyone or []:
        for key, array in part.items():
            value = torch.from_numpy(array)
            assert key not in merged or torch.allclose(merged[key], value, rtol=1e-4, atol=1e-7), f"{key} differs"
            merged[key] = value
    return merged


def gradients_of_steps(plans: Sequence[ExperimentPlan], samples: Samples) -> list[dict[str, torch.Tensor]]:
    """Gradients of the first global batch by each plan, before clipping, on rank 0. Runs on a rank of the pool.

    The plans differ in their batch keys only: one built state, with the initial weights, serves all.
    """
    state = build_state(plans[0])
    try:
        return [accumulated(dataclasses.replace(state, plan=plan), samples) for plan in plans]
    finally:
        state.topology.destroy()


def accumulated(
    state: TrainState, samples: Samples, step: int = 0, weights: LossWeights | None = None
) -> dict[str, torch.Tensor]:
    """Gradients of one step at the current weights, on rank 0. Collective over the world.

    Args:
        weights: of the loss; None takes those of the global batch, which are right.
    """
    batches = macro_batches(state.plan, samples, dist.get_rank(), step)
    TrainStep(state).accumulate(batches, weights or loss_weights(state.plan, samples, step))
    return full_gradients(state)
