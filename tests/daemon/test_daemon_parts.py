"""Lock, log lines, faults, ages, readiness and the audit."""

import asyncio
import concurrent.futures
import logging
import os
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.daemon import poll
from slurm_migbatch.daemon import record as daemon_record
from slurm_migbatch.daemon.lock import AlreadyRunning, InstanceLock
from slurm_migbatch.daemon.log import FaultReporter, LineFormatter
from slurm_migbatch.daemon.metrics import Age
from slurm_migbatch.daemon.poll import Poller, UnsavedJobs
from slurm_migbatch.daemon.records import asked_text
from slurm_migbatch.node.notify import notify
from slurm_migbatch.slurm.client import UNREAD, JobRow, SlurmError
from slurm_migbatch.slurm.gpu_defaults import GpuDefaults
from tests.support.daemon_fakes import FakeSlurm
from tests.support.directories import open_to_users


def test_poll_goes_on_with_the_last_settings(monkeypatch):
    """Jobs and nodes may come from slurmrestd while Slurm's commands do not answer."""
    slurm, seen = FakeSlurm(), []

    async def act(view):
        seen.append((view.gpu_defaults, view.backfill_window_s))
        if len(seen) == 1:
            slurm.gpu_defaults = failing
        return len(seen) < 3

    def failing():
        raise SlurmError("scontrol: Unable to contact slurm controller")

    async def polls():
        task = asyncio.create_task(Poller(slurm, 0.01, act).run())
        while len(seen) < 3:
            await asyncio.sleep(0.01)
        task.cancel()

    monkeypatch.setattr(poll, "_CONFIG_S", 0.0)
    slurm.gpu_defaults = lambda: {"gpu": GpuDefaults(8)}
    slurm.backfill_window_s = lambda: 600.0
    asyncio.run(asyncio.wait_for(polls(), 60))
    assert seen == [({"gpu": GpuDefaults(8)}, 600.0)] * 3


def test_second_instance_is_refused_and_names_the_first(tmp_path):
    first = InstanceLock(tmp_path / "run")
    first.acquire()
    with pytest.raises(AlreadyRunning, match=str(os.getpid())):
        InstanceLock(tmp_path / "run").acquire()
    first.release()
    again = InstanceLock(tmp_path / "run")
    again.acquire()
    again.release()


def test_lock_is_released_when_its_process_is_killed(tmp_path):
    code = (
        "import os,sys,pathlib;from slurm_migbatch.daemon.lock import InstanceLock;"
        "InstanceLock(pathlib.Path(sys.argv[1])).acquire();os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    lock = InstanceLock(tmp_path)
    lock.acquire()
    lock.release()


def test_other_users_cannot_hold_the_lock(tmp_path):
    """Whoever can open a file for reading can lock it: any user could keep migbatchd from starting again."""
    open_to_users(tmp_path)
    older = tmp_path / "migbatchd.pid"
    older.touch()
    older.chmod(0o644)
    lock = InstanceLock(tmp_path)
    lock.acquire()
    lock.release()
    code = "import fcntl,sys;fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH)"
    taken = subprocess.run(["/usr/bin/python3", "-c", code, str(older)], user=65534, stderr=subprocess.PIPE, text=True)
    assert "PermissionError" in taken.stderr


def line(message, *args, journal=False, **extra):
    record = logging.makeLogRecord(
        {
            "name": "slurm_migbatch.daemon.x",
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": message,
            "args": args,
        }
        | extra
    )
    return LineFormatter(journal=journal).format(record)


def test_log_lines_carry_fields():
    assert line("slot made", node="n1", job=12).endswith(" warning daemon.x: slot made node=n1 job=12")
    assert line("a", journal=True, why="it is late") == '<4>daemon.x: a why="it is late"'


@given(st.text(max_size=40), st.text(max_size=40))
def test_log_record_is_one_line_whatever_users_write(message, value):
    assert line("%s", message, job=value).isprintable()


def test_a_fault_is_logged_once_per_cause_and_backs_off(caplog):
    caplog.set_level(logging.INFO)
    now = [0.0]
    fault = FaultReporter("Slurm", "look there", logging.getLogger("t"), first=1, longest=5, clock=lambda: now[0])
    assert [fault.failed(OSError("port 1 refused")) for _ in range(5)] == [1, 2, 4, 5, 5]
    fault.failed("port 2 refused")
    fault.failed("timeout")
    now[0] = 60.0
    assert fault.open
    fault.succeeded()
    fault.succeeded()
    assert not fault.open
    assert [r.getMessage() for r in caplog.records] == [
        "Slurm: port 1 refused; look there",
        "Slurm: timeout; look there",
        "Slurm: recovered after 60 s and 7 failures",
    ]


def test_readiness_reaches_systemd(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1")
        assert server.recv(100) == b"READY=1"
    notify("READY=1")  # systemd is gone: no error
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")


def test_unreadable_row_neither_removes_nor_overwrites_its_job() -> None:
    class Kept:
        def __init__(self):
            self.rows, self.live = [], frozenset()

        def upsert_jobs(self, rows, *, live):
            self.rows.extend(rows)
            self.live = live

    jobs, store = UnsavedJobs(), Kept()
    running, unread = JobRow(7, state="RUNNING", name="x"), JobRow(7, state=UNREAD, reason="odd")
    jobs.update([running])
    jobs.save(store)
    assert jobs.update([unread]) == (False, frozenset())
    assert jobs.lists(7)
    jobs.save(store)
    assert [(row["job_id"], row["state"]) for row in store.rows] == [(7, "RUNNING")]
    assert store.live == {7}
    assert jobs.update([replace(running, state="COMPLETING")]) == (True, frozenset())
    assert jobs.update([]) == (True, frozenset({7}))


def test_supply_age_is_given_as_current_and_longest_value():
    now = 100.0
    age = Age(lambda: now)
    assert age.values() == {}
    age.renewed(99.0)
    now = 103.0  # from a poll at 99: the round of the next poll ends after 4 s
    age.renewed(102.5)
    now = 104.0
    assert age.values() == {"now": 1.5, "longest": 4.0}
    now = 110.0  # no further round
    assert age.values() == {"now": 7.5, "longest": 7.5}


def test_migbatchd_starts_without_importing_what_it_does_not_use():
    program = "import sys, slurm_migbatch.daemon.main; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "sqlalchemy" in imported
    assert not {"scipy", "jinja2", "sqlalchemy.dialects.mysql"} & imported


def test_submit_process_starts_without_importing_sqlalchemy_or_scipy():
    """After this process has ended, submissions wait for the next one."""
    program = "import sys, slurm_migbatch.daemon.submit_worker; print({*sys.modules} & {'sqlalchemy', 'scipy'})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("field", "text", "option"),
    [
        ("tres_per_node", "gres/mig:auto,gres/fpga:1", "--gres=mig:auto,fpga:1"),
        ("tres_per_node", "gres:mig:1", "--gres=mig:auto"),
        ("tres_per_node", "gres/fpga:1,gres/mig=2,gres/mig:1g.10gb:1", "--gres=fpga:1,mig:auto:2,mig:1g.10gb:1"),
        ("tres_per_job", "gres:gpu:2", "--gpus=2"),
        ("tres_per_task", "gres:gpu:1", "--gpus-per-task=1"),
        ("tres_per_task", "gres/mig:auto", "--tres-per-task=gres/mig:auto"),
        ("tres_per_task", "cpu:2,gres/gpu:1", "--tres-per-task=cpu:2,gres/gpu:1"),
        ("comment", "migbatch: mem=1g", "--comment='migbatch: mem=1g'"),
    ],
)
def test_a_request_is_recorded_as_the_option_that_the_user_wrote(field: str, text: str, option: str) -> None:
    assert asked_text({field: text}) == option


def test_a_database_that_does_not_take_loans_in_time_is_named(monkeypatch, caplog):
    monkeypatch.setattr(daemon_record, "_SAVE_S", 0.01)
    writer = SimpleNamespace(fault=SimpleNamespace(open=False), call=lambda *_: concurrent.futures.Future())
    assert not daemon_record.WriterRecord(writer).save([{}], [])
    assert "the database did not answer within 0.01 s; nothing is lent until it is writable" in caplog.text
