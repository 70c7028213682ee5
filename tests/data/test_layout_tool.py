"""`tools/layout.py`: rank map and exchange of a configuration, without starting anything."""

from __future__ import annotations

import re

import pytest

from tests.data.helpers import write_mixture
from tools import layout


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The default configuration on samples with 0 to 3 images."""
    source = write_mixture(tmp_path_factory.mktemp("mixture"), 40)
    return [
        f"data.train_path={source}", "data.valid_path=null", "model.eval_interval=null", "data.min_pixels=4096",
        "data.max_pixels=25600", "model.seq_length=256",
        "data.packing=none", "model.global_batch_size=32",
    ]  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_and_rows(arguments: list[str], stages: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a rank; rows of the matrices add up; every stage encodes, the ends receive."""
    assert layout.main([*arguments, f"model.pipeline_model_parallel_size={stages}"]) == 0
    head, *macros = capsys.readouterr().out.split("\n\nmacro batch ")
    assert f"LLM TP2/PP{stages}/DP{2 // stages}" in head
    ranks = [line for line in head.splitlines() if re.match(r" +\d", line)]
    takes = {1: ["decoder, MTP"] * 4, 2: ["decoder"] * 2 + ["MTP"] * 2}[stages]
    assert [line[29:].strip() for line in ranks] == takes
    assert len(macros) == 2
    for macro in macros:
        assert all(int(count) > 0 for count in re.findall(r"encodes (\d+) images", macro))
        for table in re.split(r"  (?=embeddings|gradients)", macro)[1:]:
            claimed = int(re.search(r": (\d+) rows leave", table)[1])
            cells = [line.split()[1:] for line in table.splitlines()[2:]]
            assert claimed == sum(int(cell) for row in cells for cell in row if cell.isdigit())


def test_an_iteration_that_does_not_exist(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert layout.main([*arguments, "--step", "9999"]) == 2
    assert "error: --step 9999: the run has iterations 0 to " in capsys.readouterr().err
