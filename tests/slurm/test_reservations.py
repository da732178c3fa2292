"""The output of `scontrol show reservation`, and which nodes it closes to which jobs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from slurm_migbatch.decide.capacity.demand import demands
from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.reservations import of_jobs, of_nodes, parse, with_least_times
from slurm_migbatch.slurm.times import parse_time

LINE = (
    "ReservationName={name} StartTime=2026-11-22T22:32:08 EndTime=2026-11-22T23:32:08 Duration=01:00:00 Nodes={nodes} "
    "NodeCnt=2 CoreCnt=64 Features=(null) PartitionName=(null) Flags={flags} TRES=cpu={cpus} Users=ann Groups=(null) "
    "Accounts=(null) Licenses=(null) State={state} BurstBuffer=(null) Watts=n/a MaxStartDelay=(null) \n"
)


def line(name: str, nodes: str, cpus: int = 128, flags: str = "SPEC_NODES", state: str = "ACTIVE") -> str:
    return LINE.format(name=name, nodes=nodes, cpus=cpus, flags=flags, state=state)


def rows() -> list[NodeRow]:
    return [NodeRow(name, frozenset({"IDLE"}), partitions=("gpu",), cpus=64) for name in ("n1", "n2", "n3", "cat")]


START = parse_time("2026-11-22T22:32:08")


def pools(output: str, *jobs: JobRow, now: float = START) -> list[frozenset[str]]:
    found = demands(jobs, of_nodes(rows(), parse(output, {}.__setitem__, now), now), ("n1", "n2", "n3"), 0.0)
    return [demand.pool for demand in found]


def job(number: int, reservation: str = "") -> JobRow:
    return JobRow(number, partition="gpu", gres="gres/mig:1g.10gb:1", reservation=reservation)


@pytest.mark.parametrize(
    "output",
    [
        "No reservations in the system\n",
        "",
        line("r", "n1", state="INACTIVE"),
        line("r", "(null)"),
    ],
)
def test_output_without_an_active_reservation_of_nodes_gives_none(output: str) -> None:
    unread: dict[str, str] = {}
    assert (parse(output, unread.__setitem__), unread) == ([], {})


def test_active_reservation_with_an_unreadable_node_list_is_named() -> None:
    unread: dict[str, str] = {}
    text = line("odd", "n[1", 64) + line("r", "n1", 64) + line("old", "n[1", 64, state="INACTIVE")
    assert [held.name for held in parse(text, unread.__setitem__)] == ["r"]
    assert list(unread) == ["odd"]


def test_comment_of_a_reservation_does_not_replace_its_fields() -> None:
    text = line("r", "n1", 64).rstrip("\n") + "Comment=was Nodes=n2 State=INACTIVE Flags=MAGNETIC\n"
    assert pools(text, job(1), job(2, "r")) == [{"n2", "n3"}, {"n1"}]


def test_jobs_get_the_nodes_of_their_reservation_and_other_jobs_the_rest() -> None:
    text = line("a", "n1,cat") + line("b", "n2", 64)
    assert pools(text, job(1), job(2, "a"), job(3, "b")) == [{"n3"}, {"n1"}, {"n2"}]


def test_a_job_that_names_several_reservations_may_use_the_nodes_of_each() -> None:
    text = line("a", "n1,cat") + line("b", "n2", 64)
    assert pools(text, job(1, "a,b"), job(2, "b,later")) == [{"n1", "n2"}, {"n2"}]


def test_a_reservation_of_some_cores_leaves_the_node_open() -> None:
    assert pools(line("a", "n1", 8), job(1), job(2, "a")) == [{"n1", "n2", "n3"}, {"n1"}]


def test_magnetic_reservation_is_open_to_other_jobs() -> None:
    assert pools(line("a", "n1", 64, "MAGNETIC,SPEC_NODES"), job(1), job(2, "a")) == [{"n1", "n2", "n3"}, {"n1"}]


@pytest.mark.parametrize(
    ("flags", "cpus", "limit_s", "nodes"),
    [
        ("MAINT", 128, 3600, {"n1", "n2", "n3"}),
        ("MAINT", 128, 3720, {"n3"}),
        ("MAINT", 128, None, {"n3"}),
        ("MAINT", 8, None, {"n1", "n2", "n3"}),
        ("MAGNETIC", 128, None, {"n1", "n2", "n3"}),
    ],
)
def test_jobs_must_end_before_a_coming_reservation(flags: str, cpus: int, limit_s: int | None, nodes: set[str]) -> None:
    text = line("soon", "n[1-2]", cpus, flags, "INACTIVE") + line("over", "n3", state="INACTIVE").replace(
        "22T22", "20T22"
    )
    job_row = replace(job(1), time_limit_s=limit_s)
    assert pools(text, job_row, now=START - 3600) == [nodes]
    assert pools(text.replace("2026-11-22T22:32:08", str(int(START))), job_row, now=START - 3600) == [nodes]
    assert pools(text, job_row, now=START + 1) == [{"n1", "n2", "n3"}]


@pytest.mark.parametrize(
    ("shown", "nodes"),
    [("30:00", {"n1", "n2", "n3"}), ("2:00:00", {"n3"}), ("0:00", {"n3"}), ("UNLIMITED", {"n3"}), ("odd", {"n3"})],
)
def test_a_job_that_accepts_less_time_ends_before_a_coming_reservation(shown: str, nodes: set[str]) -> None:
    """As in Slurm, whose backfill starts a job for as long as there is time, at least --time-min."""
    text = line("soon", "n[1-2]", 128, state="INACTIVE")
    limited = replace(job(1), time_limit_s=3 * 3600)
    assert pools(text, limited, now=START - 3600) == [{"n3"}]
    (row,) = with_least_times([limited], {1: shown})
    assert row.time_limit_s == 3 * 3600
    assert pools(text, row, now=START - 3600) == [nodes]
    assert with_least_times([replace(limited, state="RUNNING")], {1: shown})[0].time_min_s is None


def test_first_of_several_coming_reservations_counts() -> None:
    text = line("later", "n[1-2]", state="INACTIVE").replace("22T22", "23T22") + line(
        "soon", "n1", 64, state="INACTIVE"
    )
    found = of_nodes(rows(), parse(text, {}.__setitem__, START - 600), START - 600)
    assert [row.free_for_s for row in found] == [600, 87360, 0, 0]


class _Client(CliClient):
    """Commands of a Slurm with these reservations."""

    output = ""

    def _run(self, *command: str, **_: object) -> str:
        self.calls += 1
        return self.output


def test_coming_reservations_are_read_once_a_minute_and_active_ones_end_with_their_flag(monkeypatch) -> None:
    clock = [START - 3600.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    client = _Client()
    client.output = line("soon", "n1", 64, state="INACTIVE")

    def seen(state: str = "IDLE") -> list[tuple[int, bool]]:
        listed = [replace(row, states=frozenset({state})) for row in rows()]
        return [(row.free_for_s, row.set_aside) for row in client._with_reservations(listed)[:2]]

    assert seen() == seen() == [(3600, False), (0, False)] and client.calls == 1
    clock[0] += 59
    assert seen() == [(3600, False), (0, False)] and client.calls == 1
    clock[0] += 60
    assert seen() == [(3540, False), (0, False)] and client.calls == 2
    clock[0], client.output = START, line("soon", "n1", 64)
    assert seen("RESERVED") == [(0, True), (0, False)] and client.calls == 3
    clock[0] += 1
    assert seen() == [(0, False), (0, False)] and client.calls == 3


def test_reservations_are_assigned_to_jobs_by_id() -> None:
    assert [row.reservation for row in of_jobs([job(1), job(2)], {2: "a"})] == ["", "a"]
