"""The user commands on a login node of a test bed, without configuration and database."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import slurm_migbatch
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import PYTHON

Done = subprocess.CompletedProcess[str]


class LoginNode:
    """The commands on a login node, where the only configuration is login.conf."""

    def __init__(self, bed: Cluster) -> None:
        self._bed, self._lib = bed, bed.directory / "login"
        ignored = shutil.ignore_patterns("lab", "testbed", "__pycache__", "*.c", "*.h")
        shutil.copytree(Path(slurm_migbatch.__file__).parent, self._lib / "slurm_migbatch", ignore=ignored)
        for package in ("click", "rich"):
            spec = find_spec(package)
            assert spec is not None and spec.origin is not None
            shutil.copytree(Path(spec.origin).parent, self._lib / package)
        self.conf = bed.directory / "login.conf"
        url = f"http://127.0.0.1:{bed.ports['query']}"
        self.conf.write_text(
            f"Servers=http://127.0.0.1:1,{url}\nSlurmUser={bed.spec.slurm_user}\nMungeSocket={bed.munge_socket}\n"
        )

    def run(
        self, user: str | None, command: str, *arguments: str, at: str = "login"
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user; with `at` "controller", on the host of migbatchd, with its configuration."""
        module, words = ("migacct", arguments) if command == "migacct" else ("main", (command, *arguments))
        env = {"PYTHONPATH": str(self._lib), "PYTHONDONTWRITEBYTECODE": "1"}
        if at == "login":
            env |= {"MIGBATCH_CONFIG": "", "MIGBATCH_LOGIN_CONF": str(self.conf)}
        start = f"from slurm_migbatch.cli.{module} import main; main()"
        return self._bed.run([PYTHON, "-c", start, *words], user, check=False, env=env)

    def script(self, command: str) -> str:
        """Return a shell script that runs this command as the calling user."""
        module = "migacct" if command == "migacct" else "main"
        env = f"PYTHONPATH={self._lib} PYTHONDONTWRITEBYTECODE=1 MIGBATCH_CONFIG= MIGBATCH_LOGIN_CONF={self.conf}"
        start = f"from slurm_migbatch.cli.{module} import main; main()"
        return f'#!/bin/sh\nexec env {env} {PYTHON} -c "{start}" "$@"\n'

    def out(self, user: str | None, command: str, *arguments: str, at: str = "login") -> str:
        done = self.run(user, command, *arguments, at=at)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout
