"""The experiment on lending of slices: reading of MISO's jobs and speeds, and the contents of a measurement."""

import json
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
import pytest

from slurm_migbatch.config import loads, render, text_of
from slurm_migbatch.decide.lending.forecast import DAY_S
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.experiments import lendbound, lending, lendslices
from slurm_migbatch.lab.experiments.lendslices import Load
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.slurm.controller import pace_of
from slurm_migbatch.mig.profile import Profile
from tests.support.lending_folders import write_miso

TINY = Load("slices, tiny", 60, 3, 60.0)


@pytest.fixture
def data(tmp_path):
    return write_miso(tmp_path)


def test_miso_jobs_and_speeds_are_read(data):
    found = lendslices.miso(data)
    assert found.jobs == (("resnet50", 64, 300.0), ("bert-base", 8, 900.0))
    job = SimulatedJob(1, "bert", 0.0, 900.0, app="bert-base", batch=8)
    assert found.speeds.relative(job, Profile.parse("3g.40gb")) == pytest.approx(0.1 / 0.15)
    assert found.speeds.relative(job, Profile.parse("2g.20gb")) == 0.0
    assert lendslices.miso(data / "miso" / "raw") is None
    (data / "miso" / "raw" / "job_models.json").write_text(json.dumps({"2": "dummy_train1"}))
    with pytest.raises(NotMeasurable, match="none of its models"):
        lendslices.miso(data)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("job_models.json", "{", "job_models.json is not JSON: Expecting"),
        ("job_models.json", "[]", "job_models.json must have one object with a model for each job"),
        ("job_models.json", '{"0": 5}', "job_models.json: job 0 must have a model, not 5"),
        ("exp_100.json", '{"0": "soon"}', "exp_100.json: job 0 must have seconds, not soon"),
    ],
)
def test_invalid_miso_file_is_named_in_the_error(data, name, text, message):
    next(data.rglob(name)).write_text(text)
    with pytest.raises(NotMeasurable, match=message):
        lendslices.miso(data)


@pytest.fixture
def moments():
    shape = np.cumsum(np.random.Generator(np.random.PCG64(1)).exponential(1.0, 500))
    return lendslices.Moments([[float(n * 30) for n in range(160)], [float(n * 500) for n in range(20)]], shape)


def test_every_variant_is_measured_and_the_result_is_deterministic(data, moments):
    found = lendslices.miso(data)
    (result,) = lending.results_of(found, moments, 1, [TINY], window_s=300.0)
    assert [result] == lending.results_of(found, moments, 1, [TINY], window_s=300.0, processes=2)
    ways = result["ways"]
    assert set(ways) == {"Slurm alone", "half", "idle", "servers", "ours"}
    assert ways["Slurm alone"]["restarts"] == 0
    least = min(way["jct_ratio"][0] for way in ways.values())
    assert 0 < result["bound"]["alone_ratio"] <= result["bound"]["jct_ratio"] < least
    assert ways["half"]["reclaimed"] == ways["half"]["preempted"] == 0
    assert ways["ours"]["jct_s"] < ways["half"]["jct_s"]
    assert ways["servers"]["jct_s"] < ways["half"]["jct_s"]
    assert result["decides"] == "slurm_migbatch.decide.core.decide"
    assert len(lending.bars(result)) == 5
    assert len(lending.bars({**result, "load": "slices, large"})) == 6


def test_jct_bound_is_not_above_the_best_schedule_and_is_close_to_it(data):
    found = lendslices.miso(data)
    full = geometry(lendslices.GPU).full.profile
    jobs = [SimulatedJob(n, f"train{n}", 0.0, 600.0, app="bert-base", batch=8, profile=full) for n in range(4)]
    assert lendbound.alone_jct_s(jobs) == 600.0
    at_once = lendbound.least_jct_s(jobs, [], found, 4)
    assert at_once == pytest.approx(600.0, abs=lendbound.STEP_S * lendbound.LATER)
    assert at_once <= 600.0
    queued = lendbound.least_jct_s(jobs, [], found, 1)
    assert 1100.0 < queued <= (600 + 1200 + 1800 + 2400) / 4, "one after the other is the best order on one GPU"
    small = [Profile.parse("3g.40gb")] * 2
    requests = [SimulatedJob(9 + n, "infer", 0.0, 5000.0, "infer", profile=p) for n, p in enumerate(small)]
    assert lendbound.least_jct_s(jobs, requests, found, 4) > at_once + 60.0, "inference has one of four GPUs"


def test_one_request_reclaims_all_loans_of_one_server(data, moments):
    """Eight 7g training jobs hold all the lent nodes; one request reclaims one node."""
    found = lendslices.miso(data)
    full = geometry(lendslices.GPU).full.profile
    trainings = [
        SimulatedJob(n, f"train{n}", 0.0, 900.0, app="bert-base", batch=8, profile=full, costs=lendslices.TRAIN)
        for n in range(16)
    ]
    request = SimulatedJob(99, "infer", 600.0, 30.0, "infer", profile=full, costs=lendslices.INFER)
    figures = lending.play(lending.PlayedLoad(trainings, [request], []), found, lending.WAYS["servers"])
    assert figures["preempted"] == lendslices.PER_NODE, "the four loans of one node"
    assert figures["restarts"] == 4 / 16
    assert figures["delay_max_s"] < 60.0


def test_measured_configuration_is_the_shipped_one_with_lending_enabled():
    shipped, decides = loads(render()), lending.config()
    assert decides.lending == replace(shipped.lending, enabled=True, partitions=("train",), training_only=("train",))
    assert text_of(replace(decides, lending=shipped.lending)) == text_of(shipped)
    assert (lending.pace().every_s, lending.pace().soon_s) == (pace_of(shipped).every_s, pace_of(shipped).soon_s)
    assert lending.settings()["decides"] == "slurm_migbatch.decide.core.decide"
    assert len(lending.settings()["configuration"]) == 16


def test_windows_of_ten_seeds_cover_the_whole_day(data, moments):
    """Requests before the window are history; requests in the window are not."""
    found, load = lendslices.miso(data), Load("many", 3000, 7, 60.0)
    for seed in (0, 4, 9, 10):
        case = lending.PlayedLoad.of(load, moments, found, seed, 3600.0)
        jobs, uses = lendslices.inference(load, moments, seed)
        assert case.begin_s == pytest.approx(seed % 10 * 0.1 * (lendslices.SPAN_S - 3600.0))
        assert len(case.inference) == sum(0 <= job.arrival - case.begin_s < 3600.0 for job in jobs)
        assert len(case.uses) == len(uses) + sum(job.arrival < case.begin_s for job in jobs)
        assert all(until <= lendslices.HISTORY_DAYS * DAY_S + case.begin_s for _, _, until in case.uses)
        assert all(0 <= job.arrival < 3600.0 for job in (*case.inference, *case.training))


def test_whole_gpu_load_uses_only_the_full_profile(data):
    shape = np.cumsum(np.ones(100))
    jobs, uses = lendslices.inference(Load("whole", 300, 7, 60.0, whole=True), lendslices.Moments([], shape), 2)
    assert {str(job.profile) for job in jobs} == {"7g.80gb"} == {name for name, _, _ in uses}
    jobs = lendslices.training(lendslices.miso(data), [0.0, 1.0], 0, whole=True)
    assert {str(job.profile) for job in jobs} == {"7g.80gb"}


def test_history_precedes_the_requests_of_the_same_stream():
    shape = np.cumsum(np.ones(100))
    jobs, uses = lendslices.inference(Load("many", 3000, 7, 60.0), lendslices.Moments([], shape), 2)
    assert {job.profile for job in jobs} == set(lendslices.PROFILES)
    assert all(0 <= job.arrival < lendslices.SPAN_S for job in jobs)
    assert all(since <= until <= lendslices.HISTORY_DAYS * DAY_S for _, since, until in uses)
    assert min(since for _, since, _ in uses) < DAY_S


def test_each_virtual_cluster_has_at_most_the_site_limit_of_jobs_at_once():
    floods = [SimulatedJob(n, f"job{n}", 60.0 * (n // 40), 3600.0, gpus=1, user=f"vc{n % 2}") for n in range(4000)]
    site = [*floods, SimulatedJob(4000, "last", 60 * DAY_S, 3600.0, gpus=1, user="vc1")]
    moments = lendslices.Moments(
        [], np.cumsum(np.ones(9)), [replace(job, arrival=job.arrival + 36 * DAY_S) for job in site]
    )
    found = lendslices.requests(Load("site", 0, 1, 0.0, site=True), moments, 0)
    running = [sum(at <= moment < at + seconds for at, _, seconds in found) for moment, _, _ in found]
    assert max(running) == 2 * lendslices.SITE_LIMIT
    assert found == sorted(found)


def test_jobs_of_a_site_are_drawn_from_its_trace(tmp_path):
    begin = datetime(2017, 10, 1)
    rows = [f"{begin + timedelta(hours=n)},{(30, 1800, 20_000)[n % 3]},{1 + n % 2},0,a" for n in range(24 * 60)]
    text = "\n".join(["timestamp,duration,num_gpus,gpu_time,cluster", *rows])
    (tmp_path / "philly_jobs.csv").write_text(text + "\n")
    site = lendslices.philly_jobs(tmp_path)
    assert {(job.gpus, job.work) for job in site} == {(1, 1800.0)}
    assert len(site) == 24 * 60 / 6
    load = Load("site", 0, 7, 0.0, site=True)
    moments = lendslices.Moments([], np.cumsum(np.ones(9)), site)
    for seed in range(10):
        jobs, uses = lendslices.inference(load, moments, seed)
        assert len(jobs) == pytest.approx(lendslices.SPAN_S / 6 / 3600, abs=1)
        assert len(uses) == pytest.approx(lendslices.HISTORY_DAYS * 4, abs=1)
        assert all(0 <= job.arrival < lendslices.SPAN_S and job.work == 1800 for job in jobs)
    assert lendslices.philly_jobs(tmp_path / "none") == ()
    assert lending.results_of(None, lendslices.Moments([], moments.shape), 1, [load]) == []
    with pytest.raises(NotMeasurable, match="no jobs"):
        lendslices.inference(load, lendslices.Moments([], moments.shape), 0)
    assert len(lendslices.arrivals_of(load, [[1.0, 2.0], [3.0, 4.0]], 0)) == 4
