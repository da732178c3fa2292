"""A private Slurm cluster on loopback: slurmctld, several slurmd on one host, munge, optional accounting."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from slurm_migbatch import site

from . import cage as cages
from . import database, registry, users
from .daemons import Daemon, Daemons
from .errors import TestbedError
from .gputypes import FILLER, base_counts, gpu_type
from .ports import PortBook
from .proc import ProcessId, wait_until
from .slurmroot import PATH, SlurmRoot

CLIENTS = ("sbatch", "srun", "salloc", "squeue", "scontrol", "scancel", "sinfo", "sacct", "sacctmgr", "sdiag", "sprio")
CATALOG = "catalog"
_READY_S = 30.0


@dataclass(frozen=True)
class Hooks:
    """Paths of the hook programs, empty for none, and slurmd's limit for them in seconds."""

    prolog: str = ""
    epilog: str = ""
    task_prolog: str = ""
    timeout: int = 60


@dataclass(frozen=True)
class Spec:
    """What a cluster is made of.

    Attributes:
        nodes, gpus, gpu_type: nodes n1..., simulated GPUs per node and their model.
        users: number of ordinary users (mbalice, mbbob, mbcarol, ...).
        dbd: whether slurmdbd and MariaDB run and keep accounts.
        slurm_root: a debootstrapped Debian whose Slurm programs are run; empty for the machine's own.
        latency: of the simulated driver: seconds per create or destroy, or "real".
        cpus: made-up CPUs per node.
        counts: GRES counts per node in slurm.conf (types in GRES spelling); empty for the smallest slices everywhere.
        job_submit, cli_filter: Lua scripts to load; empty for none.
        options: further lines of slurm.conf.
    """

    nodes: int = 2
    gpus: int = 2
    gpu_type: str = "h100-80gb"
    users: int = 3
    dbd: bool = False
    slurm_root: str = ""
    latency: float | str = 0.0
    cpus: int = 64
    counts: Mapping[str, int] = field(default_factory=dict)
    hooks: Hooks = Hooks()
    job_submit: str = ""
    cli_filter: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def node_names(self) -> tuple[str, ...]:
        """n1, n2, ..."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))


class Cluster:
    """One test bed; `with Cluster(nodes=2) as cluster:` brings it up and takes it down again.

    Everything lives below `directory` (chosen where not given); see `registry` for what happens when the process that
    started it is killed.
    """

    def __init__(self, directory: Path | str | None = None, **spec: object) -> None:
        self._open(Path(directory).absolute() if directory else _new_directory(), Spec(**spec))  # type: ignore[arg-type]

    def _open(self, directory: Path, spec: Spec) -> None:
        self.directory = directory
        self.spec = spec
        self.root = SlurmRoot(Path(spec.slurm_root).absolute() if spec.slurm_root else None)
        self.users: tuple[users.User, ...] = ()
        self.ports: dict[str, int] = {}
        self._book = PortBook()
        self._daemons: Daemons | None = None

    @classmethod
    def attach(cls, directory: Path | str) -> Cluster:
        """The running cluster in `directory`, started by another process."""
        directory = Path(directory).absolute()
        record = registry.find(directory)
        if record is None:
            raise TestbedError(f"no test bed lives in {directory}; `migbatch testbed up` starts one")
        try:
            data = json.loads((directory / "etc/testbed.json").read_text())
        except FileNotFoundError:
            raise TestbedError(f"the test bed in {directory} is not complete; `migbatch testbed down` it") from None
        data["spec"]["hooks"] = Hooks(**data["spec"]["hooks"])
        self = cls.__new__(cls)
        self._open(directory, Spec(**data["spec"]))
        self.ports = data["ports"]
        self.users = tuple(users.User(**user) for user in data["users"])
        self._daemons = self._supervisor(cages.reopen(directory, record.cage))
        return self

    # --- up and down

    def up(self) -> Cluster:
        """Start everything and wait until all nodes are idle; on any error or interrupt nothing is left."""
        self.root.check(self.directory)
        for program in ("slurmctld", "slurmd", *CLIENTS, *(["slurmdbd"] if self.spec.dbd else [])):
            self.root.locate(program)
        try:
            self._register()
            self._write()
            self._start()
        except BaseException:
            self.down()
            raise
        finally:
            self._book.release()
        return self

    def down(self) -> None:
        """Take everything away; harmless where nothing is."""
        with registry.uninterrupted(), registry.locked():
            record = registry.find(self.directory)
            if record is not None:
                registry.destroy(record)
            if self._daemons is not None:
                self._daemons.reap()
                self._daemons = None

    def keep(self) -> None:
        """Let the cluster outlive this process; it stays until `down`."""
        with registry.locked():
            record = registry.find(self.directory)
            if record is not None:
                record.disown().save()

    def __enter__(self) -> Cluster:
        return self.up()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def _register(self) -> None:
        with registry.locked():
            registry.sweep()
            if registry.find(self.directory) is not None:
                raise TestbedError(f"a test bed already lives in {self.directory}; `migbatch testbed down` removes it")
            registry.check_directory(self.directory)
            name = f"migbatch-{secrets.token_hex(4)}"
            me = ProcessId.mine()
            names = users.NAMES[: self.spec.users]
            cage, cage_text = cages.plan(self.directory, name)
            record = registry.Record(name, str(self.directory), (me.pid, me.start), cage_text, names)
            record.save()
            self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            self.directory.chmod(0o755)
            (self.directory / registry.MARKER).touch()
            cage.create()
            self.users = users.ensure(self.spec.users)
            for folder in ("etc", "log", "run/procs", "state", "munge", "bin", "lib", "home", "nodes"):
                (self.directory / folder).mkdir(parents=True, exist_ok=True)
            self._daemons = self._supervisor(cage)

    def _supervisor(self, cage: cages.Cage) -> Daemons:
        return Daemons(self.directory / "run/procs", self.directory / "log", cage)

    @property
    def daemons(self) -> Daemons:
        """The recorded processes."""
        if self._daemons is None:
            raise TestbedError("the test bed is not up")
        return self._daemons

    # --- files

    def _write(self) -> None:
        for service in ("slurmctld", *self.spec.node_names, "migbatchd", *(["slurmdbd"] if self.spec.dbd else [])):
            self.ports[service] = self._book.take()
        for user in self.users:
            home = self.directory / "home" / user.name
            home.mkdir(mode=0o755, exist_ok=True)
            os.chown(home, user.uid, user.gid)
        for node in self.spec.node_names:
            (self.directory / "nodes" / node / "spool").mkdir(parents=True, exist_ok=True)
        (self.directory / "munge").chmod(0o755)
        _write_private(self.directory / "munge/key", secrets.token_bytes(1024))
        self.write_conf()
        data = {"spec": asdict(self.spec), "ports": self.ports, "users": [asdict(user) for user in self.users]}
        (self.directory / "etc/testbed.json").write_text(json.dumps(data))

    def write_conf(self) -> None:
        """Write Slurm's configuration files from the templates (after a change: `scontrol reconfigure` or restart)."""
        etc = self.directory / "etc"
        names = {"site": self.site(), "bed": self._bed()}
        (etc / "slurm.conf").write_text(site.render("testbed.conf.j2", **names))
        (etc / "gres.conf").write_text(site.render("gres.conf.j2", **names))
        (etc / "cgroup.conf").write_text(site.render("cgroup.conf.j2", **names))
        for name, source in (("job_submit.lua", self.spec.job_submit), ("cli_filter.lua", self.spec.cli_filter)):
            if source and Path(source) != etc / name:
                shutil.copyfile(source, etc / name)

    def site(self) -> site.Site:
        """What the templates are filled with."""
        spec, kind = self.spec, gpu_type(self.spec.gpu_type)
        counts = dict(spec.counts) or base_counts(kind, spec.gpus)
        settings = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 CPUs={spec.cpus} RealMemory=500000"
        nodes = [site.Node(name, counts, f"{settings} Port={self.ports[name]}") for name in spec.node_names]
        every = {**dict.fromkeys(kind.profiles, kind.slots * spec.gpus), FILLER: 0}
        listed = ",".join(spec.node_names)
        return site.Site(
            version=self.root.version(),
            nodes=nodes,
            catalog=site.Node(CATALOG, every, f"NodeAddr=127.0.0.1 Port=1 CPUs={spec.cpus} RealMemory=500000"),
            partitions=[
                site.Partition("gpu", listed, "Default=YES MaxTime=INFINITE State=UP PriorityTier=10"),
                site.Partition("train", listed, "MaxTime=INFINITE State=UP PriorityTier=1"),
            ],
            prolog=spec.hooks.prolog,
            epilog=spec.hooks.epilog,
            task_prolog=spec.hooks.task_prolog,
            hook_timeout=spec.hooks.timeout,
            job_submit=bool(spec.job_submit),
            cli_filter=bool(spec.cli_filter),
            accounting=spec.dbd,
        )

    def _bed(self) -> dict[str, object]:
        return {
            "name": "migbatch",
            "host": socket.gethostname(),
            "port": self.ports["slurmctld"],
            "dbd_port": self.ports.get("slurmdbd"),
            "directory": self.directory,
            "munge_socket": self.munge_socket,
            "debug": "info",
            "options": self.spec.options,
        }

    @property
    def munge_socket(self) -> Path:
        """Socket of the test bed's own munged."""
        return self.directory / "munge/munge.sock"

    @property
    def slurm_conf(self) -> Path:
        """The configuration file that SLURM_CONF names."""
        return self.directory / "etc/slurm.conf"

    # --- daemons

    def _start(self) -> None:
        munge = self.directory / "munge"
        self.spawn(
            "munged",
            [
                "/usr/sbin/munged",
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
        self.wait("munged", lambda: _answers(self.munge_socket))
        if self.spec.dbd:
            database.start(self)
        self.spawn("slurmctld", [self.root.locate("slurmctld"), "-D"], in_root=True)
        self.wait("slurmctld", lambda: _listens(self.ports["slurmctld"]))
        for node in self.spec.node_names:
            self.spawn(f"slurmd-{node}", [self.root.locate("slurmd"), "-D", "-N", node], in_root=True)
        self.wait_idle()

    def wait_idle(self) -> None:
        """Wait until every node is idle."""
        names = ",".join(self.spec.node_names)

        def idle() -> bool:
            done = self.run(["sinfo", "-h", "-N", "-p", "gpu", "-n", names, "-o", "%T"], check=False)
            return done.returncode == 0 and done.stdout.split() == ["idle"] * self.spec.nodes

        self.wait("registration of the nodes", idle)

    def wait(self, what: str, ready: Callable[[], bool], timeout: float = _READY_S) -> None:
        """Poll `ready` until it is true; an error at once where a process of the test bed has ended."""

        def still() -> bool:
            self.daemons.check()
            return ready()

        wait_until(still, timeout, what)

    def spawn(
        self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None, *, in_root: bool = False
    ) -> Daemon:
        """Start a long-running process as root; its output is in `log/NAME.out`, `stop(name)` etc. steer it.

        Args:
            name: unique in the test bed.
            argv: program (full path, or found on the test bed's PATH) and arguments.
            env: further variables; nothing else of the caller's environment is passed on.
            in_root: run it inside --slurm-root (where there is one), as Slurm's own daemons do.
        """
        inside = in_root and self.root.path is not None
        line = self.root.enter(self._holder(), list(argv)) if inside else list(argv)
        return self.daemons.start(name, line, {**self.client_env(inside=inside), **(env or {})})

    def stop(self, name: str, grace: float = 20.0) -> None:
        """SIGTERM a process, SIGKILL after `grace` seconds."""
        self.daemons.stop(name, grace)

    def kill(self, name: str) -> None:
        """SIGKILL a process, as a crash would."""
        self.daemons.kill(name)

    def restart(self, name: str) -> None:
        """Stop a process where it runs, and start it with the same command line."""
        self.daemons.restart(name)
        if name == "slurmctld":
            self.wait("slurmctld", lambda: _listens(self.ports["slurmctld"]))

    # --- clients

    def client_env(self, user: str | None = None, *, inside: bool | None = None) -> dict[str, str]:
        """Environment in which Slurm's commands talk to this cluster."""
        inside = self.root.path is not None if inside is None else inside
        return {
            "PATH": PATH if inside else f"{self.directory}/bin:{PATH}",
            "SLURM_CONF": str(self.slurm_conf),
            cages.MARK: str(self.directory),
            "LC_ALL": "C.UTF-8",
            "HOME": str(self.home(user)) if user else "/root",
            "USER": user or "root",
            "LOGNAME": user or "root",
            "SHELL": "/bin/sh",
        }

    def command(self, argv: Sequence[str], user: str | None = None) -> list[str]:
        """Command line (for root) that runs `argv` as `user` inside the test bed; start it with `client_env(user)`."""
        line = list(argv)
        if user is not None:
            account = self.user(user)
            line = ["setpriv", f"--reuid={account.uid}", f"--regid={account.gid}", "--clear-groups", "--", *line]
        line = self.root.enter(self._holder(), line, str(self.home(user)) if user else "/")
        return self.daemons.cage.enter(line)

    def run(
        self,
        argv: Sequence[str],
        user: str | None = None,
        *,
        check: bool = True,
        input: str | None = None,
        timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end as root or as a test user, in the user's home directory.

        Raises:
            TestbedError: `check` is set and the exit status is not 0; the text holds what the command wrote.
        """
        done = subprocess.run(
            self.command(argv, user),
            check=False,
            env={**self.client_env(user), **(env or {})},
            cwd=self.home(user) if user else "/",
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            raise TestbedError(
                f"{shlex.join(argv)}: exit {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done

    def submit(self, *options: str, wrap: str | None = None, script: str | None = None, user: str = "mbalice") -> int:
        """`sbatch --parsable OPTIONS` with a one-line command or a script text; the job id."""
        argv = ["sbatch", "--parsable", *options, *(["--wrap", wrap] if wrap is not None else [])]
        return int(self.run(argv, user, input=script).stdout.split(";")[0])

    def job_state(self, job: int) -> str:
        """State as slurmctld knows it (PENDING, RUNNING, COMPLETED, ...)."""
        text = self.run(["scontrol", "show", "job", str(job), "-o"]).stdout
        return next(word.partition("=")[2] for word in text.split() if word.startswith("JobState="))

    def wait_job(self, job: int, *states: str, timeout: float = 60.0) -> str:
        """Wait until a job is in one of `states` (default: any final one); the state."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
        seen = ""

        def there() -> bool:
            nonlocal seen
            seen = self.job_state(job)
            return seen in wanted

        try:
            wait_until(there, timeout, f"job {job} in {' or '.join(wanted)}", every=0.1)
        except TestbedError as error:
            raise TestbedError(f"{error}; it is {seen}") from None
        return seen

    def user(self, name: str) -> users.User:
        """One of the test users."""
        for user in self.users:
            if user.name == name:
                return user
        raise TestbedError(f"no test user {name!r}; there are {', '.join(user.name for user in self.users)}")

    def home(self, user: str | None) -> Path:
        """Where a test user's commands run."""
        return self.directory / "home" / user if user else Path("/root")

    def node_directory(self, node: str) -> Path:
        """Folder of one node: spool, driver (the simulated machine), state and run of its hooks."""
        return self.directory / "nodes" / node

    def _holder(self) -> int | None:
        if self.root.path is None:
            return None
        daemon = self.daemons.get("root")
        return daemon.pid if daemon else None

    def _write_wrappers(self) -> None:
        env = self.client_env()
        exports = "".join(f"export {name}={shlex.quote(env[name])}\n" for name in ("SLURM_CONF", cages.MARK))
        for program in CLIENTS:
            line = shlex.join(self.root.enter(self._holder(), [self.root.locate(program)], cwd="@"))
            line = line.replace("--wdns=@", '--wdns="$PWD"')
            path = self.directory / "bin" / program
            path.write_text(f'#!/bin/sh\n{exports}exec {line} "$@"\n')
            path.chmod(0o755)


def _new_directory() -> Path:
    return registry.usable_base() / f"migbatch-testbed-{secrets.token_hex(3)}"


def _write_private(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(data)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
