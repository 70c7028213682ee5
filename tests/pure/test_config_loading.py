"""Where a key may be written, which value wins, and what is refused while reading."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.build import build_config
from flagscale.config.canonical import settings_of
from flagscale.config.errors import ConfigError, UserError
from flagscale.config.fields import all_fields, find_home, short_names
from flagscale.config.layers import shipped_folder
from flagscale.config.loading import load
from tests.pure.yaml_files import SNIPPET, Project, project

__all__ = ["project"]
BASE = "defaults: [/qwen35_mimo, _self_]\n"


def test_default_configuration_is_the_documented_layout() -> None:
    model = load("qwen35_mimo").config.model
    assert (model.tensor_model_parallel_size, model.vision_tensor_model_parallel_size) == (2, 1)
    assert (model.micro_batch_size, model.vision_micro_batch_size, model.global_batch_size) == (2, 4, 16)


@pytest.mark.parametrize("head", ["", BASE])
def test_the_users_snippet_works_as_it_stands(project: Project, head: str) -> None:
    config = project.load(head + SNIPPET).config
    assert config.model.vision_micro_batch_size == 4
    assert config.model.num_layers == 4, "the shipped configuration lies beneath a file without a model"
    assert Path(config.experiment.task.entrypoint).is_file()


def test_a_defaults_list_of_its_own_leaves_the_shipped_configuration_out(project: Project) -> None:
    with pytest.raises(UserError, match="num_layers = null: must be given"):
        project.load("defaults: [_self_]\nmodel: {micro_batch_size: 2}\n")


@pytest.mark.parametrize(
    "written",
    [
        "system: {seq_length: 64}",
        "data: {seq_length: 64}",
        "train: {model: {seq_length: 64}}",
        "train: {system: {checkpoint: {seq_length: 64}}}",
        "train: {data: {seq_length: 64}}",
        "system: {logging: {seq_length: 64}}",
        "model: {lr_scheduler: {seq_length: 64}}",
    ],
)
def test_a_key_is_understood_in_every_section(project: Project, written: str) -> None:
    assert project.load(BASE + written).config.model.seq_length == 64


@pytest.mark.parametrize(
    "written",
    ["model: {lr: 0.5}", "system: {optimizer: {lr: 0.5}}", "train: {model: {optimizer: {lr_scheduler: {lr: 0.5}}}}"],
)
def test_groupings_may_be_left_out_or_added(project: Project, written: str) -> None:
    assert project.load(BASE + written).config.model.optimizer.lr == 0.5


def test_the_tokenizer_section_is_no_mere_grouping(project: Project) -> None:
    assert project.load(BASE + "model: {tokenizer: {type: hf}}").config.data.tokenizer.type == "hf"
    with pytest.raises(ConfigError, match="no known key"):
        project.load(BASE + "data: {type: hf}")


@given(
    short=st.sampled_from(sorted(short_names())),
    section=st.sampled_from(["system", "model", "data"]),
    train=st.booleans(),
    groupings=st.lists(st.sampled_from(["precision", "logging", "optimizer"]), max_size=2),
)
def test_any_spelling_of_a_key_leads_to_its_one_home(
    short: str, section: str, train: bool, groupings: list[str]
) -> None:
    path = (*(("train",) if train else ()), section, *groupings, *short.split("."))
    assert find_home(path) == short_names()[short]


def test_precedence_holds_key_by_key_across_sections(project: Project) -> None:
    loaded = project.load(BASE + "system: {tensor_model_parallel_size: 1}\n")
    assert loaded.config.model.tensor_model_parallel_size == 1, "the shipped YAML has 2, in section model"
    assert loaded.origin("model.tensor_model_parallel_size").startswith("written as system.tensor_model_parallel_size")
    loaded = project.load(BASE + "system: {tensor_model_parallel_size: 1}\n", "data.tensor_model_parallel_size=4")
    assert loaded.config.model.tensor_model_parallel_size == 4


def test_a_group_that_writes_keys_of_another_section(project: Project) -> None:
    project.write("micro_batch_size: 4\nbf16: true\n", "data/mine")
    config = project.load("defaults: [/qwen35_mimo, {data@system: mine}, _self_]\n").config
    assert (config.model.micro_batch_size, config.system.bf16) == (4, True)


def test_one_file_with_one_key_twice_names_both_places(project: Project) -> None:
    with pytest.raises(ConfigError) as caught:
        project.load(BASE + "model: {seq_length: 64}\nsystem: {seq_length: 65}\n")
    assert "model.seq_length = 64" in str(caught.value)
    assert "system.seq_length = 65" in str(caught.value)
    assert "mine.yaml" in str(caught.value)
    assert project.load(BASE + "model: {seq_length: 64}\nsystem: {seq_length: 64}\n").config.model.seq_length == 64


@pytest.mark.parametrize("sign", ["", "++"])
def test_the_command_line_sets_any_known_key(project: Project, sign: str) -> None:
    config = project.load(BASE, f"{sign}system.lr_warmup_iters=7", f"{sign}model.adam_eps=1e-6").config
    assert (config.model.optimizer.lr_warmup_iters, config.model.optimizer.adam_eps) == (7, 1e-6)


def test_plus_adds_a_key_that_is_not_set_and_refuses_one_that_is(project: Project) -> None:
    assert project.load(BASE, "+system.vision_recompute=true").config.model.vision_recompute is True
    with pytest.raises(ConfigError, match=r"given twice: model.micro_batch_size = 2 \(.*system.micro_batch_size = 4"):
        project.load(BASE, "+system.micro_batch_size=4")


def test_the_command_line_with_one_key_twice(project: Project) -> None:
    with pytest.raises(ConfigError, match=r"model.seed = 1 \(command line\) and data.seed = 2"):
        project.load(BASE, "model.seed=1", "data.seed=2")


def test_tilde_gives_a_key_its_default_back(project: Project) -> None:
    assert project.load(BASE, "~model.save_interval").config.system.checkpoint.save_interval is None


def test_false_null_and_empty_lists_survive(project: Project) -> None:
    text = (
        BASE
        + "model: {use_mimo: false, eval_interval: null, mrope_section: []}\nexperiment: {envs: {A: null, B: false}}\n"
    )
    config = project.load(text, "experiment.envs.C=null", "experiment.envs.D=0.5").config
    assert config.model.use_mimo is False
    assert config.model.eval_interval is None
    assert config.model.mrope_section == []
    assert config.experiment.envs == {"A": None, "B": False, "C": None, "D": 0.5}
    assert build_config(dataclasses.asdict(config)) == config


def test_interpolations_name_keys_wherever_they_are_written(project: Project) -> None:
    text = BASE + (
        "system: {seq_length: 96}\n"
        "model: {train_iters: '${system.seq_length}', lr_warmup_iters: '${.micro_batch_size}', micro_batch_size: 2}\n"
        "experiment: {exp_name: 'tp${model.tensor_model_parallel_size}-${model.vision_balance}'}\n"
    )
    config = project.load(text).config
    assert config.model.train_iters == 96
    assert config.model.optimizer.lr_warmup_iters == 2
    assert config.experiment.exp_name == "tp2-world"
    with pytest.raises(ConfigError, match=r"model.train_iters = '\$\{model.nothing\}'.*cannot be resolved"):
        project.load(BASE + "model: {train_iters: '${model.nothing}'}\n")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("micro_batch_size: '2'", "model.micro_batch_size = '2' .*must be a whole number, not text"),
        ("micro_batch_size: true", "must be a whole number, not true or false"),
        ("micro_batch_size: 2.5", "must be a whole number, not a number with a fraction"),
        ("micro_batch_size: null", "must be a whole number, not null"),
        ("micro_batch_size: 0", "must be at least 1"),
        ("use_mimo: 1", "must be true or false, not a whole number"),
        ("vision_balance: planet", "must be one of none, replica, node, world"),
        ("mrope_section: [3, a]", "must be a list of whole numbers, not a list with a whole number and text"),
        ("mrope_section: 3", "must be a list of whole numbers, not a whole number"),
        ("lr: .inf", "must be a number, not one that is not finite"),
        ("lr: .nan", "must be a number, not one that is not finite"),
        ("lr: many", "must be a number, not text"),
        ("optimizer: adam", "is a section of keys"),
        ("micro_batch_siez: 2", "model.micro_batch_siez.*no known key.*model.micro_batch_size"),
    ],
)
def test_wrong_types_and_unknown_keys_name_key_value_and_file(project: Project, written: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        project.load(BASE + "model: {" + written + "}\n")
    assert "mine.yaml" in str(caught.value)


@pytest.mark.filterwarnings("error")
def test_a_defaults_list_without_self_ends_with_the_file_itself(project: Project) -> None:
    assert project.load("defaults: [/qwen35_mimo]\nmodel: {seed: 77}\n").config.model.seed == 77


@pytest.mark.parametrize(("written", "value"), [("'1e-4'", 1e-4), ("1", 1.0), ("1e-4", 1e-4)])
def test_numbers_for_a_float(project: Project, written: str, value: float) -> None:
    assert project.load(BASE + f"model: {{lr: {written}}}").config.model.optimizer.lr == value


def test_text_on_the_command_line_needs_no_quotes(project: Project) -> None:
    assert project.load(BASE, "experiment.exp_name=007").config.experiment.exp_name == "007"
    with pytest.raises(ConfigError, match=r"must be text, not a whole number.*put it in quotes"):
        project.load(BASE + "experiment: {exp_name: 42}\n")


def test_all_mistakes_of_a_file_are_found_together(project: Project) -> None:
    with pytest.raises(UserError) as caught:
        project.load(BASE + "model: {micro_batch_size: x, lr: y}\n")
    assert len(str(caught.value).splitlines()) == 2


def test_a_section_without_keys_and_hydras_own_section(project: Project) -> None:
    loaded = project.load(BASE + "model:\nsystem: {}\nhydra: {run: {dir: x}}\n")
    assert loaded.config.model.micro_batch_size == 2
    assert any("hydra has no effect" in note for note in loaded.notes)


def test_history_tells_which_file_set_a_key(project: Project) -> None:
    loaded = project.load(BASE + "model: {seq_length: 64}\n", "model.seq_length=32")
    sources = [(setting.value, Path(setting.source).name) for setting in loaded.history["model.seq_length"]]
    assert sources == [(144, "qwen35_mimo.yaml"), (64, "mine.yaml"), (32, "command line")]


class TestPaths:
    """A relative path in YAML means the same from any working folder."""

    def test_user_yaml_starts_at_its_project(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        text = BASE + "data: {train_path: sub/a.jsonl}\nexperiment: {exp_dir: out}\n"
        for cwd in (project.folder.parent, Path("/")):
            monkeypatch.chdir(cwd)
            config = project.load(text).config
            assert config.data.train_path == str(project.folder / "sub/a.jsonl")
            assert config.experiment.exp_dir == str(project.folder / "out")
        (project.folder.parent / ".git").mkdir()
        assert project.load(text).config.data.train_path == str(project.folder.parent / "sub/a.jsonl")

    def test_shipped_yaml_starts_at_the_checkout(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        config = load("qwen35_mimo").config
        assert config.experiment.exp_dir == str(shipped_folder().parent / "outputs/qwen35_mimo")

    def test_command_line_starts_at_the_working_folder(self, project: Project) -> None:
        project.write(BASE)
        config = load("mine", project.folder, ["experiment.exp_dir=here"], cwd=Path("/tmp")).config
        assert config.experiment.exp_dir == "/tmp/here"


@given(tree=st.dictionaries(st.sampled_from(["seq_length", "bf16", "lr", "prefetch"]), st.integers(1, 9), min_size=1))
@settings(max_examples=30)
def test_a_tree_and_its_canonical_form_set_the_same_keys(tree: dict[str, int]) -> None:
    homes = {setting.home: setting.value for setting in settings_of({"data": tree}, "f").values()}
    assert homes == {short_names()[name]: value for name, value in tree.items()}
    assert set(homes) <= set(all_fields())
