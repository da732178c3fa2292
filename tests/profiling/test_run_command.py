"""`migbatch profile run` as a user runs it, on the CPU and on a simulated slice."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.nvml import NvmlDriver
from slurm_migbatch.profiling.measurement import COLUMNS
from slurm_migbatch.profiling.table import read_folder
from slurm_migbatch.testbed.simdriver import SimulatedMachine

ROOT = Path(__file__).parents[2]
QUICK = ["--device", "cpu", "--warmup", "1", "--repeats", "3", "--min-seconds", "0"]

BENCH = """
    import os, time
    def make(batch, size):
        if batch * size > 1000:
            raise MemoryError("the activations do not fit")
        data = list(range(size))
        return lambda: [sum(data) for _ in range(batch)]

    def plain(batch):
        if batch == 4:
            raise ValueError("batch 4 is cursed")
        return lambda: None

    def slow(batch):
        return lambda: time.sleep(0.01 if batch == 1 else 600)

    def on_slice(batch):
        from slurm_migbatch.testbed.simdriver import SimulatedMachine
        if batch * 5000 > 20000:
            raise RuntimeError("CUDA error: out of memory")
        SimulatedMachine(os.environ["SIM"]).start_process(os.environ["CUDA_VISIBLE_DEVICES"], memory_mib=batch * 5000)
        return lambda: time.sleep(0.06)
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    (tmp_path / "bench.py").write_text(textwrap.dedent(BENCH))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    return tmp_path


def go(capsys, *args):
    code = run(cli, "migbatch", ["profile", "run", *map(str, args)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_model_is_measured_up_to_the_memory_limit(capsys):
    code, out, err = go(
        capsys,
        "bench.py:make",
        "--model",
        "Toy-Net",
        "--family",
        "CNN",
        "--batches",
        "1-16",
        "--inputs",
        "100,300",
        *QUICK,
    )
    assert code == 0
    rows = read_folder(Path("toy-net.csv"))
    assert Path("toy-net.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    ran = {(row.batch, row.input_size) for row in rows if row.ran}
    assert ran == {(1, 100), (2, 100), (4, 100), (8, 100), (1, 300), (2, 300)}
    assert {(row.batch, row.input_size) for row in rows if not row.ran} == {(16, 100), (4, 300)}
    assert {(row.gpu, row.model, row.family, row.kind, row.profile) for row in rows} == {
        ("cpu", "toy-net", "cnn", "infer", "")
    }
    assert all(row.rate > 0 and row.memory_mib > 0 for row in rows if row.ran)
    assert "does not fit" in out and "knee at input 100: batch" in out and "toy-net.csv: 8 new rows" in out
    assert "not tried, because smaller ones did not fit: 2 points" in out
    assert "toy-net on the CPU" in err and "batch 16, input 100: does not fit" in err


def test_json_output_holds_rows_and_details_beyond_the_table_columns(capsys):
    code, out, err = go(
        capsys, "bench.py:make", "--model", "m", "--batches", "2-8", "--inputs", 250, "--json", "-q", *QUICK
    )
    assert (code, err) == (0, "")
    result = json.loads(out)
    points = result["points"]
    assert [(point["batch"], point["ran"]) for point in points] == [(2, True), (4, True), (8, False)]
    assert set(COLUMNS) <= set(points[0])
    assert points[0]["samples"] >= 3 and points[0]["latency_p50_s"] > 0
    assert "do not fit" in points[2]["why"] and result["unfit"] == []
    assert result["device"]["gpu"] == "cpu" and result["table"] == "m.csv"
    assert [set(knee) for knee in result["knees"]] == [{"input_size", "procs", "batch"}]


def test_process_counts_are_separate_points(capsys):
    code, _, _ = go(
        capsys, "bench.py:make", "--model", "m", "--batches", "2", "--inputs", "100", "--procs", "1-2", *QUICK
    )
    assert code == 0
    assert [(row.batch, row.procs) for row in read_folder(Path("m.csv"))] == [(2, 1), (2, 2)]


def test_a_run_that_failed_is_resumed(capsys):
    code, out, err = go(capsys, "bench.py:plain", "--model", "m", "--batches", "1-4", *QUICK)
    assert code == 1 and out == ""
    assert "migbatch: error: batch 4: ValueError: batch 4 is cursed; its last output:\n  Traceback (most" in err
    assert '\n      raise ValueError("batch 4 is cursed")\n  ValueError: batch 4 is cursed\n' in err
    before = read_folder(Path("m.csv"))
    assert [row.batch for row in before] == [1, 2]

    code, _, err = go(capsys, "bench.py:plain", "--model", "m", "--batches", "1-4", *QUICK)
    assert code == 1 and "m.csv exists: use --resume" in err

    code, out, _ = go(capsys, "bench.py:plain", "--model", "m", "--batches", "1,2,8", "--resume", *QUICK)
    assert code == 0 and "1 new rows, 2 existing" in out
    after = read_folder(Path("m.csv"))
    assert after[:2] == before and [row.batch for row in after] == [1, 2, 8]


def test_plot_option_draws_the_curves(capsys):
    args = ("bench.py:make", "--model", "m<&>", "--batches", "1-16", "--inputs", "100,200", *QUICK)
    code, _, err = go(capsys, *args, "--plot", "m.svg")
    assert code == 2 and "--model is a name" in err
    code, _, err = go(capsys, args[0], "--model", "m", *args[3:], "--plot", "m.png")
    assert code == 2 and "use m.svg" in err
    code, _, _ = go(capsys, args[0], "--model", "m", *args[3:], "--plot", "m.svg")
    assert code == 0
    drawing = ET.parse("m.svg").getroot()
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"m on cpu", "input 100", "input 200", "batch"} <= set(texts)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "give either a TARGET"),
        (["bench.py:make", "--command", "x {batch}"], "either a TARGET"),
        (["bench.py"], "module:callable"),
        (["nowhere.py:make"], "no such file: nowhere.py"),
        (["--command", "prog"], "{batch}"),
        (["bench.py:make", "--batches", "0"], "above 0"),
        (["bench.py:make", "--params", "many"], "25.6m"),
    ],
)
def test_wrong_usage_is_refused_with_advice(capsys, args, text):
    code, out, err = go(capsys, *args, "--model", "m", "--device", "cpu")
    assert (code, out) == (2, "")
    assert text in err
    assert not Path("m.csv").exists()


def test_invalid_table_options_are_refused_before_measuring(capsys):
    code, _, err = go(capsys, "bench.py:plain", "--model", "n", "--source", "x" * 300, *QUICK)
    assert code == 2 and "256 characters" in err and not Path("n.csv").exists()
    code, _, err = go(capsys, "bench.py:plain", "--model", "n", "--family", "a\nb", *QUICK)
    assert code == 1 and "family" in err and not Path("n.csv").exists()
    code, _, err = go(capsys, "bench.py:plain", "--model", "n", "-o", "nowhere/n.csv", *QUICK)
    assert code == 1 and "no such directory" in err
    code, _, err = go(capsys, "bench.py:plain", "--model", "n", "--python", "no-such-python", *QUICK)
    assert code == 1 and "no-such-python cannot be run" in err


def test_counts_accept_suffixes_and_exponents(capsys):
    code, _, _ = go(
        capsys, "bench.py:plain", "--model", "m", "--batches", "1", "--params", "25.6M", "--flops", "8.2e9", *QUICK
    )
    assert code == 0
    (row,) = read_folder(Path("m.csv"))
    assert (row.params, row.flops_per_item) == (25.6e6, 8.2e9)


def test_external_command_is_measured(capsys, place):
    script = place / "prog.sh"
    script.write_text('#!/bin/sh\nfor i in 1 2 3; do echo "migbatch: items=$1 seconds=0.5"; done\n')
    script.chmod(0o755)
    code, _, _ = go(capsys, "--command", "./prog.sh {batch}", "--model", "m", "--batches", "4", *QUICK)
    assert code == 0
    (row,) = read_folder(Path("m.csv"))
    assert (row.throughput_per_s, row.latency_s) == (8.0, 0.5)


def test_interrupted_run_keeps_its_results():
    code = "import sys; from slurm_migbatch.cli.main import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "profile",
        "run",
        "bench.py:slow",
        "--model",
        "m",
        "--batches",
        "1,2",
        *QUICK,
    ]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    ) as running:
        lines = []
        for line in running.stderr:
            lines.append(line)
            if line.startswith("batch 1:"):
                running.send_signal(signal.SIGINT)
    assert running.returncode == 130
    assert "the results are in m.csv, continue with --resume" in "".join(lines)
    assert [row.batch for row in read_folder(Path("m.csv"))] == [1]


@pytest.mark.slow
def test_rows_measured_on_a_slice_name_it_and_its_memory_use(place):
    machine = SimulatedMachine.create(place / "sim", gpus=["h100-80gb"])
    with NvmlDriver(str(machine.library)) as driver:
        uuid = driver.gpus()[0].create(Slot.of("2g.20gb", 0, 2)).mig_uuid
    code = "import sys; from slurm_migbatch.cli.main import main; main()"
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LD_LIBRARY_PATH": str(machine.directory),
        "CUDA_VISIBLE_DEVICES": uuid,
        "SIM": str(machine.directory),
    }
    args = ["bench.py:on_slice", "--model", "m", "--batches", "1-8", "--json", *QUICK[2:]]
    done = subprocess.run(
        [sys.executable, "-c", code, "profile", "run", *args], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["device"]["uuid"] == uuid and result["device"]["profile"] == "2g.20gb"
    rows = read_folder(Path("m.csv"))
    assert {(row.gpu, row.profile, row.sm_count, row.memory_slices) for row in rows} == {
        ("NVIDIA H100 80GB HBM3", "2g.20gb", 32, 2)
    }
    assert [(row.batch, row.memory_mib) for row in rows] == [(1, 5000), (2, 10000), (4, 20000), (8, None)]
    assert not rows[-1].ran


def test_points_option_lets_the_predictor_choose_the_points(capsys):
    """Batch 4, 32, 8; the next run adds the most informative points, and never one twice."""
    wanted = ["bench.py:plain2", "--model", "m", "--batches", "1-64", *QUICK, "--json"]
    Path("bench.py").write_text(Path("bench.py").read_text() + "\ndef plain2(batch):\n    return lambda: None\n")
    code, out, _ = go(capsys, *wanted, "--points", 3)
    assert code == 0, out
    assert [row.batch for row in read_folder(Path.cwd())] == [4, 32, 8]
    code, _, _ = go(capsys, *wanted, "--points", 2, "--resume")
    batches = [row.batch for row in read_folder(Path.cwd())]
    assert code == 0 and len(batches) == len(set(batches)) == 5 and {4, 8, 32} <= set(batches)


@pytest.mark.slow
def test_points_with_slo_find_the_largest_batch_within_the_limit(capsys):
    """Two milliseconds per item: whatever the first guess, the largest batch that keeps the limit is found."""
    Path("bench.py").write_text(
        Path("bench.py").read_text() + "\nimport time\ndef slow(batch):\n    return lambda: time.sleep(0.002 * batch)\n"
    )
    wanted = ["bench.py:slow", "--model", "m", "--batches", "1-64", *QUICK, "--json"]
    code, out, _ = go(capsys, *wanted, "--points", 7, "--slo", "20ms")
    assert code == 0, out
    rows = read_folder(Path.cwd())
    assert 8 in [row.batch for row in rows]  # 16 ms; 16 takes 32
    assert len({row.batch for row in rows}) == len(rows) <= 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slo", "20ms"], "--slo requires --points"),
        (["--points", 2, "--slo", "20"], "write 200ms"),
        (["--points", 2, "--slo", "0s"], "write 200ms"),
    ],
)
def test_slo_option_needs_a_duration_and_points(capsys, words, message):
    code, _, err = go(capsys, "bench.py:plain", "--model", "m", *QUICK, *words)
    assert code == 2 and message in err


def test_points_and_grid_options_are_exclusive(capsys):
    code, _, err = go(capsys, "bench.py:make", "--model", "m", "--points", 1, "--grid", *QUICK)
    assert code == 2 and "either" in err


def test_example_measures_a_model_of_a_public_name(place):
    """`profile-model.sh` in a directory with a space, with a name as model hubs have it: owner/model."""
    (place / "bin").mkdir()
    folder = place / "my models"
    folder.mkdir()
    shims = {"srun": 'shift; exec "$@"', "migbatch": f'exec "{sys.executable}" -m slurm_migbatch.cli "$@"'}
    for name, line in shims.items():
        (place / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (place / "bin" / name).chmod(0o755)
    values = {"MODEL": "google/bert_large", "DEVICE": "cpu", "BATCHES": "1", "INPUTS": "4", "SLURM_JOB_ID": "17"}
    environ = {"PATH": f"{place}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **values}
    example = ROOT / "sbatch_examples/profile-model.sh"
    foreign = folder / "bench-17.py"  # of a user who may write in this directory
    foreign.write_text("open('run', 'w')\nmake = lambda *size: int\n")
    os.chown(foreign, 65534, 65534)
    done = subprocess.run(["bash", example], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row.model for row in read_folder(folder / "google_bert_large-17.csv")] == ["google/bert_large"]
    assert foreign.stat().st_uid == 0 and not (folder / "run").exists()
