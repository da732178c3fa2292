"""The dispatch and D-STACK experiments on a synthetic table: their results, the form of these, and repeatability."""

import functools
import json
import math

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.main import cli
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.studies import dstack, pariselsa
from slurm_migbatch.profiling.table import read_folder
from tests.support.experiments import measured_once
from tests.support.laboratory_tables import KINDS, write_table

A100 = geometry("a100-80gb")


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path / "data", [("flat", 0.010, 0.002), ("steep", 0.001, 0.004)])


def test_kinds_are_the_leanest_profile_of_each_size():
    assert [kind.name for kind in KINDS] == ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"]


def test_curves_are_linear_between_measured_batches_and_end_at_the_last(tmp_path):
    rows = read_folder(write_table(tmp_path / "d", [("m", 0.0001, 0.007)]))
    rows = [row for row in rows if not (row.profile == "1g.10gb" and row.batch > 8)]
    (curve,) = pariselsa.curves(rows, KINDS)
    assert curve.seconds[2] == pytest.approx([0.021, 0.0105, 0.007, 0.00525, 0.003])
    assert curve.seconds[8][0] == math.inf
    assert curve.seconds[31][4] == pytest.approx(0.032)


def test_batch_sizes_are_log_normal_with_the_given_median(tmp_path):
    (curve,) = pariselsa.curves(read_folder(write_table(tmp_path / "d", [("m", 0.01, 0.002)])), KINDS)
    works = pariselsa.works_of(curve, 0.3)
    below = sum(work.share for work in works[:6]) - works[5].share / 2
    assert below == pytest.approx(0.5, abs=0.02)
    assert [work.limit_s for work in works] == pytest.approx([1.5 * 0.01] * 32)
    assert all(work.share > 0 for work in works)


def printed(monkeypatch, table, name, module, small):
    """What the command prints as JSON; it prints tables without --json."""
    monkeypatch.setattr(module, "measure", functools.partial(module.measure, **small))
    measured_once(monkeypatch, module)
    count = ["--seeds" if name == "paris-elsa" else "--mixes", "2"]
    line = ["bench", "study", name, "--data", str(table), *count]
    done = CliRunner().invoke(cli, [*line, "--json"], standalone_mode=False)
    assert done.exception is None, done.exception
    found = json.loads(done.stdout)
    assert found["bars"] == []
    done = CliRunner().invoke(cli, line, standalone_mode=False)
    assert done.exception is None, done.exception
    assert "reconstruction" in done.stdout
    assert "migbatchd uses none of these rules" in done.stdout
    return found


@pytest.mark.slow
def test_dispatch_study_measures_every_variant_and_the_command_repeats_it(monkeypatch, table):
    small = {"job_count": 500, "variances": (0.9,)}
    result = pariselsa.measure(table, seeds=2, **small)
    (found,) = result["results"]
    assert [row["model"] for row in found["models"]] == ["flat", "steep"]
    for row in found["models"]:
        rates = row["rates"]
        assert rates["best homogeneous"] >= rates["whole GPUs"] * 0.99
        assert rates["best homogeneous cut, our dispatch"] > 0
        assert sum(gpu[4] for gpu in row["ours"]["gpus"]) == row["ours"]["stock"][4]
        assert len(row["ours"]["gpus"]) == pariselsa.GPUS
        assert row["ours_latency_in_limits"]["p95"] <= 1.02  # the rate is found to two per cent
        assert 1 < row["ours_latency_in_limits"]["longest"] <= 10
    assert found["models"][0]["ratio"][0] > 1
    assert result["bars"] == []
    again = printed(monkeypatch, table, "paris-elsa", pariselsa, small)
    for measured in (result, again):
        for row in measured["results"][0]["models"]:
            del row["partition_s"]
    assert json.loads(json.dumps(result)) == again


def test_dstack_study_compares_every_scheduler_with_the_bound(tmp_path):
    models = [("flat", 0.010, 0.002), ("steep", 0.0005, 0.0007), ("middle", 0.004, 0.003)]
    data = write_table(tmp_path / "data", models)
    result = dstack.measure(data, mixes=2, sizes=(2,), batches=("own",))
    (found,) = result["results"]
    assert len(found["rows"]) == 2
    for row in found["rows"]:
        assert row["bound"] <= 1.000001
        assert row["load"]["ours"] <= row["bound"] + 1e-6
        assert row["load"]["ours"] >= max(row["load"]["best static layout"], row["load"]["EDF at the leanest slice"])
        assert row["load"]["one layout for all mixes"] <= row["load"]["best static layout"]
        for filled in row["filled"].values():
            assert 0 < filled["utilisation"] <= filled["busy"] + 1e-6 <= 1 + 1e-6
            assert 0.5 - 1e-9 <= filled["jain"] <= 1
    assert result["bars"] == []


def test_dstack_command_prints_one_json_object_or_tables(monkeypatch, table):
    printed(monkeypatch, table, "dstack", dstack, {"sizes": (2,), "batches": ("chosen",)})


@pytest.mark.parametrize("measure", [pariselsa.measure, dstack.measure])
def test_table_without_all_profiles_is_refused_and_the_error_names_them(tmp_path, measure):
    data = write_table(tmp_path / "d", [("m", 0.01, 0.002)], kinds=KINDS[:3])
    with pytest.raises(NotMeasurable, match=r"7g\.80gb"):
        measure(data)
