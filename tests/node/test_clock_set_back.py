"""A clock that is set back while jobs run: nothing waits until it has caught up with the earlier time."""

import sqlite3
import time

import pytest

from slurm_migbatch.mig.nvml.gpu import NvmlGpu
from slurm_migbatch.node import exits, liveness, progress, progressreport
from slurm_migbatch.node.deadline import Deadline
from slurm_migbatch.node.watch import Watcher
from slurm_migbatch.testbed.proc import wait_until
from tests.support.node_processes import run_hook, watching
from tests.support.progress_files import write

HOUR = 3600.0


@pytest.fixture
def clock(monkeypatch):
    """Moves the clock of this process and of the children that it forks: `clock(-HOUR)`."""
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])

    def step(seconds):
        shift[0] += seconds

    return step


def test_progress_is_reported_after_the_clock_is_set_back(new_node, clock):
    node = new_node(SampleEvery=0.05, ProgressEvery=0.1)
    node.prolog(1, "[mig:1g.10gb:1]")
    with watching(node):
        write(node, "items=1 seconds=1\n")
        wait_until(lambda: node.events("progress"), 60.0, "the first report")
        clock(-HOUR)
        write(node, "items=2 seconds=2\n")
        wait_until(lambda: len(node.events("progress")) > 1, 30.0, "the report after the step")


def test_checkpoint_written_after_the_clock_is_set_back_counts():
    started, changed = 1e9, 1e9 - HOUR

    def reported(checkpoint):
        text = b"steps=7 checkpoint=%d\n" % checkpoint
        report = progressreport.understand(progress.Content(b"", text, len(text), changed), started)
        return report.steps, report.checkpoint

    assert reported(changed - 1) == (7, changed - 1)
    assert reported(changed - HOUR) == (7, None), "an earlier run's"


def test_reported_energy_is_not_less_than_measured(new_node, clock, monkeypatch):
    node = new_node()
    node.prolog(1, "[mig:7g.80gb:1]")
    watcher, moment = Watcher(node.config, node.executor.gpus), 0.0
    monkeypatch.setattr(NvmlGpu, "energy_j", lambda _gpu: 300.0 * moment)
    for moment in (0.0, 15.0, 30.0):
        watcher.run_round(node.journal, node.executor.paths, moment)
    clock(-HOUR)
    node.epilog(1)
    assert node.events("stop")[-1]["energy_j"] == 9000


def test_a_run_without_an_epilog_is_ended(node, clock, monkeypatch):
    monkeypatch.setattr(liveness, "PAUSE_S", 0.0)
    node.prolog(1, "[mig:2g.20gb:1]")
    node.slurm_says()
    clock(-HOUR)
    node.executor.reconcile(Deadline(30))
    assert not node.slices("held")


def test_unwritable_journal_drains_the_node_despite_clock_changes(node, clock):
    node.prolog(9, "[mig:1g.10gb:1]")
    node.configure(ErrorsBeforeDrain=2, HookDeadline=0.2)
    node.forget_executor()
    other = sqlite3.connect(node.root / "state" / "journal.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        for job in (1, 2, 3):
            assert run_hook(node, "prolog", job, "[mig:1g.10gb:1]")[0] == exits.OK
            clock(-HOUR if job == 1 else 300.0)
    finally:
        other.close()
    assert [call for call in node.scontrol_calls() if call.startswith("update NodeName=n1 State=DRAIN")]
