"""Record the test beds of this machine, so that a later process can clean up after a killed one.

A record is written before anything is created and removed after everything else. A test bed with an owner (a pytest
run, a `testbed up` in progress) is stale when that process has ended; one without an owner stays until `down`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from slurm_migbatch.values import atomicfile

from . import process_group, users
from .errors import TestbedError
from .proc import ProcessId

REGISTRY = Path("/run/migbatch-testbed")
MARKER = ".migbatch-testbed"
_LOCK_S = 180.0
Handler = Callable[[int, FrameType | None], object]
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class TestbedRecord:
    """Resources of one test bed on the machine."""

    name: str
    directory: str
    owner: tuple[int, int] | None
    group: str
    users: tuple[str, ...]

    @property
    def stale(self) -> bool:
        """Its owner has ended without removing it."""
        return self.owner is not None and not ProcessId(*self.owner).alive

    @property
    def path(self) -> Path:
        """File of this record."""
        return REGISTRY / f"{self.name}.json"

    def save(self) -> None:
        """Write the record atomically."""
        fields = asdict(self)
        fields["cage"] = fields.pop("group")  # its name in the file
        atomicfile.write(self.path, json.dumps(fields).encode())

    def disown(self) -> TestbedRecord:
        """Return the same test bed, now kept until `down`."""
        return replace(self, owner=None)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer signals that would end this process, so that no Ctrl-C leaves work half done or a lock held.

    A signal mask belongs to one thread and is inherited by programs that it starts. A signal that another thread, of a
    library, receives is noted by a handler in the main thread and delivered when the work is done.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {}
    received: list[int] = []
    try:
        # At this call Python delivers a signal that has just arrived, before any work has begun.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        if threading.current_thread() is threading.main_thread():
            handlers = {
                number: signal.signal(number, lambda number, _frame: received.append(number)) for number in _ENDING
            }
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for pending in dict.fromkeys(received):
            signal.raise_signal(pending)


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Let one signal raise inside, and none after it, so that the cleanup after the first is not interrupted.

    Python delivers a signal at the next call, which may be the one that begins the cleanup. Signals that end the
    process without raising, and ignored ones, are unchanged. May be nested: only one signal raises.
    """
    handlers: dict[int, Handler] = {}
    came = False

    def first(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if not came:
            came = True
            handlers[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, first)
    try:
        yield
    finally:
        for replaced, handler in handlers.items():
            signal.signal(replaced, handler)


@contextmanager
def locked() -> Iterator[None]:
    """Hold the registry's lock, uninterrupted; remove the registry at the end if it is empty.

    Raises:
        TestbedError: another process has held it for three minutes; the text says which.
    """
    deadline = time.monotonic() + _LOCK_S
    while True:
        with uninterrupted():
            handle = _take_lock()
            if handle is not None:
                try:
                    yield
                    return
                finally:
                    if not records():
                        with suppress(OSError):
                            (REGISTRY / "lock").unlink()
                            REGISTRY.rmdir()
                    os.close(handle)
        # Wait outside `uninterrupted`, so that Ctrl-C ends the wait.
        if time.monotonic() > deadline:
            holder = (REGISTRY / "lock").read_text().strip()
            raise TestbedError(f"process {holder} has held {REGISTRY}/lock for {_LOCK_S:g} s; end it and try again")
        time.sleep(0.02)


def _take_lock() -> int | None:
    """Take the lock file; return its descriptor, or None if another process holds it."""
    REGISTRY.mkdir(mode=0o755, exist_ok=True)
    handle = -1
    try:
        handle = os.open(REGISTRY / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If the previous holder removed the file after it was opened here, this lock excludes nobody.
        if (REGISTRY / "lock").stat().st_ino == os.fstat(handle).st_ino:
            os.pwrite(handle, f"{os.getpid():<20}".encode(), 0)
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    if handle >= 0:
        os.close(handle)
    return None


def records() -> list[TestbedRecord]:
    """Return all test beds of the machine, by name."""
    test_beds = []
    names: list[str] = []
    with suppress(FileNotFoundError):  # the last one removes the directory
        names = sorted(name for name in os.listdir(REGISTRY) if name.endswith(".json"))  # noqa: PTH208 - names
    for name in names:
        try:
            data = json.loads((REGISTRY / name).read_text())
        except FileNotFoundError:
            continue
        owner = tuple(data["owner"]) if data["owner"] else None
        test_beds.append(TestbedRecord(data["name"], data["directory"], owner, data["cage"], tuple(data["users"])))
    return test_beds


def find(directory: Path) -> TestbedRecord | None:
    """Return the test bed that lives in `directory`."""
    return next((record for record in records() if record.directory == str(directory)), None)


def destroy(record: TestbedRecord) -> None:
    """Remove everything that a test bed holds; call with the registry locked. Repeating it is harmless."""
    directory = Path(record.directory)
    process_group.reopen(directory, record.group).destroy()
    unmount_below(directory)
    if (directory / MARKER).exists():
        _remove(directory)
    elif directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()
    kept_users = {name for other in records() if other.name != record.name for name in other.users}
    users.remove(name for name in record.users if name not in kept_users)
    record.path.unlink(missing_ok=True)


def _remove(directory: Path) -> None:
    """Remove a marked directory; the mark is removed last, so that an interrupted removal can be repeated."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
    (directory / MARKER).unlink()
    directory.rmdir()


def unmount_below(directory: Path) -> None:
    """Unmount whatever a test mounted below `directory`, so that removing the tree does not reach into it."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount_point in reversed([m for m in mounts if m.startswith(f"{directory}/")]):
        subprocess.run(["umount", mount_point], check=True, capture_output=True)


def sweep() -> list[TestbedRecord]:
    """Destroy the stale test beds; call with the registry locked."""
    stale = [record for record in records() if record.stale]
    for record in stale:
        destroy(record)
    return stale


def usable_base() -> Path:
    """Return a local directory that users may traverse and where programs may run and devices may be opened."""
    for base in (Path("/run"), Path("/var/tmp"), Path("/tmp")):  # noqa: S108 - a root-owned directory is made below
        flags = os.statvfs(base).f_flag
        if not flags & (os.ST_NOEXEC | os.ST_NODEV | os.ST_RDONLY):
            return base
    raise TestbedError("/run, /var/tmp and /tmp are all mounted noexec or nodev; give a directory with --dir")


def new_directory(name: str = "") -> Path:
    """Choose the directory of a test bed if none was given; `name` makes it predictable, else it is new each time."""
    return usable_base() / f"migbatch-testbed{name or '-' + secrets.token_hex(3)}"


def check_directory(directory: Path) -> None:
    """Refuse a directory in which a cluster could not work or whose contents are not a test bed's."""
    if directory.exists() and any(directory.iterdir()) and not (directory / MARKER).exists():
        raise TestbedError(f"{directory} is not empty and was not made by a test bed; choose another directory")
    if len(str(directory)) > 60:
        raise TestbedError(f"{directory} is too long for unix sockets below it; choose a shorter path")
    existing = next(path for path in [directory, *directory.parents] if path.exists())
    for path in [existing, *existing.parents]:
        if not path.stat().st_mode & 0o001:
            raise TestbedError(f"ordinary users cannot walk through {path}; choose another directory with --dir")
    if os.statvfs(existing).f_flag & (os.ST_NOEXEC | os.ST_NODEV):
        raise TestbedError(f"{existing} is mounted noexec or nodev; choose another directory with --dir")
