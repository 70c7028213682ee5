"""transformers loads what is exported, and what it saves can be converted; memory stays at about a shard."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flagscale.config.schema import ModelConfig
from flagscale.data.tokenizer import SPECIAL_TEXTS
from tests.checkpoint.helpers import MODELS, read_folder, write_hf, write_yaml
from tests.data.test_tokenizer import save_tokenizer
from tests.models.tiny import hf_config, tiny_model, tiny_moe
from tools.checkpoint.convert import main

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def transformers_model(kind: str) -> Any:
    """The class that the release names."""
    import transformers

    name = "Qwen3_5MoeForConditionalGeneration" if kind == "experts" else "Qwen3_5ForConditionalGeneration"
    return getattr(transformers, name)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_from_pretrained_takes_an_export(kind: str, tmp_path: Path) -> None:
    """With and without an original to copy the configuration from; tokenizer and processor come with the copy."""
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen2VLImageProcessor

    model, hf, mcore = MODELS[kind], tmp_path / "hf", tmp_path / "mcore"
    config = write_yaml(tmp_path, model)
    write_hf(hf, model)
    save_tokenizer(hf, list(SPECIAL_TEXTS.values()))
    Qwen2VLImageProcessor(patch_size=16).save_pretrained(hf)
    assert main(["hf-to-mcore", *config, "--hf", str(hf), "--out", str(mcore)]) == 0
    expected = transformers_model(kind).from_pretrained(hf, dtype=torch.float32).state_dict()
    for name, more in {"copied": ["--hf", str(hf)], "made": []}.items():
        out = tmp_path / name
        assert main(["mcore-to-hf", *config, "--mcore", str(mcore), "--out", str(out), *more]) == 0
        loaded, report = transformers_model(kind).from_pretrained(out, dtype=torch.float32, output_loading_info=True)
        assert not report["missing_keys"]
        found = loaded.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "copied")
    assert tokenizer.encode("<|im_end|>") == AutoTokenizer.from_pretrained(hf).encode("<|im_end|>")
    assert AutoImageProcessor.from_pretrained(tmp_path / "copied").patch_size == 16


def test_the_copied_configuration_states_the_dtype_of_the_weights(tmp_path: Path) -> None:
    """A run without bf16 saves fp32; under the release's bfloat16 `from_pretrained` would round what was trained."""
    model, hf, mcore = MODELS["dense"], tmp_path / "hf", tmp_path / "mcore"
    config = write_yaml(tmp_path, model)
    write_hf(hf, model)
    tree = json.loads((hf / "config.json").read_text())
    tree.update(dtype="bfloat16", more="kept")
    tree["text_config"].update(dtype="bfloat16", mamba_ssm_dtype="float32")
    (hf / "config.json").write_text(json.dumps(tree))
    commands = ["hf-to-mcore", *config, "--hf", str(hf), "--out", str(mcore)]
    assert main(commands) == 0
    same, wide = tmp_path / "same", tmp_path / "wide"
    export = ["mcore-to-hf", *config, "--mcore", str(mcore), "--hf", str(hf)]
    assert main([*export, "--out", str(same)]) == 0
    assert (same / "config.json").read_bytes() == (hf / "config.json").read_bytes()
    assert main([*export, "--out", str(wide), "--dtype", "float32"]) == 0
    changed = json.loads((wide / "config.json").read_text())
    tree["text_config"]["dtype"] = "float32"
    assert changed == {**tree, "dtype": "float32"}
    loaded = transformers_model("dense").from_pretrained(wide).state_dict()
    assert {value.dtype for value in loaded.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["untied", "experts"])
def test_what_transformers_saves_is_converted(kind: str, tmp_path: Path) -> None:
    """Its files have no multi-token prediction."""
    model = dataclasses.replace(MODELS[kind], mtp_num_layers=0)
    config, saved = write_yaml(tmp_path, model), tmp_path / "saved"
    torch.manual_seed(0)
    transformers_model(kind)(hf_config(model)).save_pretrained(saved, max_shard_size="200KB")
    assert main(["hf-to-mcore", *config, "--hf", str(saved), "--out", str(tmp_path / "mcore")]) == 0
    arguments = ["--mcore", str(tmp_path / "mcore"), "--out", str(tmp_path / "back"), "--hf", str(saved)]
    assert main(["mcore-to-hf", *config, *arguments]) == 0
    expected, found = read_folder(saved), read_folder(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


PEAK = """
import ctypes, gc
from pathlib import Path
from tools.checkpoint.convert import main
def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
for command in {warm_up!r}:  # imports and their caches are not the conversion's
    assert main(command) == 0
for command in {commands!r}:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what the last one freed would serve this one unseen
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = field("VmRSS")
    assert main(command) == 0
    print("peak", field("VmHWM") - before)
"""
SHARD = 16 * MIB
LARGE = {
    "dense": tiny_model(num_layers=8, hidden_size=512, ffn_hidden_size=5632),
    "experts": tiny_moe(num_layers=8, hidden_size=256, num_experts=16, moe_ffn_hidden_size=704),
}


def both_ways(folder: Path, model: ModelConfig) -> list[list[str]]:
    """Writes a Hugging Face folder; the arguments that convert it there and back."""
    hf, mcore, back = (str(folder / name) for name in ("hf", "mcore", "back"))
    folder.mkdir()
    config = write_yaml(folder, model)
    write_hf(Path(hf), model, SHARD)
    out = ["--mcore", mcore, "--out", back, "--shard-size", str(SHARD / 2**30)]
    return [["hf-to-mcore", *config, "--hf", hf, "--out", mcore], ["mcore-to-hf", *config, *out]]


def test_memory_stays_at_about_a_shard(tmp_path: Path) -> None:
    """All resident memory, pages of mapped shards included, which the system could take back at any time."""
    warm_up = both_ways(tmp_path / "small", tiny_model())
    commands = [command for name, model in LARGE.items() for command in both_ways(tmp_path / name, model)]
    for name in LARGE:
        assert sum(file.stat().st_size for file in (tmp_path / name / "hf").iterdir()) > 9 * SHARD
    run = subprocess.run(
        [sys.executable, "-c", PEAK.format(warm_up=warm_up, commands=commands)],
        cwd=ROOT,
        # The tensors of real models are beyond glibc's 32 MiB, from which memory goes back as soon as it is freed.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(256 * 1024)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    peaks = [int(peak) for peak in re.findall(r"peak (-?\d+)", run.stdout)]
    assert len(peaks) == len(commands)
    assert max(peaks) < 4 * SHARD, [peak / MIB for peak in peaks]
