"""Operate a running test bed: its processes, its users, and commands run as any of them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_migbatch.slurm.fields import fields_of

from . import process_group, users
from .daemons import Daemon, Daemons
from .errors import TestbedError
from .proc import wait_until
from .simdriver import SimulatedMachine
from .slurmroot import PATH, SlurmRoot
from .spec import Spec

FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")
# Long enough for a busy machine; a wait ends as soon as its condition is met.
READY_S = 180.0


class RunningCluster:
    """One running test bed below `directory`."""

    def __init__(self, directory: Path, spec: Spec) -> None:
        self.directory = directory
        self.spec = spec
        self.root = SlurmRoot(Path(spec.slurm_root).absolute() if spec.slurm_root else None)
        self.users: tuple[users.User, ...] = ()
        self.ports: dict[str, int] = {}
        self._daemons: Daemons | None = None

    # --- places

    @property
    def munge_socket(self) -> Path:
        """Socket of the test bed's own munged."""
        return self.directory / "munge/munge.sock"

    @property
    def slurm_conf(self) -> Path:
        """The configuration file that SLURM_CONF names."""
        return self.directory / "etc/slurm.conf"

    def conf_text(self) -> str:
        """Return slurm.conf with what it includes, for a copy in another directory."""
        return re.sub(
            r"^Include (\S+)$",
            lambda found: (self.slurm_conf.parent / found[1]).read_text(),
            self.slurm_conf.read_text(),
            flags=re.MULTILINE,
        )

    @property
    def bin(self) -> Path:
        """Wrappers of Slurm's commands that work from any directory (for root)."""
        return self.directory / "bin"

    def home(self, user: str | None) -> Path:
        """Return the directory in which a user's commands run."""
        return self.directory / "home" / user if user else Path("/root")

    def node_directory(self, node: str) -> Path:
        """Return the directory of one node: spool, driver (the simulated machine), state and run of its hooks."""
        return self.directory / "nodes" / node

    def machine(self, node: str) -> SimulatedMachine:
        """Return the simulated machine of a node: its GPUs, and the functions that break them."""
        return SimulatedMachine(self.node_directory(node) / "driver")

    # --- processes

    @property
    def daemons(self) -> Daemons:
        """The recorded processes."""
        if self._daemons is None:
            raise TestbedError("the test bed is not up")
        return self._daemons

    def spawn(
        self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None, *, in_root: bool = False
    ) -> Daemon:
        """Start a long-running process as root; its output goes to `log/NAME.out`; control it with `stop(name)` etc.

        Args:
            name: unique in the test bed.
            argv: program (full path, or found on the test bed's PATH) and arguments.
            env: further variables; nothing else of the caller's environment is passed on.
            in_root: run it inside --slurm-root (if given), like Slurm's own daemons.
        """
        inside = in_root and self.root.path is not None
        line = self.root.enter(self._holder(), list(argv)) if inside else list(argv)
        return self.daemons.start(name, line, {**self.client_env(inside=inside), **(env or {})})

    def spawn_on(self, controller: int, name: str, argv: Sequence[str], *, in_root: bool = False) -> Daemon:
        """Start a process on the first or the second controller; if there is only one, like `spawn`.

        Each controller has a host name and, as `local` and `migbatch`, directories of its own.
        """
        if not self.spec.backup:
            return self.spawn(name, argv, in_root=in_root)
        lines = ["set -e", f"mount --bind {self.directory}/etc/hosts /etc/hosts", f"hostname mbctl{controller}"]
        if controller > 1:
            for folder in ("local", "migbatch"):
                lines.append(f"mount --bind {self.directory}/second/{folder} {self.directory}/{folder}")
        lines.append('exec "$@"')
        # the mounts in a --slurm-root are private already, and its "/" is not a mount point
        propagation = "unchanged" if in_root and self.root.path is not None else "private"
        enter = ["unshare", "--uts", "--mount", "--propagation", propagation, "/bin/sh", "-c", "\n".join(lines), "sh"]
        return self.spawn(name, [*enter, *argv], in_root=in_root)

    def stop(self, name: str) -> None:
        """Stop a process by SIGTERM, and SIGKILL after `daemons.GRACE_S` seconds."""
        self.daemons.stop(name)

    def kill(self, name: str) -> None:
        """Kill a process by SIGKILL, as a crash would."""
        self.daemons.kill(name)

    def restart(self, name: str) -> Daemon:
        """Stop a process if it runs, and start it with the same command line."""
        return self.daemons.restart(name)

    def wait(self, event: str, ready: Callable[[], bool], timeout: float = READY_S) -> None:
        """Poll `ready` until it is true; raise TestbedError at once if a process of the test bed has ended."""

        def still() -> bool:
            self.daemons.check()
            return ready()

        wait_until(still, timeout, event)

    # --- commands

    def client_env(self, user: str | None = None, *, inside: bool | None = None) -> dict[str, str]:
        """Return the environment for Slurm's commands on this cluster (`inside`: of --slurm-root, by default)."""
        inside = self.root.path is not None if inside is None else inside
        return {
            "PATH": PATH if inside else f"{self.bin}:{PATH}",
            "SLURM_CONF": str(self.slurm_conf),
            process_group.MARK: str(self.directory),
            "LC_ALL": "C.UTF-8",
            "HOME": str(self.home(user)),
            "USER": user or "root",
            "LOGNAME": user or "root",
            "SHELL": "/bin/sh",
            "MIGBATCH_CONFIG": str(self.directory / "etc/migbatch.toml"),
        }

    def command(self, argv: Sequence[str], user: str | None = None) -> list[str]:
        """Return the command line (for root) that runs `argv` as `user` in the test bed.

        Start it with `client_env(user)`.
        """
        line = list(argv)
        if user is not None:
            account = self.user(user)
            line = ["setpriv", f"--reuid={account.uid}", f"--regid={account.gid}", "--clear-groups", "--", *line]
        line = self.root.enter(self._holder(), line, str(self.home(user)) if user else "/")
        return self.daemons.group.enter(line)

    def run(
        self,
        argv: Sequence[str],
        user: str | None = None,
        *,
        check: bool = True,
        input: str | None = None,
        timeout: float = 300.0,
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
            errors="surrogateescape",  # jobs may have names that are not UTF-8
            timeout=timeout,
        )
        if check and done.returncode != 0:
            output = done.stderr.strip() or done.stdout.strip()
            raise TestbedError(f"{shlex.join(argv)}: exit {done.returncode}: {output}")
        return done

    def run_here(self, argv: Sequence[str]) -> str:
        """Run a command of this machine (not of --slurm-root) as root in the test bed's environment; return its output.

        Raises:
            TestbedError: the exit status is not 0.
        """
        line = self.daemons.group.enter(argv)
        env = self.client_env(inside=False)
        done = subprocess.run(line, check=False, env=env, cwd="/", capture_output=True, text=True, timeout=300.0)
        if done.returncode != 0:
            raise TestbedError(f"{shlex.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, *options: str, wrap: str | None = None, script: str | None = None, user: str = "mbalice") -> int:
        """Run `sbatch --parsable OPTIONS` with a one-line command or a script text; return the job id."""
        argv = ["sbatch", "--parsable", *options, *(["--wrap", wrap] if wrap is not None else [])]
        return int(self.run(argv, user, input=script).stdout.split(";")[0])

    def job_state(self, job: int) -> str:
        """Return the state as slurmctld knows it (PENDING, RUNNING, COMPLETED, ...)."""
        text = self.run(["scontrol", "show", "job", str(job), "-o"]).stdout
        return fields_of(text)["JobState"]

    def states(self) -> dict[str, str]:
        """Return the state of every job and array task that slurmctld keeps, by id as squeue prints it."""
        text = self.run(["squeue", "-h", "-a", "-r", "-t", "all", "-o", "%i|%T"]).stdout
        return dict(line.split("|") for line in text.splitlines())

    def wait_job(self, job: int, *states: str, timeout: float = READY_S) -> str:
        """Wait until a job is in one of `states` (default: any final one) and return its state.

        Raises:
            TestbedError: the time is over, or the job has ended in another state.
        """
        wanted = states or FINAL
        seen = ""

        def reached() -> bool:
            nonlocal seen
            seen = self.job_state(job)
            return seen in wanted or seen in FINAL

        try:
            wait_until(reached, timeout, f"job {job} in {' or '.join(wanted)}", every=0.1)
        except TestbedError as error:
            raise TestbedError(f"{error}; it is {seen}") from None
        if seen not in wanted:
            raise TestbedError(f"job {job} has ended: {seen}, not {' or '.join(wanted)}")
        return seen

    def output(self, job: int, user: str = "mbalice") -> str:
        """Read the default output file of a batch job of `user`."""
        return (self.home(user) / f"slurm-{job}.out").read_text()

    def user(self, name: str) -> users.User:
        """Return one of the test users."""
        for user in self.users:
            if user.name == name:
                return user
        raise TestbedError(f"no test user {name!r}; there are {', '.join(user.name for user in self.users)}")

    def _holder(self) -> int | None:
        """Return the pid of the process that holds the chroot's mounts."""
        daemon = self.daemons.get("root") if self.root.path is not None else None
        return daemon.pid if daemon else None


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only root can read, also while it is written."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(data)
