"""migbatchd as a process: signals, reload, crash, a second instance, readiness."""

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys

import pytest

from slurm_migbatch.config import render
from slurm_migbatch.node.auth import TokenSigner
from slurm_migbatch.testbed.ports import PortBook
from tests.support.daemon_fakes import Node, gpu, inventory
from tests.support.daemon_running import PATIENCE_S, eventually


class Daemon:
    """One configuration and the processes started on it. There is no Slurm: commands are not found."""

    def __init__(self, home):
        self.ports = PortBook()
        self.home, self.port = home, self.ports.take()
        self.config = home / "migbatch.toml"
        (home / "token").write_text(secrets.token_hex(32))
        (home / "token").chmod(0o600)
        self.write()
        self.processes = []

    def write(self, **more):
        values = {
            "cluster": {"slurm_bin": str(self.home), "poll_s": 0.1},
            "submit": {
                "socket": str(self.home / "submit.sock"),
                "table": str(self.home / "table.lua"),
                "catalog": str(self.home / "catalog.json"),
            },
            "store": {"url": f"sqlite:///{self.home}/migbatch.db"},
            "node_api": {
                "listen": "127.0.0.1",
                "port": self.port,
                "auth": "token",
                "token_file": str(self.home / "token"),
            },
            "daemon": {"run_dir": str(self.home / "run")},
        }
        for section, keys in more.items():
            values[section].update(keys)
        self.config.write_text(render(values))

    def start(self, *, descriptors=0, **env):
        argv = [sys.executable, "-m", "slurm_migbatch.cli.migbatchd", "-c", str(self.config)]
        argv = ["prlimit", f"--nofile={descriptors}:{descriptors}", *argv] if descriptors else argv
        log = (self.home / "log").open("ab")
        process = subprocess.Popen(argv, stderr=log, env={"PATH": os.environ["PATH"], **env})
        log.close()
        self.processes.append(process)
        return process

    def serving(self):
        eventually(lambda: self.health() is not None)

    def health(self):
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            link.request("GET", "/healthz")
            return json.loads(link.getresponse().read())
        except OSError:
            return None
        finally:
            link.close()

    @property
    def log(self):
        return (self.home / "log").read_text()

    def node(self):
        return Node(self.port, TokenSigner(str(self.home / "token")))


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon(tmp_path)
    yield daemon
    for process in daemon.processes:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_S)
    daemon.ports.release()


def test_sigterm_ends_it_cleanly(daemon):
    process = daemon.start()
    daemon.serving()
    daemon.node().events(inventory(gpu(0)))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert "stopping on SIGTERM" in daemon.log
    assert "Traceback" not in daemon.log
    assert not (daemon.home / "migbatch.db-wal").exists()


def test_killed_and_started_again_it_knows_what_was_acknowledged(daemon):
    process = daemon.start()
    daemon.serving()
    assert daemon.node().events(inventory(gpu(0)))[1] == {"acked": 1}
    process.kill()
    process.wait(PATIENCE_S)
    daemon.start()
    daemon.serving()
    assert daemon.node().events({"seq": 2, "ts": 2.0, "kind": "fault", "what": "x"})[1] == {"acked": 2}


def test_a_second_one_is_refused(daemon):
    daemon.start()
    daemon.serving()
    second = daemon.start()
    assert second.wait(PATIENCE_S) == 1
    assert "migbatchd: error: migbatchd is already running as process" in daemon.log


def test_reload_takes_over_what_is_right_and_keeps_what_was_where_it_is_wrong(daemon):
    process = daemon.start()
    daemon.serving()
    old, daemon.port = daemon.port, daemon.ports.take()
    daemon.write()
    process.send_signal(signal.SIGHUP)
    daemon.serving()
    assert process.poll() is None
    daemon.config.write_text("[node_api]\nprot = 1\n")
    process.send_signal(signal.SIGHUP)
    eventually(lambda: "the configuration is not taken over" in daemon.log)
    assert ":2: unknown key 'prot'" in daemon.log
    daemon.serving()
    assert daemon.port != old


def test_no_slurm_is_no_reason_to_end(daemon):
    daemon.start()
    daemon.serving()
    eventually(lambda: daemon.health()["checks"]["slurm"] == "failing" and "cannot be started" in daemon.log)
    assert not daemon.health()["ok"]
    assert daemon.node().plan() == (200, {"version": 0})
    assert daemon.log.count("Slurm does not answer") == 1


def test_systemd_is_told(daemon):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(daemon.home / "notify"))
        systemd.settimeout(PATIENCE_S)
        process = daemon.start(NOTIFY_SOCKET=str(daemon.home / "notify"), JOURNAL_STREAM="1:2")
        assert systemd.recv(100).startswith(b"READY=1")
        process.send_signal(signal.SIGTERM)
        assert systemd.recv(100) == b"STOPPING=1"
        process.wait(PATIENCE_S)
    assert "<6>daemon.service: serving nodes" in daemon.log


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[node_api]\nport = 'x'\n", ":2: node_api.port must be a whole number"),
        ("[store]\nurl = 'sqlite:///relative.db'\n", "names no absolute file"),
    ],
)
def test_what_cannot_work_is_said_and_ends_it(daemon, text, said):
    if "[store]" in text:
        daemon.write(store={"url": "sqlite:///relative.db"})
    else:
        daemon.config.write_text(text)
    assert daemon.start().wait(PATIENCE_S) == 1
    assert said in daemon.log
    assert "Traceback" not in daemon.log


def test_a_port_that_is_taken(daemon):
    with socket.create_server(("127.0.0.1", daemon.port)):
        assert daemon.start().wait(PATIENCE_S) == 1
    assert f"cannot listen on 127.0.0.1 port {daemon.port}" in daemon.log
    assert "Traceback" not in daemon.log
