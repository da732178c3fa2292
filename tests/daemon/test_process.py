"""migbatchd as a process: signals, reload, crash, a second instance, readiness."""

import json
import re
import signal
import socket
import subprocess
from contextlib import suppress
from dataclasses import replace

import pytest

from slurm_migbatch.config import loads
from slurm_migbatch.daemon import log, main
from slurm_migbatch.daemon.compose import compose, keeper_of
from slurm_migbatch.node.auth import UsedCredentials
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.store.history import HISTORY
from tests.support.daemon_fakes import gpu, inventory
from tests.support.daemon_process import Daemon
from tests.support.gpu_kinds import SITE
from tests.support.old_schemas import make_old
from tests.support.waiting import PATIENCE_S, eventually


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path) as running:
        yield running


def test_sigterm_ends_migbatchd_cleanly(daemon):
    process = daemon.start()
    daemon.serving()
    daemon.node().events(inventory(gpu(0)))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert "stopping on SIGTERM" in daemon.log
    assert "Traceback" not in daemon.log
    assert not (daemon.home / "migbatch.db-wal").exists()


@pytest.mark.slow
def test_acknowledged_events_are_known_after_a_kill_and_restart(daemon):
    process = daemon.start()
    daemon.serving()
    assert daemon.node().events(inventory(gpu(0)))[1] == {"acked": 1}
    process.kill()
    process.wait(PATIENCE_S)
    daemon.start()
    daemon.serving()
    assert daemon.node().events({"seq": 2, "ts": 2.0, "kind": "fault", "what": "x"})[1] == {"acked": 2}


def test_second_instance_is_refused(daemon):
    daemon.start()
    daemon.serving()
    second = daemon.start()
    assert second.wait(PATIENCE_S) == 1
    assert "migbatchd: error: migbatchd is already running as process" in daemon.log


def test_reload_applies_a_valid_configuration_and_ignores_an_invalid_one(daemon):
    process = daemon.start()
    daemon.serving()
    old, daemon.port = daemon.port, daemon.ports.take()
    daemon.write()
    process.send_signal(signal.SIGHUP)
    daemon.serving()
    assert process.poll() is None
    daemon.config.write_text("[node_api]\nprot = 1\n")
    process.send_signal(signal.SIGHUP)
    eventually(lambda: "the new configuration is not applied" in daemon.log)
    assert ":2: unknown key 'prot'" in daemon.log
    daemon.serving()
    assert daemon.port != old


def test_reload_with_another_database_applies_the_other_keys_of_its_section(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "setup", lambda level: None)
    path = tmp_path / "migbatch.toml"
    path.write_text("[store]\nurl = 'sqlite:////new.db'\nkeep = '60d'\n")
    old = loads("[store]\nurl = 'sqlite:////old.db'\n")
    store = main._reloaded(str(path), old).store
    assert (store.url, store.keep) == ("sqlite:////old.db", "60d")


def test_reload_changes_the_commands_that_find_the_primary_slurmctld(site, tmp_path):
    """After an upgrade of Slurm to another directory a standby could not take over until its own restart."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Slurmctld(primary) at ctl1 is UP'\n")
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "token").write_text("0" * 64)
    (tmp_path / "token").chmod(0o600)
    api = replace(site.node_api, auth="token", token_file=str(tmp_path / "token"))
    before, after = (
        replace(site, node_api=api, cluster=replace(site.cluster, slurm_bin=f"{tmp_path}{folder}"))
        for folder in ("/removed", "")
    )
    keeper = keeper_of(before)
    compose(before, keeper, UsedCredentials())
    with pytest.raises(SlurmError):
        keeper.slurm.ping()
    compose(after, keeper, UsedCredentials())
    assert keeper.slurm.ping() == {"ctl1": True}


def test_message_sent_again_after_a_reload_is_refused(daemon):
    process = daemon.start()
    daemon.serving()
    node, body = daemon.node(), b'{"node": "n1", "have": 0, "wait": 0}'
    credential = node.credential("/node/v1/plan", body)
    assert node.send("/node/v1/plan", body, credential=credential)[0] == 200
    process.send_signal(signal.SIGHUP)
    eventually(lambda: daemon.log.count("serving nodes") == 2)
    assert node.send("/node/v1/plan", body)[0] == 200
    assert node.send("/node/v1/plan", body, credential=credential)[0] == 401


@pytest.mark.slow
@pytest.mark.parametrize("listen", ["192.0.2.1", "no-such-host.invalid", "a" * 80])
def test_reload_with_an_address_that_this_host_lacks_keeps_the_old_configuration(daemon, listen):
    process = daemon.start()
    daemon.serving()
    daemon.write(node_api={"listen": listen})
    process.send_signal(signal.SIGHUP)
    eventually(lambda: f"cannot listen on {listen}" in daemon.log or process.poll() is not None)
    eventually(lambda: daemon.health() is not None or process.poll() is not None)
    assert process.poll() is None
    assert f"the new configuration is not applied: cannot listen on {listen}" in daemon.log
    assert "configuration reloaded" not in daemon.log
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert "Traceback" not in daemon.log


def test_reload_with_an_unusable_token_file_does_not_interrupt_the_service(daemon):
    """Neither the new configuration nor the old one could be used again: both name that file."""
    process = daemon.start()
    daemon.serving()
    daemon.write(daemon={"log_level": "debug"})
    (daemon.home / "token").chmod(0o644)
    process.send_signal(signal.SIGHUP)
    eventually(lambda: "the new configuration is not applied: [node_api]: " in daemon.log)
    assert daemon.health() is not None and process.poll() is None
    assert daemon.log.count("serving nodes") == 1
    (daemon.home / "token").chmod(0o600)
    process.send_signal(signal.SIGHUP)
    eventually(lambda: "configuration reloaded" in daemon.log and daemon.log.count("serving nodes") == 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert "Traceback" not in daemon.log


def test_unusable_token_of_monitoring_stops_no_service(daemon):
    """It would stop every start, and a standby's only when it has to take over."""
    path = daemon.home / "metrics"
    daemon.write(node_api={"metrics_token_file": str(path)})
    process = daemon.start()
    daemon.serving()
    assert f"[node_api] metrics_token_file: the token file {path} cannot be opened" in daemon.log
    for number, mode in enumerate((0o644, 0o600)):
        path.write_text("0" * 64)
        path.chmod(mode)
        process.send_signal(signal.SIGHUP)
        eventually(
            lambda number=number: (
                daemon.log.count("the new configuration is not applied: [node_api] metrics_token_file") == 1
                and daemon.log.count("serving nodes") == number + 1
            )
        )
    assert process.poll() is None


def test_migbatchd_keeps_running_without_slurm(daemon):
    daemon.start()
    daemon.serving()
    eventually(lambda: daemon.health()["checks"]["slurm"] == "failing" and "cannot be started" in daemon.log)
    assert not daemon.health()["ok"]
    assert daemon.node().plan() == (200, {"version": 0})
    assert daemon.log.count("Slurm does not answer") == 1


def test_systemd_is_notified_of_start_and_stop(daemon):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(daemon.home / "notify"))
        systemd.settimeout(PATIENCE_S)
        process = daemon.start(NOTIFY_SOCKET=str(daemon.home / "notify"), JOURNAL_STREAM="1:2")
        assert systemd.recv(100).startswith(b"READY=1")
        process.send_signal(signal.SIGTERM)
        assert systemd.recv(100) == b"STOPPING=1"
        process.wait(PATIENCE_S)
    assert "<6>daemon.listening: serving nodes" in daemon.log


def test_systemd_waits_for_the_migration_of_the_record(daemon):
    """It would kill migbatchd after 90 s, and again after each restart."""
    make_old(f"sqlite:///{daemon.home}/migbatch.db", len(HISTORY) - 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(daemon.home / "notify"))
        systemd.settimeout(PATIENCE_S)
        daemon.start(NOTIFY_SOCKET=str(daemon.home / "notify"))
        first, second = systemd.recv(200), systemd.recv(200)
    assert re.match(rb"EXTEND_TIMEOUT_USEC=[1-9][0-9]{9,}\n", first) and second.startswith(b"READY=1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[node_api]\nport = 'x'\n", ":2: node_api.port must be a whole number"),
        ("[store]\nurl = 'sqlite:///relative.db'\n", "is not an absolute path"),
    ],
)
def test_invalid_configuration_ends_migbatchd_with_an_error(daemon, text, message):
    if "[store]" in text:
        daemon.write(store={"url": "sqlite:///relative.db"})
    else:
        daemon.config.write_text(text)
    assert daemon.start().wait(PATIENCE_S) == 1
    assert message in daemon.log
    assert "Traceback" not in daemon.log


def test_port_in_use_ends_migbatchd_with_an_error(daemon):
    with socket.create_server(("127.0.0.1", daemon.port)):
        assert daemon.start().wait(PATIENCE_S) == 1
    assert f"cannot listen on 127.0.0.1 port {daemon.port}" in daemon.log
    assert "Traceback" not in daemon.log


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "small", disk], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("content", ["record", "run directory"])
def test_full_disk_at_the_start_is_named_with_what_to_do(daemon, small_disk, content):
    store, run_dir = {"url": f"sqlite:///{small_disk}/migbatch.db"}, {"run_dir": str(small_disk / "run")}
    daemon.write(**({"store": store} if content == "record" else {"daemon": run_dir}))
    first = daemon.start()
    daemon.serving()
    first.terminate()
    assert first.wait(PATIENCE_S) == 0
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    assert daemon.start().wait(PATIENCE_S) == 1
    (error,) = [line for line in daemon.log.splitlines() if line.startswith("migbatchd: error: ")]
    assert error.endswith(f"free space in {small_disk if content == 'record' else small_disk / 'run'}"), error
    assert "Traceback" not in daemon.log
    ballast.unlink()
    daemon.start()
    daemon.serving()


@pytest.mark.slow
def test_no_code_in_the_working_directory_is_run(daemon, tmp_path):
    """Root may start it by hand, for a test, in a directory where others can write."""
    place = tmp_path / "others"
    place.mkdir()
    for name in ("asyncio", "json", "slurm_migbatch"):
        (place / f"{name}.py").write_text(f"open({str(place / 'ran')!r}, 'a').close()\nraise SystemExit(1)\n")
    daemon.write(query={"enabled": True, "listen": "127.0.0.1", "port": daemon.ports.take()})
    (daemon.home / "catalog.json").write_text(json.dumps(SITE.to_dict()))
    daemon.start(cwd=place)
    daemon.serving()
    served = ("serving users", "serving submissions")
    eventually(lambda: all(word in daemon.log for word in served) or (place / "ran").exists())
    assert not (place / "ran").exists()
