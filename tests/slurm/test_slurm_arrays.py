"""Separate rows for array tasks, from what squeue and scontrol print, and statistics from sdiag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.lab.bench.rpcs import Diag, RpcCount, parse_sdiag
from slurm_migbatch.slurm.arrays import parse_tasks, split_arrays, throttle
from slurm_migbatch.slurm.client import JobRow, SlurmError
from slurm_migbatch.slurm.dialog import Records
from slurm_migbatch.slurm.taskexpr import count_tasks, fold_tasks

META = JobRow(32, array_job=32, array_task="1-9", tasks=9, partition="gpu", priority=5, gres="gres/mig:1g.10gb:1")
SPLIT = replace(META, job_id=35, array_task="4", tasks=1, restarts=2, gres="gres/mig:3g.40gb:1")
PLAIN = JobRow(40, partition="gpu", priority=5)


class Commands:
    """squeue and scontrol for the array 32, whose task 4 has a record of its own."""

    def __init__(self, narrow: str) -> None:
        self.narrow = narrow
        self.asked: list[str] = []

    def run(self, program: str, *arguments: str) -> str:
        self.asked.append(program)
        assert program == "squeue"
        return self.narrow

    def show(self, jobs: Sequence[str]) -> list[str]:
        assert jobs == ["32_1"]
        return ["JobId=32 ArrayJobId=32 ArrayTaskId=1 ArrayTaskThrottle=3 JobName=x ArrayTaskThrottle=9 \n"]

    def listed(self, jobs: list[str]) -> list[JobRow]:
        rows = {"35": SPLIT, "32_1": replace(META, array_task="1", tasks=1, reason="Resources")}
        return [rows[job] for job in jobs]


NARROW = "".join(f"{35 if task == 4 else 32}|32|{task}\n" for task in range(1, 10))


def test_task_with_its_own_record_gets_a_row_before_the_rest() -> None:
    commands = Commands(NARROW)
    rows = split_arrays(
        [replace(META, reason="Resources,BeginTime"), PLAIN], commands.run, commands.show, commands.listed
    )
    rest = replace(META, array_task="1-3,5-9%3", tasks=8, throttle=3, reason="Resources")
    assert rows == [SPLIT, rest, PLAIN]


def test_task_that_already_has_a_row_gets_no_second_one() -> None:
    """squeue lists records separately where the array's own record has one task left (24.11)."""
    commands = Commands("35|32|4\n32|32|1\n")
    rows = split_arrays(
        [replace(META, array_task="1", tasks=1), SPLIT, PLAIN], commands.run, commands.show, commands.listed
    )
    assert [(row.job_id, row.array_task) for row in rows] == [(32, "1%3"), (35, "4"), (40, None)]


def test_no_command_runs_without_arrays_and_one_without_separate_tasks() -> None:
    commands = Commands(NARROW.replace("35|", "32|"))
    assert split_arrays([PLAIN], commands.run, commands.show, commands.listed) == [PLAIN]
    assert commands.asked == []
    assert split_arrays([META, PLAIN], commands.run, commands.show, commands.listed) == [META, PLAIN]
    assert commands.asked == ["squeue"]


def test_array_ids_are_split_over_several_commands() -> None:
    arrays = [JobRow(10**9 + n, array_job=10**9 + n, array_task="1-9", tasks=9) for n in range(20_000)]
    longest = 0

    def run(program: str, *arguments: str) -> str:
        nonlocal longest
        longest = max(longest, *map(len, arguments))
        asked = arguments[-2].removeprefix("--jobs=").split(",")
        return "".join(f"{array}|{array}|1\n{int(array) + 10**8}|{array}|2\n" for array in dict.fromkeys(asked))

    def listed(jobs: Sequence[str]) -> list[JobRow]:
        nonlocal longest
        longest = max(longest, len(",".join(jobs)))
        return [JobRow(int(job)) for job in jobs if "_" not in job]

    rows = split_arrays(arrays, run, lambda jobs: [""] * len(jobs), listed)
    assert sum(row.array_job is None for row in rows) == len(arrays)
    assert longest < 1 << 17


def test_requeued_task_is_placed_by_its_priority() -> None:
    commands = Commands(NARROW)
    high = JobRow(20, partition="gpu", priority=9)
    other = JobRow(21, partition="train", priority=1)
    rows = split_arrays([other, high, META, PLAIN], commands.run, commands.show, commands.listed)
    assert [row.job_id for row in rows] == [21, 20, 35, 32, 40]


def test_requeued_tasks_of_an_array_keep_their_order() -> None:
    tasks = [replace(SPLIT, job_id=32 + task, array_task=str(task)) for task in (3, 4, 7)]
    by_job = {str(row.job_id): row for row in tasks} | {"32_1": replace(META, array_task="1", tasks=1)}
    own = "".join(f"32|32|{task}\n" for task in (1, 2, 5, 6, 8, 9))
    shown = own + "".join(f"{row.job_id}|32|{row.array_task}\n" for row in tasks)
    commands = Commands(shown)
    rows = split_arrays([META, PLAIN], commands.run, commands.show, lambda jobs: [by_job[job] for job in jobs])
    assert [row.array_task for row in rows] == ["3", "4", "7", "1-2,5-6,8-9%3", None]


def test_job_name_cannot_forge_a_throttle() -> None:
    shown = "JobId=3 ArrayJobId=3 ArrayTaskId=1-4 JobName=x\nJobId=3 ArrayJobId=3 ArrayTaskId=1 ArrayTaskThrottle=7 \n"
    assert throttle(shown) is None


def test_throttle_is_read_beside_fields_of_a_later_release() -> None:
    shown = "JobId=3 SLUID=s1 ArrayJobId=3 ArrayTaskId=1-4 ArrayFlags=(null) ArrayTaskThrottle=7 JobName=x \n"
    assert throttle(shown) == 7


@given(st.lists(st.one_of(st.none(), st.text(), st.text("scontrl: JobId=7 ArayThe\n")), max_size=5), st.booleans())
def test_scontrol_output_is_split_by_job(names: list[str | None], echo: bool) -> None:
    records = Records([f"{number}_1" for number in range(len(names))])
    shown = {
        f"{number}_1": f"JobId={number} JobName={name} x\n" for number, name in enumerate(names) if name is not None
    }
    stdout = ""
    for line in records.stdin.splitlines():
        stdout += f"scontrol: {line}\n" if echo else "scontrol: "
        stdout += f"{line.split()[2]}\n" if "hostnames" in line else shown.get(line.split()[-1], "")
        stdout += "\n" if "show job" in line else ""
    found = records.by_job(stdout)
    assert found is not None
    for number, name in enumerate(names):
        assert found[number].startswith(f"JobId={number} JobName={name} x") if name is not None else not found[number]
    assert records.by_job(stdout.rpartition("after-")[0]) is None


@given(st.sets(st.integers(0, 2000), min_size=1))
def test_folded_tasks_are_the_same_tasks(tasks: set[int]) -> None:
    text = fold_tasks(tasks)
    assert count_tasks(text) == len(tasks)
    spans = [part.split("-") for part in text.split(",")]
    assert {task for span in spans for task in range(int(span[0]), int(span[-1]) + 1)} == tasks


@pytest.mark.parametrize("text", ["x|1|2", "1|2", "1|1|2-4"])
def test_malformed_task_list_is_an_error(text: str) -> None:
    with pytest.raises(SlurmError):
        parse_tasks(text)


SDIAG = """sdiag output at Sat Nov 21 20:58:07 2026 (1795294687)
Remote Procedure Call statistics by message type
\tREQUEST_UPDATE_JOB                      ( 3001) count:6      ave_time:269    total_time:1617
\tREQUEST_JOB_INFO                        ( 2003) count:2      ave_time:216    total_time:432

Remote Procedure Call statistics by user
\troot            (       0) count:8      ave_time:256    total_time:2049

Pending RPC statistics
\tREQUEST_PING                            ( 1008) count:7
"""


def test_sdiag_statistics_are_parsed_and_subtracted() -> None:
    seen = parse_sdiag(SDIAG)
    assert seen.types == {"REQUEST_UPDATE_JOB": RpcCount(6, 0.001617), "REQUEST_JOB_INFO": RpcCount(2, 0.000432)}
    assert seen.users == {"root": RpcCount(8, 0.002049)}
    before = Diag({"REQUEST_UPDATE_JOB": RpcCount(4, 0.001), "REQUEST_JOB_INFO": RpcCount(2, 0.000432)}, {})
    grown = seen.since(before)
    assert set(grown.types) == {"REQUEST_UPDATE_JOB"}
    assert grown.types["REQUEST_UPDATE_JOB"].count == 2
    reset = seen.since(Diag({"REQUEST_JOB_INFO": RpcCount(500, 1.0)}, {}))
    assert reset.types["REQUEST_JOB_INFO"] == RpcCount(2, 0.000432)


@pytest.mark.parametrize(
    "text", ["", "sdiag: error: nothing", SDIAG.partition("Remote Procedure Call statistics by u")[0]]
)
def test_output_without_statistics_is_an_error(text: str) -> None:
    with pytest.raises(SlurmError, match="no statistics"):
        parse_sdiag(text)
