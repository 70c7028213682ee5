"""Macro batches: equal plans on every rank, nothing read twice, the same with and without read-ahead."""

from __future__ import annotations

import io
import json
import re
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from flagscale.config.errors import UserError
from flagscale.data.corpus import Corpus
from flagscale.data.loader import DataPipeline
from flagscale.data.macro import MacroBatch
from flagscale.data.sampler import NO_SAMPLE
from flagscale.data.tokenizer import BUILTIN_SPECIAL
from flagscale.plan.layout import Grid
from flagscale.plan.plan import ExperimentPlan
from tests.data.helpers import make_config, make_plan, save_image, sharegpt, write_jsonl, write_mixture

BATCH = {"micro_batch_size": 2, "vision_micro_batch_size": 4, "global_batch_size": 20, "eval_iters": 1}
COLOCATED = (Grid(dp=4), Grid(tp=2, dp=2), (4, 1))
VISION_TP = (Grid(tp=2, dp=2), Grid(dp=4), (2, 1))
UNIFIED_PIPELINE = (Grid(tp=2), Grid(tp=2, pp=2), (10,))
LAYOUTS = [COLOCATED, VISION_TP, UNIFIED_PIPELINE]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    return {"train": write_mixture(folder, 50), "valid": write_mixture(folder, 23, "valid.jsonl", seed=1)}


def plan_for(
    sources: dict[str, Path], layout: tuple[Grid, Grid, tuple[int, ...]] = COLOCATED, **data: Any
) -> ExperimentPlan:
    vision, language, macro_batches = layout
    model = {**BATCH, "global_batch_size": sum(macro_batches) * 2 * language.dp}
    config = make_config(sources["train"], valid=sources["valid"], model=model, **data)
    return make_plan(config, vision, language, macro_batches)


@contextmanager
def pipelines(plan: ExperimentPlan, split: str = "train", world: int = 0) -> Iterator[list[DataPipeline]]:
    opened = [DataPipeline(plan, split, rank) for rank in range(world or plan.world_size)]
    try:
        yield opened
    finally:
        for pipeline in opened:
            pipeline.close()


def assert_same(one: MacroBatch, other: MacroBatch) -> None:
    assert one.spec == other.spec
    assert one.pixels.keys() == other.pixels.keys()
    assert all(torch.equal(one.pixels[i], other.pixels[i]) for i in one.pixels)
    for a, b in zip(one.microbatches, other.microbatches, strict=True):
        assert a.samples == b.samples
        assert all(map(torch.equal, a.tensors, b.tensors))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_over_all_ranks(sources: dict[str, Path], layout: tuple[Grid, Grid, tuple[int, ...]]) -> None:
    plan = plan_for(sources, layout)
    with pipelines(plan) as ranks:
        batch = ranks[0].sample_ids(0)
        steps = [list(pipeline.step(0)) for pipeline in ranks]
        assert [m.spec.num_microbatches for m in steps[0]] == list(plan.batch.macro_batches)
        assert all([m.spec for m in step] == ranks[0].specs(0) for step in steps)
        in_order = [i for m in steps[0] for replicas in m.spec.sample_ids for slots in replicas for i in slots]
        assert in_order == batch
        for macros in zip(*steps, strict=True):
            spec = macros[0].spec
            read = [i for macro in macros for i in macro.pixels]
            assert sorted(read) == [item.index for item in spec.items]
            for rank, macro in enumerate(macros):
                check_texts(macro, plan.language.coordinate(rank)["dp"])
                for i, pixels_PD in macro.pixels.items():
                    assert pixels_PD.shape == (spec.items[i].num_patches, spec.patch_values)
                    assert pixels_PD.dtype == torch.float32


def check_texts(macro: MacroBatch, replica: int) -> None:
    """Ids, labels, mask and placeholders of the microbatches of one language replica."""
    for m, text in enumerate(macro.microbatches):
        assert text.sample_ids == macro.spec.sample_ids[m][replica]
        ids_BS, mask_BS = text.input_ids_BS, text.loss_mask_BS.bool()
        assert torch.equal(text.labels_BS[:, :-1], ids_BS[:, 1:])
        assert (text.labels_BS[mask_BS] != BUILTIN_SPECIAL.pad).all()
        expected_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
        for item in macro.spec.items:
            if (item.microbatch, item.replica) == (m, replica):
                expected_BS[item.slot, item.start : item.start + item.num_tokens] = True
        assert torch.equal(ids_BS == BUILTIN_SPECIAL.image, expected_BS)
        assert text.position_ids_3BS.shape == (3, *ids_BS.shape)


def test_counts_of_a_step_equal_its_masks(sources: dict[str, Path]) -> None:
    plan = plan_for(sources)
    with pipelines(plan) as ranks:
        lm, mtp, tokens = 0.0, 0.0, 0
        for pipeline in (ranks[0], ranks[2]):  # one rank of each language replica
            for macro in pipeline.step(3):
                for text in macro.microbatches:
                    shifted_BS = torch.roll(text.loss_mask_BS, -1, dims=1)
                    shifted_BS[:, -1] = 0
                    lm, mtp = lm + text.loss_mask_BS.sum().item(), mtp + shifted_BS.sum().item()
                    tokens += int((text.input_ids_BS != BUILTIN_SPECIAL.pad).sum())
        assert lm == ranks[0].num_loss_tokens(3)
        assert mtp == ranks[0].num_mtp_loss_tokens(3)
        assert tokens == ranks[0].num_tokens(3)
        assert ranks[0].num_samples(3) == plan.batch.global_batch_size
        loads = [sum(sum(spec.loads) for spec in ranks[0].specs(step)) for step in (3, 4)]
        assert ranks[0].flops(3) - ranks[0].flops(4) == pytest.approx(3 * (loads[0] - loads[1]))  # forward and backward


COUNTED = {
    2: (Grid(dp=2), Grid(dp=2), (4, 4, 2)),
    4: (Grid(dp=4), Grid(tp=2, dp=2), (4, 4, 2)),
    8: (Grid(tp=2, dp=4), Grid(dp=4, pp=2), (4, 1)),
}


def as_tar(source: Path) -> Path:
    """The samples of a JSONL file as a WebDataset of one file, their images in it."""
    target = source.with_suffix(".tar")
    with tarfile.open(target, "w") as tar:
        for line in source.read_text().splitlines():
            record = json.loads(line)
            files = {f"{k}.png": (source.parent / name).read_bytes() for k, name in enumerate(record["images"])}
            for suffix, data in {**files, "json": json.dumps(record["conversations"]).encode()}.items():
                member = tarfile.TarInfo(f"{record['id']}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return target


@pytest.mark.parametrize("embedded", [False, True])
def test_reads_do_not_grow_with_the_number_of_ranks(sources: dict[str, Path], embedded: bool) -> None:
    """Images decoded and bytes read of a global batch over all ranks, at 2, 4 and 8 of them; each image once.

    Also where a sample's images are encoded by several ranks and lie in one tar file: each reads its own.
    """
    found = {}
    train = as_tar(sources["train"]) if embedded else sources["train"]
    lines = [json.loads(line) for line in sources["train"].read_text().splitlines()]
    for world, layout in COUNTED.items():
        with pipelines(plan_for({**sources, "train": train}, layout, prefetch=0)) as ranks:
            assert len(ranks) == world
            for pipeline in ranks:
                list(pipeline.step(0))
            ids = ranks[0].sample_ids(0)
            images = [sources["train"].parent / name for i in ids for name in lines[i]["images"]]
            assert sum(p.decoded for p in ranks) == len(images)
            found[world] = sum(p.corpus.media_bytes for p in ranks)
            assert found[world] == sum(image.stat().st_size for image in images)
            # A text is read by the ranks of its replica and by the encoders of its images: far less than the images.
            texts = sources["train"].stat().st_size + (512 * 4 * len(lines) if embedded else 0)  # headers of tar files
            assert sum(p.corpus.record_bytes for p in ranks) < 4 * texts < (0.3 if embedded else 0.1) * found[world]
            assert len(ids) == 40
    assert len(set(found.values())) == 1


def test_read_ahead_gives_the_same_and_reads_on_across_steps(sources: dict[str, Path]) -> None:
    with pipelines(plan_for(sources), world=1) as ahead, pipelines(plan_for(sources, prefetch=0), world=1) as plain:
        for step in (0, 1, 2, 7, 8, 7):  # a jump forward and one back
            for one, other in zip(ahead[0].step(step), plain[0].step(step), strict=True):
                assert_same(one, other)
        assert plain[0].decoded < ahead[0].decoded
        assert ahead[0].wait_s > 0
        assert plain[0].wait_s > 0


def test_read_ahead_lies_in_pinned_memory_when_asked(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, by the background worker: where that is left out, the copy to the GPU makes the host wait."""
    threads = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    pipeline = DataPipeline(plan_for(sources), "train", 0, pin=True)
    batches = list(pipeline.step(pipeline.num_batches - 1))
    pipeline.close()
    assert threads == ["prefetch"] * sum(len(m.pixels) + 4 * len(m.microbatches) for m in batches)


def test_nothing_is_read_before_or_behind_the_run(sources: dict[str, Path]) -> None:
    plan = plan_for(sources)
    last = plan.config.model.train_iters - 1
    with pipelines(plan) as ranks:
        for pipeline in ranks:
            assert len(list(pipeline.step(last))) == 2
        assert sum(p.decoded for p in ranks) == sum(len(spec.items) for spec in ranks[0].specs(last))
        with pytest.raises(IndexError, match=r"outside 0\.\.99"):
            next(ranks[0].step(last + 1))


def test_resuming_continues_with_the_same_batches(sources: dict[str, Path]) -> None:
    plan = plan_for(sources)
    with pipelines(plan, world=1) as unbroken, pipelines(plan, world=1) as resumed:
        batches = [list(unbroken[0].step(step)) for step in range(6)]
        for step in (4, 5):  # over the end of an epoch: 50 samples, 20 a step
            for one, other in zip(batches[step], resumed[0].step(step), strict=True):
                assert_same(one, other)


def test_an_abandoned_step_is_read_again_from_its_start(sources: dict[str, Path]) -> None:
    with pipelines(plan_for(sources), world=1) as (pipeline,):
        first = next(pipeline.step(0))
        assert [m.spec.index for m in pipeline.step(0)] == [0, 1]
        assert_same(first, next(pipeline.step(0)))


def test_validation_takes_every_sample_once(sources: dict[str, Path]) -> None:
    plan = plan_for(sources)
    with pipelines(plan, "valid", world=1) as (pipeline,):
        assert pipeline.num_batches == 2
        for _ in range(2):
            seen, lm = [], 0.0
            for step in range(pipeline.num_batches):
                for macro in pipeline.step(step):
                    check_texts(macro, 0)
                    seen += [i for replicas in macro.spec.sample_ids for slots in replicas for i in slots]
                    lm += sum(text.loss_mask_BS.sum().item() for text in macro.microbatches)
            assert [i for i in seen if i != NO_SAMPLE] == list(range(23))
            assert len(seen) == 40
            assert 0 < lm < pipeline.num_loss_tokens(0) + pipeline.num_loss_tokens(1)
        assert pipeline.num_samples(1) == 3


def test_validation_does_not_read_past_eval_iters(sources: dict[str, Path]) -> None:
    with pipelines(plan_for(sources), "valid") as ranks:
        for _ in range(2):
            for pipeline in ranks:
                assert len(list(pipeline.step(0))) == 2
        assert sum(p.decoded for p in ranks) == 2 * sum(len(spec.items) for spec in ranks[0].specs(0))


@pytest.mark.parametrize(("prefetch", "workers"), [(0, 0), (2, 0), (2, 1), (2, 2)])
def test_a_damaged_image_surfaces_as_itself(tmp_path: Path, prefetch: int, workers: int) -> None:
    save_image(tmp_path / "whole.png", 100, 100)
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:2000])
    samples: list[Any] = [sharegpt("<image>", "3", ["cut.png"], id=f"s{i}") for i in range(4)]
    source, data = write_jsonl(tmp_path / "s.jsonl", samples), {"prefetch": prefetch, "workers": workers}
    config = make_config(source, model={"global_batch_size": 2}, **data)
    with pipelines(make_plan(config, Grid(), Grid(), (1, 1))) as (pipeline,):
        for _ in range(2):  # and again when it is asked again
            message = rf"{source} line \d \(id s\d\): the sample has the image .*cut\.png, which is damaged .*; .* it"
            with pytest.raises(UserError) as found:
                list(pipeline.step(0))
            assert type(found.value) is UserError
            assert re.fullmatch(message, str(found.value))  # nothing around it


def test_an_image_that_changed_size_is_noticed(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png", 100, 100)
    path = write_jsonl(tmp_path / "s.jsonl", [sharegpt("<image>", "3", ["a.png"])])
    with pipelines(make_plan(make_config(path), Grid(), Grid(), (1,))) as (pipeline,):
        save_image(tmp_path / "a.png", 64, 64)
        with pytest.raises(UserError, match=r"changed size after it was indexed; remove .*\.index"):
            list(pipeline.step(0))


def test_samples_for_people(sources: dict[str, Path]) -> None:
    with pipelines(plan_for(sources), "valid", world=1) as (pipeline,):
        for sample_id in range(23):
            shown = pipeline.shown(sample_id)
            assert (shown is not None) == (len(pipeline.corpus.placements(sample_id)) == 1)
            if shown is not None:
                assert shown.question == "Which?"
                assert shown.image.is_file()
        tokens_T = pipeline.corpus.read(0).encoded.tokens_T
        assert pipeline.decode(tokens_T.tolist()).startswith("user\nWhich?\nassistant\n0")


def test_indexes_of_both_splits_lie_in_the_cache_folder(sources: dict[str, Path], tmp_path: Path) -> None:
    config = plan_for(sources, cache_path=str(tmp_path)).config
    for split in ("train", "valid"):
        (index,) = Corpus.open(config, split).indexes
        assert index.path.parent == tmp_path
    with pytest.raises(UserError, match=r"more than model\.seq_length=20"):
        Corpus.open(make_config(sources["train"], model={"seq_length": 20}), "train")
