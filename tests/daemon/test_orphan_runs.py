"""Slices that a run holds after Slurm has ended it: found and reported by migbatchd and by doctor."""

import pytest

from slurm_migbatch.daemon.audit import PATIENCE_S, Orphan, OrphanWatch, orphans
from slurm_migbatch.daemon.nodesview import LiveView
from slurm_migbatch.doctor.nodes import check_orphans
from slurm_migbatch.slurm.client import UNREAD, JobRow
from slurm_migbatch.store.queries import LeaseRow
from tests.support.daemon_fakes import gpu

HERE = ("n1",)


@pytest.mark.parametrize(
    "row",
    [
        JobRow(1, state="RUNNING", nodes=HERE),
        JobRow(1, state="SUSPENDED", nodes=("n0", "n1")),
        JobRow(1, state="COMPLETING", nodes=HERE, restarts=1),  # requeued, and the Epilog is still to come
        JobRow(1, state="CONFIGURING"),  # its nodes are not listed
        JobRow(1, state=UNREAD, reason="odd"),
    ],
)
def test_run_that_slurm_lists_on_the_node_is_no_orphan(row):
    assert orphans([("n1", 1, 0)], [row]) == set()


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [JobRow(1, state="PENDING", restarts=1)],
        [JobRow(1, state="RUNNING", nodes=("n2",))],
        [JobRow(1, state="RUNNING", nodes=HERE, restarts=1)],
        [JobRow(2, state="RUNNING", nodes=HERE)],
    ],
)
def test_run_that_slurm_no_longer_lists_on_the_node_is_an_orphan(rows):
    assert orphans([("n1", 1, 0)], rows) == {Orphan("n1", 1, 0)}


def test_only_lasting_orphans_are_reported_and_once(held):
    watch = OrphanWatch()
    facts = held("n1", 1)
    running = [JobRow(1, state="RUNNING", nodes=HERE)]
    assert watch.check(facts, [], 0.0) == []
    assert watch.check(facts, running, PATIENCE_S) == []
    assert watch.check(facts, [], PATIENCE_S + 1) == []
    assert watch.check(facts, [], 2 * PATIENCE_S) == [], "Slurm listed the run in between"
    assert watch.check(facts, [], 2 * PATIENCE_S + 1) == [Orphan("n1", 1, 0)]
    assert watch.check(facts, [], 2 * PATIENCE_S + 2) == [] and watch.present
    assert watch.check({}, [], 2 * PATIENCE_S + 3) == [] and not watch.present


@pytest.fixture
def held():
    def make(node, job):
        view = LiveView()
        view.load({node: [gpu(0)]}, ())
        slot = {"gpu": gpu(0)["uuid"], "profile": "1g.10gb", "start": 0, "size": 1, "gi": 1, "ci": 0}
        event = {"kind": "start", "seq": 2, "ts": 1.0, "job": job, "restart": 0, "slices": [slot]}
        view.apply(node, [event])
        return view.facts()

    return make


def test_doctor_reports_lasting_orphans():
    lease = LeaseRow("n1", "GPU-1", "1g.10gb", 0, 1, job=1, restart=0, since=1000.0)
    young = LeaseRow("n1", "GPU-1", "1g.10gb", 1, 1, job=2, restart=0, since=1990.0)
    (finding,) = check_orphans([lease, young], [], 2000.0)
    assert (finding.level, finding.subject) == ("warn", "n1")
    assert "job 1 run 0" in finding.text and "migbatch node reconcile" in finding.advice
    (finding,) = check_orphans([lease], [JobRow(1, state="RUNNING", nodes=HERE)], 2000.0)
    assert finding.level == "ok"
