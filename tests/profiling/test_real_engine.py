"""`migbatch profile run --server` on a third-party serving engine: llama.cpp on the CPU, with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.profiling.table import read_folder

ROOT = Path(__file__).parents[2]


@pytest.mark.engine
def test_llama_cpp_server_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = [sys.executable, str(ROOT / "tests/support/llama_cpp.py"), str(tmp_path / "random.gguf"), "4"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    with server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            assert url, (tmp_path / "log").read_text()
            words = [
                "profile",
                "run",
                "--server",
                url,
                "--model",
                "llama-3-8b",
                "--batches",
                "1,4",
                "--inputs",
                "64,512",
            ]
            words += ["--outputs", "32", "--device", "cpu", "--repeats", "8", "--max-seconds", "10", "--json"]
            code = run(cli, "migbatch", words)
            shown = capsys.readouterr()
            assert code == 0, shown.err
        finally:
            server.kill()
    report = json.loads(shown.out)
    assert (report["engine"], report["server"]["longest"]) == ("llamacpp", 1024)
    assert not report["refused"] and not report["left"]
    rows = read_folder(tmp_path / "llama-3-8b.csv")
    assert [(row.batch, row.input_size, row.output) for row in rows] == [
        (1, 64, 32),
        (4, 64, 32),
        (1, 512, 32),
        (4, 512, 32),
    ]
    for point in report["points"]:
        assert not point["errors"] and point["requests"] >= 8
        whole = point["ttft_s"]["mean"] + 31 * point["tpot_s"]["mean"]
        assert whole == pytest.approx(point["request_s"]["mean"], rel=0.2)
    short, long = rows[0], rows[2]
    assert short.ttft_s is not None and long.ttft_s is not None and long.ttft_s > short.ttft_s
