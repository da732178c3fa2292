"""Runs that hold more than they use: the findings alone, then `migbatch waste` with a record."""

from __future__ import annotations

import csv
import io
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.cli.common import run as run_command
from slurm_migbatch.cli.main import cli
from slurm_migbatch.lab.bench.reports import fill
from slurm_migbatch.predict.recurring import CUT, DONE, FAILED, OUT_OF_MEMORY, WINDOW, PastRun, RunsPolicy
from slurm_migbatch.query.waste import _with_past
from slurm_migbatch.report.waste import SliceUse, WaitFigures, WasteVerdict, judge, waited
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.waste import UsedRun
from tests.support.gpu_kinds import H100
from tests.support.store_events import Node, slice_entry
from tests.support.usage_record import at, describe, run

POLICY = RunsPolicy(3, 1.1)


def used(
    profile: str = "7g.80gb",
    peak: float | None = 4096.0,
    sm: float | None = None,
    *,
    count: int = 1,
    nodes: int = 1,
    hours: float = 10.0,
    ended: str = DONE,
    past: tuple[PastRun, ...] = (),
    **more: Any,
) -> WasteVerdict:
    engine = more.pop("engine", "")
    own = PastRun(1, profile, ended, peak, sm, None if sm is None else sm / 2, engine)
    use = SliceUse(((profile, count),), nodes, hours, own, **more)
    return judge(use, (*past, own), H100.geometry, POLICY)


def kinds(verdict: WasteVerdict) -> list[str]:
    return [finding.kind for finding in verdict.findings]


def test_whole_gpu_is_reported_if_a_slice_is_enough() -> None:
    verdict = used(peak=4096.0, sm=0.12)
    assert kinds(verdict) == ["whole"]
    # 0.84 of 7 compute slices were busy, and one and a half times 4 GiB fit
    assert (verdict.profile, verdict.sbatch) == ("1g.10gb", "sbatch --gres=mig:1g.10gb")
    assert verdict.gpu_hours == 10 and verdict.wasted_gpu_hours == pytest.approx(10 * 6 / 7)
    sentence = verdict.findings[0].sentence
    assert "at most 4 of 79.2 GiB were used, with a margin 6, and 1g.10gb has 9.75" in sentence
    assert "0.84 of 7 compute slices were busy, and 1g.10gb has 1" in sentence


def test_finding_states_that_sms_were_not_sampled() -> None:
    verdict = used(sm=None)
    assert verdict.profile == "1g.10gb"
    assert "its SMs were not sampled, so its speed there is unknown" in verdict.findings[0].sentence


def test_slice_with_busy_sms_and_little_used_memory_is_not_wasted() -> None:
    verdict = used("3g.40gb", 1024.0, 0.95)
    assert (kinds(verdict), verdict.sbatch, verdict.wasted_gpu_hours) == ([], "", 0.0)
    assert verdict.note == "no smaller slice would have been enough"


def test_unused_memory_and_unused_sms_are_separate_findings() -> None:
    verdict = used("3g.40gb", 8 * 1024.0, 0.4)
    # 1.2 of 3 compute slices: 1g.20gb would be slower by a fifth
    assert (kinds(verdict), verdict.profile) == (["memory", "sms"], "2g.20gb")
    assert verdict.wasted_gpu_hours == pytest.approx(10 * (1 / 2 - 2 / 7))
    assert kinds(used("4g.40gb", 25 * 1024.0, 0.5)) == ["sms"], "memory for 3g.40gb is needed"
    assert kinds(used("1g.20gb", 4 * 1024.0, 0.9)) == ["memory"]


def test_idle_slice_is_reported() -> None:
    verdict = used("1g.10gb", 100.0, 0.02, hours=14.0)
    assert kinds(verdict) == ["idle"] and verdict.sbatch == ""
    assert verdict.wasted_gpu_hours == pytest.approx(2 * 0.98)
    assert "SMs were in use 2.0% of the 14 h for which it held 1g.10gb" in verdict.findings[0].sentence
    assert kinds(used(sm=0.02)) == ["idle", "whole"], "and what to request if it did something"


def test_slices_that_a_job_gave_back_are_held_until_then() -> None:
    verdict = used("7g.80gb", 4096.0, sm=0.05, count=2, nodes=2, hours=10.0, given_back=8.0)
    assert verdict.gpu_hours == 12
    idle, whole = verdict.findings
    assert idle.wasted_gpu_hours == pytest.approx(12 * 0.95)
    assert whole.wasted_gpu_hours == pytest.approx(12 * 6 / 7)


def test_suggested_request_counts_slices_on_each_node() -> None:
    verdict = used("3g.40gb", 4096.0, None, count=4, nodes=2)
    assert verdict.sbatch == "sbatch --gres=mig:1g.10gb:2", "--gres counts on each node"
    assert verdict.gpu_hours == 20


@pytest.mark.parametrize(
    ("use", "note"),
    [
        ({"peak": None}, "neither its memory nor its SMs were sampled"),
        ({"peak": None, "sm": 0.5}, "its memory was not sampled"),
        ({"ended": FAILED}, "it did not complete"),
        ({"ended": FAILED, "peak": 80_000.0}, "filled its slice"),
        ({"engine": "vllm"}, "vllm allocates a fixed share of any slice"),
        ({"shared": True}, "it shared its slice"),
        ({"live": True}, "it is running"),
    ],
)
def test_run_without_sufficient_data_has_a_note_and_no_findings(use: dict[str, Any], note: str) -> None:
    verdict = used(**use)
    assert note in verdict.note and verdict.sbatch == "" and not verdict.findings


def test_next_larger_slice_is_suggested_after_out_of_memory() -> None:
    verdict = used("1g.10gb", None, ended=OUT_OF_MEMORY)
    assert verdict.sbatch == "sbatch --gres=mig:1g.20gb" and not verdict.findings and not verdict.judged
    assert verdict.note == "it reported out of memory: request 1g.20gb next time"
    assert used("2g.20gb", 20_000.0, ended=OUT_OF_MEMORY, count=2).sbatch == "sbatch --gres=mig:3g.40gb:2"
    whole = used(ended=OUT_OF_MEMORY)
    assert whole.sbatch == "" and "on the largest slice" in whole.note


def test_run_that_its_user_ended_is_judged() -> None:
    assert used(ended=CUT).profile == "1g.10gb"


def test_run_with_slices_of_different_profiles_is_not_judged() -> None:
    use = SliceUse((("1g.10gb", 2), ("3g.40gb", 1)), 1, 10.0, PastRun(1, "", DONE, 100.0))
    verdict = judge(use, (), H100.geometry, POLICY)
    assert verdict.gpu_hours == pytest.approx(10 * (2 / 7 + 0.5)) and not verdict.judged


def test_other_runs_of_the_same_recurring_job_count() -> None:
    past = tuple(PastRun(n, "7g.80gb", DONE, 30 * 1024.0) for n in range(9))
    assert used(peak=4096.0, past=past).profile == "3g.40gb"


def test_wait_figures_need_enough_runs() -> None:
    assert waited([1, 2, 3, 4]) is None
    assert waited([float(n) for n in range(10, 0, -1)]) == WaitFigures(5.5, 9.0, 10)


# -- with a record ---------------------------------------------------------------------------------------------------

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('waste')}/x.db"
    with open_store(url) as store:
        node = Node(store)
        node.send(describe(node, at("09-01")))
        whole, busy = slice_entry(0, 8, "7g.80gb", "GPU-n1-0"), {"seconds": 9.0, "tensor": 0.0, "dram": 0.05}
        run(
            store, node, 7, at("10-02T10:00"), at("10-02T12:00"), whole, waited=3600,
            memory_mib=4096, activity={**busy, "sm": 0.12},
        )  # fmt: skip
        run(store, node, 8, at("10-03T10:00"), at("10-03T11:00"), whole, user="bob", uid=1002, memory_mib=70_000)
        run(
            store,
            node,
            9,
            at("10-04T10:00"),
            at("10-04T20:00"),
            slice_entry(0, 4, "3g.40gb", "GPU-n1-0"),
            memory_mib=5000,
        )
        for number in range(20, 26):
            began = at("10-02T08:00") + 60 * number
            run(store, node, number, began, began + 50, slice_entry(gpu="GPU-n1-0"), waited=float(number))
        run(store, node, 30, at("11-14T00:00"), None, slice_entry(gpu="GPU-n1-0"))
    return url


@pytest.fixture
def waste(database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setenv("MIGBATCH_DB", database)
    monkeypatch.setattr(time, "time", lambda: at("11-15"))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run_command(cli, "migbatch", ("waste", *arguments))
        return (code, *capsys.readouterr())

    return call


BLOCK = """\
Job:          7
User/Account: alice/chemistry
Partition:    gpu
State:        COMPLETED (exit code 0:0)
Held:         7g.80gb for 02:00:00 (2 GPU-hours)
Memory:       4 GiB of 79.2 GiB (5%)
SMs:          12% in use, memory bandwidth 5%
Wasted:       1.71 GPU-hours
Findings:     a whole GPU where 1g.10gb is enough: at most 4 of 79.2 GiB were used, with a margin 6, and 1g.10gb has \
9.75; 0.84 of 7 compute slices were busy, and 1g.10gb has 1
Next time:    sbatch --gres=mig:1g.10gb
Waited:       01:00:00
Would wait:   00:00:22 median, 00:00:25 for nine of ten (6 runs with 1g.10gb submitted around that time)
"""


def test_report_of_a_job_on_a_whole_gpu_suggests_a_slice(waste: Cli) -> None:
    assert waste("7") == (0, BLOCK, "")


def test_expected_wait_is_unknown_if_too_few_runs_waited(waste: Cli) -> None:
    out = waste("9")[1]
    assert "Next time:    sbatch --gres=mig:1g.10gb\n" in out
    assert "Would wait:   unknown: fewer than 5 runs with 1g.10gb were submitted around that time" in out
    assert "SMs:          not sampled" in out


def test_running_job_is_noted_as_running(waste: Cli) -> None:
    assert "Note:         it is running; memory and SMs are reported at its end" in waste("30")[1]


def test_table_lists_the_worst_runs_first(waste: Cli) -> None:
    code, out, err = waste("-S", "2026-10-01", "-E", "2026-11-01")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split()[:4] == ["JOBID", "USER", "ACCOUNT", "HELD"]
    assert [line.split()[0] for line in lines[1:-1]] == ["9", "7"], "most GPU-hours first, job 8 needs what it had"
    assert lines[-1] == (
        "9 runs held 8.01 GPU-hours; 8 were sampled, 5.29 (66%) of these were wasted; shown: the worst 2"
    )
    assert waste("-S", "2026-10-01", "-E", "2026-11-01", "--limit", "1", "-P", "-n")[1].splitlines() == [
        "9|alice|chemistry|3g.40gb|10:00:00|12|not sampled|5.00|3.57|memory|sbatch --gres=mig:1g.10gb|00:01:00|unknown"
    ]


def test_json_and_csv_hold_the_same_runs(waste: Cli) -> None:
    window = ("-S", "2026-10-01", "-E", "2026-11-01", "-u", "alice")
    found = json.loads(waste(*window, "--json")[1])
    assert [row["job"] for row in found["runs"]] == ["9", "7"] and found["total"]["runs"] == 8
    assert found["runs"][1]["would_wait"] == {"median_s": 22.5, "p90_s": 25.0, "runs": 6}
    assert found["runs"][1]["findings"][0]["figures"]["busy_slices"] == pytest.approx(0.84)
    table = list(csv.DictReader(io.StringIO(waste(*window, "--csv")[1])))
    assert [(row["job"], row["next_time"], row["would_wait_runs"]) for row in table] == [
        ("9", "sbatch --gres=mig:1g.10gb", ""), ("7", "sbatch --gres=mig:1g.10gb", "6"),
    ]  # fmt: skip


def test_window_without_runs_is_no_error(waste: Cli) -> None:
    window = ("-S", "2020-01-01", "-E", "2020-01-02")
    assert waste(*window) == (0, "no runs with slices ended in this window\n", "")
    header = waste("-S", "2026-10-01", "-E", "2026-11-01", "--csv")[1].splitlines()[0]
    assert waste(*window, "--csv") == (0, f"{header}\n", "")
    assert waste(*window, "--csv", "-n") == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("99",), 1, "the record has no run of job 99 with slices"),
        (("a;b",), 2, "'a;b' is not a job id"),
        (("7", "-u", "alice"), 2, "cannot be combined with -u"),
        (("-S", "never"), 2, "Invalid time specification (pos=0): never"),
    ],
)
def test_wrong_arguments_have_their_exit_codes(waste: Cli, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = waste(*arguments)
    assert done[:2] == (code, "") and message in done[2]


def test_memory_does_not_grow_with_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def peak(runs: int) -> int:
        url = f"sqlite:///{tmp_path}/{runs}.db"
        with open_store(url) as store:
            fill(store, runs, 30, time.time())
        monkeypatch.setenv("MIGBATCH_DB", url)
        tracemalloc.start()
        try:
            assert run_command(cli, "migbatch", ("waste", "-S", "now-40days", "--json")) == 0
            assert json.loads(capsys.readouterr().out)["total"]["runs"] > 0.9 * runs
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(100)  # which imports what is needed
    assert peak(4000) < 1.5 * peak(1000)


def test_newest_runs_of_each_recurring_job_are_its_past() -> None:
    def used_run(number: int, key: str, ended: str = "done") -> UsedRun:
        return UsedRun(key, PastRun(number, "1g.10gb", ended), None, False, 0.0, "")

    alike = [used_run(number, "b", "" if number == 35 else "done") for number in range(40, 10, -1)]
    found = [
        (run.own.run, [earlier.run for earlier in past])
        for run, past in _with_past([used_run(50, ""), used_run(9, "a"), *alike, used_run(8, "c")])
    ]
    newest = [number for number in range(20, 41) if number != 35]
    assert len(newest) == WINDOW
    assert found == [(50, []), (9, [9]), *((number, newest) for number in range(40, 10, -1)), (8, [8])]
