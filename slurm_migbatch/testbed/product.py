"""Run migbatch on a test bed, installed as on a site: hooks, agents, migbatchd, shims.

Hooks run from a root-owned copy of the nodes' files (node/, mig/ and pynvml) with /usr/bin/python3, of --slurm-root if
given: ordinary users may not be able to read the checkout, and TaskProlog runs as them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
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

from slurm_migbatch.install.scripts import PRIMARY, primary_program, stub
from slurm_migbatch.node.paths import limited
from slurm_migbatch.values import atomicfile

from . import restd
from .conf import catalog_names
from .errors import TestbedError
from .running_cluster import RunningCluster, write_private
from .spec import Hooks

PYTHON = "/usr/bin/python3"
#: as in `submit.shim`, which is slow to import
_JOB_SUBMIT, _CLI_FILTER = "job_submit.lua", "cli_filter.lua"
_INSTALL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from slurm_migbatch.node.install import InstallError, compile_imports, programs
try:
    for path, text in programs(Path(sys.argv[2]), Path(sys.argv[3]), sys.executable):
        path.write_text(text)
        path.chmod(0o755)
    compile_imports(sys.executable)
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
        """Copy the node's files, write node.conf, the hooks and their runners, and name them in the specification."""
        self._copy(self.cluster.directory / "lib")
        secret = secrets.token_hex(32).encode()
        write_private(self.etc / "token", secret)
        write_private(self.etc / "controller-token", secret)
        shutil.chown(self.etc / "controller-token", self.cluster.spec.daemon_user)
        (self.etc / "node.conf").write_text("".join(f"{key}={value}\n" for key, value in self._node_conf().items()))
        hooks = self.cluster.directory / "hooks"
        hooks.mkdir(mode=0o755)
        self.cluster.run([PYTHON, "-c", _INSTALL, str(self.cluster.directory / "lib"), str(hooks), str(self.etc)])
        prolog, epilog, task_prolog = (self._stub(hooks / name) for name in ("prolog", "epilog", "task_prolog"))
        timeout = self.cluster.spec.hooks.timeout
        self.cluster.spec = replace(self.cluster.spec, hooks=Hooks(prolog, epilog, task_prolog, timeout))

    def _stub(self, hook: Path) -> str:
        """Write the program beside slurm.conf with which Slurm runs a hook; return its path."""
        path = self.etc / f"migbatch-{hook.name}"
        path.write_text(stub(str(hook)))
        path.chmod(0o755)
        return str(path)

    def mount_progress(self, node: str) -> None:
        """Mount the folder of progress files as a node's first hook would, before --slurm-root makes private mounts."""
        os.close(limited(f"{self.cluster.node_directory(node)}/run/progress"))

    def install_filter(self) -> None:
        """Write migbatch.toml and the Lua shims, and name those in the test bed's specification."""
        self.state.mkdir(mode=0o755, exist_ok=True)
        shutil.chown(self.state, self.cluster.spec.daemon_user)
        self._write_config()
        if self.cluster.spec.backup:
            self._install_primary_programs()
        self.render_shims(_JOB_SUBMIT)  # the user commands' script is rendered once slurmctld knows the site
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
        """Write the Lua shims (both), as `migbatch install` does, with migbatchd's current knowledge of the site.

        slurmctld reloads a changed file by itself.
        """
        from slurm_migbatch.cli.scripts import lua  # slow to import, and not needed by `migbatch testbed down`
        from slurm_migbatch.config import load

        config = load(str(self.config))
        for shim in shims or (_JOB_SUBMIT, _CLI_FILTER):
            atomicfile.write(self.etc / shim, lua(config, shim).encode())

    def start_daemon(self) -> None:
        """Start migbatchd, on both controllers if there are two, and wait until it answers."""
        line = [*self._as_daemon_user(), sys.executable, "-m", "slurm_migbatch.cli.migbatchd", "-c"]
        self.cluster.spawn_on(1, "migbatchd", [*line, str(self.config)])
        if self.cluster.spec.backup:
            self.cluster.spawn_on(2, "migbatchd-2", [*line, str(self.config_of(2))])
        for controller in self.controllers:
            self.cluster.wait("migbatchd", lambda controller=controller: self.health(controller) is not None)  # type: ignore[misc]

    def _as_daemon_user(self) -> list[str]:
        """Return the beginning of a command line (of root) that runs Python as migbatchd's user.

        Unlike on a site, the process may read every file: the interpreter may be below a directory that only root can
        open. Writing has no such exception. With --slurm-root it may also enter the root, to run Slurm's commands.
        """
        user = self.cluster.spec.daemon_user
        if user == "root":
            return []
        added = "+dac_read_search"
        if self.cluster.root.path is not None:
            added += ",+sys_admin,+sys_chroot,+sys_ptrace"
        capabilities = [f"--inh-caps=-all,{added}", f"--ambient-caps={added}"]
        return ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *capabilities, "--"]

    @property
    def default_record(self) -> str:
        """URL of migbatchd's database if the test bed's `config` names none."""
        return f"sqlite:///{self.state}/migbatch.db"

    @property
    def record(self) -> str:
        """URL of migbatchd's database."""
        return str(self._settings()["store"]["url"])

    def reconfigure(self, **sections: Mapping[str, object]) -> None:
        """Restart migbatchd with other keys of migbatch.toml (section -> key -> value)."""
        config = {name: dict(values) for name, values in self.cluster.spec.config.items()}
        for section, values in sections.items():
            config.setdefault(section, {}).update(values)
        self.cluster.spec = replace(self.cluster.spec, config=config)
        self._write_config()
        self.cluster.restart("migbatchd")
        self.cluster.wait("migbatchd", lambda: self.health() is not None)

    def start_agent(self, node: str) -> None:
        """Start a node's agent."""
        line = [sys.executable, "-m", "slurm_migbatch.cli", "node", "agent", "--etc", str(self.etc), "--node", node]
        self.cluster.spawn(f"agent-{node}", line)

    def migbatch(self, *arguments: str) -> str:
        """Run `migbatch ARGUMENTS` as root; return its output."""
        return self.cluster.run_here([sys.executable, "-m", "slurm_migbatch.cli", *arguments])

    def health(self, controller: int = 1) -> Mapping[str, Any] | None:
        """Query migbatchd's health; None if it does not answer."""
        try:
            body = self._get("/healthz", controller)
        except urllib.error.HTTPError as error:
            with error:
                body = error.read()
        except OSError:
            return None
        health: Mapping[str, Any] = json.loads(body)
        return health

    def metrics(self, controller: int = 1) -> str:
        """Read migbatchd's metrics in Prometheus' text form. Raises OSError."""
        return self._get("/metrics", controller).decode()

    @property
    def controllers(self) -> tuple[int, ...]:
        """The numbers of the controllers."""
        return (1, 2) if self.cluster.spec.backup else (1,)

    def url(self, controller: int = 1) -> str:
        """Return the node API's URL."""
        return f"http://127.0.0.{controller}:{self.cluster.ports['migbatchd']}"

    def config_of(self, controller: int) -> Path:
        """Return the configuration of migbatchd on a controller: the addresses to listen on differ."""
        return self.config if controller == 1 else self.etc / f"migbatch-{controller}.toml"

    def _write_config(self) -> None:
        from slurm_migbatch.config import render  # slow to import, see `render_shims`

        for controller in self.controllers:
            self.config_of(controller).write_text(render(self._settings(controller)))

    def _install_primary_programs(self) -> None:
        """Write the programs by which slurmctld reports that it is the primary, and name them in the specification."""
        for name, on in PRIMARY.items():
            (self.etc / name).write_text(primary_program(PYTHON, f"{self.state}/api.sock", on=on))
            (self.etc / name).chmod(0o755)
        on_program, off_program = (str(self.etc / name) for name in PRIMARY)
        hooks = replace(self.cluster.spec.hooks, primary_on=on_program, primary_off=off_program)
        self.cluster.spec = replace(self.cluster.spec, hooks=hooks)

    def _get(self, path: str, controller: int) -> bytes:
        with urllib.request.urlopen(f"{self.url(controller)}{path}", timeout=60) as answer:  # noqa: S310 - our own loopback address
            body: bytes = answer.read()
        return body

    def _knows_the_nodes(self) -> bool:
        try:
            catalog = json.loads((self.state / "catalog.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        return {row["name"] for row in catalog["nodes"]}.issuperset(self.cluster.spec.node_names)

    def _answers_submissions(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            return link.connect_ex(str(self.state / "submit.sock")) == 0

    def _copy(self, target: Path) -> None:
        source = Path(__file__).resolve().parents[1]
        spec = importlib.util.find_spec("pynvml")
        if spec is None or spec.origin is None:
            raise TestbedError("pynvml is missing; pip install 'slurm-migbatch[dev]'")
        package = target / "slurm_migbatch"
        package.mkdir(mode=0o755, parents=True)
        files = [source / "__init__.py", *source.glob("node/**/*.py"), *source.glob("mig/**/*.py")]
        for file in files:
            copy = package / file.relative_to(source)
            copy.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            _copy_module(file, copy)
        _copy_module(Path(spec.origin), target / "pynvml.py")

    def _node_conf(self) -> dict[str, str]:
        nodes = f"{self.cluster.directory}/nodes/%n"
        return {
            "StateDir": f"{nodes}/state",
            "RunDir": f"{nodes}/run",
            "NvmlLibrary": f"{nodes}/driver/libnvidia-ml.so.1",
            "ProcRoot": f"{nodes}/driver/proc",
            "DevRoot": f"{nodes}/driver/dev",
            "BootIdFile": f"{nodes}/driver/boot_id",
            "Controller": ",".join(map(self.url, self.controllers)) if self.cluster.spec.migbatch == "all" else "",
            "Auth": self.cluster.spec.auth,
            "MungeSocket": str(self.cluster.munge_socket),
            "TokenFile": str(self.etc / "token"),
            "ScontrolPath": str(self.cluster.bin / "scontrol"),
            "SlurmConf": str(self.cluster.slurm_conf),
            "SlurmdSpoolDir": f"{nodes}/spool",
            "PeerUids": ",".join(str(uid) for uid in sorted({0, pwd.getpwnam(self.cluster.spec.slurm_user).pw_uid})),
            **self.cluster.spec.node_conf,
        }

    def _rest(self) -> dict[str, object]:
        directory = self.cluster.directory
        return {"slurmrestd": restd.address(directory), "slurmrestd_token": str(restd.token_file(directory))}

    def _settings(self, controller: int = 1) -> dict[str, dict[str, object]]:
        settings: dict[str, dict[str, object]] = {
            "cluster": {
                "slurm_bin": str(self.cluster.bin),
                "slurm_conf": str(self.cluster.slurm_conf),
                "slurm_user": self.cluster.spec.slurm_user,
                "catalog_nodes": catalog_names(self.cluster.spec),
                **(self._rest() if self.cluster.spec.rest else {}),
            },
            "submit": {
                "socket": str(self.state / "submit.sock"),
                "table": str(self.state / "table.lua"),
                "catalog": str(self.state / "catalog.json"),
                # on a busy machine the test must not depend on which of the two answers: service or table
                "deadline_ms": 2000,
            },
            "learning": {"models": str(self.state / "models")},
            "store": {"url": self.default_record},
            "node_api": {
                "listen": f"127.0.0.{controller}",
                "port": self.cluster.ports["migbatchd"],
                "auth": self.cluster.spec.auth,
                "munge_socket": str(self.cluster.munge_socket),
                "token_file": str(self.etc / "controller-token"),
            },
            "query": {"listen": f"127.0.0.{controller}", "port": self.cluster.ports["query"]},
            "daemon": {"run_dir": str(self.state)},
        }
        for section, values in self.cluster.spec.config.items():
            settings.setdefault(section, {}).update(values)
        return settings


def _copy_module(source: Path, copy: Path) -> None:
    """Copy a module with its byte code, so that the installer does not compile it again for each test bed.

    The installer compiles what is missing, of an older time or for another release of Python.
    """
    shutil.copyfile(source, copy)
    status = source.stat()
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    compiled, target = (Path(importlib.util.cache_from_source(str(path))) for path in (source, copy))
    if compiled.exists():
        target.parent.mkdir(mode=0o755, exist_ok=True)
        shutil.copyfile(compiled, target)
