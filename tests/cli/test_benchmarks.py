"""The benchmarks measure what they report, and their statistics are right. No time is compared with a limit here."""

import json
import math
import statistics

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.main import cli
from slurm_migbatch.lab.bars import Bar, mean_with_interval, times_of
from slurm_migbatch.lab.bench import hooks
from slurm_migbatch.lab.bench.submit import time_table
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import shim
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.table import TableCompiler
from slurm_migbatch.workload.catalog import GpuKind, Partition, SiteCatalog
from tests.support.daemon_fakes import GEOMETRY
from tests.support.experiments import measured_once


@pytest.mark.slow
def test_hooks_are_measured_with_and_without_the_agent(monkeypatch):
    measured_once(monkeypatch, hooks)
    words = ["bench", "hooks", "--rounds", "10"]
    printed = CliRunner().invoke(cli, words, standalone_mode=False)
    assert printed.exception is None, printed.exception
    assert "with the agent" in printed.stdout and "in the hook's own process" in printed.stdout
    result = CliRunner().invoke(cli, [*words, "--json"], standalone_mode=False)
    assert result.exception is None, result.exception
    data = json.loads(result.stdout)
    assert {bar["name"] for bar in data["bars"]} >= {
        "prolog: median over python start",
        "epilog: p99 over python start",
    }
    assert all(set(bar) == {"name", "value", "target", "ok"} for bar in data["bars"])
    for series in ("agent", "in_process"):
        assert data[series]["times"]["prolog"]["n"] == 10
        assert data[series]["driver_changes"] == {}
    assert data["bars"][-1] == {
        "name": "driver creates and destroys in warm reuse",
        "value": 0.0,
        "target": 0.0,
        "ok": True,
    }


def test_answers_that_the_shim_finds_in_its_table_are_timed_in_lua(tmp_path):
    catalog = SiteCatalog({"gpu": Partition("gpu", (GpuKind("h100-80gb", Geometry.from_dict(GEOMETRY), 989, 3352),))})
    script, table = tmp_path / "job_submit.lua", tmp_path / "table.lua"
    script.write_text(shim.render(shim.JOB_SUBMIT, socket="", table=str(table), catalog=catalog, policy=SubmitPolicy()))
    table.write_text(TableCompiler(Chooser(LearnedPredictor())).text(catalog))
    figures = time_table(script, table, rounds=3)
    assert 0 < figures["lookup_us"]["median"] <= figures["lookup_us"]["p99"]
    assert figures["whole_answer_us"]["median"] > figures["lookup_us"]["median"]


def test_bar_is_met_up_to_its_target():
    assert Bar("x", 1.05, 1.05).ok
    assert not Bar("x", 1.06, 1.05).ok
    assert Bar("x", 1.06, 1.05).line().startswith("MISSED  x: 1.06 (target <= 1.05)")


def test_bar_with_at_least_is_met_from_its_target_upwards():
    met, missed = Bar("x", 1.2, 1.2, at_least=True), Bar("x", 1.19, 1.2, at_least=True)
    assert met.ok
    assert not missed.ok
    assert missed.line() == "MISSED  x: 1.19 (target >= 1.2)"
    assert met.to_dict() == {"name": "x", "value": 1.2, "target": 1.2, "ok": True, "at_least": True}
    assert set(Bar("x", 1, 2).to_dict()) == {"name", "value", "target", "ok"}
    for bar in (met, missed, Bar("x", 1, 2)):
        assert Bar.from_dict(bar.to_dict()) == bar


def test_bar_with_a_floor_states_the_value_without_migbatch():
    bar = Bar("x", 1.4, 1.15, floor=1.3666)
    assert bar.line() == "MISSED  x: 1.4 (target <= 1.15; 1.367 without migbatch)"
    assert bar.to_dict()["floor"] == 1.3666
    assert Bar.from_dict(bar.to_dict()) == bar


def test_times_report_median_p99_and_minimum_in_milliseconds():
    assert times_of([0.001, 0.003, 0.002]) == {"median_ms": 2.0, "p99_ms": 3.0, "min_ms": 1.0, "n": 3}


@pytest.mark.parametrize(("n", "t"), [(5, 2.776), (10, 2.262), (40, 2.023)])
def test_confidence_interval_is_students_t(n, t):
    values = [1 + (i % 3) * 0.1 for i in range(n)]
    mean, low, high = mean_with_interval(values)
    half = t * statistics.stdev(values) / math.sqrt(n)
    assert mean == pytest.approx(statistics.fmean(values))
    assert (high - low) / 2 == pytest.approx(half, rel=0.01)
    assert mean_with_interval([1.0])[1] == -math.inf
