"""Conversion: from Hugging Face and back without losing a bit or a name; bad input leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoint.helpers import MODELS, read_folder, same, write_hf, write_yaml
from tools.checkpoint import convert
from tools.checkpoint.convert import main


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back_is_exact(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODELS[kind]
    hf, mcore, back = tmp_path / "hf", tmp_path / "mcore", tmp_path / "back"
    stored, config = write_hf(hf, model), write_yaml(tmp_path, model)
    assert main(["hf-to-mcore", *config, "--hf", str(hf), "--out", str(mcore)]) == 0
    assert main(["verify", *config, "--hf", str(hf), "--mcore", str(mcore)]) == 0
    arguments = ["--mcore", str(mcore), "--out", str(back), "--hf", str(hf), "--shard-size", "0.0001"]
    assert main(["mcore-to-hf", *config, *arguments]) == 0
    same(read_folder(back), stored)
    assert len(list(back.glob("*.safetensors"))) > 1
    assert (back / "tokenizer_config.json").read_bytes() == (hf / "tokenizer_config.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "mcore", "back", "run.yaml"}
    assert "bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_the_progress_bar_ends_full(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes told on the way add up to the total told at the start, and come in many steps."""
    told: dict[str, tuple[int, list[int]]] = {}

    @contextmanager
    def progress(task: str, total: int) -> Iterator[convert.Report]:
        told[task] = (total, [])
        yield told[task][1].append

    monkeypatch.setattr(convert, "_progress", progress)
    model = MODELS[kind]
    hf, mcore, config = tmp_path / "hf", tmp_path / "mcore", write_yaml(tmp_path, model)
    whole = sum(value.nbytes for value in write_hf(hf, model).values())
    assert main(["hf-to-mcore", *config, "--hf", str(hf), "--out", str(mcore)]) == 0
    assert main(["verify", *config, "--hf", str(hf), "--mcore", str(mcore)]) == 0
    assert main(["mcore-to-hf", *config, "--mcore", str(mcore), "--out", str(tmp_path / "back")]) == 0
    assert told.keys() == {"hf-to-mcore", "verify", "mcore-to-hf"}
    for total, steps in told.values():
        assert total == sum(steps) == whole
        assert len(steps) > 20
