"""What /metrics exposes: the names, types, labels and texts that dashboards and alerts of sites use."""

import dataclasses
import time
from pathlib import Path

import pytest

from slurm_migbatch.daemon import audit
from slurm_migbatch.daemon.gauges import slices_by_state, waits
from slurm_migbatch.daemon.nodesview import LiveView
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.slurm.client import JobRow, NodeRow
from tests.support.daemon_fakes import gpu, inventory, state
from tests.support.daemon_running import Running
from tests.support.exposition import FAMILIES, LABELS, parsed, scrape
from tests.support.waiting import eventually


def test_metric_families_have_the_documented_types_and_texts(running):
    kind, text = scrape(running.port)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    found = {(name, family.type, family.documentation) for name, family in parsed(text).items()}
    assert found == {(name, kind, doc) for name, kind, _, doc in FAMILIES}


#: families that do not count events and have values once a node has reported and Slurm has been polled
TOLD = {
    "migbatch_healthy",
    "migbatch_jobs",
    "migbatch_loans_waiting",
    "migbatch_model_version",
    "migbatch_node_events_total",
    "migbatch_node_requests_total",
    "migbatch_node_silence_seconds",
    "migbatch_store_queue",
    "migbatch_store_wal_bytes",
    "migbatch_supply",
    "migbatch_supply_age_seconds",
}


@pytest.fixture
def busy(running, node, slurm):
    """A service with reports of a node and of Slurm, after a round of supply."""
    slurm.node_rows["n1"] = NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 7, "none": 0}, {}, ("gpu",))
    node.events(inventory(gpu(0)), state(seq=2))
    slurm.queue[5] = JobRow(5, state="PENDING", tasks=3)
    eventually(lambda: labelled(running).keys() >= TOLD)
    return running


def labelled(running):
    """The sets of labels that the series of each family have, where there are any."""
    return {
        name: {frozenset(sample.labels) - {"le"} for sample in family.samples}
        for name, family in parsed(scrape(running.port)[1]).items()
        if family.samples
    }


def test_counters_have_the_documented_labels(running):
    """A counter with labels exposes nothing before it has counted."""
    named = running.service.metrics._names_to_collectors
    counters = [name for name, kind, _, _ in FAMILIES if kind == "counter"]
    assert {name: set(named[name]._labelnames) for name in counters} == {name: LABELS[name] for name in counters}


def test_series_have_the_documented_labels(busy):
    found = labelled(busy)
    assert found == {name: {frozenset(LABELS[name])} for name in found}


def test_a_histogram_has_all_its_series(busy):
    def counts():
        return {
            sample.name: sample.value
            for sample in parsed(scrape(busy.port)[1])["migbatch_supply_round_seconds"].samples
            if sample.labels.get("le", "+Inf") == "+Inf"
        }

    name = "migbatch_supply_round_seconds"
    found = eventually(lambda: (now := counts())[f"{name}_count"] and now)
    assert found.keys() == {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    assert found[f"{name}_bucket"] == found[f"{name}_count"]
    edges = [s.labels["le"] for s in parsed(scrape(busy.port)[1])[name].samples if "le" in s.labels]
    assert [float(edge) for edge in edges] == [
        *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, float("inf"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("state", ["IDLE+POWERED_DOWN", "DOWN+NOT_RESPONDING", "gone"])
def test_node_that_is_down_in_slurm_or_removed_is_not_silent(busy, slurm, state):
    """The alert MigbatchNodeSilent would fire until somebody restarts migbatchd, or the node wakes up."""
    assert 'migbatch_node_silence_seconds{node="n1"}' in scrape(busy.port)[1]
    row = slurm.node_rows.pop("n1")
    if state != "gone":
        slurm.node_rows["n1"] = dataclasses.replace(row, states=frozenset(state.split("+")))
    eventually(lambda: "migbatch_node_silence_seconds{" not in scrape(busy.port)[1])


@pytest.mark.slow
@pytest.mark.parametrize("state", ["DOWN", "gone"])
def test_problems_that_a_node_has_found_are_counted_until_it_is_down(busy, node, slurm, state):
    """A lost GPU is offered no more, so no hook fails because of it."""

    def problems():
        samples = parsed(scrape(busy.port)[1])["migbatch_node_problems"].samples
        return {sample.labels["node"]: sample.value for sample in samples}

    def found(*levels):
        findings = [{"level": level, "subject": "GPU 0", "text": "is lost", "advice": "reset it"} for level in levels]
        assert node.send("/node/v1/findings", {"node": "n1", "sent": 1.0, "findings": findings})[0] == 200

    assert problems() == {}
    found("FAIL", "warn", "FAIL")
    assert problems() == {"n1": 2}
    found("warn")
    assert problems() == {"n1": 0}
    found("FAIL")
    row = slurm.node_rows.pop("n1")
    if state != "gone":
        slurm.node_rows["n1"] = dataclasses.replace(row, states=frozenset({state}))
    eventually(lambda: problems() == {})


def test_node_that_was_silent_before_a_restart_is_silent_after_it(config, slurm, store, signer):
    """A reload of migbatchd would end the alert MigbatchNodeSilent for good."""
    store.gpus = {name: [gpu(0)] for name in ("n1", "n2", "n3")}
    slurm.node_rows["n1"] = NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 7}, {}, ("gpu",))
    slurm.node_rows["n2"] = NodeRow("n2", frozenset({"IDLE"}), {}, {}, ("gpu",))  # has no slices any more
    slurm.node_rows["n3"] = NodeRow("n3", frozenset({"IDLE", "POWERED_DOWN"}), {"1g.10gb": 7}, {}, ("gpu",))
    slurm.node_rows["no-mig-slice-free"] = NodeRow("no-mig-slice-free", frozenset({"DOWN"}), {"1g.10gb": 7})
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:

        def silences():
            samples = parsed(scrape(running.port)[1])["migbatch_node_silence_seconds"].samples
            return {sample.labels["node"]: sample.value for sample in samples}

        assert eventually(silences).keys() == {"n1"}
        eventually(lambda: silences()["n1"] > 0.5)


def test_supply_ages_from_the_start_while_slurm_does_not_answer(config, slurm, store, signer):
    """Without a value a reload of migbatchd would end the alert MigbatchSupplyIsOld."""
    slurm.away = True
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:
        assert 'migbatch_supply_age_seconds{what="now"}' in scrape(running.port)[1]


def test_supply_does_not_age_while_only_another_stage_fails(running, monkeypatch):
    """The alert MigbatchSupplyIsOld would fire although supply goes on."""

    def broken(*_):
        raise ValueError("of a kind that nobody thought of")

    monkeypatch.setattr("slurm_migbatch.decide.core.plan_dispatch", broken)
    eventually(lambda: running.service.health()["checks"]["dispatch"] == "failing")
    failing_since = time.monotonic()
    eventually(lambda: running.service.poller.latest.at > failing_since + 0.5)
    assert 0 <= supply_age(running) < time.monotonic() - failing_since
    monkeypatch.setattr("slurm_migbatch.decide.core.plan_supply", broken)
    eventually(lambda: running.service.health()["checks"]["supply"] == "failing")
    failing_since = time.monotonic()
    eventually(lambda: running.service.poller.latest.at > failing_since + 0.5)
    assert supply_age(running) > 0.5


def supply_age(running):
    samples = parsed(scrape(running.port)[1])["migbatch_supply_age_seconds"].samples
    return next(sample.value for sample in samples if sample.labels["what"] == "now")


@pytest.mark.slow
@pytest.mark.parametrize("after", ["IDLE+POWERED_DOWN", "DOWN+NOT_RESPONDING", "gone"])
def test_runs_on_a_node_that_is_down_in_slurm_or_removed_are_no_orphans(busy, node, slurm, monkeypatch, after):
    """The alert MigbatchOrphanRuns would ask for a command on a host that is off, or no longer exists."""
    monkeypatch.setattr(audit, "PATIENCE_S", 0.0)
    held = {"gpu": "GPU-0", "profile": "1g.10gb", "start": 0, "size": 1}
    start = {"seq": 4, "ts": 1.0, "kind": "start", "job": 6, "restart": 0, "slices": [held]}
    node.events(state(gpu(0), seq=3), start)
    eventually(lambda: 'migbatch_orphan_runs{node="n1"} 1.0' in scrape(busy.port)[1])
    row = slurm.node_rows.pop("n1")
    if after != "gone":
        slurm.node_rows["n1"] = dataclasses.replace(row, states=frozenset(after.split("+")))
    eventually(lambda: "migbatch_orphan_runs{" not in scrape(busy.port)[1])


def test_slices_are_exposed_by_profile_and_state(running, node):
    held = {"gpu": "GPU-0", "profile": "1g.10gb", "start": 0, "size": 1}
    start = {"seq": 3, "ts": 1.0, "kind": "start", "job": 6, "restart": 0, "slices": [held]}
    node.events(inventory(gpu(0)), state(gpu(0), seq=2), start)
    eventually(lambda: 'migbatch_slices{profile="1g.10gb",state="held"} 1.0' in scrape(running.port)[1])


def test_slices_of_a_node_that_slurm_no_longer_has_are_not_exposed(running, node, slurm):
    """The alert MigbatchZombies would not end when the node of a slice that cannot be destroyed has been replaced."""
    slurm.node_rows["n1"] = NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 7}, {}, ("gpu",))
    zombie = {"seq": 3, "ts": 1.0, "kind": "zombie", "gpu": "GPU-0", "profile": "1g.10gb", "start": 0, "size": 1}
    node.events(inventory(gpu(0)), state(gpu(0), seq=2), zombie)
    eventually(lambda: 'migbatch_slices{profile="1g.10gb",state="zombie"} 1.0' in scrape(running.port)[1])
    slurm.node_rows["n9"] = dataclasses.replace(slurm.node_rows.pop("n1"), name="n9")
    eventually(lambda: "migbatch_slices{" not in scrape(running.port)[1])


def test_slices_are_counted_in_one_state_each():
    def places(*starts):
        return [{"gpu": "GPU-0", "profile": "1g.10gb", "start": start, "size": 1} for start in starts]

    def run(job, starts, **more):
        return {"seq": 1, "ts": 1.0, "kind": "start", "job": job, "restart": 0, "slices": places(*starts), **more}

    view = LiveView()
    view.apply("n1", [inventory(gpu(0)), run(6, (0, 1, 2)), run(7, (2,), beside=[6, 0])])
    view.apply("n1", [{**run(6, (0,)), "kind": "stop"}, {"kind": "zombie", **places(3)[0]}])
    states = {
        ("1g.10gb", "held"): 1.0,
        ("1g.10gb", "shared"): 1.0,
        ("1g.10gb", "idle"): 1.0,
        ("1g.10gb", "zombie"): 1.0,
    }
    assert slices_by_state(view.facts()) == states


def test_size_of_the_log_is_exposed(config, slurm, signer, store, tmp_path):
    site = dataclasses.replace(config, store=dataclasses.replace(config.store, url=f"sqlite:///{tmp_path}/x.db"))
    Path(f"{tmp_path}/x.db-wal").write_bytes(bytes(12345))
    with Running(Service(site, client=slurm, open_store=lambda: store, signer=signer)) as running:
        assert "\nmigbatch_store_wal_bytes 12345.0\n" in scrape(running.port)[1]


def test_log_of_a_server_has_no_series(config, slurm, signer, store):
    site = dataclasses.replace(config, store=dataclasses.replace(config.store, url="mariadb://u:p@127.0.0.1:1/x"))
    with Running(Service(site, client=slurm, open_store=lambda: store, signer=signer)) as running:
        assert "\nmigbatch_store_wal_bytes " not in scrape(running.port)[1]


def test_counters_of_faults_start_at_zero(running):
    """Otherwise the first fault is no increase, and no alert sees it."""
    text = scrape(running.port)[1]
    for kind in ("misfit", "zombie", "fault"):
        assert f'migbatch_node_events_total{{kind="{kind}"}} 0.0' in text


@pytest.mark.parametrize(
    ("reason", "wait"),
    [
        ("Resources", 400.0),
        ("ReqNodeNotAvail, UnavailableNodes:no-mig-slice-free", 400.0),
        ("launch_failed_requeued_held", 0.0),
        ("JobHeldAdmin", 0.0),
        ("QOSMaxGRESPerUser", 0.0),
        ("PartitionDown", 0.0),
    ],
)
def test_wait_of_a_job_that_would_not_start_with_slices_either_is_not_counted(reason, wait):
    """The alert MigbatchLongWait says that slices are free for it."""
    row = JobRow(1, state="PENDING", reason=reason, gres="gres:mig:1g.10gb:1", eligible=100.0)
    assert waits([row], 500.0)["longest"] == wait


def test_longest_and_median_wait_count_eligible_jobs_with_slices():
    rows = [
        JobRow(1, gres="gres:mig:1g.10gb:1", eligible=100.0),
        JobRow(2, gres="gres/mig:1g.10gb:1", eligible=400.0),
        JobRow(3, gres="gres:mig:1g.10gb:1", eligible=None),
        JobRow(4, gres="gres:gpu:1", eligible=1.0),
        JobRow(5, state="RUNNING", gres="gres:mig:1g.10gb:1", eligible=1.0),
        JobRow(6, gres="gres:mig:1g.10gb:1", eligible=900.0),
    ]
    assert waits(rows, 500.0) == {"longest": 400.0, "median": 250.0}
    assert waits([], 500.0) == {"longest": 0.0, "median": 0.0}
