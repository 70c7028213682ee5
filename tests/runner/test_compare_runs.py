"""The comparison of runs: numbers that can be checked by hand, and files that people look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flagscale.runner import compare
from tools import compare_runs


def write_run(folder: Path, losses: list[float], times: list[float], **more: float) -> Path:
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for number, (loss, time) in enumerate(zip(losses, times, strict=True), start=1):
            file.write(json.dumps({"iteration": number, "lm_loss": loss, "iteration_time_s": time, **more}) + "\n")
        file.write(json.dumps({"iteration": len(losses), "eval_lm_loss": 9.0}) + '\n{"iteration": 99, "iteration_t')
    return folder


def test_table(tmp_path: Path) -> None:
    first = write_run(tmp_path / "unified", [4.0, 2.0], [9.0, 2.0], tokens_per_s=1000.0, vision_load_max_over_mean=1.5)
    second = write_run(tmp_path / "colocated", [4.0, 2.5], [9.0, 1.0], tokens_per_s=2000.0, tflops_per_gpu=0.125)
    runs = [compare.read_run(path, path.name) for path in (first, second)]
    assert compare.table_rows(runs, skip=1) == [
        ("unified", "2", "2", "1,000", "-", "1.00x", "-", "-", "1.500"),
        ("colocated", "2", "1", "2,000", "0.125", "2.00x", "1.25e-01", "2.50e-01", "-"),
    ]


def test_long_names_are_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"vision_micro_batch_size={size},micro_batch_size=2" for size in (2, 4)]
    runs = [compare.read_run(write_run(tmp_path / name, [3.0] * 3, [0.12345] * 3), name) for name in names]
    compare.show(compare.table_rows(runs, skip=1))
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in names), shown


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]) for name in ("a|b", "c")]
    assert compare_runs.main([*map(str, runs), "--output", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "compare.md").read_text().splitlines()
    assert lines[0].startswith("| run | iterations |")
    assert lines[2].startswith("| a\\|b | 3 | 1 |")
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "speed-up" in capsys.readouterr().out


def test_resumed_run_counts_an_iteration_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [3.0], [1.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"iteration": 1, "lm_loss": 2.0, "iteration_time_s": 5.0}) + "\n")
    assert compare.read_run(folder, "run").values("lm_loss") == [2.0]


def test_names_tell_runs_apart() -> None:
    assert compare.run_names([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert compare.run_names([Path("/x/a"), Path("/y/b")]) == ["a", "b"]


@pytest.mark.parametrize("content", [None, "", "3\nnull\n[1]\n", '{"iteration": 1, "eval_lm_loss": 1}\n'])
def test_runs_without_iterations_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert compare_runs.main([str(tmp_path)]) == 2
    assert str(tmp_path / "metrics.jsonl") in capsys.readouterr().err


def test_run_given_twice_is_refused(tmp_path: Path) -> None:
    assert compare_runs.main([str(tmp_path), str(tmp_path)]) == 2


def test_what_cannot_be_written_or_left_out_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [1.0], [1.0])
    assert compare_runs.main([str(run), "--output", __file__]) == 2
    assert f"error: --output {__file__}: File exists" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        compare_runs.main([str(run), "--skip", "-3"])
    assert left.value.code == 2
