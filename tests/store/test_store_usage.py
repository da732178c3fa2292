"""Held slices, summed on each kind of database."""

from __future__ import annotations

import contextlib

import pytest

from slurm_migbatch.store import capacity, windows
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.queries import RunFilter
from slurm_migbatch.store.reader import open_reader
from slurm_migbatch.store.runquery import JobId
from slurm_migbatch.store.usage import HeldSlices, held_slices
from slurm_migbatch.store.waste import used_runs
from tests.support.store_events import Node, job, run_of, slice_entry
from tests.support.usage_record import run


def test_held_time_is_summed_and_clipped_to_the_window(database: str) -> None:
    with open_store(database) as store:
        node = Node(store)
        half = {"seconds": 9.0, "sm": 0.5, "tensor": 0.0, "dram": 0.0}
        run(store, node, 1, 1000, 1100, activity=half)
        run(store, node, 2, 1200, 1250)
        run(store, node, 3, 1300, 1400, shared=True, activity=half)
        run(store, node, 4, 900, 1010, activity=half)
        run(store, node, 5, 1900, 2100)
        run(store, node, 6, 1500, 1600, slice_entry(0, 1), slice_entry(1, 1))
        run(store, node, 7, 1700, None, slice_entry(0, 2, "2g.20gb"), user="")
        run(store, node, 8, 2000, 2500)
        run(store, node, 9, 500, 1000)
        with store.reading() as connection:
            everyone = list(held_slices(connection, RunFilter(), ("user", "node"), 1000, 2000, 1800))
            here = list(held_slices(connection, RunFilter(nodes=("n1",)), ("user", "node"), 1000, 2000, 1800))
            of_account = RunFilter(accounts=("chemistry",), nodes=("n1",))
            both = list(held_slices(connection, of_account, ("user", "node"), 1000, 2000, 1800))
            other = list(held_slices(connection, RunFilter(nodes=("n2",)), (), 1000, 2000, 1800))
            nobody = list(held_slices(connection, RunFilter(accounts=("ml",)), ("partition",), 1000, 2000, 1800))
    alice = ("alice", "n1")
    assert sorted(everyone) == [
        HeldSlices(("1001", "n1"), "2g.20gb", 2, 7, 1, 100.0, 0.0, 0.0),
        HeldSlices(alice, "1g.10gb", 1, 0, 4, 450.0, 100.0, 50.0),
        HeldSlices(alice, "1g.10gb", 1, 4, 1, 10.0, 10.0, 5.0),
    ]
    assert sorted(here) == sorted(both) == sorted(everyone)
    assert other == nobody == []


def test_runs_of_equal_slices_are_one_row_and_those_in_several_groups_one_each(database: str) -> None:
    """A year of a large site has millions of runs; `migbatch usage` holds the rows in memory."""
    with open_store(database) as store:
        nodes = [Node(store, name) for name in ("n1", "n2")]
        pair = [slice_entry(0, 1), slice_entry(1, 1)]
        for job in range(1, 4):
            run(store, nodes[0], job, 1000 + 100 * job, 1050 + 100 * job, *pair)
        run(store, nodes[0], 4, 1500, 1600, slice_entry(0, 1), slice_entry(2, 2, "2g.20gb"))
        run(store, nodes[0], 5, 1700, 1800, slice_entry(0, 1), slice_entry(1, 2))
        run(store, nodes[0], 6, 1850, 1900)
        nodes[1].send(nodes[1].start(1852, 6), nodes[1].stop(1903, 6))
        with store.reading() as connection:
            by_user = sorted(held_slices(connection, RunFilter(), ("user",), 0, 3000, 3000))
            by_node = sorted(held_slices(connection, RunFilter(), ("node",), 0, 3000, 3000))
    alice = ("alice",)
    assert by_user == [
        HeldSlices(alice, "1g.10gb", 1, 0, 4, 400.0, 0.0, 0.0),
        HeldSlices(alice, "1g.10gb", 1, 4, 1, 100.0, 0.0, 0.0),
        HeldSlices(alice, "1g.10gb", 1, 5, 1, 100.0, 0.0, 0.0),
        HeldSlices(alice, "1g.10gb", 2, 5, 1, 100.0, 0.0, 0.0),
        HeldSlices(alice, "2g.20gb", 2, 4, 1, 100.0, 0.0, 0.0),
    ]
    assert [(row.groups, row.run, row.runs, row.seconds) for row in by_node if row.run in (0, 6)] == [
        (("n1",), 0, 3, 300.0),
        (("n1",), 6, 1, 50.0),
        (("n2",), 6, 1, 50.0),
    ]


@pytest.mark.parametrize("ended", [True, False])
def test_a_slice_on_a_node_that_a_job_gives_back_counts_until_then(database: str, *, ended: bool) -> None:
    """After `scontrol update JobId= NumNodes=1` Slurm, and sreport, count the remaining node only."""
    with open_store(database) as store:
        kept, given_back = Node(store, "n10"), Node(store, "n1")
        store.upsert_jobs([job(1, "RUNNING", start=1000.0, nodes=("n1", "n10"))], now=1000.0)
        kept.send(kept.start(1002, 1))
        given_back.send(given_back.start(1002, 1), given_back.stop(1103, 1))
        store.upsert_jobs([job(1, "RUNNING", start=1000.0, nodes=("n10",))], now=1104.0)
        if ended:
            store.upsert_jobs([job(1, "COMPLETED", start=1000.0, end=1400.0, nodes=("n10",))], now=1401.0)
            kept.send(kept.stop(1403, 1))
        with store.reading() as connection:
            whole = held_slices(connection, RunFilter(), ("node",), 0, 1400, 1400)
            assert sorted((row.groups, row.seconds) for row in whole) == [(("n1",), 103.0), (("n10",), 400.0)]
            later = held_slices(connection, RunFilter(), ("node",), 1200, 1400, 1400)
            assert [(row.groups, row.seconds) for row in later] == [(("n10",), 200.0)]
            (wasted,) = used_runs(connection, RunFilter(jobs=(JobId(1),)), 1400)
            assert wasted.given_back_s == 297.0
    record = open_reader(database)
    with contextlib.closing(record):
        drawn = windows.held_slices(record, RunFilter(start=0.0, end=2000.0))
        assert sorted((row[0], row[6], row[7]) for row in drawn) == [
            ("n1", 1000.0, 1103.0),
            ("n10", 1000.0, 1400.0 if ended else None),
        ]
        drawn = windows.held_slices(record, RunFilter(start=1200.0, end=2000.0))
        assert [row[0] for row in drawn] == ["n10"]


@pytest.mark.parametrize("group", ["user", "account", "partition", "node"])
def test_held_time_can_be_grouped_by_each_field(database: str, group: str) -> None:
    with open_store(database) as store:
        node = Node(store)
        run(store, node, 1, 1000, 1100)
        with store.reading() as connection:
            (found,) = held_slices(connection, RunFilter(), (group,), 0, 2000, 2000)
    assert found.groups == ({"user": "alice", "account": "chemistry", "partition": "gpu", "node": "n1"}[group],)


def test_only_the_last_description_of_gpus_before_the_window_is_read(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node describes its GPUs at each boot and each start of its agent: that is long, and stays for a year."""
    read: list[object] = []
    monkeypatch.setattr(capacity, "_mig_gpus", lambda payload: read.append(payload) or len(payload["gpus"]))
    with open_store(database) as store:
        for name in ("n1", "n2"):
            node = Node(store, name)
            for number in range(20):
                gpus = [{"uuid": f"GPU-{name}-{n}", "mig": True, "geometry": {}} for n in range(1 + number % 4)]
                node.send(node.event("inventory", 100.0 * (number + 1), gpus=gpus))
        seconds = store.read(capacity.gpu_seconds, 1050.0, 1250.0)
        assert seconds == dict.fromkeys(("n1", "n2"), 50 * 2 + 100 * 3 + 50 * 4)
        assert len(read) == 2 * 3
        assert store.read(capacity.gpu_seconds, 1050.0, 1250.0, ("n2",)) == {"n2": 600.0}


@pytest.mark.parametrize("listed", ["first", "later"])
def test_slices_that_a_node_claims_for_a_run_on_other_nodes_are_not_charged(database: str, listed: str) -> None:
    """Root of a node can report any job, also before Slurm's list of jobs is read."""
    with open_store(database) as store:
        own, false = Node(store, "n_1"), Node(store, "nx1")
        row = job(1, "RUNNING", start=1000.0, nodes=["n_1", "n2"])
        claim = false.start(1001, 1, slice_entry(0, 4, "4g.40gb", gpu="GPU-b"))
        if listed == "first":
            store.upsert_jobs([row], now=1000)
        false.send(claim)
        store.upsert_jobs([row], now=1002)
        own.send(own.start(1003, 1))
        own.send(own.stop(1100, 1))
        store.upsert_jobs([{**row, "state": "COMPLETED", "end": 1100.0}], now=1101)
        found_run = run_of(store, 1)
        shown = found_run.run
        with store.reading() as connection:
            found = list(held_slices(connection, RunFilter(), ("user", "node"), 0, 3000, 3000))
    assert [(row.groups, row.profile, row.seconds) for row in found] == [(("alice", "n_1"), "1g.10gb", 100.0)]
    assert (shown["profile"], shown["slice_count"], shown["nodes"]) == ("1g.10gb", 1, "n_1,n2")
    assert [row["node"] for row in found_run.slices] == ["n_1"], "nor does migacct sum them"


def test_node_that_a_job_has_given_up_is_charged(database: str) -> None:
    """A user can take nodes from a running job: scontrol update NumNodes=1."""
    with open_store(database) as store:
        row = job(1, "RUNNING", start=1000.0, nodes=["n1", "n2"])
        store.upsert_jobs([row], now=1000)
        for node in (Node(store, "n1"), Node(store, "n2")):
            node.send(node.start(1001, 1))
        store.upsert_jobs([{**row, "nodes": ["n1"]}], now=1090)
        store.upsert_jobs([{**row, "nodes": ["n1"], "state": "COMPLETED", "end": 1100.0}], now=1101)
        with store.reading() as connection:
            found = list(held_slices(connection, RunFilter(), ("node",), 0, 3000, 3000))
    assert sorted(row.groups for row in found) == [("n1",), ("n2",)]


def test_nodes_on_which_a_job_has_completed_already_are_not_given_back(database: str) -> None:
    """Of a job that is completing squeue lists the remaining nodes only; here n1's clock is behind the controller's."""
    with open_store(database) as store:
        first, last = Node(store, "n1"), Node(store, "n10")
        store.upsert_jobs([job(1, "RUNNING", start=1000.0, nodes=("n1", "n10"))], now=1000.0)
        first.send(first.start(1002, 1), first.stop(1390, 1))
        last.send(last.start(1002, 1))
        store.upsert_jobs([job(1, "COMPLETING", start=1000.0, end=1400.0, nodes=("n10",))], now=1401.0)
        last.send(last.stop(1403, 1))
        store.upsert_jobs([job(1, "COMPLETED", start=1000.0, end=1400.0, nodes=("n1", "n10"))], now=1404.0)
        with store.reading() as connection:
            whole = held_slices(connection, RunFilter(), ("node",), 0, 1500, 1500)
            assert sorted((row.groups, row.seconds) for row in whole) == [(("n1",), 400.0), (("n10",), 400.0)]
