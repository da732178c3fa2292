"""The study of placement rules on a synthetic trace: what it counts, and that it is deterministic."""

import json

import pytest
from click.testing import CliRunner

from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.cli.bench import bench
from slurm_migbatch.lab.papers.placement import FirstFit, LeastLoss, mix
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.studies import placement as study
from slurm_migbatch.lab.studies.placement import Equal, PlacementCluster, PodKind, SlicePool, measure, run
from slurm_migbatch.mig.profile import Profile
from tests.support.experiments import measured_once

A100 = geometry("a100-80gb")
THREE, FOUR, ALL = (Profile.parse(p) for p in ("3g.40gb", "4g.40gb", "7g.80gb"))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(study, "ARRIVALS", 300)
    monkeypatch.setattr(study, "WARM", 50)
    monkeypatch.setattr(study, "GPUS", 5)


def test_run_counts_accepted_jobs_after_the_warm_up():
    """One GPU, two slices, 3g and 4g: first fit places the 3g at 0 and rejects every 4g."""
    kinds = [PodKind(THREE, 1.5, True), PodKind(FOUR, 1.5, False)] * 100
    times = [float(i) for i in range(200)]
    asked = mix({THREE: 1, FOUR: 1})
    first = run(PlacementCluster(A100, 1, FirstFit()).place, times, kinds, 7)
    ours = run(PlacementCluster(A100, 1, LeastLoss(asked)).place, times, kinds, 7)
    assert first.accepted == {THREE: 75}
    assert ours.accepted == {THREE: 75, FOUR: 75}
    assert ours.offered == {THREE: 75, FOUR: 75}
    assert ours.by_class == {True: 75, False: 75}
    assert ours.slices == 75 * 7
    assert ours.busy == pytest.approx(7 * 1.5 / 2 / 7, abs=0.02)
    assert first.busy == pytest.approx(3 * 1.5 / 2 / 7, abs=0.02)


def test_pool_ignores_placements_and_equal_slices_reject_larger_profiles():
    pool = SlicePool(A100, 2)
    assert pool.place(PodKind(FOUR, 1, True))
    assert pool.place(PodKind(FOUR, 1, True))
    release = pool.place(PodKind(FOUR, 1, True))  # 12 of 14 compute slices, 12 of 16 memory slices
    assert release is not None
    assert pool.place(PodKind(THREE, 1, True)) is None
    release()
    assert pool.place(PodKind(THREE, 1, True))
    equal = Equal(A100, 2, THREE)
    assert equal.place(PodKind(FOUR, 1, True)) is None
    given = [equal.place(PodKind(THREE, 1, True)) for _ in range(5)]
    assert [give_back is not None for give_back in given] == [True] * 4 + [False]
    given[0]()
    assert equal.place(PodKind(THREE, 1, True))


def test_measurement_is_deterministic_and_has_both_populations(openb):
    result = measure(openb, seeds=2)
    assert result == measure(openb, seeds=2)
    parts, whole = result["populations"]["parts of a GPU"], result["populations"]["parts and whole GPUs"]
    assert parts["mix"] == {"3g.40gb": 0.5, "4g.40gb": 0.5}
    assert whole["mix"] == {"3g.40gb": 0.3333, "4g.40gb": 0.3333, "7g.80gb": 0.3333}
    for load in parts["loads"]:
        rules = {row["rule"]: row for row in load["rules"]}
        assert rules["first fit"]["gain_jobs"][0] == 0
        assert all(0 <= row["accepted"][0] <= 1 and 0 <= row["busy"][0] <= 1 for row in load["rules"])
        assert sum(name.startswith("best equal slices") for name in rules) == 1
    some = {row["rule"]: row for row in parts["loads"][0]["rules"]}  # below capacity: only placements are lacking
    assert some["least loss"]["gain_jobs"][0] > 0.05
    assert some["pool without fragmentation"]["busy"][0] >= some["least loss"]["busy"][0]
    assert result["bars"] == []


def test_command_prints_one_json_object_or_a_table(openb, monkeypatch):
    measured_once(monkeypatch, study)
    runner = CliRunner()
    found = runner.invoke(bench, ["study", "placement", "--data", str(openb), "--seeds", "2", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["populations"]
    report = runner.invoke(bench, ["study", "placement", "--data", str(openb), "--seeds", "2"])
    assert report.exit_code == 0, report.output
    assert "least loss" in report.stdout


def test_folder_without_the_trace_is_reported(tmp_path):
    with pytest.raises(NotMeasurable, match="openb_pod_list_default"):
        measure(tmp_path)
    found = CliRunner().invoke(bench, ["study", "placement", "--data", str(tmp_path)])
    assert found.exit_code == 1
    assert "openb_pod_list_default" in str(found.exception)
