"""The parts of a test bed that need no Slurm: templates, mirrors, ports, processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from slurm_migbatch import site
from slurm_migbatch.install.slurmconf import INCLUDED, load
from slurm_migbatch.install.slurmedit import plan, rendered
from slurm_migbatch.install.slurmplan import INCLUDED_GRES
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.node.install import unit
from slurm_migbatch.testbed import process_group, registry
from slurm_migbatch.testbed.conf import described, installed
from slurm_migbatch.testbed.debian import mirror
from slurm_migbatch.testbed.errors import TestbedError
from slurm_migbatch.testbed.ports import PortBook, listening
from slurm_migbatch.testbed.proc import ProcessId, start_time, wait_until
from slurm_migbatch.testbed.spec import Spec

SITE = site.Site(
    version=(22, 5),
    nodes=[site.NodeLine("gpu[01-16]", {"1g.10gb": 14, "7g.80gb": 0, "none": 0})],
    catalog=site.NodeLine("no-mig-slice-free", {"1g.10gb": 14, "7g.80gb": 2, "none": 0}),
    prolog="/etc/migbatch/hooks/prolog",
    epilog="/etc/migbatch/hooks/epilog",
    task_prolog="/etc/migbatch/hooks/task_prolog",
    job_submit=True,
)


@pytest.mark.parametrize("lending", [{}, {"enabled": True, "partitions": ["train"]}])
@pytest.mark.parametrize("version", [(22, 5), (24, 11)])
def test_configuration_of_a_test_bed_is_what_install_would_write(
    version: tuple[int, int], lending: dict[str, object]
) -> None:
    spec = Spec(nodes=2, dbd=True, config={"lending": lending}, job_submit="/j.lua", options={"PrologFlags": "Contain"})
    stock = (
        "PrologFlags=Contain\nNodeName=n1 CPUs=4 RealMemory=9\nNodeName=n2 CPUs=4\nPartitionName=train Nodes=n[1-2]\n"
    )
    texts = installed(spec, geometry("h100-80gb"), version, Path("/e"), stock)
    assert set(texts) == {f"/e/{name}" for name in ("slurm.conf", "gres.conf", INCLUDED, INCLUDED_GRES)}
    conf, gres_conf = load("/e/slurm.conf", texts.get), load("/e/gres.conf", texts.get)
    again = plan(described(spec, geometry("h100-80gb"), version), conf, gres_conf, spec.lending)
    assert not again.edits and not again.problems
    assert {f"/e/{name}": text for name, text in rendered(again).items()}.items() <= texts.items()
    assert conf.value("PrologFlags") == "Contain" and conf.value("JobSubmitPlugins") == "lua"
    assert conf.value("PreemptType") == ("preempt/partition_prio" if lending else "")
    nodes = {values["nodename"]: values for _, values in conf.records("nodename")}
    assert "mig:1g.10gb:14" in nodes["n2"]["gres"] and nodes["no-mig-slice-free[1-2]"]["realmemory"] == "9"
    assert ("mig:loan:1" in nodes["n1"]["gres"]) == (bool(lending) and version == (22, 5))


def test_slurm_options_incompatible_with_migbatch_are_named() -> None:
    with pytest.raises(TestbedError, match="RunInJob"):
        installed(Spec(), geometry("h100-80gb"), (24, 11), Path("/e"), "PrologFlags=RunInJob\nNodeName=n[1-2]\n")


@pytest.mark.parametrize(("version", "flags"), [((22, 5), "CountOnly"), ((24, 11), "CountOnly,explicit")])
def test_gres_conf_counts_every_type_of_every_node(version: tuple[int, int], flags: str) -> None:
    text = site.render("gres.conf.j2", site=replace(SITE, version=version))
    assert f"NodeName=gpu[01-16] Name=mig Type=1g.10gb Count=14 Flags={flags}" in text.splitlines()
    assert text.count("NodeName=") == 7


def test_systemd_unit_names_program_and_configuration() -> None:
    text = unit("/opt/migbatch/bin/migbatch", "/etc/migbatch")
    assert "ExecStart=/opt/migbatch/bin/migbatch node agent --etc /etc/migbatch" in text.splitlines()


def test_missing_template_variable_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        site.render("gres.conf.j2")


def test_a_missing_template_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.j2"):
        site.render("nothing.j2")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list", "deb [signed-by=/k] http://mirror.example/debian bookworm main\n"),
        ("sources.list.d/debian.sources", "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\n"),
        (
            "sources.list.d/a.list",
            "# deb http://no.example/debian x main\n"
            "deb http://x.example/debian-security y main\ndeb http://mirror.example/debian y main\n",
        ),
    ],
)
def test_mirror_is_read_from_the_sources_of_apt(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert mirror(tmp_path) == "http://mirror.example/debian"


def test_error_without_a_debian_archive_names_the_mirror_option(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match="--mirror"):
        mirror(tmp_path)


def test_no_port_is_given_to_two_starters() -> None:
    first, second = PortBook(), PortBook()
    try:
        ports = [book.take() for book in (first, second) for _ in range(50)]
    finally:
        first.release()
        second.release()
    assert len(set(ports)) == 100


def test_listening_is_read_from_the_kernel() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not listening(port)
        server.listen()
        assert listening(port)


def test_recycled_pid_is_not_taken_for_the_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        known = ProcessId.of(child.pid)
        recycled = ProcessId(child.pid, known.start + 1)
        assert known.alive
        assert not recycled.alive
        assert not recycled.signal(signal.SIGKILL)
        recycled.end(1.0)
        assert known.alive
        known.end(60.0)
        assert not known.alive
    assert start_time(child.pid) is None
    assert ProcessId.own().pid == os.getpid()


def test_children_in_a_session_are_found_and_those_that_left_it_are_not() -> None:
    line = "sleep 60 & exec sleep 60"
    with subprocess.Popen(["sh", "-c", line], start_new_session=True) as process:
        leader = ProcessId.of(process.pid)
        outside = subprocess.Popen(["sleep", "60"], start_new_session=True)
        wait_until(leader.children_of_session, 30.0, "a child")
        (child,) = leader.children_of_session()
        assert child not in (leader, ProcessId.of(outside.pid))
        assert ProcessId.of(outside.pid) not in ProcessId.own().children_of_session()
        for killed in (leader, child, ProcessId.of(outside.pid)):
            killed.signal(signal.SIGKILL)
        outside.wait()
    assert leader.children_of_session() == []


def test_interrupt_is_delayed_until_the_work_ends_with_other_threads_too() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    done = []
    try:
        with pytest.raises(KeyboardInterrupt), registry.uninterrupted(), registry.uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            done.append("work")
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert done == ["work"]


def test_first_interrupt_raises_and_later_ones_do_not_stop_the_cleanup() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    cleared = []
    try:
        with pytest.raises(KeyboardInterrupt), registry.interrupted_once():
            try:
                with registry.interrupted_once():
                    signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                cleared.append("all")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert cleared == ["all"]


def test_interrupted_removal_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "bed"
    for name in ("etc", "log", "run/procs"):
        (directory / name).mkdir(parents=True)
    (directory / registry.MARKER).touch()
    (directory / "link").symlink_to(tmp_path)
    removed: list[Path] = []
    rmtree = shutil.rmtree

    def once(path: Path) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(path)
        rmtree(path)

    record = registry.TestbedRecord("bed", str(directory), None, "", ())
    monkeypatch.setattr(process_group, "reopen", lambda *_: Gone())
    monkeypatch.setattr(shutil, "rmtree", once)
    with pytest.raises(KeyboardInterrupt):
        registry.destroy(record)
    assert directory.exists()
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    registry.destroy(record)
    assert not directory.exists() and tmp_path.exists()


class Gone:
    """The processes of a test bed that has none."""

    def destroy(self) -> None:
        pass
