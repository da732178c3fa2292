"""The evaluation of language models: it recovers the parameters of a synthetic laboratory, and leaves models out."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest

from slurm_migbatch.lab.evaluate.llm import evaluate, fit, roofline
from slurm_migbatch.lab.evaluate.servers import scan_servers
from slurm_migbatch.lab.traces.csvlines import TraceError
from tests.support.laboratory_tables import TRUE, grid, served, table


@pytest.fixture
def laboratory(tmp_path: Path) -> Path:
    """A table with exactly the times that `TRUE` gives."""
    return served(tmp_path)


def test_fit_recovers_the_parameters_of_the_table(laboratory: Path) -> None:
    found = fit(scan_servers(laboratory).points)
    for name in ("compute", "narrow", "bandwidth"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name


def test_left_out_model_is_predicted_from_the_others(laboratory: Path) -> None:
    result = evaluate(scan_servers(laboratory).points)
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
    scores = evaluate(scan_servers(laboratory).points)["scores"]["ours/tpot"]["per_model"]
    assert scores["qwen3-14b"] > 85


def test_plain_roofline_is_faster_than_every_measurement(laboratory: Path) -> None:
    for point in scan_servers(laboratory).points:
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
        scan_servers(table(tmp_path, [row]))


def test_tables_of_other_gpus_are_read(tmp_path: Path) -> None:
    systems = ("h100_sxm", "h200_sxm", "b200_sxm", "gb200", "a100_sxm", "h100_nvl")
    rows = [[*grid()[0][:2], system, "bf16", *grid()[0][4:]] for system in systems]
    machines = [point.machine for point in scan_servers(table(tmp_path, rows)).points]
    assert [machine.bytes_s / 1e9 for machine in machines] == pytest.approx([3352, 4800, 8000, 8000, 2039, 3938])
    assert [round(machine.mib / 1024) for machine in machines] == [80, 140, 179, 185, 80, 94]


def test_rows_that_cannot_be_scored_are_skipped_and_counted(tmp_path: Path) -> None:
    place = table(tmp_path, [grid()[0]]) / "served.csv"
    head, row = place.read_text().split()
    unknown = row.replace("h100_sxm", "l40s")
    place.write_text(f"{head},tp_size\n{row},1\n{row},4\n{unknown},1\n{unknown},1\n")
    found = scan_servers(tmp_path)
    assert len(found.points) == 1
    assert [notice.replace(str(place), "FILE") for notice in found.notices] == [
        "1 row is not scored (first FILE:3): tp_size must be 1, not 4: servers on several GPUs are left out",
        "2 rows are not scored (first FILE:4): system must name a GPU whose speed and memory are known, such as "
        "h100_sxm, not 'l40s'",
    ]


def test_table_without_a_usable_row_is_refused_with_the_reason(tmp_path: Path) -> None:
    place = table(tmp_path, [grid()[0]]) / "served.csv"
    head, row = place.read_text().split()
    place.write_text(f"{head},tp_size\n{row},4\n")
    with pytest.raises(TraceError, match=r"served\.csv:2: tp_size must be 1, not 4"):
        scan_servers(tmp_path)


COMMON = "gpu,model,kind,profile,batch,input_size,output,engine,throughput_per_s,latency_s,ttft_s,tpot_s\n"
LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-7B-Instruct"


def common_row(
    model: str = LLAMA, gpu: str = "h100-80gb", profile: str = "3g.40gb", batch: int = 4, **cells: str
) -> str:
    own = {"kind": "serve", "output": "128", "rate": f"{batch / 2.64:.4f}", **cells}
    return f"{gpu},{model},{own['kind']},{profile},{batch},1024,{own['output']},vllm,{own['rate']},2.64,0.1,0.02\n"


def common_table(folder: Path, *rows: str) -> Path:
    (folder / "common.csv").write_text(COMMON + "".join(rows))
    return folder


def test_common_tables_are_read_with_the_share_of_their_profile(tmp_path: Path) -> None:
    slices, whole = scan_servers(common_table(tmp_path, common_row(), common_row(profile=""))).points
    assert (slices.ttft, slices.tpot, slices.model) == (0.1, 0.02, "llama-3.1-8b")
    assert slices.machine.sliced and not whole.machine.sliced
    assert slices.machine.bytes_s == pytest.approx(whole.machine.bytes_s / 2)
    assert slices.machine.mib == 40 * 1024
    assert slices.machine.flops == pytest.approx(whole.machine.flops * 60 / 132), "the SMs of 3g.40gb on an H100"
    assert slices.share < whole.share == 1.0
    assert slices.workload.serving is not None
    assert (slices.workload.serving.input, slices.workload.serving.output) == (1024, 128)


def test_each_model_of_a_common_table_is_held_out(tmp_path: Path) -> None:
    rows = [common_row(model, profile=profile) for model in (LLAMA, QWEN) for profile in ("", "3g.40gb")]
    result = evaluate(scan_servers(common_table(tmp_path, *rows)).points)
    assert result["models"] == ["llama-3.1-8b", "qwen2.5-7b"]
    assert {place: errors["points"] for place, errors in result["places"].items()} == {"whole GPUs": 2, "slices": 2}


def test_rows_of_a_common_table_that_cannot_be_scored_are_counted(tmp_path: Path) -> None:
    rows = [
        common_row(),
        common_row(gpu="l40s", profile=""),
        common_row(model="nobody/knows-this"),
        common_row(batch=8, rate="100"),
        common_row(output=""),
        common_row(kind="infer"),
    ]
    found = scan_servers(common_table(tmp_path, *rows))
    assert len(found.points) == 1
    words = ("such as h100-80gb, not 'l40s'", "'nobody/knows-this' is unknown", "requests (not tokens)", "output must")
    assert len(found.notices) == len(words)
    for notice, word in zip(found.notices, words, strict=True):
        assert notice.startswith("1 row is not scored (first ") and word in notice


def test_tables_are_found_in_subfolders_among_other_data(laboratory: Path, tmp_path: Path) -> None:
    points = scan_servers(laboratory).points
    deep = tmp_path / "data" / "silicon"
    deep.mkdir(parents=True)
    with gzip.open(deep / "served.csv.gz", "wt") as file:
        file.write((laboratory / "served.csv").read_text())
    (deep.parent / "jobs.csv").write_text("timestamp,duration\n1,2\n")
    assert scan_servers(tmp_path / "data").points == points
    (deep / "part.csv").write_text("backend,silicon_ttft_ms\nvllm,3\n")
    with pytest.raises(TraceError, match=r"part\.csv:1: lacks the columns model_path"):
        scan_servers(tmp_path / "data")


def test_tables_of_servers_may_have_the_usual_names_of_others(tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text(
        "GPU,Model,kind,MIG Profile,Batch Size,input_size,output,engine,latency_ms,ttft_ms,tpot_ms\n"
        "NVIDIA H100 80GB HBM3,llama-3.1-8b,serve,3g40gb,8,1024,256,vllm,5300,200,20\n"
    )
    (point,) = scan_servers(tmp_path).points
    assert (point.ttft, point.tpot, point.machine.mib) == (0.2, 0.02, 40 * 1024)


def test_folder_without_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no measured point"):
        scan_servers(tmp_path)
