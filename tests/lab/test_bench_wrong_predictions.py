"""The cost of wrong predictions, on synthetic data: migbatchd's inputs differ, the jobs' real run times do not."""

import functools
import json

import pytest
from click.testing import CliRunner

from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.cli.bench import bench
from slurm_migbatch.lab.experiments import fragmentation, fragwrong, lending, lendslices, lendwrong
from slurm_migbatch.lab.experiments.fragmentation import OURS, STILL, Draw
from slurm_migbatch.lab.experiments.lending import PlayedLoad
from slurm_migbatch.lab.experiments.lendslices import Load
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.studies.placement import PodKind
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.loans import LoanHints
from tests.support.experiments import measured_once
from tests.support.lending_folders import write_miso, write_pollux

TINY = Load("slices, tiny", 600, 3, 60.0)
DAYS_S = lendslices.HISTORY_DAYS * DAY_S
THREE, FOUR = Profile.parse("3g.40gb"), Profile.parse("4g.40gb")
KINDS = [PodKind(THREE, 600.0, True), PodKind(FOUR, 300.0, True), PodKind(FOUR, 500.0, False)]

#: one row for each kind of error
EACH_ERROR = (
    "right",
    "history 12 h later",
    "history x2",
    "speeds x0.5 to x2, each its own",
    "speeds of slices x0.5",
    "restarts and checkpoints x2",
    "limits x1 to x8, each its own",
)


@pytest.fixture
def data(tmp_path):
    return write_miso(write_pollux(tmp_path))


@pytest.fixture
def small(monkeypatch):
    for name, value in (("ARRIVALS", 15), ("WARM", 4), ("NODES", 1), ("PER_NODE", 2)):
        monkeypatch.setattr(fragmentation, name, value)
    for module in (fragmentation, fragwrong):
        monkeypatch.setattr(module, "QUEUED", (0.95,))


def case(uses=(), training=(), begin_s=0.0):
    return PlayedLoad(training, [], uses, begin_s)


def test_recorded_uses_can_be_shifted_later_or_earlier():
    """Uses shifted beyond the end are left out, those across it end there; earlier is later by the rest of a day."""
    uses = [("1g.10gb", 100.0, 200.0), ("1g.10gb", DAYS_S - 7200.0, DAYS_S - 3600.0), ("2g.20gb", DAYS_S - 60.0, None)]
    later = lendwrong.WrongLendingData(later_s=3600.0).with_errors(case(uses), None, 0).uses
    assert later == [("1g.10gb", 3700.0, 3800.0), ("1g.10gb", DAYS_S - 3600.0, DAYS_S)]
    earlier = lendwrong.WrongLendingData(later_s=-3600.0).with_errors(case(uses), None, 0).uses
    assert earlier == [("1g.10gb", DAY_S - 3500.0, DAY_S - 3400.0)]
    begun = lendwrong.WrongLendingData(later_s=3600.0).with_errors(case(uses, begin_s=7200.0), None, 0).uses
    assert len(begun) == 3 and begun[1][2] == DAYS_S


@pytest.mark.parametrize("height, small, large", [(0.5, 2, 5), (1.0, 4, 10), (2.0, 8, 20)])
def test_recorded_uses_can_be_scaled_for_each_profile(height, small, large):
    uses = [("3g.40gb", float(n), n + 0.5) for n in range(4)] + [("1g.10gb", float(n), n + 0.5) for n in range(10)]
    recorded = lendwrong.WrongLendingData(height=height).with_errors(case(uses), None, 0).uses
    assert [sum(use[0] == name for use in recorded) for name in ("3g.40gb", "1g.10gb")] == [small, large]
    assert set(recorded) <= set(uses)


def test_predicted_speeds_are_wrong_by_the_given_factor(data):
    found = lendslices.miso(data)
    hints = LoanHints(model="resnet50", batch=64)
    right = lending.KnownSpeeds(found).training_speeds(hints, "train")
    assert lendwrong.WrongLendingData().predictions(found, 0).training_speeds(hints, "train") == right
    own = lendwrong.WrongLendingData(cells=2.0)
    factors = {}
    for seed in range(8):
        predicted = own.predictions(found, seed).training_speeds(hints, "train")
        assert predicted == own.predictions(found, seed).training_speeds(hints, "train")
        factors |= {(seed, profile): predicted[profile] / right[profile] for profile in right}
    assert len(set(factors.values())) == len(factors)
    assert 0.5 <= min(factors.values()) < 0.7 and 1.4 < max(factors.values()) <= 2.0
    full = geometry(lendslices.GPU).full.profile
    predicted = lendwrong.WrongLendingData(slices=0.5).predictions(found, 0).training_speeds(hints, "train")
    assert {p: predicted[p] / right[p] for p in right} == {p: 1.0 if p == full else 0.5 for p in right}


def test_time_limits_are_at_least_the_run_time_on_the_smallest_slice(data):
    found = lendslices.miso(data)
    jobs = lendslices.training(found, [float(n) for n in range(40)], 0)
    limits = lendwrong.WrongLendingData(limits=(1.0, 8.0)).with_errors(case(training=jobs), found, 0).limits
    slowest = {"resnet50": 0.1 / 0.3, "bert-base": 0.1 / 0.15}
    ratios = [limits[job.id] / (job.work / slowest[job.app] + 145.0) for job in jobs]
    assert 1.0 <= min(ratios) < 2.0 and 5.0 < max(ratios) <= 8.01
    assert lendwrong.WrongLendingData().with_errors(case(training=jobs), found, 0).limits == {}


def test_wrong_restart_times_apply_to_the_input_and_to_the_truth(data):
    jobs = lendslices.training(lendslices.miso(data), [0.0], 0)
    wrong = lendwrong.WrongLendingData(restarts=2.0, checkpoints=0.5)
    for played in (wrong.with_errors(case(training=jobs), None, 0), wrong.with_true_costs(case(training=jobs))):
        (job,) = played.training
        assert (job.costs.restart_s, job.costs.checkpoint_s) == (50.0, 2.5)
        assert job.costs.cold_start_s == lendslices.TRAIN.cold_start_s


def test_training_job_that_times_out_is_not_counted_as_completed(data):
    found = lendslices.miso(data)
    job = SimulatedJob(1, "train1", 0.0, 900.0, app="bert-base", batch=8, costs=lendslices.TRAIN)
    played = PlayedLoad([job], [SimulatedJob(9, "infer", 0.0, 5.0, "infer", profile=THREE)], [], limits={1: 300})
    with pytest.raises(NotMeasurable, match="never ended"):
        lending.play(played, found, lending.WAYS["ours"])


def test_every_lending_row_is_compared_with_the_half_variant_and_printed(data, tmp_path, monkeypatch):
    """That such runs are deterministic is checked in test_bench_lendslices.py."""
    monkeypatch.setattr(lendwrong, "ROWS", {row: lendwrong.ROWS[row] for row in EACH_ERROR})
    monkeypatch.setattr(lendwrong, "LOADS", [TINY])
    monkeypatch.setattr(lendwrong, "measure", functools.partial(lendwrong.measure, window_s=600.0))
    measured_once(monkeypatch, lendwrong)
    words = ["lending", "--wrong", "--data", str(data), "--seeds", "1", "--processes", "2"]
    done = CliRunner().invoke(bench, [*words, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    assert "history 12 h later" in done.stdout and "at worst" in done.stdout
    done = CliRunner().invoke(bench, [*words, "--plot", str(tmp_path / "plots")])
    assert done.exit_code == 2 and "no plots" in done.output
    (found,) = result["results"]
    assert set(found["rows"]) == set(lendwrong.ROWS)
    for row in found["rows"].values():
        assert row["over_half"][0] <= row["over_half_worst"]
    assert len(result["bars"]) == 3
    worst = max(row["over_half"][0] for row in found["rows"].values())
    assert result["bars"][0]["value"] == pytest.approx(worst)
    assert result["decides"] == "slurm_migbatch.decide.core.decide"


def test_lending_without_miso_data_is_reported(tmp_path):
    with pytest.raises(NotMeasurable, match="no MISO data"):
        lendwrong.measure(write_pollux(tmp_path), 1)


def test_fragmentation_rows_set_time_limits_and_learned_run_times(monkeypatch):
    found = Draw(tuple(map(float, range(300))), tuple(KINDS[n % 3] for n in range(300)))
    rows = fragwrong.ROWS
    assert rows["limits x2 (right)"].limits_of(found, 3) == fragmentation.usual_limits(found)
    assert rows["no limits"].limits_of(found, 3) == [None] * 300
    own = rows["limits x1 to x4, each its own"].limits_of(found, 3)
    ratios = [limit / kind.seconds for limit, kind in zip(own, found.kinds, strict=True)]
    assert 1.0 <= min(ratios) < 1.5 and 3.0 < max(ratios) < 4.21
    right = fragmentation.config_of(KINDS)
    assert right.supply.preference
    assert rows["limits x2 (right)"].config(right, KINDS, 0) == right
    assert rows["nothing learned"].config(right, KINDS, 0).supply.preference == ()
    assert not rows["nothing moved, no limits"].config(right, KINDS, 0).moves.enabled
    seen = []
    monkeypatch.setattr(fragmentation, "learned", lambda gpus, classes: seen.append(classes) or right)
    for seed in range(6):
        rows["learned x0.5 to x2, each profile its own"].config(right, KINDS, seed)
    factors = [c.seconds / {THREE: 600.0, FOUR: 400.0}[c.profile] for classes in seen for c in classes]
    assert len(set(factors)) == 12
    assert 0.5 <= min(factors) < 1.0 < max(factors) <= 2.0


@pytest.mark.slow
def test_every_fragmentation_row_is_compared_with_first_fit_and_printed(small, openb, monkeypatch):
    limits = ("limits x2 (right)", "no limits")
    some = (*limits, *(f"nothing moved, {row}" for row in limits))
    monkeypatch.setattr(fragwrong, "ROWS", {row: fragwrong.ROWS[row] for row in some})
    measured_once(monkeypatch, fragwrong)
    result = fragwrong.measure(data=openb, seeds=2)
    right = fragmentation.measure(openb, 2)
    for name, population in result["populations"].items():
        for load, other in zip(population["loads"], right["populations"][name]["loads"], strict=True):
            assert set(load["rows"]) == set(fragwrong.ROWS)
            for row, way in (("limits x2 (right)", OURS), ("nothing moved, limits x2 (right)", STILL)):
                assert load["rows"][row]["over_first_fit"] == other["ways"][way]["over_first_fit"]
    assert len(result["bars"]) == 2 * 2 * (2 * 1 + 1)
    rows = result["populations"]["parts of a GPU"]["loads"][0]["rows"]
    for bar, moves in zip(result["bars"], (True, False), strict=False):
        worst = max(rows[name]["over_first_fit"]["wait_s"][0] for name in rows if fragwrong.ROWS[name].moves == moves)
        assert bar["value"] == pytest.approx(worst)
    words = ["fragmentation", "--wrong", "--data", str(openb), "--seeds", "2"]
    done = CliRunner().invoke(bench, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(json.dumps(result))
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    assert all(row in done.stdout for row in some) and "at worst" in done.stdout
