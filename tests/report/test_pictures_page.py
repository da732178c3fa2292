"""`migbatch report --html`: what the file contains, who sees what, and what is refused. No browser is needed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest
from sqlalchemy import insert, update

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.report import report
from slurm_migbatch.config import Config, StoreConfig
from slurm_migbatch.decide.lending.loan import Cause
from slurm_migbatch.query import pictures
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report.pictures.words import amount, in_chart, percent
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.models import Run, StoredLoan
from slurm_migbatch.store.queries import RunFilter
from tests.support.pictures_page import HOSTILE, OCTOBER, october, page_of

NOVEMBER = OCTOBER + 40 * 86400


class Document(HTMLParser):
    """The elements of a page, its scripts and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.elements[-1:] and self.elements[-1][0] == "script" and not data.isspace():
            self.scripts.append(data)
        elif not data.isspace():
            self.words.append(data.strip())

    @property
    def charts(self):
        return {chart["id"]: chart for chart in json.loads(self.scripts[0])}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return october(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def text(url, tmp_path_factory):
    return page_of(url, tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def document(text):
    return Document(text)


def test_page_has_every_chart(document):
    assert list(document.charts) == [
        "accounts", "activity", "profiles", "waits", "layout", "predicted-throughput", "predicted-latency",
        "predicted-memory", "loans",
    ]  # fmt: skip


def test_plotly_accepts_every_chart(document):
    for chart in document.charts.values():
        go.Figure(data=chart["data"], layout=chart["layout"])  # raises ValueError for what it does not know


def test_the_page_loads_nothing_and_runs_its_own_scripts_only(document):
    loading = [(tag, a) for tag, a in document.elements if a.keys() & {"src", "srcset", "action", "data"}]
    assert loading == []
    assert {tag for tag, _ in document.elements} & {"link", "iframe", "base", "img"} == set()
    assert all(a["href"].startswith("#") for tag, a in document.elements if tag == "a")
    policies = [a["content"] for tag, a in document.elements if a.get("http-equiv") == "Content-Security-Policy"]
    hashes = re.findall(r"'sha256-([^']+)'", policies[0])
    scripts = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in document.scripts[1:]]
    assert sorted(hashes) == sorted(scripts)
    assert policies[0].startswith("default-src 'none'; script-src 'sha256-")


def test_names_from_the_record_are_escaped_everywhere(document):
    assert [tag for tag, _ in document.elements].count("script") == 3
    assert HOSTILE in document.words  # in the table of accounts
    assert "<script>" not in json.dumps(document.charts["accounts"])


def test_each_chart_has_a_table_of_its_figures_and_a_label(document):
    tags = [tag for tag, _ in document.elements]
    charts = [a for tag, a in document.elements if a.get("class") == "chart"]
    assert len(charts) == tags.count("table") == len(document.charts)
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in charts)


def test_page_of_one_account_shows_its_gpu_hours_and_idle_share(url, tmp_path):
    document = Document(page_of(url, tmp_path / "chem.html", "--account", "chemistry"))
    assert "GPU slices: account chemistry" in document.words
    (summary,) = [words for words in document.words if words.startswith("chemistry: ")]
    assert re.fullmatch(r"chemistry: \d{2,3} GPU hours, \d\d % of the \d{2,3} sampled idle", summary)
    busy, idle, unknown = (trace["x"][0] for trace in document.charts["accounts"]["data"])
    assert summary.startswith(f"chemistry: {amount(busy + idle + unknown)} GPU hours, {percent(idle / (busy + idle))}")
    assert HOSTILE not in document.words


def test_name_that_is_not_utf_8_in_a_filter_is_no_error(url, tmp_path):
    """As typed in a terminal with another encoding."""
    text = page_of(url, tmp_path / "other.html", "--account", os.fsdecode(b"caf\xe9"))
    assert "<h1>GPU slices: account caf?</h1>" in text


def test_use_over_time_adds_up_to_the_use_by_account(document):
    for by_account, over_time in zip(
        document.charts["accounts"]["data"], document.charts["activity"]["data"], strict=True
    ):
        assert sum(by_account["x"]) == pytest.approx(sum(over_time["y"]), rel=0.01)


def page_for(rights, url, **wanted):
    site = QuerySite(replace(Config(), store=StoreConfig(url)))
    asked = RunFilter(start=OCTOBER, end=OCTOBER + 31 * 86400, **wanted)
    return Document(pictures.page(asked, rights, site, NOVEMBER))


def test_private_runs_are_not_counted(url):
    """PrivateData=jobs: uid 1001 has every fifth run."""
    mine = page_for(Rights(1001, private=frozenset({"jobs"})), url)
    own = sum(row["runs"] for row in _waits(mine))
    everything = sum(row["runs"] for row in _waits(page_for(Rights(0, everything=True), url)))
    assert 0 < own < everything / 4
    assert any("Only your own runs" in words for words in mine.words)


def _waits(document):
    return [{"runs": count} for trace in document.charts["waits"]["data"] for count in trace["customdata"]]


def test_private_accounts_and_nodes_are_not_named(url):
    found = page_for(Rights(1001, private=frozenset({"accounts", "nodes"})), url)
    assert not {"chemistry", "physics", HOSTILE} & set(found.words)
    assert "layout" not in found.charts
    assert "n1 GPU 0" not in found.words


def test_throughput_of_several_slices_is_compared_with_the_prediction_for_all_of_them(tmp_path):
    url = f"sqlite:///{tmp_path}/two.db"
    figures = {"predicted_throughput_per_s": 100.0, "measured_throughput_per_s": 200.0, "slice_count": 2}
    times = {"submitted": OCTOBER, "started": OCTOBER, "ended": OCTOBER + 60}
    with open_store(url) as store:
        store.upsert_jobs([{"job_id": 7, "restarts": 0, "state": "COMPLETED", "submit": OCTOBER, "end": OCTOBER + 60}])
        with store.engine.begin() as connection:
            connection.execute(update(Run).values(**figures, **times))
    words = page_for(Rights(0, everything=True), url).words
    assert "100 % of 1 run within 25 % of the measured value." in words and "1.00" in words


def test_every_cause_of_a_loans_end_is_in_words(tmp_path):
    url = f"sqlite:///{tmp_path}/loans.db"
    causes = [cause.value for cause in Cause if cause.value]
    run = {"restart": 0, "profile": "7g.80gb", "state": "ended", "decided": OCTOBER, "started": OCTOBER}
    with open_store(url) as store, store.engine.begin() as connection:
        connection.execute(
            insert(StoredLoan),
            [{**run, "job_id": number, "ended": OCTOBER + 60, "cause": why} for number, why in enumerate(causes)],
        )
    words = page_for(Rights(0, everything=True), url).words
    ends = [each.removeprefix("ended: ") for each in words if each.startswith("ended: ")]
    assert len(ends) == len(causes)
    assert not set(ends) & set(causes)


def test_empty_record_is_stated_on_the_page(tmp_path):
    url = f"sqlite:///{tmp_path}/empty.db"
    open_store(url).close()
    document = Document(page_of(url, tmp_path / "page.html"))
    assert document.charts == {}
    assert "The record has no matching data." in document.words


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("-S", "nonsense"), 2, "Invalid time specification (pos=0): nonsense"),
        (("-S", "2026-10-02", "-E", "2026-10-01"), 2, "-E must be later than -S"),
        (("-S", "tomorrow", "-E", "now+3days"), 2, "is in the future"),
        (("-S", "2026-10-01", "-E", "2026-10-01"), 2, "2026-10-01 00:00 is empty; -E must be later than -S"),
    ],
)
def test_invalid_time_windows_are_refused(url, tmp_path, capsys, options, code, words):
    file = tmp_path / "page.html"
    assert run(report, "migbatch report", ["--db", url, "--html", str(file), *options]) == code
    assert words in capsys.readouterr().err
    assert not file.exists()


def test_numbers_have_no_false_precision():
    assert [amount(value) for value in (0, 0.04, 0.44, 2.0, 9.94, 12.3, 1234.5, 45678.9)] == [
        "0", "under 0.1", "0.4", "2", "9.9", "12", "1,230", "45,700",
    ]  # fmt: skip
    assert [percent(share) for share in (0, 0.001, 0.5, 0.999, 1)] == ["0 %", "under 1 %", "50 %", "over 99 %", "100 %"]


def test_texts_in_charts_are_escaped_as_markup_and_as_templates():
    assert in_chart("<b>%{x}\n&") == "&lt;b&gt;% {x}?&amp;"
    assert len(in_chart("x" * 100)) == 48
