"""Fragmentation as shipped, on synthetic jobs: migbatchd's own decision runs; contents of a measurement."""

import json
import statistics
from dataclasses import replace

import pytest
from click.testing import CliRunner

from slurm_migbatch.config import SupplyConfig, loads, render
from slurm_migbatch.lab import shipped
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.cli.bench import bench
from slurm_migbatch.lab.experiments import fragmentation
from slurm_migbatch.lab.experiments.fragmentation import GRMU, OURS, POOL, SIMPLE, STILL, Draw
from slurm_migbatch.lab.papers.placement import FirstFit
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.studies.placement import PlacementCluster, PodKind, SlicePool
from slurm_migbatch.mig.profile import Profile
from tests.support.experiments import measured_once

A100 = geometry("a100-80gb")
TWO, THREE, FOUR, ALL = (Profile.parse(p) for p in ("2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in (("ARRIVALS", 26), ("WARM", 5), ("NODES", 1), ("PER_NODE", 2), ("QUEUED", (0.95,))):
        monkeypatch.setattr(fragmentation, name, value)


def waits(served):
    return [None if job is None else job.wait_s for job in served]


def test_configuration_is_the_shipped_one_except_for_the_learned_preference():
    config = fragmentation.config_of([PodKind(THREE, 600.0, True), PodKind(FOUR, 600.0, True)])
    default = replace(loads(render()), path="")
    assert {THREE.name, FOUR.name} == set(config.supply.preference)
    assert replace(config, supply=SupplyConfig()) == default == replace(config, supply=default.supply)
    assert replace(config.supply, preference=()) == default.supply
    pace = shipped.pace(config)
    assert pace.every_s == pace.soon_s == default.cluster.poll_s
    assert shipped.DECIDES == "slurm_migbatch.decide.core.decide"
    assert len(shipped.provenance(shipped.DECIDES, config)["configuration"]) == 16


def test_jobs_wait_in_order_for_space_or_are_rejected_without_a_queue():
    kinds = (
        PodKind(ALL, 100.0, True),
        PodKind(ALL, 100.0, True),
        PodKind(FOUR, 50.0, True),
        PodKind(THREE, 50.0, True),
    )
    found = Draw((0.0, 10.0, 20.0, 30.0), kinds)
    served = fragmentation.at_once(found, PlacementCluster(A100, 1, FirstFit()).place, queued=True)
    assert waits(served) == [0.0, 90.0, 180.0, 170.0]
    assert [job.jct_s for job in served if job] == [100.0, 190.0, 230.0, 220.0]
    turned_away = fragmentation.at_once(found, PlacementCluster(A100, 1, FirstFit()).place, queued=False)
    assert waits(turned_away) == [0.0, None, None, None]
    assert waits(fragmentation.at_once(found, SlicePool(A100, 2).place, queued=False)) == [0.0, 0.0, None, None]


def test_migbatchd_starts_jobs_that_fit_soon_and_queues_or_rejects_others():
    kinds = (
        PodKind(ALL, 1000.0, True),
        PodKind(ALL, 1000.0, True),
        PodKind(ALL, 1000.0, True),
        PodKind(TWO, 50.0, True),
    )
    found = Draw((0.0, 10.0, 20.0, 2500.0), kinds)
    config = fragmentation.config_of(kinds)
    first, second, third, last = waits(fragmentation.shipped(found, config, queued=True))
    assert max(first, second, last) < 15
    assert 980 <= third < 1030
    first, second, third, last = waits(fragmentation.shipped(found, config, queued=False))
    assert max(first, second, last) < 15
    assert third is None


def test_training_job_is_moved_to_free_a_whole_gpu_and_inference_is_not():
    for served, shortest, longest in ((False, 0.0, 60.0), (True, 1000.0, 4000.0)):
        kinds = (
            PodKind(FOUR, 400.0, True),
            PodKind(THREE, 3000.0, served),
            PodKind(FOUR, 4000.0, True),
            PodKind(ALL, 100.0, True),
        )
        found = Draw((0.0, 1.0, 10.0, 450.0), kinds)
        jobs = fragmentation.shipped(found, fragmentation.config_of(kinds), queued=True)
        assert shortest <= jobs[3].wait_s < longest
        assert [job.restarts for job in jobs] == [0, 0 if served else 1, 0, 0]
        assert jobs[1].jct_s < 3000 + 100, "a restart and a checkpoint"


def test_measurement_has_both_populations_and_is_printed(openb, tmp_path, monkeypatch):
    """That it is deterministic is checked in test_bench_wrong_predictions.py, which measures the same twice."""
    measured_once(monkeypatch, fragmentation)
    words = ["fragmentation", "--data", str(openb), "--seeds", "2"]
    done = CliRunner().invoke(bench, [*words, "--json", "--plot", str(tmp_path / "plots")])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["populations"]["parts of a GPU"]["mix"] == {"3g.40gb": 0.5, "4g.40gb": 0.5}
    for population in result["populations"].values():
        assert population["decides"] == shipped.DECIDES
        for load in population["loads"]:
            ways = load["ways"]
            assert set(ways) == {*SIMPLE, OURS, STILL, GRMU, POOL}
            if load["queued"]:
                assert ways["first fit"]["over_first_fit"] == {"wait_s": [1.0, 1.0, 1.0], "jct_s": [1.0, 1.0, 1.0]}
                assert all(row["wait_s"] <= row["wait_max_s"] for row in ways.values())
                assert not any(row["restarts"] for way, row in ways.items() if way != "planner")
            else:
                assert all(0 < row["jobs"] <= 1 and 0 < row["slices"] <= 1 for row in ways.values())
    assert len(result["bars"]) == 2 * (1 * 3 + 3)
    bar = result["bars"][1]
    rows = result["populations"]["parts of a GPU"]["loads"][0]["ways"]
    least = min(rows[way]["wait_s"] for way in ("first fit", "best fit", "FGD"))
    assert bar["value"] == pytest.approx(rows["planner"]["wait_s"] / least, abs=1e-5)
    assert len(list((tmp_path / "plots").glob("fragmentation-*.svg"))) == 4
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    assert "slurm_migbatch.decide.core.decide, configuration" in done.stdout


def test_drawn_arrivals_have_the_requested_load():
    kinds = [PodKind(THREE, 600.0, True)]
    drawn = fragmentation.draw(kinds, 0.5, 1)
    offered = sum(kind.profile.compute * kind.seconds for kind in drawn.kinds)
    assert offered / (drawn.times[-1] * 2 * 7) == pytest.approx(0.5, rel=0.4)
    assert drawn == fragmentation.draw(kinds, 0.5, 1) != fragmentation.draw(kinds, 0.5, 2)
    assert statistics.fmean(kind.seconds for kind in drawn.kinds) == 600


def test_folder_without_the_trace_is_reported(tmp_path):
    with pytest.raises(NotMeasurable, match="openb_pod_list_default"):
        fragmentation.measure(tmp_path)
    done = CliRunner().invoke(bench, ["fragmentation", "--data", str(tmp_path)])
    assert done.exit_code == 1
    assert "openb_pod_list_default" in str(done.exception)
