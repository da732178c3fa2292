"""migbatchd in a separate process."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_migbatch.config import render
from slurm_migbatch.node.auth import TokenSigner
from slurm_migbatch.testbed.ports import PortBook
from tests.support.daemon_fakes import Node
from tests.support.waiting import PATIENCE_S, eventually


class Daemon:
    """A configuration and the processes started with it. There is no Slurm: its commands are not found."""

    def __init__(self, home: Path) -> None:
        self.ports = PortBook()
        self.home, self.port = home, self.ports.take()
        self.config = home / "migbatch.toml"
        (home / "token").write_text(secrets.token_hex(32))
        (home / "token").chmod(0o600)
        self.write()
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE_S)
        self.ports.release()

    def write(self, **more: Mapping[str, Any]) -> None:
        values: dict[str, dict[str, Any]] = {
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
            "query": {"enabled": False},
            "daemon": {"run_dir": str(self.home / "run")},
        }
        for section, keys in more.items():
            values[section].update(keys)
        self.config.write_text(render(values))

    def start(self, *, descriptors: int = 0, cwd: Path | None = None, **env: str) -> subprocess.Popen[bytes]:
        argv = [str(Path(sys.executable).with_name("migbatchd")), "-c", str(self.config)]
        argv = ["prlimit", f"--nofile={descriptors}:{descriptors}", *argv] if descriptors else argv
        log = (self.home / "log").open("ab")
        process = subprocess.Popen(argv, stderr=log, cwd=cwd, env={"PATH": os.environ["PATH"], **env})
        log.close()
        self.processes.append(process)
        return process

    def serving(self) -> None:
        eventually(lambda: self.health() is not None)

    def health(self) -> dict[str, Any] | None:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            link.request("GET", "/healthz")
            answer: dict[str, Any] = json.loads(link.getresponse().read())
            return answer
        except OSError:
            return None
        finally:
            link.close()

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    def node(self) -> Node:
        return Node(self.port, TokenSigner(str(self.home / "token")))
