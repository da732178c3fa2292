"""The exposition of migbatchd's metrics: the expected families, and functions to read it."""

from __future__ import annotations

import http.client

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

#: name as in a query, type, labels (without a histogram's `le`), help
FAMILIES = (
    ("migbatch_submit_answers", "gauge", "verdict", "Submit requests answered since the last start."),
    ("migbatch_submit_seconds", "gauge", "quantile", "Handling time that a share of the last requests kept."),
    ("migbatch_model_refits_total", "counter", "outcome", "Refits of the predictor, by outcome."),
    ("migbatch_model_version", "gauge", "", "Version of the learned model in use; 0: physics."),
    (
        "migbatch_model_kept_share",
        "gauge",
        "figure",
        "Share of runs since the last refit that met the predicted limit.",
    ),
    ("migbatch_model_kept_runs", "gauge", "figure", "Runs since the last refit that reported the figure."),
    (
        "migbatch_model_drift",
        "gauge",
        "figure model",
        "Median of measured over predicted since the last refit, by model.",
    ),
    ("migbatch_supply_round_seconds", "histogram", "", "Duration of a supply round."),
    ("migbatch_supply_changes_total", "counter", "", "Changes of what a node offers."),
    (
        "migbatch_supply_age_seconds",
        "gauge",
        "what",
        "Seconds since the Slurm query of the last round in which supply did not fail, and the maximum so far.",
    ),
    ("migbatch_supply_offered", "gauge", "profile", "Offered free slices, by profile."),
    ("migbatch_supply", "gauge", "what", "Figures of the last round."),
    ("migbatch_lending_round_seconds", "histogram", "", "Duration of a decision on loans."),
    ("migbatch_loans_ended_total", "counter", "cause", "Ended loans, by cause."),
    ("migbatch_lending_actions_total", "counter", "kind outcome", "Actions on training jobs, by kind."),
    ("migbatch_loans", "gauge", "state", "Current loans, by state."),
    ("migbatch_loans_waiting", "gauge", "", "Elastic training jobs that wait for a slice."),
    ("migbatch_dispatch_round_seconds", "histogram", "", "Duration of a decision on pending jobs."),
    ("migbatch_dispatch_actions_total", "counter", "kind outcome", "Changes of pending jobs, by kind."),
    ("migbatch_node_requests_total", "counter", "path status", "Requests from nodes by path and status."),
    ("migbatch_node_events_total", "counter", "kind", "Events received from nodes, by kind."),
    ("migbatch_audit_cancelled_total", "counter", "", "Jobs cancelled for holding more than allocated."),
    ("migbatch_start_time_seconds", "gauge", "", "Start time of this service."),
    ("migbatch_store_queue", "gauge", "", "Records waiting for the database."),
    ("migbatch_store_removed_total", "counter", "table", "Records removed because of their age."),
    ("migbatch_store_dropped", "gauge", "kind", "Dropped records, by kind."),
    ("migbatch_store_wal_bytes", "gauge", "", "Size of the write-ahead log of a record in SQLite."),
    ("migbatch_healthy", "gauge", "part", "Whether a component works (1) or not (0)."),
    (
        "migbatch_node_silence_seconds",
        "gauge",
        "node",
        "Seconds since the last message of a node that is not down in Slurm.",
    ),
    (
        "migbatch_node_problems",
        "gauge",
        "node",
        "Problems found by the checks of a node that is not down in Slurm (migbatch doctor).",
    ),
    ("migbatch_orphan_runs", "gauge", "node", "Runs that hold slices on a node after Slurm has ended them."),
    ("migbatch_query_answers", "gauge", "status", "User queries answered since the last start, by status."),
    ("migbatch_jobs", "gauge", "state", "Jobs in Slurm's queue, by state."),
    (
        "migbatch_slices",
        "gauge",
        "profile state",
        "Slices on nodes, by profile and state: held, shared (by two jobs), idle, zombie.",
    ),
    (
        "migbatch_wait_seconds",
        "gauge",
        "what",
        "Current wait of jobs that request slices, since they were eligible.",
    ),
)
LABELS = {name: set(labels.split()) for name, _, labels, _ in FAMILIES}


def scrape(port: int) -> tuple[str | None, str]:
    """Return content type and text of /metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200
    return answer.getheader("content-type"), text


def parsed(text: str) -> dict[str, Metric]:
    """Return the families of an exposition by their name in a query (OpenMetrics has `_total` in sample names only)."""
    families: dict[str, Metric] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert families.setdefault(name, family) is family, f"{name} appears twice"
    return families
