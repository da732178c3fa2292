"""The output of `scontrol show reservation`, and which nodes it closes to which jobs."""

from __future__ import annotations

import pytest

from slurm_migbatch.decide.capacity.demand import demands
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.reservations import of_jobs, of_nodes, parse

LINE = (
    "ReservationName={name} StartTime=2026-11-22T22:32:08 EndTime=2026-11-22T23:32:08 Duration=01:00:00 Nodes={nodes} "
    "NodeCnt=2 CoreCnt=64 Features=(null) PartitionName=(null) Flags={flags} TRES=cpu={cpus} Users=ann Groups=(null) "
    "Accounts=(null) Licenses=(null) State={state} BurstBuffer=(null) Watts=n/a MaxStartDelay=(null) \n"
)


def line(name: str, nodes: str, cpus: int = 128, flags: str = "SPEC_NODES", state: str = "ACTIVE") -> str:
    return LINE.format(name=name, nodes=nodes, cpus=cpus, flags=flags, state=state)


def rows() -> list[NodeRow]:
    return [NodeRow(name, frozenset({"IDLE"}), partitions=("gpu",), cpus=64) for name in ("n1", "n2", "n3", "cat")]


def pools(output: str, *jobs: JobRow) -> list[frozenset[str]]:
    found = demands(jobs, of_nodes(rows(), parse(output, {}.__setitem__)), ("n1", "n2", "n3"), 0.0)
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


def test_reservations_are_assigned_to_jobs_by_id() -> None:
    assert [row.reservation for row in of_jobs([job(1), job(2)], {2: "a"})] == ["", "a"]
