"""From what nodes report to answers for slurmctld: catalog, compiled table, submit socket and the record."""

import asyncio
import dataclasses
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from slurm_migbatch.config import GpuConfig, ModelConfig, loads, text_of
from slurm_migbatch.daemon import facts, submit_supervisor
from slurm_migbatch.daemon.catalog import build
from slurm_migbatch.daemon.children import Child
from slurm_migbatch.daemon.facts import SiteFacts, chooser_of
from slurm_migbatch.daemon.metrics import Metrics
from slurm_migbatch.daemon.nodesview import LiveView
from slurm_migbatch.daemon.poll import SlurmView
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.daemon.submit_supervisor import SubmitSupervisor
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.slurm.client import NodeRow
from slurm_migbatch.submit.client import ask
from slurm_migbatch.submit.request import Accept, JobRequest, Refuse
from tests.support.daemon_fakes import GEOMETRY, FakeSigner, FakeSlurm, FakeStore, Node, gpu, inventory
from tests.support.daemon_running import Running
from tests.support.waiting import eventually


class Process:
    """A process that answers submissions, which ends when the test says so."""

    def __init__(self):
        self.stdin, self.stdout, self.pid, self.returncode = self, asyncio.StreamReader(), 7, None
        self.closed, self.over = False, asyncio.Event()

    def write(self, _data):
        pass

    def close(self):
        self.closed = True

    def end(self):
        self.returncode = 0
        self.stdout.feed_eof()
        self.over.set()

    async def wait(self):
        await self.over.wait()
        return 0


def test_service_ended_by_a_reload_does_not_end_the_new_submit_process(config, monkeypatch):
    """Also while it still waits for the process before it to end: reloads may follow each other at once."""

    async def reloads():
        first, second = Process(), Process()

        async def start(*_argv, **_options):
            return second

        monkeypatch.setattr("asyncio.create_subprocess_exec", start)
        supervisors = [SubmitSupervisor(config, StoreWriter(FakeStore, 20), Metrics()) for _ in range(2)]
        supervisors[0]._before = [Child("first", first)]
        supervisors[0]._known.set()
        running = asyncio.create_task(supervisors[0].run())
        second.stdout.feed_data(b'{"serving": true}\n')
        while not first.closed:
            await asyncio.sleep(0)
        supervisors[0].leave()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        first.end()
        await supervisors[0]._relieving
        assert not second.closed
        supervisors[1].succeed(supervisors[0])
        closing = asyncio.create_task(supervisors[1].close())
        while not second.closed:
            await asyncio.sleep(0)
        second.end()
        await closing

    asyncio.run(asyncio.wait_for(reloads(), 60))


def row(name, *partitions):
    return NodeRow(name, frozenset({"IDLE"}), {"1g.10gb": 7, "none": 0}, {}, partitions)


def request(**fields):
    return JobRequest(uid=1000, user="ann", partition="gpu", **fields)


def serving(running):
    return eventually(running.service.submit.serving.is_set)


def test_requests_are_answered_once_a_node_has_reported(running, node, slurm, store, config):
    assert not running.service.submit.serving.is_set()
    slurm.node_rows["n1"] = row("n1", "gpu", "long")
    node.events(inventory(gpu(0)))
    serving(running)
    answer = ask(Path(config.submit.socket), request(tres_per_node="gres:mig:auto", comment="migbatch: mem=15gb"))
    assert isinstance(answer, Accept)
    assert "mig:2g.20gb" in answer.changes["tres_per_node"]
    decision = eventually(lambda: store.decisions and store.decisions[0])
    assert decision["chosen"] == "mig:2g.20gb:1"
    assert decision["asked"] == "--gres=mig:auto --comment='migbatch: mem=15gb'"
    assert decision["user"] == "ann"
    assert decision["id"] in answer.changes["comment"]


def test_candidates_are_recorded_in_the_units_of_reports(running, node, slurm, store, config):
    slurm.node_rows["n1"] = row("n1", "gpu")
    node.events(inventory(gpu(0)))
    serving(running)
    comment = "migbatch: model=bert-large batch=32 slo=500ms"
    ask(Path(config.submit.socket), request(tres_per_node="gres:mig:auto", comment=comment))
    decision = eventually(lambda: store.decisions and store.decisions[0])
    assert decision["bucket"].startswith("bert-large/infer/b32/")
    full = next(c for c in decision["candidates"] if c["profile"] == "7g.80gb")
    assert 1 < full["latency_ms"] < 1000
    assert full["latency_ms_range"][0] < full["latency_ms"] < full["latency_ms_range"][1]
    assert full["throughput_per_s"] > 10


@pytest.mark.slow
def test_table_and_catalog_are_written_only_when_something_has_changed(running, node, slurm, config):
    slurm.node_rows["n1"] = row("n1", "gpu")
    node.events(inventory(gpu(0)))
    table, catalog = Path(config.submit.table), Path(config.submit.catalog)
    eventually(table.exists)
    before = table.stat().st_ino, catalog.stat().st_ino
    eventually(catalog.exists)
    running.service.submit.facts.write()
    assert (table.stat().st_ino, catalog.stat().st_ino) == before
    node.events(inventory(gpu(0), gpu(1), seq=2))  # what a node can hold at once has changed
    eventually(lambda: catalog.stat().st_ino != before[1])
    slurm.node_rows["n1"] = row("n1", "gpu", "night")
    eventually(lambda: "night" in table.read_text())
    assert set(running.service.submit.facts.catalog.partitions) == {"gpu", "night"}
    assert oct(table.stat().st_mode)[-3:] == "644"


def test_table_that_a_service_compiles_when_it_ends_is_not_written(config, monkeypatch):
    """The next one, with another configuration, may have written its own by then."""
    supervisor = SubmitSupervisor(config, StoreWriter(FakeStore, 20), Metrics())
    compiling, ended = threading.Event(), threading.Event()

    def text(_catalog):
        compiling.set()
        ended.wait()
        return "of an earlier configuration"

    async def end_while_compiling():
        files = asyncio.create_task(supervisor.keep_files())
        await asyncio.to_thread(compiling.wait)
        files.cancel()
        await asyncio.gather(files, return_exceptions=True)
        ended.set()

    monkeypatch.setattr(supervisor.facts._compiler, "text", text)
    supervisor.facts.unwritten = True
    asyncio.run(end_while_compiling())  # waits for the thread that compiles
    assert not Path(config.submit.table).exists()


@pytest.mark.slow
def test_saved_catalog_answers_submissions_at_once_after_a_restart(config, store, signer, tmp_path):
    slurm = FakeSlurm()
    slurm.node_rows["n1"] = row("n1", "gpu")
    make = lambda: Service(config, client=slurm, open_store=lambda: store, signer=signer)  # noqa: E731
    with Running(make()) as running:
        Node(running.port, FakeSigner()).events(inventory(gpu(0)))
        serving(running)
        eventually(Path(config.submit.catalog).exists)
    slurm.away = True
    store = FakeStore()
    with Running(make()) as running:
        serving(running)
        answer = ask(Path(config.submit.socket), request(tres_per_node="gres:mig:9g.10gb"))
        assert isinstance(answer, Refuse)


def test_killed_submit_process_is_started_again(running, node, slurm, store, config, caplog):
    slurm.node_rows["n1"] = row("n1", "gpu")
    node.events(inventory(gpu(0)))
    serving(running)
    first = running.service.submit._child.process.pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: running.service.submit.serving.is_set() and running.service.submit._child.process.pid != first)
    answer = ask(Path(config.submit.socket), request(tres_per_node="gres:mig:1g.10gb:2"))
    assert isinstance(answer, Accept)
    eventually(lambda: store.decisions)
    assert "exited with -9; it is started again" in caplog.text
    assert "internal error in submit" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["submit.sock", "submit-slurmctld.sock"])
def test_removed_submit_socket_is_created_again(running, node, slurm, config, caplog, name):
    """Slurm's compiled table would answer from then on, and nobody would notice."""
    slurm.node_rows["n1"] = row("n1", "gpu")
    node.events(inventory(gpu(0)))
    serving(running)
    path = Path(config.submit.socket).with_name(name)
    path.unlink()
    eventually(lambda: running.service.health()["checks"]["submit"] == "failing")
    assert f"{path} is missing" in caplog.text
    eventually(path.exists)
    assert isinstance(ask(path, request(tres_per_node="gres:mig:auto")), Accept)
    eventually(lambda: running.service.health()["checks"]["submit"] == "ok")


def test_health_shows_that_no_submissions_are_answered(running, node, slurm, monkeypatch):
    """Slurm's compiled table answers most of them, and nobody would notice."""
    assert running.service.health()["checks"]["submit"] == "ok", "its GPUs are not known yet"
    with monkeypatch.context() as broken:
        broken.setattr(submit_supervisor, "_PROGRAM", "no_such_program")
        slurm.node_rows["n1"] = row("n1", "gpu")
        node.events(inventory(gpu(0)))
        eventually(lambda: running.service.health()["checks"]["submit"] == "failing")
    serving(running)
    assert running.service.health()["checks"]["submit"] == "ok"


def test_decisions_made_just_before_the_stop_are_recorded(config, slurm, store, signer):
    slurm.node_rows["n1"] = row("n1", "gpu")
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:
        Node(running.port, FakeSigner()).events(inventory(gpu(0)))
        serving(running)
        child = running.service.submit._child.process.pid
        for _ in range(20):
            ask(Path(config.submit.socket), request(tres_per_node="gres:mig:auto"))
    assert len(store.decisions) == 20
    assert not Path(config.submit.socket).exists()
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.slow
def test_catalog_is_kept_when_no_gpu_has_mig_any_more(running, node, slurm, config):
    slurm.node_rows["n1"] = row("n1", "gpu")
    node.events(inventory(gpu(0)))
    serving(running)
    node.events(inventory(gpu(0, mig=False), seq=2))
    eventually(lambda: running.service.rounds.view.geometries()["n1"] == [])
    polled = running.service.poller.latest.at
    eventually(lambda: running.service.poller.latest.at > polled + facts.CLOSEST_S)
    assert "gpu" in running.service.submit.facts.catalog


def test_migbatchd_runs_with_an_unreadable_catalog_file(config, slurm, store, signer, caplog):
    Path(config.submit.catalog).write_text("{broken")
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:
        eventually(lambda: running.service.poller.latest)
    assert "is not used" in caplog.text


def test_catalog_names_gpu_kinds_and_uses_figures_set_by_the_site(config):
    other = json.loads(json.dumps(GEOMETRY))
    other["profiles"] = other["profiles"][1:]
    view = LiveView()
    made = {"n1": [gpu(0)], "n2": [gpu(0, geometry=other)], "n3": [gpu(0, geometry={"version": 99})], "n4": []}
    view.load(made, ())
    config = dataclasses.replace(
        config,
        cluster=dataclasses.replace(config.cluster, partitions=("gpu",)),
        gpus={"h100-80gb": GpuConfig(tflops=900.0, types=("big",))},
    )
    found = build(
        view.geometries(), [row("n1", "gpu", "other"), row("n2", "gpu"), row("n3", "gpu"), row("n5", "gpu")], config
    )
    assert set(found.partitions) == {"gpu"}
    assert set(found.kinds) == {"h100-80gb", "h100-80gb-v2"}
    kind = found.kinds["h100-80gb"]
    assert (kind.tflops, kind.bandwidth_gbs, kind.sm_count) == (900.0, 3352, 132)
    assert kind.types == ("big", "h100", "nvidia_h100_80gb_hbm3")


def test_catalog_is_built_at_a_limited_rate_while_a_node_keeps_reporting(config, monkeypatch):
    """The process that answers submissions begins anew with each change."""
    view, built = LiveView(), []
    site = SiteFacts(config, chooser_of(config), built.append)

    def report(seq, *gpus):
        view.apply("n1", [inventory(*gpus, seq=seq)])
        site.follow(view.geometries(), SlurmView(0.0, (), (row("n1", "gpu"),)))

    report(1, gpu(0))
    monkeypatch.setattr(facts, "CLOSEST_S", 3600.0)
    for seq in (2, 3, 4):
        report(seq, *(gpu(number) for number in range(seq)))
    assert len(built) == 1
    monkeypatch.setattr(facts, "CLOSEST_S", 0.0)
    report(5, gpu(0), gpu(1))
    report(6, gpu(0), gpu(1))
    assert len(built) == 2, "nothing has changed since"


def test_models_configured_by_the_site_are_known(config):
    config = dataclasses.replace(
        config,
        models={
            "org/net_1": ModelConfig(params_m=100, gflops=10, reference=128),
            "x": ModelConfig(params_m=1, gflops=1, reference=1),
        },
    )
    assert {"net-1", "x", "bert-large"} <= set(chooser_of(config).grids)
    assert loads(text_of(config), "") == dataclasses.replace(config, path="")
