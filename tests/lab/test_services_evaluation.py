"""`migbatch eval services`: points for a limit and for the grid, wrong predictions, and the report of them."""

import json
import re

import pytest
from click.testing import CliRunner

from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.cli.eval import eval_
from slurm_migbatch.lab.evaluate import services
from slurm_migbatch.lab.evaluate.services import ServicePlanner, evaluate, made_up, out_of_line
from slurm_migbatch.lab.papers.settings import InstanceSetting
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.profiling.table import write
from tests.support.small_laboratory import laboratory


@pytest.fixture(scope="module")
def result(parvagpu, instance_bench):
    """The evaluation, shortened."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MADE": 1, "FACTORS": (0.5, 2.0), "SEEDS": (1,), "HOPES": (1.0,)}.items():
            patch.setattr(services, name, value)
        patch.setattr(services, "InstanceBench", lambda *_: instance_bench)
        return evaluate(parvagpu)


@pytest.mark.slow
def test_every_variant_is_replayed_and_none_beats_full_measurement(result):
    off, measured, *_ = result["rows"]
    for way in (*result["placed"], *result["wrong"]):
        for at in way["rounds"]:
            assert len(at["gpus"]) == 2 and sum(at["gpus"]) == at["total"]
            if not at["broken"] and not at["short"]:
                assert all(mine >= best for mine, best in zip(at["gpus"], measured["gpus"], strict=True))
        assert way["rounds"][0]["points"] <= 3 < way["rounds"][1]["points"]
    assert re.fullmatch(r".* at most \d a model: \d+ limits exceeded, \d+ rates not met", result["rows"][3]["name"])
    grid, limit = result["placed"]
    assert len(grid["rounds"]) == len(limit["rounds"]) == services.ROUNDS
    assert limit["rounds"][0]["total"] <= grid["rounds"][0]["total"] <= off["total"]
    assert {way["half"] for way in result["made"]} == {"chosen on", "others"}
    assert [bar["name"] for bar in result["bars"]][:1] == ["first placement: GPUs"]


def test_planner_doubts_predictions_after_a_point_took_longer(instance_bench):
    """Predictions of half the time break limits for the trusting planner, and no more of them for the doubting one."""
    half = lambda _model, _cell: 0.5  # noqa: E731
    believing, doubting = ServicePlanner(instance_bench, half, trusting=True), ServicePlanner(instance_bench, half)
    for loads in instance_bench.loads.values():
        known = {load.sample.model: believing.points(load, (), 3) for load in loads}
        for load in loads:
            assert believing.surprise(load.sample.model, known[load.sample.model]) == 1.0
        careless, careful = believing.place(loads, known), doubting.place(loads, known)
        assert careful.broken <= careless.broken and careful.short <= careless.short
        assert any(doubting.surprise(model, points) > services.DOUBTFUL for model, points in known.items())


def test_points_are_requested_one_by_one_and_never_twice(instance_bench):
    planner = ServicePlanner(instance_bench)
    for load in (load for loads in instance_bench.loads.values() for load in loads):
        three = planner.points(load, (), 3)
        six = planner.points(load, three, 3)
        assert six[:3] == three == planner.points(load, (), 2) + three[2:]
        assert len(set(six)) == len(six) <= 6
        usable = instance_bench.subjects[load.sample.model].usable
        assert set(six) <= set(usable)


def test_cells_that_do_not_fit_the_latency_curve_are_found():
    profile = Profile.parse("3g.40gb")
    curve = {16: 0.021, 32: 0.0415, 64: 0.0753, 128: 0.0876}  # densenet169 in ParvaGPU's table
    settings = [InstanceSetting(profile, batch, 1, seconds) for batch, seconds in curve.items()]
    assert {setting.batch for setting in out_of_line(settings)} == {128}
    host = [InstanceSetting(profile, batch, 1, 0.01 + 0.0001 * batch) for batch in (1, 2, 4, 8, 16, 32)]
    assert not out_of_line(host)


def test_synthetic_services_can_be_served_and_are_deterministic(instance_bench):
    subjects = list(instance_bench.subjects.values())
    first, again = made_up(subjects, 3, 7), made_up(subjects, 3, 7)
    assert first == again != made_up(subjects, 3, 8)
    for loads in first.values():
        for load in loads:
            settings = instance_bench.subjects[load.sample.model].settings
            assert load.rate > 0 and any(s.seconds <= load.limit_s for s in settings if s.procs == 1)


def test_command_prints_one_json_object_or_tables_with_bars(parvagpu, result, monkeypatch):
    monkeypatch.setattr(services, "evaluate", lambda data, progress: result)
    found = CliRunner().invoke(eval_, ["services", "--data", str(parvagpu), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["bars"] == result["bars"]
    report = CliRunner().invoke(eval_, ["services", "--data", str(parvagpu)])
    assert report.exit_code == 0, report.output
    assert (
        "for the limit" in report.stdout
        and "synthetic services" in report.stdout
        and "first placement: GPUs" in report.stdout
    )


def test_services_of_one_model_are_refused(tmp_path):
    rows = [row for row in laboratory(models=["resnet50"], procs=(1, 2)) if row.ran]
    with (tmp_path / "table.csv").open("w") as file:
        write(rows, file)
    with pytest.raises(NotMeasurable, match="has services of one model, resnet50: at least two are needed"):
        evaluate(tmp_path)
