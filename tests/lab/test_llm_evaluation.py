"""The evaluation of language models: it recovers the parameters of a synthetic laboratory, and leaves models out."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest

from slurm_migbatch.lab.evaluate.llm import evaluate, fit, read, roofline
from slurm_migbatch.lab.traces.csvlines import TraceError
from tests.support.laboratory_tables import TRUE, grid, served, table


@pytest.fixture
def laboratory(tmp_path: Path) -> Path:
    """A table with exactly the times that `TRUE` gives."""
    return served(tmp_path)


def test_fit_recovers_the_parameters_of_the_table(laboratory: Path) -> None:
    found = fit(read(laboratory))
    for name in ("compute", "narrow", "bandwidth"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name


def test_left_out_model_is_predicted_from_the_others(laboratory: Path) -> None:
    result = evaluate(read(laboratory))
    assert result["points"] == 48 and len(result["models"]) == 3
    assert result["scores"]["ours/tpot"]["mape"] < 8 and result["scores"]["ours/ttft"]["mape"] < 15
    assert result["scores"]["roofline/tpot"]["mape"] > 2 * result["scores"]["ours/tpot"]["mape"]
    assert [bar["ok"] for bar in result["bars"]] == [True, True, True]


def test_measurements_of_a_model_do_not_affect_its_own_prediction(laboratory: Path) -> None:
    """If a model's times are wrong by a factor, its error is that factor, however often it was measured."""
    text = (laboratory / "served.csv").read_text().split("\n")
    changed = [
        ",".join([*line.split(",")[:8], str(10 * float(line.split(",")[8]))]) if "Qwen3-14B" in line else line
        for line in text
    ]
    (laboratory / "served.csv").write_text("\n".join(changed))
    scores = evaluate(read(laboratory))["scores"]["ours/tpot"]["per_model"]
    assert scores["qwen3-14b"] > 85


def test_plain_roofline_is_faster_than_every_measurement(laboratory: Path) -> None:
    for point in read(laboratory):
        ttft, tpot = roofline(point)
        assert ttft < point.ttft and tpot < point.tpot and math.isfinite(ttft * tpot)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({1: "nobody/knows-this"}, "the model 'nobody/knows-this' is unknown"),
        ({1: "BAAI/bge-m3"}, "model_path: bge-m3 generates no tokens"),
        ({1: "moonshotai/Kimi-K2-Instruct"}, "the architecture of kimi-k2 is unknown"),
        ({2: "abacus"}, "system must name a GPU .*, not 'abacus'"),
        ({3: "magic"}, "precision 'magic' is unknown"),
        ({7: "soon"}, "silicon_ttft_ms"),
        ({6: "0"}, "batch_size"),
        ({4: "1024.5"}, "isl must be a whole number, not 1024.5"),
    ],
)
def test_invalid_table_row_raises_an_error_with_its_line_number(
    tmp_path: Path, change: dict[int, str], words: str
) -> None:
    row = grid()[0]
    for column, value in change.items():
        row[column] = value
    with pytest.raises(TraceError, match=rf"served\.csv:2: .*{words}"):
        read(table(tmp_path, [row]))


def test_tables_of_other_gpus_are_read(tmp_path: Path) -> None:
    systems = ("h100_sxm", "h200_sxm", "b200_sxm", "gb200", "a100_sxm", "h100_nvl")
    rows = [[*grid()[0][:2], system, "bf16", *grid()[0][4:]] for system in systems]
    machines = [point.machine for point in read(table(tmp_path, rows))]
    assert [machine.bytes_s / 1e9 for machine in machines] == pytest.approx([3352, 4800, 8000, 8000, 2039, 3938])
    assert [round(machine.mib / 1024) for machine in machines] == [80, 140, 179, 185, 80, 94]


def test_a_server_on_several_gpus_is_refused(tmp_path: Path) -> None:
    place = table(tmp_path, [grid()[0]]) / "served.csv"
    head, row = place.read_text().split()
    place.write_text(f"{head},tp_size\n{row},1\n{row},4\n")
    with pytest.raises(TraceError, match=r"served\.csv:3: tp_size must be 1, not 4"):
        read(tmp_path)


def test_tables_are_found_in_subfolders_among_other_data(laboratory: Path, tmp_path: Path) -> None:
    points = read(laboratory)
    deep = tmp_path / "data" / "silicon"
    deep.mkdir(parents=True)
    with gzip.open(deep / "served.csv.gz", "wt") as file:
        file.write((laboratory / "served.csv").read_text())
    (deep.parent / "jobs.csv").write_text("timestamp,duration\n1,2\n")
    assert read(tmp_path / "data") == points
    (deep / "part.csv").write_text("backend,silicon_ttft_ms\nvllm,3\n")
    with pytest.raises(TraceError, match=r"part\.csv:1: lacks the columns model_path"):
        read(tmp_path / "data")


def test_folder_without_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no measured point"):
        read(tmp_path)
