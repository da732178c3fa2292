"""A record of two users' jobs, and a query service for it in a separate process, with a private munged."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_migbatch.config import render
from slurm_migbatch.node.auth import MungeSigner, digest_of, headers
from slurm_migbatch.query.login import Servers
from slurm_migbatch.query.protocol import PATH
from slurm_migbatch.store.db import open_store
from slurm_migbatch.testbed.ports import PortBook
from tests.support.directories import open_to_users
from tests.support.munge import private_munged
from tests.support.stores import prepared
from tests.support.waiting import eventually

#: strings that only the user who wrote them may read
SECRETS = ("secretname", "secretcomment", "secretmodel", "secretdoubt")
ALICE, BOB = 1, 2
"""uids of daemon and bin, which every Linux has."""

SCONTROL = """#!/bin/sh
cat {home}/config
"""


def fill(url: str) -> None:
    """Make a record in which job 7 and the running job 9 are Alice's and job 8 is Bob's."""
    now = time.time() - 60  # "now" in queries is a whole second, and must not precede the record's times
    with open_store(prepared(url)) as store:
        for number, uid, user in ((7, ALICE, "daemon"), (8, BOB, "bin"), (9, ALICE, "daemon")):
            decision = {
                "id": f"d{number}", "ts": now, "uid": uid, "user": user, "partition": "gpu",
                "asked": f"--gres=mig:auto --comment='migbatch: secretcomment{number}'",
                "hints": {"model": f"secretmodel{number}"}, "bucket": f"secretmodel{number}/infer/b8/128tok",
                "candidates": [], "chosen": "mig:1g.10gb:1", "message": f"secretmodel{number} fits",
                "source": "service",
            }  # fmt: skip
            store.record_decisions([decision])
            entry = {"gpu": "GPU-a", "profile": "1g.10gb", "start": number - 7, "size": 1, "mig_uuid": f"MIG-{number}"}
            run = {"job": number, "restart": 0, "uid": uid, "user": user, "decision": f"d{number}", "slices": [entry]}
            events: list[dict[str, Any]] = [{"kind": "start", **run}]
            if number != 9:
                events.append({"kind": "stop", "exit_code": 0, **run})
            store.ingest("n1", f"j{number}", "b1", [{"seq": n, "ts": now, **e} for n, e in enumerate(events, 1)])
            state = "RUNNING" if number == 9 else "COMPLETED"
            job = {"job_id": number, "restarts": 0, "state": state, "name": f"secretname{number}", "uid": uid}
            store.upsert_jobs([{**job, "user": user, "account": f"a{number}", "submit": now - 9, "partition": "gpu"}])


class QueryProcess:
    """A running service: its port, its process, and queries as any user."""

    def __init__(self, home: Path, munge: str, report: dict[str, Any] | None = None, **query: Any) -> None:
        self.home, self.munge, self._book = home, munge, PortBook()
        self.port = self._book.take()
        (home / "bin").mkdir(exist_ok=True)
        self.private("")
        scontrol = home / "bin" / "scontrol"
        scontrol.write_text(SCONTROL.format(home=home))
        scontrol.chmod(0o755)
        self.url = f"sqlite:///{home}/migbatch.db"
        values: dict[str, dict[str, Any]] = {
            "cluster": {"slurm_bin": str(home / "bin"), "slurm_user": "root", "timeout_s": 5},
            "submit": {"catalog": str(home / "catalog.json")},
            "store": {"url": self.url},
            "node_api": {"munge_socket": munge},
            "query": {"listen": "127.0.0.1", "port": self.port, **query},
            "daemon": {"run_dir": str(home / "run")},
            **({"report": report} if report else {}),
        }
        self.config = home / "migbatch.toml"
        self.config.write_text(render(values))
        self.log_file = home / "log"
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slurm_migbatch.query.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"config": self.config.read_text(), "level": "info"}).encode() + b"\n")
        self.process.stdin.flush()
        eventually(lambda: "serving users" in self.log)

    def private(self, words: str) -> None:
        """Set PrivateData of the site before the first query of the service for it."""
        (self.home / "config").write_text(f"PrivateData = {words or 'none'}\nAccountingStorageType = (null)\n")

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def servers(self) -> Servers:
        return Servers((f"http://127.0.0.1:{self.port}",), frozenset({0}), self.munge, "the test")

    def proof(self, body: bytes, uid: int = 0, path: str = PATH) -> tuple[dict[str, str], str]:
        """Return the headers and the credential for a request of `uid` with this body."""
        signed: tuple[dict[str, str], str] = as_user(
            uid, lambda: headers(MungeSigner(self.munge), "POST", path, "login", body)
        )
        assert digest_of(body) in signed[0].values()
        return signed

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        self._book.release()


def as_user(uid: int, work: Any) -> Any:
    """Call `work` with another effective uid, by which munged identifies the user."""
    os.seteuid(uid)
    try:
        return work()
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def query_process(
    home: Path, private: str = "", report: dict[str, Any] | None = None, **query: Any
) -> Iterator[QueryProcess]:
    """Run a service on the record of `fill`, on a site with that PrivateData."""
    open_to_users(home)
    (home / "munge").mkdir(mode=0o755)
    with private_munged(home / "munge") as socket:
        fill(f"sqlite:///{home}/migbatch.db")
        service = QueryProcess(home, socket, report, **query)
        service.private(private)
        try:
            yield service
        finally:
            service.stop()
