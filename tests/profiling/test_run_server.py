"""`migbatch profile run --server` on a small server that streams in real time."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.profiling.completions import ServerAddress, ServerError, find
from slurm_migbatch.profiling.load import LoadEffort, LoadPoint, LoadRefused, Percentiles, Prompts, measure_load
from slurm_migbatch.profiling.table import read_folder
from tests.support.completion_server import CompletionServer

QUICK = ["--device", "cpu", "--warmup", "1", "--repeats", "4", "--min-seconds", "0", "--max-seconds", "5"]
EFFORT = LoadEffort(1, 4, 0.0, 5.0, 60.0)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return tmp_path


@pytest.fixture
def server() -> Iterator[CompletionServer]:
    with CompletionServer().running() as found:
        yield found


def go(capsys: pytest.CaptureFixture[str], url: str, *args: object) -> tuple[int, str, str]:
    words = ["profile", "run", "--server", url, "--model", "Llama-3-8B", *QUICK, *map(str, args)]
    code = run(cli, "migbatch", words)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.slow
def test_load_steps_are_written_as_table_rows(capsys: pytest.CaptureFixture[str], server: CompletionServer) -> None:
    code, out, _ = go(capsys, server.url, "--batches", "1-4", "--inputs", "40,120", "--outputs", 8, "--json")
    assert code == 0
    report = json.loads(out)
    rows = read_folder(Path("llama-3-8b.csv"))
    assert [(row.input_size, row.output, row.batch) for row in rows] == [
        (size, 8, at_once) for size in (40, 120) for at_once in (1, 2, 4)
    ]
    assert {(row.kind, row.engine, row.model, row.gpu) for row in rows} == {("serve", "vllm", "llama-3-8b", "cpu")}
    for row in rows:
        # the server sleeps this long for a prompt and for each token, whatever the load of this machine
        assert row.ttft_s is not None and row.ttft_s >= row.input_size * 0.9 * server.prompt_token_s
        assert row.tpot_s is not None and row.tpot_s >= server.token_s
        assert row.latency_s is not None and row.latency_s >= row.ttft_s
        assert row.throughput_per_s == pytest.approx(row.batch / row.latency_s, rel=1e-4)
    assert server.peak >= 4
    assert len(set(server.prompts)) == len(server.prompts), "no two prompts are equal"
    point = report["points"][-1]
    assert point["ttft_s"]["p50"] <= point["ttft_s"]["p90"] <= point["ttft_s"]["p99"]
    assert point["requests"] >= 4 and point["errors"] == {}
    assert point["tokens_per_s"] == pytest.approx(8 * point["requests_per_s"])
    assert report["server"]["api"] == "completions"


def test_resumed_server_run_keeps_rows_and_skips_measured_points(
    capsys: pytest.CaptureFixture[str], server: CompletionServer
) -> None:
    assert go(capsys, server.url, "--batches", 1, "--inputs", 40, "--outputs", 4)[0] == 0
    before, asked = read_folder(Path("llama-3-8b.csv")), len(server.seen)
    assert go(capsys, server.url, "--batches", "1,2", "--inputs", 40, "--outputs", 4)[0] == 1, "the table is there"
    code, out, _ = go(capsys, server.url, "--batches", "1,2", "--inputs", 40, "--outputs", 4, "--resume")
    assert code == 0 and "1 new rows, 1 existing" in out
    assert read_folder(Path("llama-3-8b.csv"))[0] == before[0]
    assert all(order["max_tokens"] for order in server.seen[asked:])


def test_chat_only_server_with_short_answers_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with CompletionServer(forms=("chat/completions",), words=(), ends_after=5, owner="me").running() as server:
        assert go(capsys, server.url, "--batches", 1, "--inputs", 40)[0] == 2, "the engine is not known"
        code, out, _ = go(capsys, server.url, "--batches", 1, "--inputs", 40, "--outputs", 16, "--engine", "sglang")
    assert code == 0 and "the actual lengths are shown" in out
    (row,) = read_folder(Path("llama-3-8b.csv"))
    assert (row.engine, row.output, row.input_size) == ("sglang", 5, 40), "it ended its answers earlier"


def test_loads_that_the_server_rejects_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    with CompletionServer(most=2).running() as server:
        code, out, err = go(capsys, server.url, "--batches", "1-8", "--inputs", 40, "--outputs", 6)
    assert code == 0
    assert [row.batch for row in read_folder(Path("llama-3-8b.csv"))] == [1, 2]
    assert "no figures for 4 at once" in out and "too many requests" in out
    assert "not tried: 1 points" in out
    assert "8 at once" not in err


def test_broken_streams_are_counted_as_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with CompletionServer(broken=3).running() as server:
        code, out, err = go(capsys, server.url, "--batches", 2, "--inputs", 40, "--outputs", 6, "--json")
    assert code == 1 and "nothing was measured" in err
    refused = json.loads(out)["refused"][0]
    assert sum(refused["errors"].values()) >= 1
    assert not Path("llama-3-8b.csv").exists()


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (CompletionServer(models=("a", "b")), "serves 2 models (a, b): select one"),
        (CompletionServer(silent=True), "had no token"),
        (CompletionServer(key="secret"), "status 401: a key is needed"),
        (CompletionServer(forms=()), "status 404"),
        (CompletionServer(longest=32), "sequences of at most 32 tokens"),
    ],
)
def test_server_that_cannot_be_measured_is_reported(
    capsys: pytest.CaptureFixture[str], server: CompletionServer, words: str
) -> None:
    with server.running():
        code, _, err = go(capsys, server.url, "--batches", 1, "--inputs", 40)
    assert code == 1 and words in err and not Path("llama-3-8b.csv").exists()


def test_api_key_and_served_name_are_sent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with CompletionServer(key="secret", models=("a", "b")).running() as server:
        args = ("--batches", 1, "--inputs", 40, "--outputs", 2, "--served-name", "b")
        assert go(capsys, server.url, *args)[0] == 0
    assert {order["model"] for order in server.seen} == {"b"}


def test_parameters_of_the_model_are_in_the_rows(capsys: pytest.CaptureFixture[str], server: CompletionServer) -> None:
    args = ("--batches", 1, "--inputs", 40, "--outputs", 2, "--params", "8b")
    assert go(capsys, server.url, *args)[0] == 0
    assert [row.params for row in read_folder(Path("llama-3-8b.csv"))] == [8e9]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["http://192.0.2.1:8000"], "is not an address of this host"),
        (["http://user:secret@localhost:1"], "OPENAI_API_KEY"),
        (["ftp://localhost"], "write it as http://"),
        (["http://127.0.0.1:1"], "refused"),
        (["http://127.0.0.1:1", "--points", "3"], "--points cannot be used with --server"),
        (["http://127.0.0.1:1", "--precision", "exact"], "--precision must be a value"),
        (["http://127.0.0.1:1", "bench.py:make"], "TARGET cannot be used with --server"),
    ],
)
def test_invalid_server_options_are_refused(capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    code, _, err = go(capsys, *args)
    assert code and words in err and "secret" not in err


def test_measuring_time_is_bounded(server: CompletionServer) -> None:
    """No wait is longer than the limit: neither for a point that never ends nor for requests that do not count."""
    slow = replace(server, token_s=100.0)
    with slow.running():
        served = find_with(slow)
        with pytest.raises(LoadRefused, match="no request ended within 1 s"):
            measure_load(served, LoadPoint(2, 20, 4), Prompts(), replace(EFFORT, timeout=1.0), "x")


def find_with(server: CompletionServer):
    server.token_s, pace = 0.0, server.token_s
    found = find(ServerAddress.parse(server.url), None, "", 10.0)
    server.token_s = pace
    return found


def test_address_without_a_completion_server_is_an_error(server: CompletionServer) -> None:
    url = server.url
    found = find(ServerAddress.parse(url), None, "", 10.0)
    assert (found.name, found.engine, found.form) == ("tiny", "vllm", "completions")
    with pytest.raises(ServerError):
        find(ServerAddress.parse(f"{url}/nothing"), None, "", 10.0)


@pytest.mark.parametrize("status", ["200 OK", "503 Service Unavailable"])
def test_answer_that_breaks_off_is_an_error(status: str) -> None:
    def answer(listening: socket.socket) -> None:
        with listening.accept()[0] as client:
            client.recv(65536)
            client.sendall(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nbus".encode())

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        with pytest.raises(ServerError, match="IncompleteRead"):
            find(ServerAddress.parse(f"http://127.0.0.1:{listening.getsockname()[1]}"), None, "", 5.0)
        thread.join()


def test_prompt_has_the_token_count_of_the_server(server: CompletionServer) -> None:
    served = find(ServerAddress.parse(server.url), None, "", 10.0)
    line = served.line(10.0)
    prompts = Prompts.asked(served, line, 100, "x")
    assert served.ask(line, prompts.make(100, 1, "x"), 2).inputs == 100
    line.close()


def test_percentiles_are_computed_with_enough_samples() -> None:
    found = Percentiles.of([float(i) for i in range(101)])
    assert (found.p50, found.at[0.9], found.p99, found.mean) == (50.0, 90.0, 99.0, 50.0)
    assert Percentiles.of([1.0, 3.0]).p99 is None and Percentiles.of([1.0, 3.0]).p50 == 2.0
