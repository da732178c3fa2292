"""`migbatch eval pairs` on the measured pairs of this repository, and what they say about the shipped constant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.main import cli
from slurm_migbatch.decide.lending.pair_slowdowns import SWITCHING, time_sliced
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.evaluate.pairs import COLUMNS, evaluate, fitted, read
from slurm_migbatch.profiling.csvfile import TableError

MEASUREMENTS = Path(__file__).parents[2] / "measurements"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return evaluate(read(MEASUREMENTS))


def table(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pairs.csv").write_text("\n".join((",".join(COLUMNS), *lines)) + "\n")
    return folder


def test_shipped_constant_is_that_of_the_fit(result: dict[str, Any]) -> None:
    assert result["switching"] == {"shipped": SWITCHING, "fitted": SWITCHING}


def test_target_is_met_and_no_constant_is_better(result: dict[str, Any]) -> None:
    assert all(bar["ok"] for bar in result["bars"])
    for row in result["sizes"]:
        errors = row["errors"]
        assert errors["held out"] < min(errors["best constant"], errors["assumed"]), row["size"]
        assert row["work_errors"]["held out"] < row["work_errors"]["best constant"], row["size"]


def test_small_slices_lose_and_large_ones_gain(result: dict[str, Any]) -> None:
    work = [row["work"] for row in result["sizes"]]
    assert work == sorted(work) and work[0] < 1 < work[-1]


def test_constant_of_computed_pairs_is_found(tmp_path: Path) -> None:
    lines = []
    for number, (own, other) in enumerate(((0.9, 0.9), (0.3, 0.8), (0.5, 0.2))):
        slowdowns = time_sliced(own, other, 1.25)
        cells = (*(f"{share}" for share in (own, other)), *(f"{slowdown:.4f}" for slowdown in slowdowns))
        lines.append(f"GPU,16,time slices,a{number},1,1,b,1,1,{','.join(cells)}")
    lines.append("GPU,16,MPS,a0,1,1,b,1,1,0.9,0.9,1.25,0.8")
    pairs = read(table(tmp_path / "pairs", *lines))
    assert fitted(pairs[:3]) == 1.25
    assert pairs[3].slowdown == (1.25, 1.0), "a job that was faster next to another one was not slowed down"
    (row,) = evaluate(pairs)["sharing"]
    assert row["pairs"] == 1 and row["work"]["MPS"] == 1.8 > row["work"]["time slices"]


def test_invalid_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotMeasurable, match="has no table of pairs of jobs"):
        read(tmp_path)
    bad = table(
        tmp_path / "bad", "GPU,16,time slices,a,1,1,b,1,1,90,0.9,2,2", "GPU,16,time slices,a,1,1,b,1,1,0.9,0.9,0,2"
    )
    with pytest.raises(TableError, match=r"(?s)pairs\.csv:2: activity1 and activity2.*pairs\.csv:3: slowdown1 and"):
        read(bad)


def test_command_prints_what_its_json_has(result: dict[str, Any]) -> None:
    done = CliRunner().invoke(cli, ["eval", "pairs", "--data", str(MEASUREMENTS), "--json"], standalone_mode=False)
    assert json.loads(done.output) == {"data": str(MEASUREMENTS), **json.loads(json.dumps(result))}
    done = CliRunner().invoke(cli, ["eval", "pairs", "--data", str(MEASUREMENTS)], standalone_mode=False)
    assert done.exception is None and "16 SMs of NVIDIA H100 80GB HBM3" in done.output and "MISSED" not in done.output
