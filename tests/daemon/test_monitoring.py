"""Alert rules and dashboard name what migbatchd exposes, and nothing else.

The rules are read line by line, as there is no YAML reader here; promtool, where it is installed, reads them whole.
"""

import json
import re

import pytest
from click.testing import CliRunner

from slurm_migbatch import monitoring
from slurm_migbatch.cli.config import config
from tests.support.exposition import LABELS, parsed, scrape

EXPR = re.compile(r"^ +expr: (.+)$", re.MULTILINE)
METRIC = re.compile(r"\b(migbatch_[a-z_]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
JOINED = re.compile(r"\bon \(([^)]*)\)")
SHOWN = re.compile(r"\{\{ ?\$?(?:labels\.)?(\w+)")

#: labels that Prometheus gives each series of one migbatchd
TARGET = {"job", "instance"}


def rules():
    return monitoring.text(monitoring.RULES)


def dashboard():
    return json.loads(monitoring.text(monitoring.DASHBOARD))


def targets():
    return [target for panel in dashboard()["panels"] for target in panel["targets"]]


def expressions():
    return [*EXPR.findall(rules()), *(target["expr"] for target in targets())]


def used(expr):
    """(family, labels in its selector) of each metric in an expression."""
    for name, selector in METRIC.findall(expr):
        yield name.removesuffix("_bucket"), set(re.findall(r"(\w+)=~?\"", selector))


def test_expressions_use_only_existing_metrics_and_labels(running):
    exposed = parsed(scrape(running.port)[1]).keys()
    assert len(expressions()) > 15
    for expr in expressions():
        found = list(used(expr))
        assert found, expr
        for name, selected in found:
            assert name in exposed, expr
            assert selected <= LABELS[name] | TARGET, expr
        labels = {label for name, _ in found for label in LABELS[name]} | {"le"} | TARGET
        for group in GROUPED.findall(expr):
            assert {label.strip() for label in group.split(",")} <= labels, expr


def test_rules_or_dashboard_use_the_metrics_required_for_operation():
    shown = {name for expr in expressions() for name, _ in used(expr)}
    for name in ("slices", "wait_seconds", "node_events_total", "loans", "healthy", "node_silence_seconds"):
        assert f"migbatch_{name}" in shown
    assert "migbatch_node_problems" in shown
    assert {"misfit", "zombie", "fault"} <= set(re.findall(r"[a-z]+", " ".join(expressions())))


def test_a_rule_fires_where_no_series_is_left():
    """Without migbatchd every other expression is empty."""
    (expr,) = (expr for expr in EXPR.findall(rules()) if expr.startswith("absent("))
    assert expr.startswith("absent(migbatch_healthy) or ")


def test_a_rule_fires_where_no_series_of_one_cluster_is_left():
    """As long as another cluster has some, nothing is absent."""
    (expr,) = (expr for expr in EXPR.findall(rules()) if expr.startswith("absent("))
    assert expr.endswith(" unless on (job) count by (job) (migbatch_healthy))")


def test_rules_compare_series_of_one_migbatchd_only():
    """A Prometheus server may scrape several clusters: the free slices of one are no use to the jobs of another."""
    found = [expr for expr in EXPR.findall(rules()) if not expr.startswith("absent(")]
    joined = [(expr, labels) for expr in found for labels in (*JOINED.findall(expr), *GROUPED.findall(expr))]
    assert joined
    for expr, labels in joined:
        assert {label.strip() for label in labels.split(",")} >= TARGET, expr


def test_dashboard_shows_one_cluster_at_a_time():
    """The sum of the slices of two clusters is of no use to anybody."""
    _, variable = dashboard()["templating"]["list"]
    assert (variable["name"], variable["type"]) == ("job", "query")
    assert variable["query"]["query"] == variable["definition"] == "label_values(migbatch_healthy, job)"
    for target in targets():
        for _, selector in METRIC.findall(target["expr"]):
            assert 'job="$job"' in selector, target["expr"]


def test_alerts_name_the_cluster():
    summaries = re.findall(r'summary: "(.+)"$', rules(), re.MULTILINE)
    assert len(summaries) == len(EXPR.findall(rules()))
    assert [text for text in summaries if "$labels.job" not in text] == []


def test_rules_have_the_fields_that_prometheus_requires():
    blocks = rules().split("- alert: ")[1:]
    names = [block.split("\n")[0] for block in blocks]
    assert len(set(names)) == len(names) == len(EXPR.findall(rules()))
    for block in blocks:
        (expr,) = EXPR.findall(block)
        assert re.search(r"^ +labels: \{severity: (critical|warning|info)\}$", block, re.MULTILINE)
        assert 'summary: "' in block and 'description: "' in block
        for label in re.findall(r"\$labels\.(\w+)", block):
            assert label in TARGET or all(label in LABELS[name] for name, _ in used(expr)), block


def test_dashboard_has_the_fields_that_grafana_requires():
    board = dashboard()
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    source, _ = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}" and panel["type"] in ("timeseries", "stat")
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    for target in targets():
        legend = {label for name, _ in used(target["expr"]) for label in LABELS[name]}
        assert set(SHOWN.findall(target["legendFormat"])) <= legend


@pytest.mark.parametrize(("what", "name"), [("prometheus", monitoring.RULES), ("grafana", monitoring.DASHBOARD)])
def test_config_render_prints_rules_and_dashboard(what, name):
    done = CliRunner().invoke(config, ["render", what])
    assert done.exit_code == 0 and done.output == monitoring.text(name)
