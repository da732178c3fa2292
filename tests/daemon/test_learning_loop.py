"""The loop from finished runs back to predictions: what is learned, refused, rolled back, and survives a restart."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from sqlalchemy import delete

from slurm_migbatch.config import text_of
from slurm_migbatch.daemon.catalog import build
from slurm_migbatch.daemon.facts import chooser_of, known_models, models_of
from slurm_migbatch.daemon.refit import due, gather, news, run, seen_of, watch
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.predict import state
from slurm_migbatch.predict.check import Coverage
from slurm_migbatch.predict.statefile import Index
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.slurm.client import NodeRow
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.models import Run, StoredDecision, StoredLease
from slurm_migbatch.store.recurring import Learnable, learnable
from slurm_migbatch.submit.client import ask
from slurm_migbatch.submit.request import JobRequest
from slurm_migbatch.workload.buckets import Bucket
from tests.support.daemon_fakes import GEOMETRY, FakeSlurm, Node, gpu, inventory
from tests.support.daemon_running import Running
from tests.support.learning_record import FACTS, SMS, truth_s
from tests.support.waiting import eventually

HINT = "migbatch: model=net batch=32 slo=80ms"


def table(factor=1.0, source="imported", models=("net",)):
    return [
        Measurement(
            "NVIDIA H100 80GB HBM3", model, "encoder", "infer", profile, int(profile[0]), batch=batch, input_size=128,
            sm_count=SMS[profile], latency_s=truth_s(profile, batch) * factor, source=source,
        )
        for model in models for profile in SMS for batch in (1, 8, 32, 64)
    ]  # fmt: skip


def metrics_of(running):
    """The text of /metrics of a service."""
    return generate_latest(running.service.metrics).decode()


def error(site):
    """How far the current model is from the truth on a whole GPU, as a factor."""
    kind = next(iter(catalog(site).kinds.values()))
    figures = chooser_of(site).predictor.figures(Bucket("net", "infer", 32, 128, "tok"), kind)
    return max(
        math.exp(abs(math.log(figure.latency_s.mid / truth_s(profile.name)))) for profile, figure in figures.items()
    )


def catalog(site):
    return build({"n1": [Geometry.from_dict(GEOMETRY)]}, [NodeRow("n1", frozenset({"IDLE"}), {}, {}, ("gpu",))], site)


def test_runs_correct_a_wrong_prior(site, record):
    assert error(site) > 5
    record.add(30)
    found = run(site)["refit"]
    assert (found["outcome"], found["version"], found["runs"]) == ("taken", 1, 30)
    assert error(site) < 1.3
    assert found["check"]["on"] == "new runs held out"
    assert found["check"]["candidate"]["time"]["error"] < 0.2 * found["check"]["current"]["time"]["error"]
    assert models_of(site).index().seen["lesson"] == 30


def test_refit_waits_for_enough_new_runs(site, record):
    record.add(4)
    assert run(site)["refit"] is None
    record.add(1)
    assert run(site)["refit"]["outcome"] == "taken"
    record.add(4)
    assert run(site)["refit"] is None
    assert run(site, force="asked for")["refit"]["outcome"] == "taken"


def test_refits_continue_with_more_runs_of_the_same_kind(site, record):
    """The current model has seen what the candidate has not; more runs of the same kind are learned all the same."""
    for version in range(1, 5):
        record.add(10, noise=0.2)
        found = run(site)["refit"]
        assert (found["outcome"], found.get("version")) == ("taken", version), found


def test_refit_follows_a_change_of_the_real_times(site, record):
    record.add(40)
    run(site)
    record.add(300, factor=3.0)
    found = run(site)
    assert found["refit"]["outcome"] == "taken"
    assert found["watch"]["models"]["net/infer/h100-80gb"]["time"]["ratio"] == pytest.approx(3.0, rel=0.3)
    assert found["watch"]["kept"]["time"]["broken"]
    assert 2.0 < error(site) < 4.5


def test_a_worse_candidate_is_refused(site, record):
    """A table of another machine under the name of this one: it contradicts what runs say."""
    record.add(40, profiles=("7g.80gb",))
    assert run(site)["refit"]["outcome"] == "taken"
    before = error_on(site, "7g.80gb")
    record.store.add_measurements(table(factor=30.0, source="site"))
    record.add(6, profiles=("7g.80gb",))
    found = run(site)["refit"]
    assert found["outcome"] == "refused", found
    assert "its error on the check data" in found["why"]
    index = models_of(site).index()
    assert index.current == 1 and models_of(site).versions() == [1]
    assert index.tries[-1]["outcome"] == "refused" and "its error" in index.tries[-1]["why"]
    assert error_on(site, "7g.80gb") == before
    assert run(site)["refit"] is None  # until there is something new


def error_on(site, profile):
    kind = next(iter(catalog(site).kinds.values()))
    figures = chooser_of(site).predictor.figures(Bucket("net", "infer", 32, 128, "tok"), kind)
    return next(figure.latency_s.mid / truth_s(profile) for found, figure in figures.items() if found.name == profile)


def test_false_reports_of_one_user_among_three_change_no_prediction(site, record):
    record.add(30)
    run(site)
    before = error(site)
    record.add(60, user="eve", factor=1000.0)
    found = run(site)
    assert found["refit"]["outcome"] == "taken"
    report = models_of(site).current().saved.report
    assert report["left_out"]["net/infer/h100-80gb"]["time"]["users"] == 1
    assert "eve" not in json.dumps(report)
    assert error(site) == pytest.approx(before, rel=0.1)


def test_imported_measurements_are_learned_at_once(site, record):
    record.store.add_measurements(table(models=("net", "resnet50", "vgg16")))
    found = run(site)["refit"]
    assert (found["outcome"], found["reason"], found["measured"]) == ("taken", "imported measurements", 48)
    assert found["check"]["on"] == "new points held out"
    assert error(site) < 1.3


def test_changed_model_specifications_cause_a_refit(site, record):
    record.add(10)
    run(site)
    assert run(site)["refit"] is None
    other = dataclasses.replace(site, models={"net": FACTS, "more": dataclasses.replace(FACTS, gflops=1.0)})
    assert run(other)["refit"]["reason"] == "changed specifications of models or another release"


def test_models_of_another_release_are_learned_again_without_new_runs(site, record, monkeypatch, caplog):
    record.add(10)
    run(site)
    monkeypatch.setattr(state, "FORMAT", state.FORMAT + 1)
    assert chooser_of(site).predictor.version == "prior"
    assert "another release wrote it; migbatchd learns again from the record" in caplog.text
    assert run(site)["refit"]["outcome"] == "taken"
    assert chooser_of(site).predictor.version == "learned-2"
    assert run(site)["refit"] is None


def test_forced_refit_without_data_reports_nothing(site, record):
    found = run(site, force="asked for")["refit"]
    assert found["outcome"] == "nothing" and models_of(site).index().current == 0


def test_only_the_newest_runs_are_learned(site, record):
    record.add(30, factor=10.0)
    record.add(20)
    small = dataclasses.replace(site, learning=dataclasses.replace(site.learning, runs=20))
    found = run(small)["refit"]
    assert found["runs"] == 20 and error(small) < 1.3


def test_refit_after_a_rollback_waits_for_new_runs(site, record):
    for _ in range(2):
        record.add(10)
        run(site)
    facts = known_models(site)
    with open_store(site.store.url, readonly=True) as store:
        seen = seen_of(store.read(learnable), facts)
    assert models_of(site).roll_back(None, 5.0, seen) == (2, 1)
    assert run(site)["refit"] is None
    record.add(10)
    assert run(site)["refit"]["version"] == 3
    assert models_of(site).index().rejected == {2: 5.0}


def test_refit_learns_from_a_restored_or_new_database():
    """A restored or new database has lower numbers; otherwise migbatchd would wait for numbers beyond the old one."""
    index = Index(current=1, seen=seen_of(Learnable(5000, 7.0), []))
    assert not news(index, Learnable(5000, 7.0), [])
    assert news(index, Learnable(4000, 7.0), [])
    assert not news(index, Learnable(0, 7.0), [])


def test_candidate_is_judged_by_runs_of_a_new_database_that_it_has_not_seen(site, record):
    record.add(40)
    assert run(site)["refit"]["outcome"] == "taken"
    with record.store.engine.begin() as connection:
        for kind in (StoredLease, Run, StoredDecision):
            connection.execute(delete(kind))
    record.count = 0
    record.add(30)
    found = run(site)
    assert found["watch"]["runs"] == 30, "the current model has seen none of them"
    assert found["refit"]["check"]["on"] == "new runs held out"


def test_new_runs_measurements_or_specifications_count_as_news():
    facts = []
    seen = seen_of(Learnable(5, 2.0), facts)
    assert not news(Index(1, 1, seen=seen), Learnable(5, 2.0), facts)
    assert news(Index(1, 1, seen=seen), Learnable(6, 2.0), facts)
    assert news(Index(1, 1, seen=seen), Learnable(5, 3.0), facts)
    assert news(Index(1, 1, seen={**seen, "facts": "others"}), Learnable(5, 2.0), facts)
    assert not news(Index(), Learnable(), facts)


@pytest.mark.parametrize(
    ("runs", "kept", "broken"), [(19, 0, False), (20, 14, True), (100, 86, False), (100, 80, True)]
)
def test_confidence_level_is_missed_only_beyond_chance(runs, kept, broken):
    assert Coverage(runs, kept, 0.9).broken is broken


def test_runs_not_yet_learned_are_compared_with_predictions(site, record):
    record.add(20)
    run(site)
    saved = models_of(site).current().saved
    facts = known_models(site)
    with open_store(site.store.url, readonly=True) as store:
        assert watch(saved, gather(store, facts, 100, saved), facts, 0.9)["runs"] == 0
        record.add(3)
        material = gather(store, facts, 100, saved)
        found = watch(saved, material, facts, 0.9)
        assert due(models_of(site).index(), material, facts, 3) == "3 new runs"
    assert (found["runs"], found["kept"]["time"]["runs"], found["kept"]["memory"]["runs"]) == (3, 3, 3)


@pytest.fixture
def make(site, signer):
    slurm = FakeSlurm()
    slurm.node_rows["n1"] = NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 7, "none": 0}, {}, ("gpu",))
    return lambda: Service(site, client=slurm, open_store=lambda: open_store(site.store.url), signer=signer)


def answer(site):
    request = JobRequest(uid=1000, user="ann", partition="gpu", tres_per_node="gres:mig:auto", comment=HINT)
    return ask(Path(site.submit.socket), request).changes["tres_per_node"]


@pytest.mark.slow
def test_service_refits_by_itself_and_all_parts_use_the_new_model(make, site, record, signer):
    with Running(make()) as running:
        Node(running.port, signer).events(inventory(gpu(0)))
        eventually(running.service.submit.serving.is_set)
        eventually(Path(site.submit.table).exists)
        assert "7g.80gb" in answer(site)
        before = Path(site.submit.table).read_text()
        record.add(30)
        eventually(lambda: "7g.80gb" not in answer(site))
        eventually(lambda: Path(site.submit.table).read_text() != before)
        eventually(lambda: "migbatch_model_version 1" in metrics_of(running))
        assert 'migbatch_model_refits_total{outcome="taken"} 1' in metrics_of(running)
        assert 'migbatch_model_kept_runs{figure="time"} 30' in metrics_of(running)
        models_of(site).roll_back(None, 1.0, models_of(site).index().seen)
        eventually(lambda: "7g.80gb" in answer(site))
        models_of(site).roll_back(1, 1.0, {})
        eventually(lambda: "7g.80gb" not in answer(site))
    with Running(make()) as running:
        eventually(running.service.submit.serving.is_set)
        assert "7g.80gb" not in answer(site)
        eventually(lambda: "migbatch_model_version 1" in metrics_of(running))


@pytest.mark.slow
def test_predicted_limits_that_hold_too_rarely_are_warned_of(site, record, signer, caplog):
    record.add(30)
    run(site)
    patient = dataclasses.replace(site, learning=dataclasses.replace(site.learning, min_new=1000))
    record.add(25, factor=3.0)
    opener = lambda: open_store(site.store.url)  # noqa: E731
    with Running(Service(patient, client=FakeSlurm(), open_store=opener, signer=signer)) as running:
        eventually(lambda: 'migbatch_model_kept_share{figure="time"} 0' in metrics_of(running))
        drift = 'migbatch_model_drift{figure="time",model="net/infer/h100-80gb"} '
        (line,) = (line for line in metrics_of(running).splitlines() if line.startswith(drift))
        assert 2.5 < float(line.removeprefix(drift)) < 3.5
    warning = "predicted limits hold too rarely: time: 0% of 25 runs, confidence level 90% (version 1)"
    assert warning in caplog.text


@pytest.mark.slow
def test_refit_that_takes_too_long_is_stopped(make, site, record, signer, caplog, monkeypatch):
    record.add(30)
    service = make()
    object.__setattr__(service.config.learning, "limit_s", 0.01)
    with Running(service) as running:
        eventually(lambda: 'outcome="failed"' in metrics_of(running))
    assert "took longer than [learning] limit_s" in caplog.text
    assert models_of(site).index() == Index()


def test_nothing_is_learned_while_learning_is_disabled(site, record, signer):
    record.add(30)
    off = dataclasses.replace(site, learning=dataclasses.replace(site.learning, enabled=False))
    slurm = FakeSlurm()
    service = Service(off, client=slurm, open_store=lambda: open_store(site.store.url), signer=signer)
    with Running(service) as running:
        eventually(lambda: running.service.poller.latest)
        models_of(site).path.mkdir()
        eventually(lambda: running.service.learning._current == 0)
        assert running.service.learning._done is None
    assert models_of(site).versions() == []


def test_refit_process_ends_with_its_parent(site, record):
    """Its stdin is closed when migbatchd ends, in whatever way."""
    child = subprocess.Popen(
        [sys.executable, "-m", "slurm_migbatch.daemon.refit"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    record.add(30)
    child.stdin.write(json.dumps({"config": text_of(site), "level": "info"}).encode() + b"\n")
    child.stdin.close()
    with child.stdout:
        assert child.wait(120) in (0, 1)
    assert not Path(f"/proc/{child.pid}").exists()


@pytest.mark.slow
def test_refit_process_has_the_lowest_priority(site, record):
    record.add(30)
    start = json.dumps({"config": text_of(site), "level": "info"})
    code = "import os,runpy,atexit; atexit.register(lambda: print(os.nice(0))); "
    code += "runpy.run_module('slurm_migbatch.daemon.refit', run_name='__main__')"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdin.write(start + "\n")
    child.stdin.flush()
    result, nice = child.stdout.readline(), child.stdout.readline()
    assert child.wait(120) == 0  # with its stdin open
    child.stdin.close()
    child.stdout.close()
    assert json.loads(result)["refit"]["outcome"] == "taken"
    assert int(nice) == min(19, os.nice(0) + 19)


def test_broken_model_file_is_logged_and_the_version_before_is_used(site, record, caplog):
    for _ in range(2):
        record.add(10)
        run(site)
    (models_of(site).path / "model-2.json.gz").write_bytes(b"\x80\x04 a pickle")
    assert chooser_of(site).predictor.version == "learned-1"
    assert "model-2.json.gz is not gzip" in caplog.text and "predictions use version 1" in caplog.text
    (models_of(site).path / "model-1.json.gz").chmod(0o666)
    assert chooser_of(site).predictor.version == "prior"
    assert "predictions use physics alone" in caplog.text
