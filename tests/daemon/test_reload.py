"""SIGHUP while submissions go on: every one is answered by the service, none is left to the compiled table."""

import json
import signal
import socket
import threading
from pathlib import Path

import pytest

from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.request import JobRequest
from slurm_migbatch.submit.service import reserved
from tests.support.daemon_process import Daemon
from tests.support.gpu_kinds import SITE
from tests.support.waiting import PATIENCE_S, eventually

RELOADS = 4


class Submissions(threading.Thread):
    """Sends requests as slurmctld does, one after the other; `kept`: on one connection, reopened once it is closed."""

    def __init__(self, path: Path, kept: bool) -> None:
        super().__init__()
        self.path, self.kept = path, kept
        self.answered, self.lost = 0, []
        self.over = threading.Event()
        request = JobRequest(uid=0, user="root", partition="gpu", tres_per_node="gres:mig:auto")
        self.question = protocol.encode(request.to_fields())

    def ask(self, link: socket.socket) -> bool:
        try:
            link.sendall(self.question)
            return bool(link.recv(protocol.MAX_REQUEST))
        except OSError:
            return False

    def run(self) -> None:
        while not self.over.is_set():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
                link.settimeout(PATIENCE_S)
                try:
                    link.connect(str(self.path))
                except OSError as error:
                    self.lost.append(str(error))
                    continue
                if not self.ask(link):
                    self.lost.append("no answer")
                    continue
                self.answered += 1
                while self.kept and not self.over.is_set() and self.ask(link):
                    self.answered += 1


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path) as running:
        (tmp_path / "catalog.json").write_text(json.dumps(SITE.to_dict()))
        yield running


@pytest.mark.slow
def test_every_submission_during_reloads_is_answered(daemon):
    process = daemon.start()
    path = reserved(daemon.home / "submit.sock")
    eventually(lambda: "serving submissions" in daemon.log)  # a SIGHUP right before it would leave one line fewer
    askers = [Submissions(path, kept) for kept in (True, False, False)]
    for asker in askers:
        asker.start()
    try:
        for number in range(1, RELOADS + 1):
            before = [asker.answered for asker in askers]
            process.send_signal(signal.SIGHUP)
            eventually(lambda number=number: daemon.log.count("serving submissions") > number)
            eventually(lambda before=before: all(a.answered > n + 20 for a, n in zip(askers, before, strict=True)))
    finally:
        for asker in askers:
            asker.over.set()
        for asker in askers:
            asker.join(PATIENCE_S)
    assert [asker.lost for asker in askers] == [[], [], []]
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert "Traceback" not in daemon.log
    assert not path.exists()


@pytest.mark.slow
def test_one_process_answers_with_the_new_configuration_after_a_reload(daemon):
    process = daemon.start()
    path = reserved(daemon.home / "submit.sock")
    eventually(path.exists)
    daemon.write(submit={"socket": str(daemon.home / "elsewhere.sock")}, daemon={"run_dir": str(daemon.home / "other")})
    process.send_signal(signal.SIGHUP)
    eventually(lambda: not path.exists())
    assert reserved(daemon.home / "elsewhere.sock").exists()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    eventually(lambda: len(children.read_text().split()) == 1)
    assert "[daemon] run_dir" in daemon.log
    assert "a restart of migbatchd" in daemon.log
    assert not (daemon.home / "other").exists()


@pytest.mark.slow
def test_reload_while_the_record_is_moved_away_begins_no_other_one(daemon):
    process = daemon.start()
    record, aside = daemon.home / "migbatch.db", daemon.home / "aside.db"
    eventually(lambda: "serving submissions" in daemon.log)
    record.rename(aside)
    process.send_signal(signal.SIGHUP)
    eventually(lambda: "the new configuration is not applied" in daemon.log)
    assert f"{record} was moved or deleted: put it back" in daemon.log
    assert not record.exists()
    aside.rename(record)
    process.send_signal(signal.SIGHUP)
    eventually(lambda: daemon.log.count("serving submissions") == 2)
