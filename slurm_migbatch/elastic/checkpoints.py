"""Read and write checkpoint files: complete or absent, whatever happens during a write.

    DIRECTORY/step-000000001200.ckpt

    migbatch-checkpoint 1 <sha256> <bytes of facts> <bytes of state>
    {"steps": 1200, ...}        facts, JSON, also for other programs
    ...                         the state, by pickle or torch

The checksum covers everything after the first line. A file is written under a temporary name, its first line last; it
is synced, then renamed, then the directory is synced. Only then older ones are deleted. So at any instant, SIGKILL and
power failure included, the newest complete file holds a complete state, and it is at worst the last but one.

A file is read only if it is a regular file of the user that others may not write, because reading a state can
run code. Incomplete, foreign or unreadable files are skipped and the reason recorded; the next older one is tried.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from slurm_migbatch.elastic import states
from slurm_migbatch.elastic.disk import Disk
from slurm_migbatch.elastic.errors import ElasticError

_MAGIC = b"migbatch-checkpoint 1"
_FIRST = re.compile(rb"migbatch-checkpoint (\d+) ([0-9a-f]{64}) (\d{8}) (\d{20})\n")
_FIRST_BYTES = len(_MAGIC) + 1 + 64 + 1 + 8 + 1 + 20 + 1
_NAME = re.compile(r"step-(\d{12})\.ckpt")
_BESIDE = re.compile(r"\.step-\d{12}\.[A-Za-z0-9_.-]+\.tmp")
_BLOCK = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Checkpoint(NamedTuple):
    """A checkpoint that was read: the steps done, its facts, and the state."""

    path: Path
    steps: int
    facts: Mapping[str, Any]
    state: Any


class Torn(Exception):
    """This file is not a usable checkpoint; the message says why."""


class Checkpoints:
    """The checkpoints of one training, in a directory of their own.

    Attributes:
        passed_over: sentences about files that `newest` could not use.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        mark: str = "",
        disk: Disk | None = None,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Open a directory: the `keep` newest are kept; `mark` distinguishes this run's unfinished files from others'.

        `ready` is called before a file is put into its place, and may raise.
        """
        if keep < 1:
            raise ElasticError(f"keep={keep} must be 1 or more")
        self.directory, self.keep, self.disk = directory, keep, disk or Disk()
        self.passed_over: list[str] = []
        self._mark = mark or str(os.getpid())
        self._ready = ready
        self._unusable: set[str] = set()

    def names(self) -> list[str]:
        """List every file with a checkpoint's name, the newest first."""
        return sorted((name for name in os.listdir(self.directory) if _NAME.fullmatch(name)), reverse=True)  # noqa: PTH208

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, steps: int, facts: Mapping[str, Any], state: Any) -> float:
        """Write a checkpoint; return the seconds that it took. On a full disk, delete older ones and retry.

        Raises:
            OSError: it could not be written; the existing ones remain, except those older than the newest.
        """
        begun = time.monotonic()
        try:
            self._write(steps, facts, state)
        except OSError as error:
            if error.errno not in _NO_ROOM or not self._delete_old(1):
                raise
            self._write(steps, facts, state)
        with suppress(OSError):  # the new one is saved; leftovers are deleted next time
            self._delete_old(self.keep)
        return time.monotonic() - begun

    def _write(self, steps: int, facts: Mapping[str, Any], state: Any) -> None:
        """Write a checkpoint to a temporary file, sync it, and rename it."""
        form = states.form_of(state)
        head = json.dumps({**facts, "steps": steps, "form": form, "written": round(time.time(), 3)}).encode()
        name = f"step-{steps:012d}.ckpt"
        temporary = self.directory / f".{name.removesuffix('.ckpt')}.{self._mark}.tmp"
        with suppress(FileNotFoundError):
            self.disk.unlink(temporary)
        try:
            handle = self.disk.create(temporary)
            try:
                sink = _Sink(self.disk, handle, _FIRST_BYTES)
                try:
                    with io.BufferedWriter(sink, _BLOCK) as file:
                        file.write(head)
                        states.dump(state, form, file)
                except Exception as error:
                    if sink.failure is None or isinstance(error, OSError):
                        raise
                    raise sink.failure from error  # torch.save then closes its archive, and raises RuntimeError
                size = sink.offset - _FIRST_BYTES - len(head)
                first = b"%s %s %08d %020d\n" % (_MAGIC, sink.digest.hexdigest().encode(), len(head), size)
                _all(self.disk, handle, first, 0)
                self.disk.sync(handle)
            finally:
                os.close(handle)
            self._ready()
            self.disk.rename(temporary, self.directory / name)
        except BaseException:
            with suppress(OSError):
                self.disk.unlink(temporary)
            raise
        self.disk.sync_directory(self.directory)
        self._unusable.discard(name)

    def _delete_old(self, keep: int) -> int:
        """Delete all but the newest `keep`; return how many. Files that were skipped remain for the user."""
        old = [name for name in self.names() if name not in self._unusable][keep:]
        for name in old:
            self.disk.unlink(self.directory / name)
        return len(old)

    def tidy(self) -> None:
        """Delete unfinished files of runs that were killed. Only for the holder of the directory's lock."""
        for name in os.listdir(self.directory):  # noqa: PTH208
            if _BESIDE.fullmatch(name):
                with suppress(OSError):
                    self.disk.unlink(self.directory / name)

    # -- reading -------------------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """Read the newest complete checkpoint; None if the training has not begun.

        Raises:
            ElasticError: there are checkpoints but none is usable, or a complete one needs a module that is missing.
        """
        names = self.names()
        self.passed_over.clear()
        for name in names:
            path = self.directory / name
            try:
                return self._read(path)
            except (Torn, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                self._unusable.add(name)
                self.passed_over.append(f"{path} is ignored: {reason}")
        if names:
            raise ElasticError(
                f"none of the {len(names)} checkpoints in {self.directory} can be used, and training does not restart "
                f"over them: {'; '.join(self.passed_over)}. Restore a valid one, or use another directory"
            )
        return None

    def _read(self, path: Path) -> Checkpoint:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise Torn("it is not a file")
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise Torn("it belongs to another user, or is writable by others")
            with open(handle, "rb", closefd=False) as file:
                return self._understand(path, file, status.st_size)
        finally:
            os.close(handle)

    @staticmethod
    def _understand(path: Path, file: io.BufferedReader, length: int) -> Checkpoint:
        match = _FIRST.fullmatch(file.read(_FIRST_BYTES))
        if match is None:
            raise Torn("it is not a checkpoint of this library, or it is incomplete")
        if match[1] != b"1":
            raise Torn(f"it has a newer format ({match[1].decode()}) than this release supports")
        head, size = int(match[3]), int(match[4])
        if length != _FIRST_BYTES + head + size:
            raise Torn(f"it has {length} bytes and should have {_FIRST_BYTES + head + size}")
        digest = hashlib.sha256()
        while block := file.read(_BLOCK):
            digest.update(block)
        if digest.hexdigest().encode() != match[2]:
            raise Torn("its checksum is wrong: the file was damaged or changed")
        file.seek(_FIRST_BYTES)
        facts = json.loads(file.read(head))
        section = io.BufferedReader(_Section(file, _FIRST_BYTES + head, size), _BLOCK)
        try:
            state = states.load(facts["form"], section)
        except Exception as error:
            raise ElasticError(
                f"{path} is valid, but its state cannot be restored: {type(error).__name__}: {error}. Has the "
                "program changed? Run it with the code that wrote it, or use another directory"
            ) from error
        return Checkpoint(path, int(facts["steps"]), facts, state)


def _all(disk: Disk, handle: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`; one call may write less (a signal, a disk that is nearly full)."""
    view = memoryview(data)
    while view:
        count = disk.write(handle, view, offset)
        view, offset = view[count:], offset + count


class _Sink(io.RawIOBase):
    """A file-like writer that computes the checksum.

    Attributes:
        failure: the disk's error, which the caller of `write` may replace by its own.
    """

    def __init__(self, disk: Disk, handle: int, offset: int) -> None:
        self.offset = offset
        self.failure: OSError | None = None
        self.digest = hashlib.sha256()
        self._disk, self._handle = disk, handle

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`. Raises OSError."""
        try:
            return self._write(data)
        except OSError as error:
            self.failure = error
            raise

    def _write(self, data: Any) -> int:
        """Write and hash. A large block is hashed meanwhile, which takes about as long; neither holds the GIL."""
        view = memoryview(data).cast("B")
        if len(view) < _BLOCK:
            self.digest.update(view)
            _all(self._disk, self._handle, view, self.offset)
        else:
            hashing = threading.Thread(target=self.digest.update, args=(view,), daemon=True)
            hashing.start()
            try:
                _all(self._disk, self._handle, view, self.offset)
            finally:
                hashing.join()  # the caller reuses the memory
        self.offset += len(view)
        return len(view)


class _Section(io.RawIOBase):
    """A file-like reader of one part of a file."""

    def __init__(self, file: io.BufferedReader, begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, as files do."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`, as files do."""
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count
