"""The plan: grids, batch arithmetic, sizes and work, the file, and what `action=dryrun` shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.config.errors import UserError
from flagscale.config.layers import shipped_folder
from flagscale.config.loading import load
from flagscale.config.schema import Config, ModelConfig
from flagscale.plan import devices
from flagscale.plan.batch import batch_plan, grids_of, macro_batches
from flagscale.plan.build import make_plan
from flagscale.plan.flops import (
    encoder_flops,
    language_flops,
    language_training_flops,
    training_factors,
    vision_item_flops,
    vision_item_training_flops,
)
from flagscale.plan.images import CHAT_TOKENS, largest_image_tokens, largest_max_pixels
from flagscale.plan.layout import LANGUAGE, VISION, Grid
from flagscale.plan.params import merger_parameters, parameter_counts
from flagscale.plan.plan import ExperimentPlan
from flagscale.plan.rules import world_errors
from tests.pure.yaml_files import Project, project

__all__ = ["project"]
DEFAULT = load("qwen35_mimo").config


def with_model(config: Config, **values: object) -> Config:
    """The configuration with other values in `model`."""
    return replace(config, model=replace(config.model, **values))  # type: ignore[arg-type]


def with_ranks(config: Config, ranks: int) -> Config:
    """The configuration on another number of processes."""
    runner = replace(config.experiment.runner, nproc_per_node=ranks)
    return replace(config, experiment=replace(config.experiment, runner=runner))


def test_default_plan_is_the_documented_example() -> None:
    plan = make_plan(DEFAULT)
    assert (plan.layout, plan.world_size) == ("colocated", 4)
    assert (plan.vision, plan.language) == (Grid(tp=1, dp=4), Grid(tp=2, dp=2))
    assert plan.batch.vit_batch_factor == 4
    assert (plan.batch.num_microbatches, plan.batch.macro_batches) == (4, (4,))


def test_the_reference_layout_on_eight_ranks() -> None:
    plan = make_plan(with_ranks(with_model(DEFAULT, global_batch_size=64), 8))
    assert (plan.vision.dp, plan.language.dp, plan.batch.vit_batch_factor) == (8, 4, 4)


def test_unified_follows_the_language_grid() -> None:
    plan = make_plan(with_model(DEFAULT, use_mimo=False))
    assert (plan.layout, plan.vision, plan.batch.vit_batch_factor) == ("unified", plan.language, 1)
    assert plan.vision_balance == "replica"
    staged = make_plan(with_model(DEFAULT, use_mimo=False, pipeline_model_parallel_size=2))
    assert staged.vision == Grid(tp=2, dp=1)
    assert staged.vision.ranks == staged.language.groups("tp", "dp")[0], "the ranks of the first stage"
    assert staged.batch.macro_batches == (staged.batch.num_microbatches,)


def test_colocated_with_stages_encodes_on_every_rank() -> None:
    plan = make_plan(with_model(DEFAULT, pipeline_model_parallel_size=2, vision_micro_batch_size=1))
    assert (plan.vision.dp, plan.language.dp, plan.batch.vit_batch_factor) == (4, 1, 2)


@given(num_microbatches=st.integers(1, 60), factor=st.integers(1, 20))
def test_macro_batches_add_up(num_microbatches: int, factor: int) -> None:
    sizes = macro_batches(num_microbatches, factor)
    assert sum(sizes) == num_microbatches
    assert set(sizes[:-1]) <= {factor}
    assert 1 <= sizes[-1] <= factor
    assert macro_batches(6, 4) == (4, 2)


@given(
    world=st.integers(1, 8),
    tp=st.sampled_from([1, 2, 4]),
    vision_tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 64)),
    mimo=st.booleans(),
)
def test_what_the_rules_let_through_is_whole(
    world: int, tp: int, vision_tp: int, pp: int, sizes: tuple[int, int, int], mimo: bool
) -> None:
    config = with_model(
        with_ranks(DEFAULT, world),
        use_mimo=mimo,
        tensor_model_parallel_size=tp,
        vision_tensor_model_parallel_size=vision_tp,
        pipeline_model_parallel_size=pp,
        micro_batch_size=sizes[0],
        vision_micro_batch_size=sizes[1],
        global_batch_size=sizes[2],
    )
    whole = world % (tp * pp) == 0 and (not mimo or world % vision_tp == 0)
    language_dp = world // (tp * pp) if whole else 1
    whole = whole and sizes[2] % (sizes[0] * language_dp) == 0
    if mimo and whole:
        whole = Fraction(world // vision_tp * sizes[1], language_dp * sizes[0]).denominator == 1
    assert (not world_errors(config)) == whole
    if whole:
        grids = grids_of(config)
        batch = batch_plan(config, grids)
        assert grids[LANGUAGE].size == world
        assert grids[VISION].size == (world if mimo else world // pp)
        assert batch.vision_micro_batch_size * grids[VISION].dp == batch.vit_batch_factor * sizes[0] * language_dp
        assert sum(batch.macro_batches) * sizes[0] * language_dp == sizes[2]


@given(micro=st.integers(1, 12), vision=st.integers(1, 12), tp=st.sampled_from([1, 2, 4]))
def test_the_vision_micro_batch_sizes_that_are_proposed_work(micro: int, vision: int, tp: int) -> None:
    language_dp = 4 // tp
    config = with_model(
        DEFAULT,
        tensor_model_parallel_size=tp,
        micro_batch_size=micro,
        vision_micro_batch_size=vision,
        global_batch_size=micro * language_dp,
    )
    for error in world_errors(config):
        sizes = [
            int(part.split(" (")[0]) for part in error.remedy.removeprefix("use vision_micro_batch_size ").split(" or ")
        ]
        assert len(sizes) == 2
        for size in sizes:
            assert not world_errors(with_model(config, vision_micro_batch_size=size))


class TestFile:
    """plan.json."""

    def test_loads_back_equal(self, tmp_path: Path) -> None:
        for values in ({}, {"use_mimo": False}, {"eval_interval": None, "mrope_section": [8, 0, 0]}):
            plan = make_plan(with_model(DEFAULT, **values), lambda config, folder: ["a b", "--plan", str(folder)])
            plan.save(tmp_path / "deep/plan.json")
            assert ExperimentPlan.load(tmp_path / "deep/plan.json") == plan
            assert [path.name for path in (tmp_path / "deep").iterdir()] == ["plan.json"]

    def test_holds_what_tools_read(self) -> None:
        tree = make_plan(DEFAULT, lambda *_: ["python", "a b.py"]).to_tree()
        assert json.loads(json.dumps(tree)) == tree
        assert (tree["world_size"], tree["layout"], tree["vit_batch_factor"]) == (4, "colocated", 4)
        assert (tree["num_microbatches"], tree["macro_batches"], tree["global_batch_size"]) == (4, [4], 16)
        assert tree["command"] == ["python", "a b.py"]
        assert tree["command_line"] == "python 'a b.py'"
        language = tree["modules"]["language"]
        assert {axis: language[axis] for axis in ("tp", "cp", "pp", "dp", "ep")} == {
            "tp": 2, "cp": 1, "pp": 1, "dp": 2, "ep": 1
        }  # fmt: skip
        assert language["groups"]["tp"] == [[0, 1], [2, 3]]
        assert language["groups"]["dp"] == [[0, 2], [1, 3]]
        assert set(language["groups"]) >= {"tp", "cp", "pp", "dp", "ep"}

    @pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"config": 3}'])
    def test_what_is_no_plan_is_refused_by_name(self, tmp_path: Path, text: str | None) -> None:
        path = tmp_path / "plan.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=r"plan\.json"):
            ExperimentPlan.load(path)


QWEN35 = {  # hidden, layers, heads, groups, ffn, GDN value heads, untied, ViT depth, width, heads, ffn, total, ViT
    "0.8B": (1024, 24, 8, 2, 3584, 16, False, 12, 768, 12, 3072, 0.853e9, 100.6e6),
    "2B": (2048, 24, 8, 2, 6144, 16, False, 24, 1024, 16, 4096, 2.213e9, 331.4e6),
    "4B": (2560, 32, 16, 4, 9216, 32, False, 24, 1024, 16, 4096, 4.539e9, 333.5e6),
    "9B": (4096, 32, 16, 4, 12288, 32, True, 27, 1152, 16, 4304, 9.410e9, 456.0e6),
    "27B": (5120, 64, 24, 4, 17408, 48, True, 27, 1152, 16, 4304, 27.357e9, 460.7e6),
}


def qwen35(size: str) -> ModelConfig:
    """The model of a published size."""
    hidden, layers, heads, groups, ffn, value_heads, untied, depth, width, vision_heads, vision_ffn = QWEN35[size][:11]
    return ModelConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_query_groups=groups,
        ffn_hidden_size=ffn,
        linear_num_value_heads=value_heads,
        untie_embeddings_and_output_weights=untied,
        vision_num_layers=depth,
        vision_hidden_size=width,
        vision_num_attention_heads=vision_heads,
        vision_ffn_hidden_size=vision_ffn,
    )


class TestSizesAndWork:
    """Parameters and FLOPs."""

    @pytest.mark.parametrize("size", QWEN35)
    def test_parameters_of_the_published_sizes(self, size: str) -> None:
        counts = parameter_counts(qwen35(size))
        visual = counts["vision"] + counts["merger"]
        assert visual + counts["language"] == pytest.approx(QWEN35[size][11], rel=1e-3)
        assert visual == pytest.approx(QWEN35[size][12], rel=1e-3)

    def test_language_flops_are_near_two_a_weight_and_token(self) -> None:
        model = qwen35("4B")
        weights = parameter_counts(model)["language"]
        flops = language_flops(model, 2, 2048)
        assert 1.0 < flops / (2 * 2048 * 2 * weights) < 1.1
        assert language_flops(model, 4, 2048) == 2 * flops
        assert language_flops(model, 1, 4096) > language_flops(model, 2, 2048), "attention grows with the length"

    def test_vision_flops_are_linear_plus_quadratic(self) -> None:
        model = qwen35("4B")
        assert vision_item_flops(model, 2, 8) == vision_item_flops(model, 4, 4)
        one, two, four = (vision_item_flops(model, 32, 32 * n) for n in (1, 2, 4))
        quadratic = (two - 2 * one) / 2  # of one: f = a n + b n^2
        assert four == pytest.approx(4 * one + 12 * quadratic)
        assert quadratic == pytest.approx(model.vision_num_layers * 4 * 1024**2 * model.vision_hidden_size)
        assert vision_item_flops(model, 4, 4) - encoder_flops(model, 16) == pytest.approx(
            2 * 4 * merger_parameters(model), rel=2e-3
        )

    def test_training_multiplies_by_what_is_trained(self) -> None:
        model = qwen35("0.8B")
        assert language_training_flops(replace(model, mtp_num_layers=0), 1, 64) == 3 * language_flops(model, 1, 64)
        assert vision_item_training_flops(model, 4, 4) == 3 * vision_item_flops(model, 4, 4)
        frozen = training_factors(replace(model, freeze_vision=True, freeze_merger=True, freeze_language=False))
        assert frozen == {"vision": 1, "merger": 1, "language": 3, "mtp": 3}
        assert training_factors(replace(model, freeze_language=True))["language"] == 2

    def test_memory_shrinks_with_what_divides_it(self) -> None:
        def memory(**values: object) -> int:
            return make_plan(with_model(DEFAULT, **values)).memory.total

        assert memory(tensor_model_parallel_size=4) < memory() < memory(tensor_model_parallel_size=1)
        assert memory(vision_recompute=True) < memory()
        assert memory(freeze_vision=True) < memory()

    def test_largest_image_and_the_sequence(self) -> None:
        assert largest_image_tokens(DEFAULT) == 25
        fits = largest_max_pixels(DEFAULT)
        held = replace(DEFAULT, data=replace(DEFAULT.data, max_pixels=fits))
        assert largest_image_tokens(held) + CHAT_TOKENS == DEFAULT.model.seq_length


class TestGpus:
    """GPUs that a process can see, with the driver's tool replaced by a script."""

    @pytest.mark.parametrize(
        ("visible", "count"),
        [(None, 2), ("", 0), ("0", 1), ("1,0", 2), ("0,7", 1), ("-1", 0), ("GPU-abc", 1), ("0, 1", 2)],
    )
    def test_driver_list_and_mask(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
    ) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-abc)'\necho 'GPU 1: H200 (UUID: GPU-def)'\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert devices.visible_gpus() == count

    def test_unused_gpus_are_mentioned(
        self, project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tool = project.folder / "bin/nvidia-smi"
        tool.parent.mkdir(parents=True)
        tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-abc)'\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        project.write("defaults: [/qwen35_mimo, _self_]\n")
        assert project.run() == 0
        assert "4 processes and 1 visible GPUs, so the run is on the CPU" in capsys.readouterr().out
        assert project.run("system.platform=cuda") == 2
        assert "visible GPUs, 1" in capsys.readouterr().err

    def test_no_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert devices.visible_gpus() == 0


class TestDryrun:
    """`action=dryrun` from outside, as users start it."""

    def test_shows_and_writes_the_plan_without_torch(self, project: Project, tmp_path: Path) -> None:
        project.write("defaults: [/qwen35_mimo, _self_]\nexperiment: {exp_dir: exp}\n")
        program = (
            "import sys; from flagscale.run import main; code = main(sys.argv[1:]);"
            "loaded = {'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules);"
            "sys.exit(f'imported {loaded}' if loaded else code)"
        )
        data = tmp_path / "data.jsonl"
        data.write_text("{}\n")
        arguments = [f"data.train_path={data}", "data.valid_path=null", "model.eval_interval=null", "action=dryrun"]
        done = subprocess.run(
            [sys.executable, "-c", program, "--config-path", "conf", "--config-name", "mine", *arguments],
            capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
            env={**os.environ, "PYTHONPATH": str(shipped_folder().parent)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        for text in ("vision grid", "tp1 cp1 dp4", "4 = (vision dp 4 x", "4 = 16 / (2 x 2)", "torch.distributed.run"):
            assert text in done.stdout
        folder = project.folder / "exp"
        assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "plan.json"]
        plan = ExperimentPlan.load(folder / "plan.json")
        assert plan.config.model.eval_interval is None
        assert plan.command[-2:] == ("--plan", str(folder / "plan.json"))
        assert load("config", folder).config == replace(plan.config, action="dryrun"), "config.yaml can be run again"

    def test_keys_without_effect_are_reported_once(self, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
        project.write("defaults: [/qwen35_mimo, _self_]\n")
        cases = {
            "model.use_mimo=false": "vision_tensor_model_parallel_size, vision_micro_batch_size have no effect",
            "data.tokenizer.path=.": "data.tokenizer.path: no effect",
            "model.mtp_num_layers=0": "model.mtp_loss_scaling_factor: no effect",
            "model.eval_interval=null": "model.eval_iters: no effect",
            "model.vision_micro_batch_size=16": "vit_batch_factor 16 exceeds the 4 microbatches",
        }
        for override, note in cases.items():
            assert project.run(override) == 0
            assert capsys.readouterr().out.count(note) == 1
        assert project.run("model.sequence_parallel=true", "model.tensor_model_parallel_size=1") == 0
        assert "sequence_parallel=true: no effect" in capsys.readouterr().out
        assert project.run("model.freeze_vision=true", "model.vision_recompute=true") == 0
        assert "model.vision_recompute: no effect" in capsys.readouterr().out
        assert project.run() == 0
        assert "note:" not in capsys.readouterr().out
