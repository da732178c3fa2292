"""Root on a node may report anything: reports on jobs elsewhere do not count."""

from __future__ import annotations

import pytest

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.nodesview import LiveView
from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.daemon.plans import NodePlans
from slurm_migbatch.daemon.run_reports import PATIENCE_S, RunReport, confirm
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.decide.snapshot import Report
from slurm_migbatch.slurm.client import JobRow
from tests.support.daemon_fakes import FakeSigner, FakeSlurm, FakeStore

NOW = 1_000_000.0
HERE, SAFE = "n1", Report(checkpoint=NOW)
RUNS = JobRow(7, state="RUNNING", nodes=("n1", "n2"), restarts=1)
WAITS = JobRow(7, state="PENDING", reason="BeginTime", restarts=1)


def verdict(row: JobRow | None, report: Report | None, *, node: str = HERE, restart: int = 1, at: float = NOW) -> str:
    word = RunReport(node, (7, restart), report, at)
    found = confirm([word], {} if row is None else {7: row}, NOW)
    assert sum(map(len, found)) <= 1
    if found.later:
        assert found.later == [word]
        return "later"
    assert found.reports in ([], [((7, restart), report)]) and found.sent_back in ([], [(7, restart)])
    return "counts" if found.reports or found.sent_back else "no"


@pytest.mark.parametrize("report", [SAFE, None])
def test_only_nodes_of_a_running_job_may_report_on_it(report: Report | None) -> None:
    assert verdict(RUNS, report) == verdict(RUNS, report, node="n2") == "counts"
    assert verdict(RUNS, report, node="n3") == verdict(None, report) == "no"


def test_job_that_never_ran_does_not_count_as_requeued_by_a_node() -> None:
    """Its user has set the time at which it may begin."""
    never = JobRow(7, state="PENDING", reason="BeginTime", restarts=0)
    assert verdict(never, None, restart=0) == "later" != verdict(never, None, restart=0, at=NOW - PATIENCE_S)
    assert verdict(WAITS, None, restart=0) == "counts"
    assert verdict(WAITS, None, restart=2, at=NOW - PATIENCE_S) == "no"
    assert verdict(JobRow(7, state="PENDING", restarts=5), None, restart=1) == "no"


def test_report_on_a_run_that_is_over_does_not_count() -> None:
    assert verdict(WAITS, SAFE, restart=0) == "no"


def test_report_from_before_slurm_lists_the_start_is_kept_for_later() -> None:
    assert verdict(WAITS, SAFE) == "later"
    assert verdict(WAITS, SAFE, at=NOW - PATIENCE_S) == "no"


def test_reports_made_while_slurm_is_away_are_kept_once_for_each_run() -> None:
    """Thousands of jobs report every two minutes, and nothing is decided until slurmctld answers again."""
    observer = Observer(LiveView(), NodePlans(), lambda row: 0)
    misfit = {"kind": "misfit", "job": 7, "restart": 0}
    for number in range(1, 1001):
        safe = {"checkpoint": NOW} if number == 10 else {}
        event = {"kind": "progress", "job": 7, "restart": 1, "ts": NOW + number, "items": number, **safe}
        observer.ingested(HERE, [event, misfit], NOW + number)
        observer.ingested("n2", [event], NOW + number)
    assert sum(map(len, observer._run_reports.values())) == 3
    found = observer.snapshot(NOW + 1000, [RUNS], [], recording=True)
    assert found.reports == (((7, 1), Report(checkpoint=NOW, items=1000, at=NOW + 1000)),) * 2
    assert observer.snapshot(NOW + 1000, [RUNS], [], recording=True).reports == ()


def test_invented_runs_of_one_node_do_not_displace_reports_of_others() -> None:
    observer = Observer(LiveView(), NodePlans(), lambda row: 0)
    observer.ingested("n2", [{"kind": "progress", "job": 7, "restart": 1, "ts": NOW, "items": 5}], NOW)
    for job in range(10_000):
        observer.ingested(HERE, [{"kind": "progress", "job": job, "restart": 1, "ts": NOW, "items": 1}], NOW)
    assert sum(map(len, observer._run_reports.values())) <= 1001
    found = observer.snapshot(NOW, [RUNS], [], recording=True)
    assert found.reports == (((7, 1), Report(items=5, at=NOW)),)


def test_many_misfits_of_one_node_do_not_fill_the_log(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    service = Service(config, client=FakeSlurm(), open_store=FakeStore, signer=FakeSigner())
    for job in range(1000):
        service._ingested(HERE, [{"kind": "misfit", "job": job, "restart": 0, "reason": "no slot"}], True)
    service._ingested("n2", [{"kind": "misfit", "job": 1000, "restart": 0, "reason": "no slot"}], True)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert messages == [
        "misfit of job 0 on n1: no slot",
        "misfit of job 1000 on n2: no slot (999 similar warnings suppressed)",
    ]


def test_invented_job_ends_are_limited_while_slurm_is_away(config: Config) -> None:
    service = Service(config, client=FakeSlurm(), open_store=FakeStore, signer=FakeSigner())
    for job in range(0, 200_000, 500):
        service._ingested(HERE, [{"kind": "stop", "job": job + more, "restart": 0} for more in range(500)], True)
    assert len(service._departed) == 100_000
