"""migbatch itself on a test bed, installed as a site installs it and run as programs: hooks, agents, migbatchd, shims.

Hooks run from a root-owned copy of what nodes get (node/, mig/ and pynvml) with /usr/bin/python3, of --slurm-root where
there is one: a checkout may lie where ordinary users cannot read, and TaskProlog runs as them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_migbatch.node.paths import limited

from .conf import catalog_names
from .errors import TestbedError
from .running_cluster import RunningCluster, write_private
from .spec import Hooks

PYTHON = "/usr/bin/python3"
#: as `submit.shim` names them, which is slow to import
_JOB_SUBMIT, _CLI_FILTER = "job_submit.lua", "cli_filter.lua"
_PARTS = ("__init__.py", "node", "mig")
_INSTALL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from slurm_migbatch.node.install import InstallError, install
try:
    list(install(Path(sys.argv[2]), Path(sys.argv[3]), sys.executable))
except InstallError as error:
    sys.exit(str(error))
"""


class Product:
    """migbatch on one test bed."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.cluster = cluster
        self.etc = cluster.directory / "etc"
        self.config = self.etc / "migbatch.toml"
        self.state = cluster.directory / "migbatch"

    def install_hooks(self) -> None:
        """Copy the node's part, write node.conf and the hooks, and name them in the test bed's specification."""
        self._copy(self.cluster.directory / "lib")
        write_private(self.etc / "token", secrets.token_hex(32).encode())
        (self.etc / "node.conf").write_text("".join(f"{key}={value}\n" for key, value in self._node_conf().items()))
        hooks = self.cluster.directory / "hooks"
        self.cluster.run([PYTHON, "-c", _INSTALL, str(self.cluster.directory / "lib"), str(hooks), str(self.etc)])
        timeout = self.cluster.spec.hooks.timeout
        self.cluster.spec = replace(
            self.cluster.spec,
            hooks=Hooks(str(hooks / "prolog"), str(hooks / "epilog"), str(hooks / "task_prolog"), timeout),
        )

    def mount_progress(self, node: str) -> None:
        """Mount what the first hook of a node would, before a --slurm-root has mounts of its own."""
        os.close(limited(f"{self.cluster.node_directory(node)}/run/progress"))

    def install_filter(self) -> None:
        """Write migbatch.toml and the Lua shims, and name those in the test bed's specification."""
        self.state.mkdir(mode=0o755, exist_ok=True)
        self.config.write_text(_toml(self._settings()))
        self.render_shims(_JOB_SUBMIT)  # users have theirs once slurmctld can tell what belongs in it
        self.cluster.spec = replace(
            self.cluster.spec,
            job_submit=str(self.etc / _JOB_SUBMIT),
            cli_filter=str(self.etc / _CLI_FILTER),
        )

    def start(self) -> None:
        """Start migbatchd and the agents; wait until migbatchd knows every node's GPUs and has updated slurmctld."""
        self.start_daemon()
        for node in self.cluster.spec.node_names:
            self.start_agent(node)
        self.cluster.wait("the nodes' reports to migbatchd", self._knows_the_nodes)
        self.render_shims()
        self.cluster.wait("the submit service", self._answers_submissions)
        self.cluster.wait("the compiled table", (self.state / "table.lua").exists)

    def render_shims(self, *shims: str) -> None:
        """Write the Lua shims (both), as `migbatch config render` does, with what migbatchd knows of the site by now.

        slurmctld takes up a new file by itself.
        """
        from slurm_migbatch.cli.scripts import lua  # slow to import, and `migbatch testbed down` does without
        from slurm_migbatch.config import load

        config = load(str(self.config))
        for shim in shims or (_JOB_SUBMIT, _CLI_FILTER):
            fresh = self.etc / f"{shim}.new"
            fresh.write_text(lua(config, shim))
            fresh.replace(self.etc / shim)

    def start_daemon(self) -> None:
        """Start migbatchd and wait until it answers."""
        self.cluster.spawn("migbatchd", [sys.executable, "-m", "slurm_migbatch.cli.migbatchd", "-c", str(self.config)])
        self.cluster.wait("migbatchd", lambda: self.health() is not None)

    def reconfigure(self, **sections: Mapping[str, object]) -> None:
        """Restart migbatchd with other keys of migbatch.toml (section -> key -> value)."""
        config = {name: dict(values) for name, values in self.cluster.spec.config.items()}
        for section, values in sections.items():
            config.setdefault(section, {}).update(values)
        self.cluster.spec = replace(self.cluster.spec, config=config)
        self.config.write_text(_toml(self._settings()))
        self.cluster.restart("migbatchd")
        self.cluster.wait("migbatchd", lambda: self.health() is not None)

    def start_agent(self, node: str) -> None:
        """Start a node's agent."""
        line = [sys.executable, "-m", "slurm_migbatch.cli", "node", "agent", "--etc", str(self.etc), "--node", node]
        self.cluster.spawn(f"agent-{node}", line)

    def migbatch(self, *arguments: str) -> str:
        """Run `migbatch ARGUMENTS` as root; return its output."""
        return self.cluster.run_here([sys.executable, "-m", "slurm_migbatch.cli", *arguments])

    def health(self) -> Mapping[str, Any] | None:
        """Ask migbatchd for its health; None where it does not answer."""
        try:
            body = self._get("/healthz")
        except urllib.error.HTTPError as error:
            with error:
                body = error.read()
        except OSError:
            return None
        found: Mapping[str, Any] = json.loads(body)
        return found

    def metrics(self) -> str:
        """Read migbatchd's metrics in Prometheus' text form. Raises OSError."""
        return self._get("/metrics").decode()

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self._url}{path}", timeout=60) as answer:  # noqa: S310 - our own loopback address
            found: bytes = answer.read()
        return found

    def _knows_the_nodes(self) -> bool:
        try:
            catalog = json.loads((self.state / "catalog.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        return bool(catalog.get("partitions"))

    def _answers_submissions(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            return link.connect_ex(str(self.state / "submit.sock")) == 0

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.cluster.ports['migbatchd']}"

    def _copy(self, target: Path) -> None:
        source = Path(__file__).resolve().parents[1]
        spec = importlib.util.find_spec("pynvml")
        if spec is None or spec.origin is None:
            raise TestbedError("pynvml is missing; pip install 'slurm-migbatch[dev]'")
        package = target / "slurm_migbatch"
        package.mkdir(mode=0o755, parents=True)
        files = [source / "__init__.py", *source.glob("node/**/*.py"), *source.glob("mig/**/*.py")]
        for file in files:
            place = package / file.relative_to(source)
            place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        shutil.copyfile(spec.origin, target / "pynvml.py")

    def _node_conf(self) -> dict[str, str]:
        nodes = f"{self.cluster.directory}/nodes/%n"
        return {
            "StateDir": f"{nodes}/state",
            "RunDir": f"{nodes}/run",
            "NvmlLibrary": f"{nodes}/driver/libnvidia-ml.so.1",
            "ProcRoot": f"{nodes}/driver/proc",
            "DevRoot": f"{nodes}/driver/dev",
            "BootIdFile": f"{nodes}/driver/boot_id",
            "Controller": self._url if self.cluster.spec.migbatch == "all" else "",
            "Auth": self.cluster.spec.auth,
            "MungeSocket": str(self.cluster.munge_socket),
            "TokenFile": str(self.etc / "token"),
            "ScontrolPath": str(self.cluster.bin / "scontrol"),
            "SlurmConf": str(self.cluster.slurm_conf),
            "SlurmdSpoolDir": f"{nodes}/spool",
            **self.cluster.spec.node_conf,
        }

    def _settings(self) -> dict[str, dict[str, object]]:
        settings: dict[str, dict[str, object]] = {
            "cluster": {
                "slurm_bin": str(self.cluster.bin),
                "slurm_conf": str(self.cluster.slurm_conf),
                "slurm_user": "root",
                "catalog_nodes": catalog_names(self.cluster.spec),
            },
            "submit": {
                "socket": str(self.state / "submit.sock"),
                "table": str(self.state / "table.lua"),
                "catalog": str(self.state / "catalog.json"),
                # a busy machine may be slow, and it must not depend on that which of the two answers: service or table
                "deadline_ms": 2000,
            },
            "learning": {"models": str(self.state / "models")},
            "store": {"url": f"sqlite:///{self.state}/migbatch.db"},
            "node_api": {
                "listen": "127.0.0.1",
                "port": self.cluster.ports["migbatchd"],
                "auth": self.cluster.spec.auth,
                "munge_socket": str(self.cluster.munge_socket),
                "token_file": str(self.etc / "token"),
            },
            "query": {"listen": "127.0.0.1", "port": self.cluster.ports["query"]},
            "daemon": {"run_dir": str(self.state)},
        }
        if self.cluster.spec.lends:
            settings["lending"] = {"enabled": True, "partitions": ["train"]}
        for section, values in self.cluster.spec.config.items():
            settings.setdefault(section, {}).update(values)
        return settings


def _toml(settings: Mapping[str, Mapping[str, object]]) -> str:
    """Return the TOML of tables of strings, numbers, booleans and lists of them (which JSON spells alike)."""
    lines: list[str] = []
    for section, values in settings.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join([*lines, ""])
