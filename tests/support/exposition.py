"""The exposition of migbatchd's metrics: what families it has, and how to read it."""

from __future__ import annotations

import http.client

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

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
        "Seconds since the query of Slurm that the last round without an error followed, and the most so far.",
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
    ("migbatch_store_removed_total", "counter", "table", "Records removed for their age."),
    ("migbatch_store_dropped", "gauge", "kind", "Records that could not be kept, by kind."),
    ("migbatch_healthy", "gauge", "part", "Whether a part works (1) or not (0)."),
    ("migbatch_node_silence_seconds", "gauge", "node", "Seconds since a node was heard."),
    ("migbatch_orphan_runs", "gauge", "node", "Runs that hold slices on a node after Slurm has ended them."),
    ("migbatch_query_answers", "gauge", "status", "Questions of users answered since the last start, by status."),
    ("migbatch_jobs", "gauge", "state", "Jobs in Slurm's queue, by state."),
    (
        "migbatch_slices",
        "gauge",
        "profile state",
        "Slices that nodes have, by profile and state: held, shared (by two jobs), idle, zombie.",
    ),
    (
        "migbatch_wait_seconds",
        "gauge",
        "what",
        "How long jobs that ask for slices have waited so far, since they could start.",
    ),
)
LABELS = {name: set(labels.split()) for name, _, labels, _ in FAMILIES}


def scrape(port: int) -> tuple[str | None, str]:
    """(content type, text) of /metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200
    return answer.getheader("content-type"), text


def parsed(text: str) -> dict[str, Metric]:
    """The families of an exposition by their name in a query; OpenMetrics keeps `_total` to the samples."""
    found: dict[str, Metric] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert found.setdefault(name, family) is family, f"{name} stands twice"
    return found
