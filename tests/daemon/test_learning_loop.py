"""The loop from finished runs back to predictions: what is learned, refused, gone back from, and survives a restart."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_fakes import GEOMETRY, FakeSlurm, Node, gpu, inventory
from daemon_running import Running, eventually
from sqlalchemy import insert

from slurm_migbatch.config import ModelConfig, text_of
from slurm_migbatch.daemon.facts import chooser_of, known_models, models_of
from slurm_migbatch.daemon.history import Learnable, open_history
from slurm_migbatch.daemon.refit import due, gather, news, run, seen_of, watch
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.predict.check import Kept
from slurm_migbatch.predict.statefile import Index
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.slurm.client import NodeRow
from slurm_migbatch.store.models import Decision, Gpu, Lease, Run
from slurm_migbatch.store.models import Node as NodeRecord
from slurm_migbatch.submit.client import ask
from slurm_migbatch.submit.request import JobRequest

FACTS = ModelConfig(
    family="encoder", params_m=110, gflops=440.0, reference=128, kernels=170, activation_mib=40, weight_bytes=4
)
HINT = "migbatch: model=net batch=32 slo=80ms"
SMS = {"1g.10gb": 16, "2g.20gb": 32, "3g.40gb": 48, "7g.80gb": 112}


def truth_s(profile: str, batch: int = 32) -> float:
    """Seconds of a batch in truth: a twentieth of what the facts say."""
    return 0.003 + 0.006 * batch / 32 * 112 / SMS[profile]


@pytest.fixture
def config(config, tmp_path):
    return dataclasses.replace(
        config,
        models={"net": FACTS},
        store=dataclasses.replace(config.store, url=f"sqlite:///{tmp_path}/record.db"),
        learning=dataclasses.replace(config.learning, min_new=5, every_s=0.2),
    )


@pytest.fixture
def record(config):
    """The record, with a node that has an H100."""
    with open_history(config.store.url) as store:
        with store.engine.begin() as connection:
            connection.execute(insert(NodeRecord).values(node="n1", seen=1.0))
            entry = {"uuid": "GPU-0", "name": GEOMETRY["name"], "mig": True, "geometry": GEOMETRY, "facts": {}}
            connection.execute(insert(Gpu).values(node="n1", minor=0, gpu_index=0, present=True, seen=1.0, **entry))
        yield Record(store)


class Record:
    def __init__(self, store):
        self.store, self.count, self.chance = store, 0, random.Random(1)

    def add(self, count, *, factor=1.0, user=None, profiles=tuple(SMS), model="net", noise=0.05):
        """Finished runs on slices, `factor` slower than in truth; told by their jobs."""
        with self.store.engine.begin() as connection:
            for _ in range(count):
                self.count += 1
                n, profile = self.count, profiles[self.count % len(profiles)]
                batch = (8, 32)[self.count // len(profiles) % 2]
                seconds = truth_s(profile, batch) * factor * math.exp(self.chance.gauss(0, noise))
                hints = {"model": model, "batch": batch, "role": "infer"}
                connection.execute(insert(Decision).values(id=f"d{n}", ts=1.0, hints=hints, candidates=[], facts={}))
                told = {"by": {"latency_ms": "job", "memory_mib": "driver"}}
                fields = {
                    "id": n, "job_id": n, "restart": 0, "reuse": 0, "latest": True, "state": "COMPLETED",
                    "state_from": "slurm", "user": user or ("ann", "bob", "cat")[n % 3], "started": 10.0 * n,
                    "ended": 10.0 * n + 5, "began": 10.0 * n, "span_class": 2, "decision": f"d{n}", "profile": profile,
                    "slice_count": 1, "measured_latency_ms": 1e3 * seconds, "measured_memory_mib": 2000.0 + 10 * batch,
                    "measured_facts": told, "lesson": n,
                }  # fmt: skip
                connection.execute(insert(Run).values(**fields))
                lease = {"run_id": n, "job_id": n, "restart": 0, "node": "n1", "journal": "j", "position": 0}
                place = {"gpu": "GPU-0", "profile": profile, "slot_start": 0, "slot_size": 1}
                connection.execute(insert(Lease).values(**lease, **place))


def table(factor=1.0, source="imported", models=("net",)):
    return [
        Measurement(
            "NVIDIA H100 80GB HBM3", model, "encoder", "infer", profile, int(profile[0]), batch=batch, input_size=128,
            sm_count=SMS[profile], latency_s=truth_s(profile, batch) * factor, source=source,
        )
        for model in models for profile in SMS for batch in (1, 8, 32, 64)
    ]  # fmt: skip


def error(config):
    """How far the current model is from the truth on a whole GPU, as a factor."""
    kind = next(iter(catalog(config).kinds.values()))
    from slurm_migbatch.workload.buckets import Bucket

    figures = chooser_of(config).predictor.figures(Bucket("net", "infer", 32, 128, "tok"), kind)
    return max(math.exp(abs(math.log(each.latency_s.mid / truth_s(profile.name)))) for profile, each in figures.items())


def catalog(config):
    from slurm_migbatch.daemon.catalog import build

    return build({"n1": [gpu(0)]}, [NodeRow("n1", frozenset({"IDLE"}), {}, {}, ("gpu",))], config)


def test_runs_put_a_wrong_prior_right(config, record):
    assert error(config) > 5
    record.add(30)
    found = run(config)["refit"]
    assert (found["outcome"], found["version"], found["runs"]) == ("taken", 1, 30)
    assert error(config) < 1.3
    assert found["check"]["on"] == "new runs held out"
    assert found["check"]["candidate"]["time"]["error"] < 0.2 * found["check"]["current"]["time"]["error"]
    assert models_of(config).index().seen["lesson"] == 30


def test_a_few_runs_are_waited_for(config, record):
    record.add(4)
    assert run(config)["refit"] is None
    record.add(1)
    assert run(config)["refit"]["outcome"] == "taken"
    record.add(4)
    assert run(config)["refit"] is None
    assert run(config, force="asked for")["refit"]["outcome"] == "taken"


def test_refits_go_on_with_more_of_the_same(config, record):
    """The present model has seen what the candidate has not; still more of the same is taken in."""
    for version in range(1, 5):
        record.add(10, noise=0.2)
        found = run(config)["refit"]
        assert (found["outcome"], found.get("version")) == ("taken", version), found


def test_a_change_of_the_truth_is_followed(config, record):
    record.add(40)
    run(config)
    record.add(300, factor=3.0)
    found = run(config)
    assert found["refit"]["outcome"] == "taken"
    assert found["watch"]["models"]["net/infer/h100-80gb"]["time"]["ratio"] == pytest.approx(3.0, rel=0.3)
    assert found["watch"]["kept"]["time"]["broken"]
    assert 2.0 < error(config) < 4.5


def test_a_worse_candidate_is_refused(config, record):
    """A table of another machine under the name of this one: it contradicts what runs say."""
    record.add(40, profiles=("7g.80gb",))
    assert run(config)["refit"]["outcome"] == "taken"
    before = error_on(config, "7g.80gb")
    record.store.add_measurements(table(factor=30.0, source="site"))
    record.add(6, profiles=("7g.80gb",))
    found = run(config)["refit"]
    assert found["outcome"] == "refused", found
    assert "off by a factor of" in found["why"]
    index = models_of(config).index()
    assert index.current == 1 and models_of(config).versions() == [1]
    assert index.tries[-1]["outcome"] == "refused" and "off by a factor" in index.tries[-1]["why"]
    assert error_on(config, "7g.80gb") == before
    assert run(config)["refit"] is None  # until there is news


def error_on(config, profile):
    from slurm_migbatch.workload.buckets import Bucket

    kind = next(iter(catalog(config).kinds.values()))
    figures = chooser_of(config).predictor.figures(Bucket("net", "infer", 32, 128, "tok"), kind)
    return next(each.latency_s.mid / truth_s(profile) for found, each in figures.items() if found.name == profile)


def test_one_liar_among_three_moves_nothing(config, record):
    record.add(30)
    run(config)
    before = error(config)
    record.add(60, user="eve", factor=1000.0)
    found = run(config)
    assert found["refit"]["outcome"] == "taken"
    report = models_of(config).current().saved.report
    assert report["left_out"]["net/infer/h100-80gb"]["time"]["users"] == 1
    assert "eve" not in json.dumps(report)
    assert error(config) == pytest.approx(before, rel=0.1)


def test_imported_points_are_learned_from_at_once(config, record):
    record.store.add_measurements(table(models=("net", "resnet50", "vgg16")))
    found = run(config)["refit"]
    assert (found["outcome"], found["reason"], found["measured"]) == ("taken", "imported measurements", 48)
    assert found["check"]["on"] == "new points held out"
    assert error(config) < 1.3


def test_other_facts_are_a_reason_too(config, record):
    record.add(10)
    run(config)
    assert run(config)["refit"] is None
    other = dataclasses.replace(config, models={"net": FACTS, "more": dataclasses.replace(FACTS, gflops=1.0)})
    assert run(other)["refit"]["reason"] == "other facts of models"


def test_nothing_to_learn_from_is_said(config, record):
    found = run(config, force="asked for")["refit"]
    assert found["outcome"] == "nothing" and models_of(config).index().current == 0


def test_only_the_newest_runs_count(config, record):
    record.add(30, factor=10.0)
    record.add(20)
    small = dataclasses.replace(config, learning=dataclasses.replace(config.learning, runs=20))
    found = run(small)["refit"]
    assert found["runs"] == 20 and error(small) < 1.3


def test_going_back_is_waited_out(config, record):
    for _ in range(2):
        record.add(10)
        run(config)
    facts = known_models(config)
    with open_history(config.store.url, readonly=True) as store:
        seen = seen_of(store.learnable(), facts)
    assert models_of(config).roll_back(None, 5.0, seen) == (2, 1)
    assert run(config)["refit"] is None
    record.add(10)
    assert run(config)["refit"]["version"] == 3
    assert models_of(config).index().rejected == {2: 5.0}


def test_news():
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
def test_promises_are_broken_beyond_chance_only(runs, kept, broken):
    assert Kept(runs, kept, 0.9).broken is broken


def test_what_was_not_learned_from_is_watched(config, record):
    record.add(20)
    run(config)
    saved = models_of(config).current().saved
    facts = known_models(config)
    with open_history(config.store.url, readonly=True) as store:
        assert watch(saved, gather(store, facts, 100, saved), facts, 0.9)["runs"] == 0
        record.add(3)
        material = gather(store, facts, 100, saved)
        found = watch(saved, material, facts, 0.9)
        assert due(models_of(config).index(), material, facts, 3) == "3 new runs"
    assert (found["runs"], found["kept"]["time"]["runs"], found["kept"]["memory"]["runs"]) == (3, 3, 3)


@pytest.fixture
def make(config, signer):
    slurm = FakeSlurm()
    slurm.node_rows["n1"] = NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 7, "none": 0}, {}, ("gpu",))
    return lambda: Service(config, client=slurm, open_store=lambda: open_history(config.store.url), signer=signer)


def answer(config):
    request = JobRequest(uid=1000, user="ann", partition="gpu", tres_per_node="gres:mig:auto", comment=HINT)
    return ask(Path(config.submit.socket), request).changes["tres_per_node"]


def test_the_service_learns_by_itself_and_all_parts_take_it_over(make, config, record, signer):
    with Running(make()) as running:
        Node(running.port, signer).events(inventory(gpu(0)))
        eventually(running.service.door.serving.is_set)
        eventually(Path(config.submit.table).exists)
        assert "7g.80gb" in answer(config)
        before = Path(config.submit.table).read_text()
        record.add(30)
        eventually(lambda: "7g.80gb" not in answer(config))
        eventually(lambda: Path(config.submit.table).read_text() != before)
        metrics = running.service.metrics
        eventually(lambda: "migbatch_model_version 1" in metrics.text())
        assert 'migbatch_model_refits_total{outcome="taken"} 1' in metrics.text()
        assert 'migbatch_model_kept_runs{figure="time"} 30' in metrics.text()
        models_of(config).roll_back(None, 1.0, models_of(config).index().seen)
        eventually(lambda: "7g.80gb" in answer(config))
        models_of(config).roll_back(1, 1.0, {})
        eventually(lambda: "7g.80gb" not in answer(config))
    with Running(make()) as running:
        eventually(running.service.door.serving.is_set)
        assert "7g.80gb" not in answer(config)
        eventually(lambda: "migbatch_model_version 1" in running.service.metrics.text())


def test_a_refit_that_takes_too_long_is_given_up(make, config, record, signer, caplog, monkeypatch):
    record.add(30)
    service = make()
    object.__setattr__(service.config.learning, "limit_s", 0.01)
    with Running(service) as running:
        eventually(lambda: 'outcome="failed"' in running.service.metrics.text())
    assert "took longer than [learning] limit_s" in caplog.text
    assert models_of(config).index() == Index()


def test_switched_off_nothing_is_learned(config, record, signer):
    record.add(30)
    off = dataclasses.replace(config, learning=dataclasses.replace(config.learning, enabled=False))
    slurm = FakeSlurm()
    service = Service(off, client=slurm, open_store=lambda: open_history(config.store.url), signer=signer)
    with Running(service) as running:
        eventually(lambda: running.service.poller.latest)
        models_of(config).path.mkdir()
        eventually(lambda: running.service.learning._current == 0)
        assert running.service.learning._done is None
    assert models_of(config).versions() == []


def test_the_child_ends_with_its_parent(config, record):
    """Its stdin ends when migbatchd does, however it does."""
    child = subprocess.Popen(
        [sys.executable, "-m", "slurm_migbatch.daemon.refit"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    record.add(30)
    child.stdin.write(json.dumps({"config": text_of(config), "level": "info"}).encode() + b"\n")
    child.stdin.close()
    with child.stdout:
        assert child.wait(120) in (0, 1)
    assert not Path(f"/proc/{child.pid}").exists()


def test_the_child_is_the_least_of_processes(config, record):
    record.add(30)
    start = json.dumps({"config": text_of(config), "level": "info"})
    code = "import os,runpy,atexit; atexit.register(lambda: print(os.nice(0))); "
    code += "runpy.run_module('slurm_migbatch.daemon.refit', run_name='__main__')"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdin.write(start + "\n")
    child.stdin.flush()
    result, nice = child.stdout.readline(), child.stdout.readline()
    child.stdin.close()
    child.stdout.close()
    child.wait(120)
    assert json.loads(result)["refit"]["outcome"] == "taken"
    assert int(nice) == 19 or os.nice(0) > 0


def test_a_broken_file_means_the_version_before_and_a_clear_word(config, record, caplog):
    for _ in range(2):
        record.add(10)
        run(config)
    (models_of(config).path / "model-2.json.gz").write_bytes(b"\x80\x04 a pickle")
    assert chooser_of(config).predictor.version == "learned-1"
    assert "model-2.json.gz is not gzip" in caplog.text and "predictions are made with version 1" in caplog.text
    (models_of(config).path / "model-1.json.gz").chmod(0o666)
    assert chooser_of(config).predictor.version == "prior"
    assert "predictions are made with physics alone" in caplog.text
