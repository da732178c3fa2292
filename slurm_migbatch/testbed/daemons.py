"""Manage long-running processes of a test bed, by name: start in its process group, record, stop, restart."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_migbatch.values import atomicfile

from .errors import TestbedError
from .proc import ProcessId
from .process_group import ProcessGroup

# slurmctld saves its state before it ends, which may be slow on a busy machine.
GRACE_S = 60.0
_BURIAL_S = 60.0
_CHILD_S = 30.0
_TAIL_LINES = 15


@dataclass(frozen=True)
class Daemon:
    """The command line and the identity of a process."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    pid: int
    start: int

    @property
    def id(self) -> ProcessId:
        """Pid and start time."""
        return ProcessId(self.pid, self.start)


class Daemons:
    """The processes recorded in one folder; any process that opens the folder sees and controls the same ones."""

    def __init__(self, records: Path, logs: Path, group: ProcessGroup) -> None:
        self.records = records
        self.logs = logs
        self.group = group
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Daemon:
        """Start `argv` (as root, with nothing but `env`) under `name`; output goes to `log(name)`."""
        running = self.get(name)
        if running is not None and running.id.alive:
            raise TestbedError(f"process {name!r} already runs with pid {running.pid}; stop or restart it")
        self._reap(name)
        with self.log(name).open("ab") as out:
            child = subprocess.Popen(
                self.group.enter(argv),
                env=dict(env),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._children[name] = child
        try:
            identity = ProcessId.of(child.pid)
        except TestbedError:
            raise TestbedError(f"{name} ended at once: {self.tail(name)}") from None
        daemon = Daemon(name, tuple(argv), dict(env), identity.pid, identity.start)
        atomicfile.write(self._record(name), json.dumps(asdict(daemon)).encode())
        return daemon

    def get(self, name: str) -> Daemon | None:
        """Return the process recorded as `name`, running or not."""
        with suppress(FileNotFoundError):
            data = json.loads(self._record(name).read_text())
            return Daemon(data["name"], tuple(data["argv"]), data["env"], data["pid"], data["start"])
        return None

    def all(self) -> list[Daemon]:
        """Return every recorded process."""
        recorded = (self.get(path.stem) for path in sorted(self.records.glob("*.json")))
        return [daemon for daemon in recorded if daemon is not None]

    def stop(self, name: str) -> None:
        """Stop a process by SIGTERM, then SIGKILL after `GRACE_S` seconds; its record stays for `restart`."""
        self._end(name, lambda process: process.end(GRACE_S))

    def kill(self, name: str) -> None:
        """Kill a process by SIGKILL, as a crash would."""
        self._end(name, lambda process: process.signal(signal.SIGKILL))

    def _end(self, name: str, send: Callable[[ProcessId], object]) -> None:
        """End a process by `send`, and wait for its children in the same session, which keep its ports open.

        slurmctld's slurmscriptd ends once it notices that slurmctld has ended. Job processes have sessions of their own
        and continue.
        """
        daemon = self._known(name)
        children = daemon.id.children_of_session()
        send(daemon.id)
        daemon.id.wait(_BURIAL_S)
        self._reap(name)
        for child in children:
            child.wait(_CHILD_S)

    def restart(self, name: str) -> Daemon:
        """Stop the process if it runs, and start it again with the same command line and environment."""
        daemon = self._known(name)
        self.stop(name)
        return self.start(name, daemon.argv, daemon.env)

    def check(self) -> None:
        """Raise TestbedError with the end of the log for the first recorded process that is not running."""
        for daemon in self.all():
            if not daemon.id.alive:
                raise TestbedError(f"{daemon.name} has ended: {self.tail(daemon.name)}")

    def log(self, name: str) -> Path:
        """Return the log file of `name`."""
        return self.logs / f"{name}.out"

    def tail(self, name: str) -> str:
        """Return the last lines that `name` wrote."""
        with suppress(FileNotFoundError):
            return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        return "(no output)"

    def reap(self) -> None:
        """Collect children of this process that have ended (after the group was destroyed)."""
        for name in list(self._children):
            self._reap(name)

    def _reap(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None:
            child.wait(_BURIAL_S)
            del self._children[name]

    def _known(self, name: str) -> Daemon:
        daemon = self.get(name)
        if daemon is None:
            names = ", ".join(known.name for known in self.all())
            raise TestbedError(f"no process {name!r} in this test bed; there are: {names}")
        return daemon

    def _record(self, name: str) -> Path:
        return self.records / f"{name}.json"
