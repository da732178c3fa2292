"""A private Slurm cluster on loopback: slurmctld, several slurmd on one host, munge, optional accounting."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from slurm_migbatch.mig.geometry import Geometry

from . import conf, database, geometry, process_group, registry, restd, users
from .daemons import Daemon, Daemons
from .errors import TestbedError
from .ports import PortBook, answers, listening
from .proc import ProcessId
from .product import Product
from .running_cluster import RunningCluster, write_private
from .simdriver import SimulatedMachine
from .spec import Hooks, Spec

CLIENTS = ("sbatch", "srun", "salloc", "squeue", "scontrol", "scancel", "sinfo", "sacct", "sacctmgr", "sdiag", "sprio")
_MUNGED = "/usr/sbin/munged"
#: by type of GPU; a new process of Python reads it
_GEOMETRIES: dict[str, Geometry] = {}


class Cluster(RunningCluster):
    """One test bed during its lifetime; `with Cluster(nodes=2) as cluster:` starts and stops it.

    Everything is below `directory` (chosen if not given); see `registry` for what happens when the process that
    started it is killed. The keywords are those of `Spec`.
    """

    def __init__(self, directory: Path | str | None = None, **spec: object) -> None:
        chosen = Path(directory).absolute() if directory else registry.new_directory()
        super().__init__(chosen, Spec(**spec))  # type: ignore[arg-type]
        self._book = PortBook()
        self._registered = False
        self.product = Product(self)
        self._known: tuple[Geometry, tuple[int, int]] | None = None

    @classmethod
    def attach(cls, directory: Path | str) -> Cluster:
        """Attach to the running cluster in `directory`, started by another process."""
        directory = Path(directory).absolute()
        record = registry.find(directory)
        if record is None:
            raise TestbedError(f"no test bed lives in {directory}; `migbatch testbed up` starts one")
        try:
            data = json.loads((directory / "etc/testbed.json").read_text())
        except FileNotFoundError:
            raise TestbedError(f"the test bed in {directory} is not complete; `migbatch testbed down` it") from None
        data["spec"]["hooks"] = Hooks(**data["spec"]["hooks"])
        self = cls(directory, **data["spec"])
        self.ports = data["ports"]
        self.users = tuple(users.User(**user) for user in data["users"])
        self._daemons = self._supervisor(process_group.reopen(directory, record.group))
        return self

    # --- up and down

    def up(self) -> Cluster:
        """Start everything and wait until all nodes are idle; after an error or interrupt, remove everything."""
        if os.geteuid() != 0:
            raise TestbedError("a test bed starts Slurm's daemons and makes users, which needs root")
        self.root.check(self.directory)
        optional = [name for name, wanted in (("slurmdbd", self.spec.dbd), (restd.NAME, self.spec.rest)) if wanted]
        for program in ("slurmctld", "slurmd", *CLIENTS, *optional):
            self.root.locate(program)
        needed = [_MUNGED, *([database.MARIADBD] if self.spec.dbd else [])]
        if missing := [path for path in needed if not Path(path).exists()]:
            raise TestbedError(
                f"{', '.join(missing)} missing on this machine; `make system` installs Debian's packages"
            )
        if users.lookup(self.spec.slurm_user) is None:
            raise TestbedError(
                f"no user {self.spec.slurm_user!r}, as whom slurmctld runs, on this machine; `make system` installs "
                "Debian's packages, which create it"
            )
        mask = os.umask(0o022)  # ordinary users must be able to read most files
        with registry.interrupted_once():
            try:
                self._register()
                self._prepare()
                self._start()
            except BaseException:
                if self._registered:  # otherwise the test bed belongs to another process, or nothing was created
                    self.down()
                raise
            finally:
                os.umask(mask)
                self._book.release()
        return self

    def down(self) -> None:
        """Remove everything; harmless if nothing exists."""
        with registry.uninterrupted(), registry.locked():
            record = registry.find(self.directory)
            if record is not None:
                registry.destroy(record)
            if self._daemons is not None:
                self._daemons.reap()
                self._daemons = None

    def _surely_down(self) -> None:
        """Run `down`, even if Ctrl-C is pressed again before it has begun."""
        while True:
            try:
                return self.down()
            except (KeyboardInterrupt, SystemExit):
                continue

    def keep(self) -> None:
        """Keep the cluster after this process has ended; it stays until `down`."""
        with registry.locked():
            record = registry.find(self.directory)
            if record is None:
                raise TestbedError(f"the test bed in {self.directory} was taken down by another process")
            record.disown().save()

    def __enter__(self) -> Cluster:
        return self.up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._surely_down()

    def _register(self) -> None:
        """Record what will be created, then create it: a kill in between leaves nothing unrecorded."""
        with registry.locked():
            registry.sweep()
            if registry.find(self.directory) is not None:
                raise TestbedError(f"a test bed already lives in {self.directory}; `migbatch testbed down` removes it")
            registry.check_directory(self.directory)
            name = f"migbatch-{secrets.token_hex(4)}"
            current = ProcessId.own()
            group, group_text = process_group.plan(self.directory, name)
            names = users.NAMES[: self.spec.users]
            self._registered = True
            registry.TestbedRecord(name, str(self.directory), (current.pid, current.start), group_text, names).save()
            self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            self.directory.chmod(0o755)
            (self.directory / registry.MARKER).touch()
            group.create()
            self.users = users.ensure(self.spec.users)
            self._daemons = self._supervisor(group)

    def _supervisor(self, group: process_group.ProcessGroup) -> Daemons:
        return Daemons(self.directory / "run/procs", self.directory / "log", group)

    # --- files

    def _prepare(self) -> None:
        for folder in ("etc", "log", "run/procs", "state", "munge", "bin", "home", "nodes"):
            (self.directory / folder).mkdir(mode=0o755, parents=True, exist_ok=True)
        for folder in ("log", "run", "state"):
            shutil.chown(self.directory / folder, self.spec.slurm_user)
        for service in (
            "slurmctld",
            *self.spec.node_names,
            "migbatchd",
            "query",
            *(["slurmdbd"] if self.spec.dbd else []),
        ):
            self.ports[service] = self._book.take()
        if self.spec.backup:
            for folder in ("local", "migbatch", "second/local", "second/migbatch"):
                (self.directory / folder).mkdir(mode=0o755, parents=True)
                owner = self.spec.slurm_user if folder.endswith("local") else self.spec.daemon_user
                shutil.chown(self.directory / folder, owner)
            names = "".join(f"{address} {name}\n" for name, address in conf.controllers(self.spec).items())
            (self.directory / "etc/hosts").write_text(names + Path("/etc/hosts").read_text())
        for user in self.users:
            home = self.home(user.name)
            home.mkdir(mode=0o755, exist_ok=True)
            os.chown(home, user.uid, user.gid)
        for node in self.spec.node_names:
            (self.node_directory(node) / "spool").mkdir(parents=True, exist_ok=True)
            models = [self.spec.gpu_type] * self.spec.gpus
            SimulatedMachine.create(self.node_directory(node) / "driver", models, latency=self.spec.latency)
            if self.spec.migbatch:
                self.product.mount_progress(node)
        write_private(self.directory / "munge/key", secrets.token_bytes(1024))
        if self.spec.rest:
            write_private(restd.key(self.directory), secrets.token_bytes(32))
            shutil.chown(restd.key(self.directory), self.spec.slurm_user)
        self.write_conf()

    def write_conf(self) -> None:
        """Write Slurm's configuration files from `spec` (after a change: `scontrol reconfigure` or restart)."""
        if self._known is None:
            library, gpu_type = self.machine(self.spec.node_names[0]).library, self.spec.gpu_type
            if gpu_type not in _GEOMETRIES:
                _GEOMETRIES[gpu_type] = geometry.ask(library, self.run_here)
            self._known = _GEOMETRIES[gpu_type], self.root.version()
        conf.write(self.directory, self.spec, *self._known, self.ports, self.munge_socket)
        data = {"spec": asdict(self.spec), "ports": self.ports, "users": [asdict(user) for user in self.users]}
        (self.directory / "etc/testbed.json").write_text(json.dumps(data))

    def _write_wrappers(self) -> None:
        env = self.client_env()
        exports = "".join(f"export {name}={shlex.quote(env[name])}\n" for name in ("SLURM_CONF", process_group.MARK))
        for program in CLIENTS:
            located = self.root.locate(program)
            line = self.root.from_anywhere(self._holder(), located)
            # users cannot enter another root, and their tasks are inside already; root and migbatchd's user can
            inside = f'[ -e /proc/{self._holder()}/root/. ] || exec {located} "$@"\n' if self.root.path else ""
            path = self.bin / program
            path.write_text(f'#!/bin/sh\n{exports}{inside}exec {line} "$@"\n')
            path.chmod(0o755)

    # --- daemons

    def _start(self) -> None:
        munge = self.directory / "munge"
        self.spawn(
            "munged",
            [
                _MUNGED,
                "--foreground",
                f"--key-file={munge}/key",
                f"--socket={self.munge_socket}",
                f"--pid-file={munge}/munged.pid",
                f"--log-file={munge}/munged.log",
                f"--seed-file={munge}/seed",
                "--num-threads=4",
            ],
        )
        if self.root.path is not None:
            self.spawn("root", self.root.holder(self.directory))
            self.wait("the chroot", lambda: "ready" in self.daemons.tail("root"))
        self._write_wrappers()
        self.wait("munged", lambda: answers(self.munge_socket))
        if self.spec.dbd:
            database.start(self)
        if self.spec.migbatch:
            self.product.install_hooks()
            if self.spec.migbatch == "all":
                self.product.install_filter()
            self.write_conf()
        self.spawn_on(1, "slurmctld", [self.root.locate("slurmctld"), "-D"], in_root=True)
        self.wait("slurmctld", lambda: listening(self.ports["slurmctld"]))
        if self.spec.backup:
            self.wait("the primary slurmctld", (self.directory / "state/heartbeat").exists)
            self.spawn_on(2, "slurmctld-2", [self.root.locate("slurmctld"), "-D"], in_root=True)
        for node in self.spec.node_names:
            self.spawn(f"slurmd-{node}", [self.root.locate("slurmd"), "-D", "-N", node], in_root=True)
        self.wait("registration of the nodes", lambda: set(self.node_states().values()) == {"idle"})
        if self.spec.rest:
            restd.start(self)
        if self.spec.migbatch == "all":
            self.product.start()

    def node_states(self) -> dict[str, str]:
        """Return the state of each node as sinfo prints it, flags included (`idle`, `mixed`, `idle*`); may be empty."""
        names = ",".join(self.spec.node_names)
        done = self.run(["sinfo", "-h", "-N", "-p", "gpu", "-n", names, "-o", "%N %T"], check=False)
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}

    def restart(self, name: str) -> Daemon:
        """Stop a process if it runs and start it again; slurmctld listens when this returns."""
        daemon = super().restart(name)
        if name == "slurmctld":
            self.wait("slurmctld", lambda: listening(self.ports["slurmctld"]))
        return daemon
