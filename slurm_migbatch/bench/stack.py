"""A whole migbatch on a test bed: simulated GPUs, hooks, agents, migbatchd and Lua shims, as a site installs them.

The order is a site's too: nodes report their GPUs first, then the shims are rendered from what migbatchd learned.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from slurm_migbatch.config import render as render_config
from slurm_migbatch.site import template_folder
from slurm_migbatch.submit import shim
from slurm_migbatch.submit.rewrite import Policy
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.conf import CATALOG
from slurm_migbatch.testbed.errors import TestbedError
from slurm_migbatch.testbed.spec import Hooks
from slurm_migbatch.workload import catalog as catalogs

#: an interpreter that ordinary users may run, for TaskProlog
TASK_PYTHON = "/usr/bin/python3"


class Stack:
    """`with Stack(nodes=2, gpus=2) as stack:` brings everything up; `stack.cluster` is the Slurm cluster.

    Args:
        config: values of migbatch.toml beside those that the test bed needs (section -> key -> value).
        node_conf: further lines of node.conf.
        auth: how nodes and migbatchd know each other, "munge" or "token".
        agents: whether `migbatch node agent` runs on the nodes once their GPUs are reported.
        filter: whether slurmctld loads the submit filter.
        directory, spec: as for `Cluster`.
    """

    def __init__(
        self,
        directory: Path | str | None = None,
        *,
        config: Mapping[str, Mapping[str, Any]] | None = None,
        node_conf: Mapping[str, str] | None = None,
        auth: str = "token",
        agents: bool = True,
        filter: bool = True,
        **spec: object,
    ) -> None:
        self.cluster = Cluster(directory, **spec)
        home = self.cluster.directory
        self.hooks = Hooks(f"{home}/hooks/prolog", f"{home}/hooks/epilog", f"{home}/hooks/task_prolog")
        self.cluster.spec = replace(self.cluster.spec, hooks=self.hooks)
        self._values = config or {}
        self._node_conf = node_conf or {}
        self._auth, self._agents, self._filter = auth, agents, filter

    @property
    def directory(self) -> Path:
        """Where everything lives."""
        return self.cluster.directory

    @property
    def config(self) -> Path:
        """migbatch.toml."""
        return self.directory / "etc/migbatch.toml"

    @property
    def catalog(self) -> Path:
        """What migbatchd knows of the site."""
        return self.directory / "migbatch/catalog.json"

    def __enter__(self) -> Stack:
        self.cluster.up()
        try:
            self._install()
            self._start()
        except BaseException:
            self.cluster.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cluster.down()

    # -- migbatch's own commands -------------------------------------------------------------------------------

    def migbatch(self, *arguments: str, check: bool = True) -> str:
        """Run `migbatch ARGUMENTS` against this cluster as root; its output."""
        argv = [sys.executable, "-m", "slurm_migbatch.cli", *arguments]
        return self.cluster.run(argv, env={"MIGBATCH_CONFIG": str(self.config)}, check=check).stdout

    def start_daemon(self) -> None:
        """Start migbatchd and wait until it serves."""
        argv = [sys.executable, "-m", "slurm_migbatch.daemon", "-c", str(self.config)]
        self.cluster.spawn("migbatchd", argv)
        self.cluster.wait("migbatchd", lambda: self.health() is not None)

    def start_agent(self, node: str) -> None:
        """Start a node's agent."""
        argv = [sys.executable, "-m", "slurm_migbatch.cli", "node", "agent", "--etc", str(self.directory / "etc")]
        self.cluster.spawn(f"agent-{node}", argv, env={"SLURMD_NODENAME": node})

    def health(self) -> Mapping[str, Any] | None:
        """migbatchd's /healthz; None where it does not answer."""
        url = f"http://127.0.0.1:{self.cluster.ports['migbatchd']}/healthz"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        except OSError:
            return None
        found: Mapping[str, Any] = json.loads(body)
        return found

    def until(self, what: str, ready: Callable[[], bool], timeout: float = 30.0) -> None:
        """Wait for `ready`."""
        end = time.monotonic() + timeout
        while not ready():
            if time.monotonic() > end:
                raise TestbedError(f"{what} did not come about within {timeout:g} s:\n{self.logs()}")
            time.sleep(0.05)

    def logs(self) -> str:
        """The last lines that migbatchd and the agents wrote."""
        names = ["migbatchd", *(f"agent-{name}" for name in self.cluster.spec.node_names)]
        return "\n".join(f"{name}: {self.cluster.daemons.tail(name)}" for name in names)

    # -- bringing it up ----------------------------------------------------------------------------------------

    def _install(self) -> None:
        home = self.directory
        etc = home / "etc"
        machine = f"{home}/nodes/%n/driver"
        lines = {
            "StateDir": f"{home}/nodes/%n/state",
            "RunDir": f"{home}/nodes/%n/run",
            "NvmlLibrary": f"{machine}/libnvidia-ml.so.1",
            "ProcRoot": f"{machine}/proc",
            "DevRoot": f"{machine}/dev",
            "BootIdFile": f"{machine}/boot_id",
            "Controller": f"http://127.0.0.1:{self.cluster.ports['migbatchd']}",
            "Auth": self._auth,
            "MungeSocket": str(self.cluster.munge_socket),
            "TokenFile": str(etc / "token"),
            "ScontrolPath": f"{self.cluster.bin}/scontrol",
            "SlurmConf": str(self.cluster.slurm_conf),
            **self._node_conf,
        }
        with os.fdopen(os.open(etc / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as token:
            token.write(secrets.token_hex(32))
        (etc / "node.conf").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        self.migbatch("node", "install", "--dest", f"{home}/hooks", "--etc", str(etc), "--task-python", TASK_PYTHON)
        (home / "migbatch").mkdir(mode=0o755, exist_ok=True)
        self.config.write_text(render_config(self._settings()))

    def _settings(self) -> dict[str, dict[str, Any]]:
        home = self.directory
        settings: dict[str, dict[str, Any]] = {
            "cluster": {
                "slurm_bin": str(self.cluster.bin),
                "slurm_conf": str(self.cluster.slurm_conf),
                "slurm_user": "root",
                "catalog_nodes": CATALOG,
            },
            "submit": {
                "socket": str(home / "migbatch/submit.sock"),
                "table": str(home / "migbatch/table.lua"),
                "catalog": str(self.catalog),
            },
            "store": {"url": f"sqlite:///{home}/migbatch/migbatch.db"},
            "node_api": {
                "listen": "127.0.0.1",
                "port": self.cluster.ports["migbatchd"],
                "auth": self._auth,
                "munge_socket": str(self.cluster.munge_socket),
                "token_file": str(home / "etc/token"),
            },
            "daemon": {"run_dir": str(home / "migbatch")},
        }
        for section, values in self._values.items():
            settings.setdefault(section, {}).update(values)
        return settings

    def _start(self) -> None:
        self.start_daemon()
        for name in self.cluster.spec.node_names:
            self.start_agent(name)
        self.until("the catalog", self._complete)
        if not self._agents:
            for name in self.cluster.spec.node_names:
                self.cluster.stop(f"agent-{name}")
        if self._filter:
            self.load_filter()

    def _complete(self) -> bool:
        self.cluster.daemons.check()
        return self.catalog.exists() and bool(catalogs.load(self.catalog).partitions)

    def load_filter(self) -> None:
        """Render the submit filter from the catalog and let slurmctld load it."""
        etc = self.directory / "etc"
        text = shim.render(
            shim.JOB_SUBMIT,
            template_folder(),
            socket=str(self.directory / "migbatch/submit.sock"),
            table=str(self.directory / "migbatch/table.lua"),
            catalog=catalogs.load(self.catalog),
            policy=Policy(),
        )
        (etc / shim.JOB_SUBMIT).write_text(text)
        self.cluster.spec = replace(self.cluster.spec, job_submit=str(etc / shim.JOB_SUBMIT))
        self.cluster.write_conf()
        self.cluster.restart("slurmctld")
        self.until("registration of the nodes", lambda: set(self.cluster.node_states().values()) == {"idle"})
