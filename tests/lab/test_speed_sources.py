"""GPUs that can be simulated, and speeds of models on their slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slurm_migbatch.lab.sim import gpus
from slurm_migbatch.lab.sim.cluster import Place, SimulatedCluster
from slurm_migbatch.lab.sim.curves import Curves, Predicted, RateTable, SpeedError
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.sim.run import SimulatedRun
from slurm_migbatch.lab.sim.speeds import Linear, Neighbours, Paired, Whole
from slurm_migbatch.lab.traces import gavel
from slurm_migbatch.lab.traces.csvlines import TraceError
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.nvml import NvmlDriver
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.profiling import pairs
from slurm_migbatch.profiling.csvfile import TableError
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.testbed.simdriver import GPU_MODELS, SimulatedMachine

A100 = gpus.geometry("a100-80gb")
FULL, HALF, ONE = (Profile.parse(name) for name in ("7g.80gb", "3g.40gb", "1g.10gb"))


def at(profile: Profile, gpu: int = 0) -> Place:
    return Place(gpu, Slot(profile, A100.info(profile).placements[0]))


def test_geometries_are_those_of_the_simulated_driver(tmp_path_factory: pytest.TempPathFactory) -> None:
    machine = SimulatedMachine.create(tmp_path_factory.mktemp("sim") / "all", gpus=GPU_MODELS)
    with NvmlDriver(str(machine.library)) as driver:
        assert gpus.models() == GPU_MODELS
        for model, gpu in zip(GPU_MODELS, driver.gpus(), strict=True):
            assert gpus.geometry(model) == gpu.geometry()
    with pytest.raises(gpus.UnknownGpu, match="'k80' cannot be simulated; known GPUs: a30"):
        gpus.geometry("k80")
    assert [info.profile for info in gpus.whole("h200").profiles] == [Profile.parse("7g.141gb")]


def rows() -> list[Measurement]:
    def row(profile: str, batch: int, rate: float | None, **more: object) -> Measurement:
        return Measurement("a100-40gb", "net", "cnn", "train", profile, batch=batch, throughput_per_s=rate, **more)

    return [
        row("7g.40gb", 8, 100.0),
        row("3g.20gb", 8, 60.0),
        row("1g.5gb", 8, 30.0),
        row("7g.40gb", 32, 200.0),
        row("3g.20gb", 32, 90.0),
        row("1g.5gb", 32, None),
        row("3g.20gb", 64, 90.0),  # no figure of the whole GPU to compare it with
        row("1g.5gb", 8, 500.0, procs=3),
    ]


def job(batch: int = 8, n: int = 1, app: str = "net") -> SimulatedJob:
    return SimulatedJob(1, "j", 0, 10, gpus=n, app=app, batch=batch)


def test_measured_speeds_are_relative_to_the_whole_gpu() -> None:
    table = RateTable(rows(), A100)
    curves = Curves(table, A100)
    assert curves.speed(job(), [at(FULL)]) == 1
    assert curves.speed(job(), [at(HALF)]) == pytest.approx(0.6)
    assert curves.speed(job(), [at(ONE)]) == pytest.approx(0.3)
    assert curves.speed(job(32), [at(HALF)]) == pytest.approx(0.45)
    assert curves.speed(job(32), [at(ONE)]) == 0  # out of memory
    assert curves.speed(job(20), [at(HALF)]) == pytest.approx(0.45)  # 32 is nearer to 20 than 8 is
    assert curves.speed(job(16, 2), [at(FULL), at(FULL, 1)]) == 1
    assert curves.speed(job(16, 2), [at(FULL), at(HALF, 1)]) == pytest.approx(0.8)
    assert curves.speed(job(app=""), [at(HALF)]) == pytest.approx(3 / 7)
    assert table.apps("train") == ["net"]
    assert table.batches("net", "train") == [8, 32]
    with pytest.raises(SpeedError, match="no train speeds of other; it has net"):
        curves.speed(job(app="other"), [at(HALF)])


def test_memory_slices_missing_in_a_table_are_those_of_its_gpu() -> None:
    def measured(gpu: str, rates: dict[str, float]) -> list[Measurement]:
        return [Measurement(gpu=gpu, model="net", profile=name, throughput_per_s=rate) for name, rate in rates.items()]

    wide = measured("a100-80gb", {"7g.80gb": 100, "1g.10gb": 10, "1g.20gb": 20})
    rates = RateTable(wide, A100).rates("net", 1, "infer")
    assert rates == {FULL: 100, ONE: 10, Profile.parse("1g.20gb"): 20}
    small = measured("NVIDIA A100-SXM4-40GB", {"7g.40gb": 100, "1g.5gb": 10, "1g.10gb": 20})
    assert RateTable(small, A100).rates("net", 1, "infer") == rates
    pro = measured("NVIDIA RTX PRO 6000 Blackwell Server Edition", {"4g.96gb": 100, "2g.48gb": 50, "1g.24gb": 25})
    found = RateTable(pro, gpus.geometry("rtx-pro-6000")).rates("net", 1, "infer")
    assert sorted(found.values()) == [25, 50, 100]


def test_predicted_speeds_lie_between_zero_and_the_whole_gpu() -> None:
    source = Predicted(LearnedPredictor(), A100, "a100-80gb")
    curves = Curves(source, A100)
    for app in ("resnet50", "bert-base"):
        assert app in source.apps("train")
        one, half, full = (curves.speed(job(8, app=app), [at(profile)]) for profile in (ONE, HALF, FULL))
        assert 0 < one < half < full == 1
    assert curves.speed(job(128, app="resnet50"), [at(ONE)]) == 0
    with pytest.raises(SpeedError, match="resnet50 with batch 65536 does not fit on a whole NVIDIA A100"):
        curves.speed(job(65536, app="resnet50"), [at(FULL)])
    assert source.batches("resnet50", "train")[0] == 1
    with pytest.raises(SpeedError, match="the predictor knows no model 'nothing'"):
        source.rates("nothing", 1, "train")


def test_linear_whole_and_paired_speeds() -> None:
    cluster = SimulatedCluster.of(A100, 2)
    assert Linear(cluster).speed(job(), [at(HALF)]) == pytest.approx(3 / 7)
    assert Linear(cluster, exponent=0.5).speed(job(), [at(ONE)]) == pytest.approx((1 / 7) ** 0.5)
    assert Linear(cluster).speed(job(), [at(FULL), at(FULL, 1)]) == 1
    assert Linear(cluster, most=9).speed(job(), [at(FULL), at(FULL, 1)]) == 2
    assert Whole().speed(job(8, 4), [at(ONE)]) == 0.25
    one, two = SimulatedRun(job(app="a")), SimulatedRun(job(app="b"))
    paired = Paired(Whole(), {("a", "b"): 1.1, ("b", "a"): 1.4}, default=1.8)
    assert (paired.slowdown(one, [two]), paired.slowdown(two, [one])) == (pytest.approx(1.1), pytest.approx(1.4))
    assert paired.slowdown(one, [two, one]) == pytest.approx(1.9)


def test_job_that_requests_a_profile_runs_at_full_speed_on_it() -> None:
    cluster, asked = SimulatedCluster.of(A100, 1), replace(job(), profile=HALF)
    for speeds in (Linear(cluster), Curves(RateTable(rows(), A100), A100)):
        assert speeds.speed(asked, [at(HALF)]) == pytest.approx(1)
    assert Linear(cluster).speed(asked, [at(ONE)]) == pytest.approx(1 / 3)
    assert Curves(RateTable(rows(), A100), A100).speed(asked, [at(ONE)]) == pytest.approx(0.5)


def test_job_without_a_model_is_as_fast_with_a_table_as_without_one() -> None:
    linear, curves = Linear(SimulatedCluster.of(A100, 2)), Curves(RateTable(rows(), A100), A100)
    for asked in (job(app=""), replace(job(app=""), profile=ONE), replace(job(n=2, app=""), profile=HALF)):
        for places in ([at(FULL)], [at(HALF)], [at(ONE)], [at(FULL), at(FULL, 1)]):
            assert curves.speed(asked, places) == pytest.approx(linear.speed(asked, places)), (asked, places)


def test_drawn_sensitivities_have_the_given_mean_and_maximum() -> None:
    draws = Neighbours(0.019, 0.07).draw(200_000, np.random.default_rng(1))
    assert np.mean(draws) == pytest.approx(0.019, rel=0.01)
    assert 0 <= min(draws) < max(draws) <= 0.07
    assert np.mean(Neighbours(0.084, 0.12).draw(200_000, np.random.default_rng(1))) == pytest.approx(0.084, rel=0.01)
    assert Neighbours(0).draw(3, np.random.default_rng(1)) == [0, 0, 0]
    with pytest.raises(ValueError, match="the mean must be below the worst"):
        Neighbours(0.08, 0.07)


def test_tables_of_pair_slowdowns_are_read(tmp_path: Path) -> None:
    table = tmp_path / "pairs.csv"
    table.write_text("app1,app2,slowdown1,slowdown2\na,b,1.1,1.4\nc,c,1.5,1.5\n")
    assert pairs.read(table) == {("a", "b", ""): 1.1, ("b", "a", ""): 1.4, ("c", "c", ""): 1.5}
    table.write_text("app1,app2,slowdown1,slowdown2,profile\na,b,1.1,1.4,MIG 1g.10gb\na,b,1.2,1.2,\n")
    assert pairs.read(table) == {
        ("a", "b", "1g.10gb"): 1.1, ("b", "a", "1g.10gb"): 1.4, ("a", "b", ""): 1.2, ("b", "a", ""): 1.2,
    }  # fmt: skip
    table.write_text("app1,app2,slowdown1,slowdown2,profile\na,b,1.1,1.4,small\n")
    with pytest.raises(TableError, match=r"pairs\.csv:2: .*small"):
        pairs.read(table)
    table.write_text("app1,app2,slowdown1,slowdown2\na,b,0.9,1.4\n")
    with pytest.raises(TableError, match=r"pairs\.csv:2: slowdown1 must be between 1 and 1e\+06, not 0\.9"):
        pairs.read(table)
    table.write_text(
        "gpu,job1,workers1,job2,workers2,steps_per_s_1,steps_per_s_2\n"
        "v100,A,1,,,10,\nv100,B,1,,,4,\nv100,A,1,B,1,8,4.1\nv100,A,1,A,1,0.0,0.0\nk80,A,1,,,1,\nv100,A,2,B,2,1,1\n"
    )
    assert gavel.pairs(table) == {("A", "B"): 1.25, ("B", "A"): 1.0}
    with pytest.raises(TraceError, match="has no measurement alone on a p100"):
        gavel.pairs(table, "p100")
