"""What /metrics tells: names, types, labels and texts that dashboards and alerts of sites are made of."""

import http.client

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slurm_migbatch.slurm.client import JobRow, NodeRow
from tests.support.daemon_fakes import gpu, inventory, state
from tests.support.waiting import eventually

#: name as in a query, type, labels (without a histogram's `le`), help
FAMILIES = (
    ("migbatch_submit_answers", "gauge", "verdict", "Submit requests answered since the last start."),
    ("migbatch_submit_seconds", "gauge", "quantile", "Handling time that a share of the last requests kept."),
    ("migbatch_model_refits_total", "counter", "outcome", "Refits of the predictor, by outcome."),
    ("migbatch_model_version", "gauge", "", "Learned model that predictions are made with; 0: physics."),
    ("migbatch_model_kept_share", "gauge", "figure", "Share of runs since the last refit that kept the limit."),
    ("migbatch_model_kept_runs", "gauge", "figure", "Runs since the last refit that told the figure."),
    (
        "migbatch_model_drift",
        "gauge",
        "figure model",
        "Measured over predicted since the last refit, the median by model.",
    ),
    ("migbatch_supply_round_seconds", "histogram", "", "Duration of a supply round."),
    ("migbatch_supply_changes_total", "counter", "", "Changes of what a node offers."),
    (
        "migbatch_supply_age_seconds",
        "gauge",
        "what",
        "Seconds since the look at Slurm that the last round without an error followed, and the most so far.",
    ),
    ("migbatch_supply_offered", "gauge", "profile", "Free slices that are offered, by profile."),
    ("migbatch_supply", "gauge", "what", "The last round in numbers."),
    ("migbatch_lending_round_seconds", "histogram", "", "Duration of a decision on loans."),
    ("migbatch_loans_ended_total", "counter", "cause", "Loans that ended, by what ended them."),
    ("migbatch_lending_actions_total", "counter", "kind outcome", "What was done to training jobs, by kind."),
    ("migbatch_loans", "gauge", "state", "Loans that go on, by state."),
    ("migbatch_loans_waiting", "gauge", "", "Elastic training jobs that wait for a slice."),
    ("migbatch_dispatch_round_seconds", "histogram", "", "Duration of a decision on what waits."),
    ("migbatch_dispatch_actions_total", "counter", "kind outcome", "Changes of pending jobs, by kind."),
    ("migbatch_node_requests_total", "counter", "path status", "Requests of nodes by path and status."),
    ("migbatch_node_events_total", "counter", "kind", "Events taken from nodes, by kind."),
    ("migbatch_audit_cancelled_total", "counter", "", "Jobs cancelled for holding too much."),
    ("migbatch_start_time_seconds", "gauge", "", "When this service started."),
    ("migbatch_store_queue", "gauge", "", "Records that wait for the database."),
    ("migbatch_store_dropped", "gauge", "kind", "Records that could not be kept, by kind."),
    ("migbatch_healthy", "gauge", "part", "Whether a part works (1) or not (0)."),
    ("migbatch_node_silence_seconds", "gauge", "node", "Seconds since a node was heard."),
    ("migbatch_orphan_runs", "gauge", "node", "Runs that hold slices on a node after Slurm has ended them."),
    ("migbatch_query_answers", "gauge", "status", "Questions of users answered since the last start, by status."),
    ("migbatch_jobs", "gauge", "state", "Jobs in Slurm's queue, by state."),
)
LABELS = {name: set(labels.split()) for name, _, labels, _ in FAMILIES}


def scrape(port):
    """(content type, text) of /metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200
    return answer.getheader("content-type"), text


def parsed(text):
    """The families of an exposition by their name in a query; OpenMetrics keeps `_total` to the samples."""
    found = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert found.setdefault(name, family) is family, f"{name} stands twice"
    return found


def test_families(running):
    kind, text = scrape(running.port)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    found = {(name, family.type, family.documentation) for name, family in parsed(text).items()}
    assert found == {(name, kind, doc) for name, kind, _, doc in FAMILIES}


#: families without counted events that have values once a node and Slurm were heard
TOLD = {
    "migbatch_healthy",
    "migbatch_jobs",
    "migbatch_loans_waiting",
    "migbatch_model_version",
    "migbatch_node_events_total",
    "migbatch_node_requests_total",
    "migbatch_node_silence_seconds",
    "migbatch_store_queue",
    "migbatch_supply",
    "migbatch_supply_age_seconds",
}


@pytest.fixture
def busy(running, node, slurm):
    """A service that has heard a node and Slurm, and has had a round of supply."""
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


def test_labels_of_counters(running):
    """A counter with labels tells nothing before it has counted."""
    named = running.service.metrics._names_to_collectors
    counters = [name for name, kind, _, _ in FAMILIES if kind == "counter"]
    assert {name: set(named[name]._labelnames) for name in counters} == {name: LABELS[name] for name in counters}


def test_labels(busy):
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
