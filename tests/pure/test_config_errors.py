"""Every mistake ends with exit code 2 and one message a mistake that names what is wrong; never with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.config.loading import load
from flagscale.run import main
from tests.pure.test_runner_record import record
from tests.pure.yaml_files import Project, project

__all__ = ["project"]
BASE = "defaults: [/qwen35_mimo, _self_]\n"


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The messages on stderr of a program that ended with a user's mistake."""
    captured = capsys.readouterr()
    assert code == 2, captured.out
    assert "Traceback" not in captured.err
    assert all(line.startswith("error: ") for line in captured.err.splitlines())
    return captured.err


# (overrides, what the message must say)
RULES = [
    (["model.tensor_model_parallel_size=3"], ["3 x pipeline 1 = 3", "world size 4"]),
    (["model.pipeline_model_parallel_size=3"], ["2 x pipeline 3 = 6", "multiple of 6"]),
    (["model.vision_tensor_model_parallel_size=3"], ["must divide the world size 4", "use 2 or 4"]),
    (["experiment.runner.nproc_per_node=6", "model.tensor_model_parallel_size=3"], ["num_attention_heads 4"]),
    (["experiment.runner.nproc_per_node=3", "model.tensor_model_parallel_size=3"], ["linear_num_key_heads 4"]),
    (["experiment.runner.nproc_per_node=3", "model.tensor_model_parallel_size=3"],
     ["divide num_query_groups 2, or be"]),
    (["experiment.runner.nproc_per_node=8", "model.vision_tensor_model_parallel_size=8"],
     ["vision_num_attention_heads 4"]),
    (["model.use_mimo=false", "model.vision_num_attention_heads=1"], ["tensor_model_parallel_size = 2", "follows"]),
    (["model.vocab_size=127", "model.tensor_model_parallel_size=4"], ["must divide vocab_size 127"]),
    (["model.ffn_hidden_size=255"], ["must divide ffn_hidden_size 255"]),
    (["experiment.runner.nproc_per_node=6", "model.pipeline_model_parallel_size=3"],
     ["must divide num_layers 4", "use 2 or 4"]),
    (["model.global_batch_size=30"], ["micro_batch_size 2 x data parallel 2 = 4", "use 28 or 32"]),
    (["model.global_batch_size=3"], ["use 4"]),
    (["model.global_batch_size=16000000000"], ["the 4000000000 microbatches", "at most 1000000"]),
    (["experiment.runner.nproc_per_node=1000000000"], ["world size 1000000000", "at most 1000000"]),
    (["model.vision_micro_batch_size=1", "model.micro_batch_size=4"],
     ["(vision dp 4 x vision_micro_batch_size 1) / (language dp 2 x micro_batch_size 4) = 0.5",
      "use vision_micro_batch_size 2 (factor 1) or 4 (factor 2)"]),
    (["model.vision_micro_batch_size=3", "model.micro_batch_size=4"], ["1.5", "2 (factor 1) or 4 (factor 2)"]),
    (["data.max_pixels=1000000", "model.seq_length=128"],
     ["976 tokens and 16 of text are 992", "data.max_pixels to 114688"]),
    (["model.seq_length=20"], ["seq_length = 20", "25 tokens"]),
    (["model.sequence_parallel=true", "model.seq_length=127"], ["tensor_model_parallel_size 2", "use 126 or 128"]),
    (["system.platform=cuda"], ["nproc_per_node = 4", "visible GPUs, 0"]),
    (["model.num_query_groups=3"], ["num_attention_heads 4", "use 2 or 4"]),
    (["model.linear_num_value_heads=6"], ["linear_num_key_heads 4", "use 4 or 8"]),
    (["model.num_layers=6"], ["full_attention_interval 4", "use 4 or 8"]),
    (["model.mrope_section=[3,3,3]"], ["= 8", "with the sum 9"]),
    (["model.mrope_section=[2,2,4]"], ["entry 2 is 4, but only 2 of 8"]),
    (["model.rotary_percent=0.1"], ["kv_channels 32", "3.2"]),
    (["model.rotary_percent=1.5"], ["kv_channels 32"]),
    (["model.vision_hidden_size=72"], ["4 * vision_num_attention_heads = 16", "use 64 or 80"]),
    (["model.vision_num_position_embeddings=250"], ["square", "use 225 or 256"]),
    (["model.mtp_num_layers=2"], ["must be 0 or 1"]),
    (["model.image_token_id=128"], ["below vocab_size 128"]),
    (["model.image_token_id=6"], ["is also"]),
    (["model.seq_length=5000"], ["max_position_embeddings 4096"]),
    (["data.min_pixels=30000"], ["at most max_pixels 25600"]),
    (["data.max_pixels=1000", "data.min_pixels=1000"], ["at least 1024"]),
    (["data.workers=3"], ["data.workers = 3", "at most prefetch 2", "use 2 or fewer, or raise prefetch"]),
    (["data.workers=1", "data.prefetch=0"],
     ["data.workers = 1", "at most prefetch 0, which reads nothing ahead", "use 0, or raise prefetch"]),
    (["model.min_lr=1"], ["at most lr"]),
    (["model.adam_beta2=1"], ["below 1"]),
    (["model.lr_warmup_iters=240"], ["below lr_decay_iters 240"]),
    (["model.freeze_vision=true", "model.freeze_merger=true", "model.freeze_language=true"], ["nothing to train"]),
    (["data.valid_path=null"], ["eval_interval = 80", "valid_path is null"]),
    (["data.tokenizer.type=hf"], ["tokenizer.path = null"]),
    (["data.tokenizer.type=hf", "data.tokenizer.path=/nowhere"], ["is no folder"]),
    (["data.train_path=/nowhere/a.jsonl"], ["/nowhere/a.jsonl", "is no file"]),
    (["data.train_path=/proc/self/fdinfo"], ["is a folder without .tar or .parquet files"]),
    (["experiment.task.entrypoint=gone.py"], ["entrypoint", "gone.py", "is no file"]),
    (["experiment.exp_dir=/etc/hostname/x"], ["/etc/hostname is a file"]),
    (["data.cache_path=/etc/hostname"], ["data.cache_path = '/etc/hostname'", "/etc/hostname is a file"]),
    (["experiment.runner.nnodes=2"], ["must be 1 for runner.type local"]),
    (["experiment.runner.master_port=70000"], ["at most 65535"]),
    (["experiment.runner.type=cloud"], ["must be one of local"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "parts"), RULES, ids=lambda value: " ".join(value)[:60])
def test_a_broken_rule_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str], overrides: list[str], parts: list[str]
) -> None:
    project.write(BASE)
    message = refused(capsys, project.run(*overrides))
    for part in parts:
        assert part in message
    assert not (project.folder / "exp").exists(), "nothing is written for a refused configuration"


# (command line, what the message must say)
COMMAND_LINES = [
    (["modle=qwen35_tiny"], ["modle is no group and no key", "groups: data, model, optimizer, runner"]),
    (["model=qwen35_tinny"], ["Could not find 'model/qwen35_tinny'", "qwen35_tiny"]),
    (["model=5"], ["'model=5'", "a group takes the name", "choose one of qwen35_0.8b"]),
    (["a/b=5"], ["'a/b=5'", "groups: data, model"]),
    (["runner=null"], ["choose one of local"]),
    (["=5"], ["'=5'", "names no key"]),
    (["micro_batch_size=4"], ["model.micro_batch_size"]),
    (["model.micro_batch_sise=4"], ["model.micro_batch_size", "command line"]),
    (["experiment.micro_batch_size=4"], ["experiment.micro_batch_size", "no known key"]),
    (["experiment.runner=ssh"], ["is a section of keys"]),
    (["~model.nothing"], ["model.nothing", "no known key"]),
    (["action=fly"], ["run, dryrun, test"]),
    (["model.mrope_section=[3,"], ["is no override"]),
    (["model.lr"], ["is no override"]),
    (["model.lr=1,2"], ["several values"]),
    (["model.lr=nan"], ["model.optimizer.lr = nan", "not one that is not finite"]),
    (["key=model.lr"], ["action=explain"]),
    (["+extra=1"], ["extra is no group"]),
    (["hydra.run.dir=x"], ["hydra.run.dir", "no known key"]),
]


@pytest.mark.parametrize(("overrides", "parts"), COMMAND_LINES, ids=lambda value: " ".join(value)[:60])
def test_a_mistyped_command_line_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str], overrides: list[str], parts: list[str]
) -> None:
    project.write(BASE)
    message = refused(capsys, project.run(*overrides))
    for part in parts:
        assert part in message


# (text of the file, what the message must say)
FILES = [
    ("model: {micro_batch_size: 2\n", ["mine.yaml", "line 2", "no valid YAML"]),
    ("model:\n\tseq_length: 3\n", ["mine.yaml", "line 2"]),
    ("model:\n  seed: 1\n  seed: 2\n", ["mine.yaml", "duplicate key seed"]),
    ("- a\n- b\n", ["mine.yaml", "keys and values"]),
    ("just text\n", ["mine.yaml"]),
    ("defaults: [/qwen35_mimoo, _self_]\n", ["qwen35_mimoo"]),
    ("defaults: [mine, _self_]\n", ["leads back to itself"]),
    ("defaults: [{a: b, c: d}]\n", ["mine"]),
    ("defaults: 3\n", ["mine"]),
    (BASE + "model: 5\n", ["model = 5", "is a section of keys"]),
    (BASE + "modle: {seed: 1}\n", ["modle.seed", "model.seed"]),
    (BASE + "model: {exp_name: x}\n", ["model.exp_name", "experiment.exp_name"]),
    (BASE + "experiment: {envs: [1]}\n", ["experiment.envs", "a mapping"]),
    (BASE + "model: {seed: '${oc.env:SURELY_NOT_SET}'}\n", ["SURELY_NOT_SET", "cannot be resolved"]),
    (BASE + "model: {seed: '${model.seed}'}\n", ["model.seed", "cannot be resolved"]),
    (BASE + "model: {seed: '${broken'}\n", ["model.seed"]),
    (BASE + "experiment: {exp_name: '???'}\n", ["exp_name", "must be given"]),
    (BASE + "1: 2\n", ["1 = 2", "no known key", "action=explain key=model"]),
    ("default: [/qwen35_mimo, _self_]\n", ["default = ", "nearest known keys: defaults"]),
]


@pytest.mark.parametrize(("text", "parts"), FILES, ids=lambda value: value[-40:] if isinstance(value, str) else "")
def test_a_broken_file_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str], text: str, parts: list[str]
) -> None:
    project.write(text)
    message = refused(capsys, project.run())
    for part in parts:
        assert part in message


def test_missing_names_and_folders(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert "available: qwen35_mimo" in refused(capsys, main(["--config-name", "nothing"]))
    for folder in ("/nowhere", "~surely-no-user/x"):
        assert f"{folder}: no such folder" in refused(capsys, main(["--config-path", folder, "--config-name", "x"]))
    project.write(BASE)
    message = refused(capsys, main(["--config-path", str(project.folder)]))
    assert "--config-name is missing" in message
    assert "mine" in message
    (project.folder / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    assert "mine.yaml" in refused(capsys, project.run())


def test_a_folder_with_a_run_of_another_model(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.write(BASE)
    assert project.run() == 0
    assert project.run("model.ffn_hidden_size=128") == 0, "a plan alone binds nobody"
    assert project.run() == 0
    (project.folder / "exp/metrics.jsonl").touch()
    assert project.run("model.train_iters=500") == 0, "the length of training is no part of the architecture"
    capsys.readouterr()
    message = refused(capsys, project.run("model.ffn_hidden_size=512"))
    assert "ffn_hidden_size 256 there and 512 here" in message
    message = refused(capsys, project.run("model.mrope_section=[4,2,2]"))
    assert "mrope_section [3, 3, 2] there and [4, 2, 2] here" in message, "tensors of the same shapes, read otherwise"
    (project.folder / "exp/config.yaml").write_text("[")
    assert "is no configuration of a run" in refused(capsys, project.run())


@pytest.mark.parametrize("key", ["data.train_path", "data.valid_path", "experiment.task.entrypoint"])
def test_an_empty_file_is_named(key: str, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank would find no samples in it, half a minute later; an empty entrypoint would train nothing and end well."""
    project.write(BASE)
    empty = project.folder / "empty"
    empty.touch()
    message = refused(capsys, project.run(f"{key}={empty}"))
    assert all(text in message for text in (key, str(empty), "is an empty file"))


def test_a_dry_run_leaves_the_plan_of_a_running_job(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A restart reads it again."""
    project.write(BASE)
    assert project.run() == 0
    exp_dir = project.folder / "exp"
    before = (exp_dir / "plan.json").read_text()
    record().save(exp_dir)
    assert "a job runs in this folder" in refused(capsys, project.run("model.seed=5"))
    assert (exp_dir / "plan.json").read_text() == before
    record(launcher_ticks=1).save(exp_dir)
    assert project.run("model.seed=5") == 0, "it has ended"


def test_a_folder_that_cannot_be_written(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.write(BASE)
    assert "cannot be written" in refused(capsys, project.run("experiment.exp_dir=/proc/nothing"))


def test_a_section_is_explained_by_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["action=explain", "key=model"]) == 0
    assert "model.seq_length: tokens of a sample" in capsys.readouterr().out


def test_help_names_actions_and_leaves_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "action=dryrun" in capsys.readouterr().out


def test_explain_a_key(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    file, shipped = project.write(BASE + "system: {seq_length: 64}\n"), load("qwen35_mimo").config.model.seq_length
    for arguments in (["action=explain", "key=model.seq_length"], ["--help-key", "seq_length"]):
        assert project.run(*arguments) == 0
        shown = capsys.readouterr().out
        assert "tokens of a sample" in shown
        assert f"written as system.seq_length in {file}" in shown
        assert f"overridden: {shipped}" in shown


def test_variables_are_explained_one_by_one(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    file = project.write(BASE + "experiment: {envs: {NCCL_DEBUG: WARN}}\n")
    assert project.run("action=explain", "key=experiment.envs", "+experiment.envs.MODE=3") == 0
    shown = capsys.readouterr().out
    assert f"set by:     experiment.envs.NCCL_DEBUG = 'WARN', {file}\n" in shown
    assert "set by:     experiment.envs.MODE = 3, command line\n" in shown
    assert "it is the default" not in shown


def test_explain_without_key_and_with_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    for nothing in (["action=explain"], ["action=explain", "key="], ["--help-key="]):
        assert "no key given" in refused(capsys, main(nothing))
    for asked in (["--help-key", "seed"], ["key=seed"]):
        assert "explains no key" in refused(capsys, main(["-m", "model.seed=1,2", *asked]))
    assert "model.seq_length" in refused(capsys, main(["action=explain", "key=model.seq_lenght"]))


def test_files_are_found_from_any_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["action=explain", "key=model.seed"]) == 0
