"""Bad input of the converter and of `system.checkpoint.pretrained`: one clear message, and nothing left behind."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import CheckpointException

from flagscale.config.build import build_config
from flagscale.config.schema import Config
from flagscale.models.qwen35 import stored
from flagscale.models.qwen35.hf_files import ShardWriter
from flagscale.plan.pretrained import pretrained_weights_fit
from flagscale.plan.safetensors import INDEX
from flagscale.train.checkpoint import misfit
from tests.checkpoint.helpers import DENSE, EXPERTS, write_hf, write_yaml
from tools.checkpoint.convert import main

GATE = "model.language_model.layers.0.mlp.gate_proj.weight"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], holding: str = GATE) -> None:
    """Changes the shard that holds a tensor; the index stays as it is."""
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][holding]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])


def cut_header(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:20])


def remove_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[2].unlink()


def other_architecture(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def other_size(folder: Path) -> None:
    tree = json.loads((folder / "config.json").read_text())
    tree["text_config"]["hidden_size"] = 128
    (folder / "config.json").write_text(json.dumps(tree))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def other_shape(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({GATE: torch.zeros(80, 64)}))


def quantised(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.float8_e4m3fn)}))


def unexpected(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))


def without_mtp(folder: Path) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    for file in set(weight_map.values()):
        kept = {name: value for name, value in load_file(folder / file).items() if not name.startswith("mtp.")}
        save_file(kept, folder / file)
    weight_map = {name: file for name, file in weight_map.items() if not name.startswith("mtp.")}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def index_of_a_list(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": [GATE]}))


def index_with_an_absent_file(folder: Path) -> None:
    """Under a name that no file system takes."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weight_map, GATE: "absent" * 50}}))


def rewrite_header(folder: Path, change: dict[str, Any]) -> None:
    """Changes the entry of a tensor in the header of its file."""
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][GATE]
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header[GATE].update(change)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def no_offsets(folder: Path) -> None:
    rewrite_header(folder, {"data_offsets": []})


def offsets_of_text(folder: Path) -> None:
    rewrite_header(folder, {"data_offsets": ["first", "last"]})


def sides_of_text(folder: Path) -> None:
    rewrite_header(folder, {"shape": ["wide"]})


def unknown_dtype(folder: Path) -> None:
    rewrite_header(folder, {"dtype": "F7"})


def unknown_kind_of_dtype(folder: Path) -> None:
    rewrite_header(folder, {"dtype": ["F32"]})


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGE: dict[Callable[[Path], None], tuple[str, ...]] = {
    truncate: ("model-00002-of", "bytes, its header describes"),
    cut_header: ("model-00002-of", "header cannot be read"),
    remove_shard: ("lacks model-00003-of",),
    other_architecture: ("config.json", "'llama'", "'qwen3_5'"),
    other_size: ("text_config.hidden_size is 128 there and 64 in the model config",),
    no_config: ("config.json", "No such file"),
    other_shape: (GATE, "(80, 64)", "(96, 64)"),
    quantised: (GATE, "F8_E4M3"),
    unexpected: ("has unexpected 1 (model.extra.weight)",),
    index_of_a_list: (INDEX, "is no index of safetensors files"),
    index_with_an_absent_file: (INDEX, "lacks absentabsent"),
    no_offsets: (".safetensors", "header cannot be read"),
    offsets_of_text: (".safetensors", "header cannot be read"),
    sides_of_text: (".safetensors", "header cannot be read"),
    unknown_dtype: (GATE, "of dtype F7"),
    unknown_kind_of_dtype: (GATE, "of dtype ['F32']"),
    empty_folder: ("config.json", "No such file"),
    without_mtp: ("lacks", "mtp.fc.weight", "model.mtp_num_layers to 0"),
}


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The message of a run that ended with exit code 2."""
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("error: ")
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_nothing_is_written(
    damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, config = tmp_path / "hf", write_yaml(tmp_path, DENSE)
    write_hf(hf, DENSE)
    damage(hf)
    message = refused(capsys, main(["hf-to-mcore", *config, "--hf", str(hf), "--out", str(tmp_path / "out")]))
    assert all(part in message for part in DAMAGE[damage]), message
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run.yaml"}


def test_precision_is_lost_only_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, out, config = tmp_path / "hf", tmp_path / "out", write_yaml(tmp_path, DENSE)
    write_hf(hf, DENSE)
    command = ["hf-to-mcore", *config, "--hf", str(hf), "--out", str(out), "--dtype", "bfloat16"]
    message = refused(capsys, main(command))
    assert "A_log" in message
    assert "float32 into bfloat16" in message
    assert not out.exists()
    assert main([*command, "--allow-precision-loss"]) == 0
    assert main(["verify", *config, "--hf", str(hf), "--mcore", str(out)]) == 1
    assert "float32 there, bfloat16 in the checkpoint" in capsys.readouterr().out


def test_an_output_folder_with_weights_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, out, config = tmp_path / "hf", tmp_path / "out", write_yaml(tmp_path, DENSE)
    write_hf(hf, DENSE)
    out.mkdir()
    (out / "model.safetensors").write_text("precious")
    message = refused(capsys, main(["hf-to-mcore", *config, "--hf", str(hf), "--out", str(out)]))
    assert "exists and is not empty" in message
    assert (out / "model.safetensors").read_text() == "precious"


def test_an_output_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below a file, under a name too long, in a folder that may not be written; those above it are not left either."""
    hf, config = tmp_path / "hf", write_yaml(tmp_path, DENSE)
    write_hf(hf, DENSE)
    reasons = {
        tmp_path / "run.yaml/out": "File exists",
        tmp_path / "run.yaml/a/out": "Not a directory",
        tmp_path / ("long" * 100): "File name too long",
        tmp_path / "new/a/out": "Permission denied",
    }
    make = Path.mkdir

    def refuses(path: Path, *args: Any, **keys: Any) -> None:
        if path.name.startswith(".partial-"):
            raise PermissionError(13, "Permission denied", str(path))
        make(path, *args, **keys)

    monkeypatch.setattr(Path, "mkdir", refuses)
    for out, reason in reasons.items():
        message = refused(capsys, main(["hf-to-mcore", *config, "--hf", str(hf), "--out", str(out)]))
        assert f"--out {out}: {reason}" in message
        assert {path.name for path in tmp_path.iterdir()} == {"hf", "run.yaml"}


def test_a_file_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, config = tmp_path / "hf", write_yaml(tmp_path, DENSE)
    write_hf(hf, DENSE)
    read = Path.read_text

    def refuses(path: Path, *args: Any, **keys: Any) -> str:
        if path.name == INDEX:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **keys)

    monkeypatch.setattr(Path, "read_text", refuses)
    message = refused(capsys, main(["hf-to-mcore", *config, "--hf", str(hf), "--out", str(tmp_path / "out")]))
    assert f"{hf / INDEX}: Permission denied" in message


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "1e300"])
def test_a_shard_size_that_is_none_is_refused(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = write_yaml(tmp_path, DENSE), tmp_path / "out"
    command = ["mcore-to-hf", *config, "--mcore", str(tmp_path), "--out", str(out), f"--shard-size={size}"]
    assert "--shard-size" in refused(capsys, main(command))
    assert not out.exists()


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, mcore, config = tmp_path / "hf", tmp_path / "mcore", write_yaml(tmp_path, DENSE)
    write_hf(hf, DENSE)
    assert main(["hf-to-mcore", *config, "--hf", str(hf), "--out", str(mcore)]) == 0
    export = ["mcore-to-hf", *config, "--mcore", str(mcore), "--out", str(tmp_path / "back")]
    message = refused(capsys, main([*export, "model.ffn_hidden_size=80"]))
    assert "mlp.linear_fc1.weight" in message
    assert "(192, 64)" in message
    assert "(160, 64)" in message
    for change, words in (
        ("model.mtp_num_layers=0", ("unexpected", "language.mtp.")),
        ("model.vision_num_layers=3", ("vision", "(3, ")),
        ("model.untie_embeddings_and_output_weights=true", ("lacks", "output_layer.weight")),
    ):
        message = refused(capsys, main([*export, change]))
        assert all(word in message for word in words), message
    (mcore / ".metadata").unlink()
    assert "is neither a checkpoint" in refused(capsys, main(export))
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("end", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stopped"])
def test_a_conversion_that_ends_early_leaves_nothing(
    end: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Either way, at the second parameter or shard."""
    hf, mcore, config = tmp_path / "hf", tmp_path / "mcore", write_yaml(tmp_path, DENSE)
    write_hf(hf, DENSE)
    out = ["--out", str(tmp_path / "back"), "--shard-size", "0.0001"]
    ways = {
        stored.Stored: ("from_canonical", ["hf-to-mcore", *config, "--hf", str(hf), "--out", str(mcore)]),
        ShardWriter: ("_flush", ["mcore-to-hf", *config, "--mcore", str(mcore), *out]),
    }
    for owner, (method, command) in ways.items():
        inner, calls = getattr(owner, method), []

        def ends(*args: Any, inner: Any = inner, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise end
            return inner(*args, **kwargs)

        before = {path.name for path in tmp_path.iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, ends)
            if isinstance(end, OSError):
                assert "No space left on device; nothing was left there" in refused(capsys, main(command))
            else:
                with pytest.raises(KeyboardInterrupt):
                    main(command)
        assert len(calls) == 2
        assert {path.name for path in tmp_path.iterdir()} == before
        if owner is stored.Stored:
            assert main(command) == 0


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_checkpoint_is_named(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, mcore, config = tmp_path / "hf", tmp_path / "mcore", write_yaml(tmp_path, DENSE)
    write_hf(hf, DENSE)
    assert main(["hf-to-mcore", *config, "--hf", str(hf), "--out", str(mcore)]) == 0
    (file,) = mcore.glob("*.distcp")
    file.write_bytes(file.read_bytes()[: -file.stat().st_size // 2])
    if damage == "missing":
        file.unlink()
    message = refused(capsys, main(["mcore-to-hf", *config, "--mcore", str(mcore), "--out", str(tmp_path / "back")]))
    assert f"{mcore}: " in message
    assert "cannot be read" in message
    refused(capsys, main(["verify", *config, "--hf", str(hf), "--mcore", str(mcore)]))
    assert not (tmp_path / "back").exists()


def config_with(pretrained: Path) -> Config:
    """A configuration of the model with experts that starts from `pretrained`."""
    shape = {name: getattr(EXPERTS, name) for name in EXPERTS.__dataclass_fields__ if name != "optimizer"}
    system = {"checkpoint": {"pretrained": str(pretrained)}}
    return build_config({"model": shape, "data": {"train_path": "unused"}, "system": system})


def test_weights_to_start_from_are_checked_before_a_process_starts(tmp_path: Path) -> None:
    good, dense = tmp_path / "good", tmp_path / "dense"
    write_hf(good, EXPERTS)
    write_hf(dense, DENSE)
    assert list(pretrained_weights_fit(config_with(good))) == []
    messages = {
        tmp_path / "missing": "is no folder",
        tmp_path: "holds neither safetensors files nor a checkpoint",
        dense: "model_type is 'qwen3_5', the model config describes 'qwen3_5_moe'",
    }
    for folder, part in messages.items():
        (error,) = pretrained_weights_fit(config_with(folder))
        assert part in str(error)
        assert "system.checkpoint.pretrained" in str(error)
    truncate(good)
    (error,) = pretrained_weights_fit(config_with(good))
    assert "its header describes" in str(error)


@pytest.mark.parametrize(
    ("cause", "is_misfit"), [(CheckpointingException("shape"), True), (KeyError("tensor"), True), (OSError(5), False)]
)
def test_what_torch_wraps_is_told_from_damage(cause: Exception, is_misfit: bool) -> None:
    """A tensor of another size comes in torch's own exception, as a file that cannot be read does."""
    wrapped = CheckpointException("load", {0: (cause, traceback.StackSummary())})
    for error in (cause, wrapped):
        assert misfit(error) is (cause if is_misfit else None)
