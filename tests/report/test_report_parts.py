"""Parts of reports with their own rules: formats, sizes, job ids, windows, time on a large store."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.cli.main import cli
from slurm_migbatch.lab.bench import reports as bench
from slurm_migbatch.report.columns import BRIEF, COLUMNS, DEFAULT, LONG
from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.report.format import find, parse_format
from slurm_migbatch.report.selection import parse_jobs, window
from slurm_migbatch.report.states import parse_states
from slurm_migbatch.report.units import figure, joules, size_formatter
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.models import Run, StoredLease
from slurm_migbatch.store.runquery import RETYPED_FIELDS, RUN_FIELDS, SLICE_FIELDS, JobId, RunFilter

NOW = datetime(2026, 3, 14, 12).timestamp()
MIDNIGHT = datetime(2026, 3, 14).timestamp()


def test_query_fields_match_the_columns_of_the_tables() -> None:
    assert set(RUN_FIELDS) == set(Run.__table__.columns.keys())
    assert set(SLICE_FIELDS) == set(StoredLease.__table__.columns.keys())


def test_columns_declare_fields_that_exist() -> None:
    for column in COLUMNS:
        assert set(column.run) <= {*RUN_FIELDS, *RETYPED_FIELDS}, column.name
        assert set(column.slice) <= set(SLICE_FIELDS), column.name
        assert column.doc.endswith("."), column.name
    assert len({column.name.lower() for column in COLUMNS}) == len(COLUMNS)


@pytest.mark.parametrize("text", [BRIEF, DEFAULT, LONG])
def test_predefined_formats_name_existing_columns(text: str) -> None:
    assert len(parse_format(text, "")) == text.count(",") + 1


def test_every_column_is_found_by_its_name_in_any_case() -> None:
    for column in COLUMNS:
        assert find(column.name.upper()) is find(column.name.lower()) is column


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, ""), (0, "0"), (14.4, "14"), (999, "999"), (999.6, "1K"), (1500, "1.50K"), (57_750, "57.75K"),
     (2_000_000, "2M"), (3.456e9, "3.46G")],
)  # fmt: skip
def test_energy_is_written_as_sacct_does(value: float | None, shown: str) -> None:
    assert joules(value) == shown


def test_format_strings_are_parsed_or_refused() -> None:
    def parsed(text: str, default: str = "jobid,state") -> list[tuple[str, int]]:
        return [(column.name, column.width) for column in parse_format(text, default)]

    assert parsed("user, state%4") == [("User", 8), ("State", 4)]
    assert parsed("+user%-3") == [("JobID", -12), ("State", 10), ("User", -3)]
    assert len(parsed("all")) == len(COLUMNS)
    for wrong in ("", "nix", "user%%3", "us er", "user%3x", "%3"):
        with pytest.raises(ReportError):
            parsed(wrong)


@pytest.mark.parametrize(
    ("mib", "unit", "convert", "shown"),
    [
        (None, None, True, ""), (0, None, True, "0M"), (512, None, True, "512M"), (1024, None, True, "1G"),
        (1536, None, True, "1.50G"), (3 * 2**20, None, True, "3T"), (2**40, None, True, "1024P"),
        (6144, None, False, "6144M"), (6144, "K", True, "6291456K"), (512, "G", True, "0.50G"),
        (6144, "T", False, "0.01T"),
    ],
)  # fmt: skip
def test_sizes_are_written_in_the_requested_unit(
    mib: float | None, unit: str | None, convert: bool, shown: str
) -> None:
    assert size_formatter(unit=unit, convert=convert)(mib) == shown


def test_figures_are_rounded_and_have_their_unit() -> None:
    shown = [figure(value, "ms") for value in (None, 0, 0.01234, 3.14159, 99.99, 12345.6)]
    assert shown == ["", "0ms", "0.0123ms", "3.14ms", "100ms", "12346ms"]


def test_states_are_parsed_or_refused() -> None:
    assert parse_states("cd, Failed,TO,F") == ("COMPLETED", "FAILED", "TIMEOUT")
    assert parse_states("") == ()
    with pytest.raises(ReportError):
        parse_states("C")


def test_job_ids_are_parsed_or_refused() -> None:
    assert parse_jobs("12,12, 34_5,7+1,8.s0,9.batch,10_[1-2,4]") == (
        JobId(12), JobId(34, task="5"), JobId(7, offset=1), JobId(8), JobId(9), JobId(10, task="1"),
        JobId(10, task="2"), JobId(10, task="4"),
    )  # fmt: skip
    assert parse_jobs("5_[0-6:3%2],5_[7,9,1...]") == tuple(
        JobId(5, task=task) for task in ("0", "3", "6", "0-6:3%2", "7", "9", "7,9,1...")
    )
    for wrong in (
        "x",
        "-1",
        "1_",
        "1_x",
        "1+",
        "1.",
        "1_[",
        "1_[a]",
        "1_[2-1]",
        "1_[...]",
        "1_[1-3:0%2]",
        "1_[1%x]",
        "9" * 30,
        "1;DROP TABLE runs",
    ):
        with pytest.raises(ReportError):
            parse_jobs(wrong)


@pytest.mark.parametrize("job", ["{}_[1-10000]", "7_[1-10000]"])
def test_number_of_array_tasks_in_a_query_is_limited(job: str) -> None:
    assert parse_jobs(",".join(job.format(number) for number in range(1, 6)))
    with pytest.raises(ReportError, match="more than 50000 tasks"):
        parse_jobs(",".join(job.format(number) for number in range(1, 2000)))


@given(st.text(alphabet="0123456789_[],-+.sx ", max_size=20))
def test_any_text_is_parsed_as_job_ids_or_refused(text: str) -> None:
    try:
        parse_jobs(text)
    except ReportError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("jobs", "states", "start", "end", "expected"),
    [
        (False, False, "", "", (MIDNIGHT, NOW)),
        (True, False, "", "", (0, NOW)),
        (False, True, "", "", (NOW, NOW)),
        (True, True, "", "", (0, NOW)),
        (False, False, "08:00", "", (MIDNIGHT + 8 * 3600, NOW)),
        (False, True, "08:00", "", (MIDNIGHT + 8 * 3600, MIDNIGHT + 8 * 3600)),
        (False, True, "08:00", "09:00", (MIDNIGHT + 8 * 3600, MIDNIGHT + 9 * 3600)),
        (True, True, "08:00", "", (MIDNIGHT + 8 * 3600, MIDNIGHT + 8 * 3600)),
        (True, False, "", "09:00", (0, MIDNIGHT + 9 * 3600)),
        (False, False, "", "09:00", (MIDNIGHT, MIDNIGHT + 9 * 3600)),
    ],
)
def test_time_windows_are_those_of_sacct(
    jobs: bool, states: bool, start: str, end: str, expected: tuple[float, float]
) -> None:
    since, until, _ = window(NOW, jobs, states, start, end)
    assert (since, until) == expected


@pytest.mark.slow
def test_reports_benchmark_measures_a_filled_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by the command that the documentation names (`tests/cli/test_documented_runs.py`)."""
    monkeypatch.setattr(bench, "_NODES", 8)
    url = f"sqlite:///{tmp_path}/x.db"
    with open_store(url) as store:
        bench.fill(store, 300, 10.0, NOW)
        assert len(store.runs()) == 300
        assert 0 < len(store.runs(RunFilter(start=NOW - 86400, end=NOW))) < 300
    done = CliRunner().invoke(cli, ["bench", "reports", "--runs", "1000", "--repeats", "1"], standalone_mode=False)
    assert done.exception is None, done.exception
    assert len(re.findall(r"^(?:ok|MISSED) +migacct, |^(?:ok|MISSED) +migbatch report, ", done.stdout, re.M)) == 5
    lines = {name: int(count) for name, count in re.findall(r"^  (\S.*?)  +[0-9.]+ s, (\d+) lines", done.stdout, re.M)}
    assert min(lines[name] for name in ("one job", "one array", "last day")) > 0
