"""Store learned models on disk: one file for each version, and an index of the current one.

    models/index.json           the current version, the rejected ones, how far the record was read
    models/model-7.json.gz      lines of JSON: the learned state without its models, then one measured model a line

Files cannot execute code: they are JSON, and every number is checked. Only files written by root or migbatchd are read:
directory and files must belong to one of them and be writable by nobody else, files must be regular and of bounded
size, also uncompressed. Files are replaced atomically (temporary file, fsync, rename); writers hold a lock. A version
that an administrator rolled back is rejected: it is not used again if its successor is unreadable.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.state import Learned, StateError
from slurm_migbatch.values import atomicfile

FORMAT: Final = 1
INDEX: Final = "index.json"
MOST_BYTES: Final = 32 << 20
"""Size limit of a file. A thousand measured models take 0.7 MB."""
MOST_UNPACKED: Final = 256 << 20
MOST_TRIES: Final = 20
"""Refits kept in the index."""
LARGEST_LOG: Final = 60.0
"""Limit of a parameter: parameters are logarithms and exponents; larger ones are implausible and would overflow."""
_NAME: Final = re.compile(r"model-([1-9][0-9]{0,8})\.json\.gz")
_LOCK: Final = ".lock"


@dataclass(frozen=True)
class Saved:
    """A version as written: the learned state, and the report of the refit."""

    learned: Learned
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Index:
    """The index of versions.

    Attributes:
        current: the version used for predictions; 0 is the physical prior.
        last: the highest version ever assigned.
        rejected: versions that an administrator rolled back, with the time (unix seconds).
        seen: how far the record had been read at the last refit or rollback.
        tries: the last refits, oldest first, with their outcome.
    """

    current: int = 0
    last: int = 0
    rejected: Mapping[int, float] = field(default_factory=dict)
    seen: Mapping[str, Any] = field(default_factory=dict)
    tries: tuple[Mapping[str, Any], ...] = ()

    def tried(self, seen: Mapping[str, Any], outcome: Mapping[str, Any]) -> Index:
        """Return the index after one more refit."""
        return replace(self, seen=dict(seen), tries=(*self.tries, dict(outcome))[-MOST_TRIES:])


@dataclass(frozen=True)
class Current:
    """The state used for predictions, and why newer versions cannot be used."""

    saved: Saved
    troubles: tuple[str, ...] = ()


PRIOR: Final = Saved(Learned(), {})


class ModelDirectory:
    """The models of one site. Reading needs no lock; `add`, `note` and `roll_back` exclude other writers."""

    def __init__(self, path: Path, uids: Collection[int]) -> None:
        """`uids`: owners whose files are trusted, besides root."""
        self.path = path
        self._uids = frozenset({0, *uids})

    def index(self) -> Index:
        """Return the index; that of version 0 if there is no directory yet.

        Raises:
            StateError: it cannot be read or is not safe.
        """
        with self._opened() as folder:
            return Index() if folder is None else self._index(folder)

    def versions(self) -> list[int]:
        """Return the versions that have a file, ascending; raises StateError."""
        with self._opened() as folder:
            return [] if folder is None else _versions(folder)

    def load(self, version: int) -> Saved:
        """Return one version; raises StateError if it is missing, unsafe or invalid."""
        with self._opened() as folder:
            if folder is None:
                raise StateError(f"{self.path}: nothing learned yet")
            return self._load(folder, version)

    def current(self) -> Current:
        """Load the current version, else the newest earlier usable one, else the prior."""
        troubles: list[str] = []
        try:
            with self._opened() as folder:
                if folder is None:
                    return Current(PRIOR)
                index = self._index(folder)
                if not index.current:
                    return Current(PRIOR)
                earlier = [v for v in _versions(folder) if v < index.current and v not in index.rejected]
                for version in (index.current, *reversed(earlier)):
                    try:
                        return Current(self._load(folder, version), tuple(troubles))
                    except StateError as error:
                        troubles.append(str(error))
        except StateError as error:
            troubles.append(str(error))
        return Current(PRIOR, tuple(troubles))

    def add(
        self, learned: Learned, report: Mapping[str, Any], seen: Mapping[str, Any], keep: int, created: float
    ) -> int:
        """Write a new version and make it current; of older ones the last `keep` - 1 remain.

        Returns:
            Its number.

        Raises:
            StateError: the directory is not safe to write to.
            OSError: it cannot be written.
        """
        with self._changing() as folder:
            index = self._repaired(folder)
            version = 1 + max([index.last, *_versions(folder)])
            saved = Saved(replace(learned, version=version, created=created), report)
            _write(folder, _name(version), _packed(saved))
            facts = {name: report[name] for name in ("reason", "check", "runs", "rows", "seconds") if name in report}
            outcome = {"ts": created, "outcome": "taken", "version": version, **facts}
            self._put(folder, replace(index, current=version, last=version).tried(seen, outcome))
            for old in _versions(folder)[:-keep]:
                if old != version:
                    os.unlink(_name(old), dir_fd=folder)
            return version

    def note(self, outcome: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
        """Record a refit without a new version, and how far it had read; raises as `add`."""
        with self._changing() as folder:
            self._put(folder, self._repaired(folder).tried(seen, outcome))

    def roll_back(self, version: int | None, now: float, seen: Mapping[str, Any]) -> tuple[int, int]:
        """Make an earlier version current: the one named, else the newest that is neither current nor rejected.

        The previously current one is rejected if it is newer; the named one is no longer rejected. 0 is the physical
        prior.

        Returns:
            The version that was current and the one that is now.

        Raises:
            StateError: there is no earlier version, or it cannot be read.
            OSError: the directory cannot be written.
        """
        with self._changing() as folder:
            index = self._index(folder)
            if version is None:
                if not index.current:
                    raise StateError("no learned version to roll back from; the physical prior is current")
                earlier = [v for v in _versions(folder) if v < index.current and v not in index.rejected]
                version = earlier[-1] if earlier else 0
            if version == index.current:
                raise StateError(f"version {version} is already current")
            if version:
                self._load(folder, version)
            rejected = {number: when for number, when in index.rejected.items() if number != version}
            if index.current > version:
                rejected[index.current] = now
            outcome = {"ts": now, "outcome": "rolled back", "version": version, "from": index.current}
            new_index = replace(index, current=version, rejected=rejected).tried({**index.seen, **seen}, outcome)
            self._put(folder, new_index)
            return index.current, version

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Open the directory; yield its descriptor, or None if it does not exist."""
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            raise StateError(f"{self.path} is not used: {error.strerror}; it must be a directory") from None
        try:
            self._check(os.fstat(folder), str(self.path))
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[int]:
        self._make()
        with self._opened() as folder:
            if folder is None:
                raise StateError(f"{self.path} has just been removed")
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(_LOCK, flags, 0o600, dir_fd=folder)  # any user who could open it could hold the lock forever
            try:
                if (owner := _owner(folder)) is not None:
                    os.fchown(lock, *owner)
                fcntl.flock(lock, fcntl.LOCK_EX)
                for name in os.listdir(folder):  # noqa: PTH208 of an open directory
                    if name.startswith(".") and name != _LOCK:  # left by a writer that was killed
                        os.unlink(name, dir_fd=folder)
                yield folder
            finally:
                os.close(lock)

    def _make(self) -> None:
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            self.path.mkdir(mode=0o755)
        except FileExistsError:
            return
        owner = self.path.parent.stat()
        if os.geteuid() == 0 and owner.st_uid in self._uids:  # root creates it: give it to migbatchd's user
            os.chown(self.path, owner.st_uid, owner.st_gid, follow_symlinks=False)

    def _index(self, folder: int) -> Index:
        try:
            text = self._read(folder, INDEX)
        except FileNotFoundError:
            return Index()
        where = f"{self.path / INDEX}"
        data = _json(text, where)
        try:
            if data["format"] != FORMAT:
                raise ValueError("it was written by another release")
            index = Index(
                int(data["current"]),
                int(data["last"]),
                {int(version): float(when) for version, when in data["rejected"].items()},
                dict(data["seen"]),
                tuple(dict(attempt) for attempt in data["tries"]),
            )
            if not 0 <= index.current <= index.last:
                raise ValueError("the current version is not in the list")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise StateError(f"{where} cannot be parsed: {error!r}") from None
        return index

    def _repaired(self, folder: int) -> Index:
        """Return the index, or a new one if it is broken: a writer must be able to continue."""
        try:
            return self._index(folder)
        except StateError:
            return Index(last=max(_versions(folder), default=0))

    def _put(self, folder: int, index: Index) -> None:
        _write(folder, INDEX, json.dumps({"format": FORMAT, **asdict(index)}, indent=1).encode())

    def _load(self, folder: int, version: int) -> Saved:
        """Return a saved version. Raises StateError if it is missing, damaged or of another release."""
        where = f"{self.path / _name(version)}"
        try:
            packed = self._read(folder, _name(version))
        except FileNotFoundError:
            raise StateError(f"{where} is missing") from None
        head, *lines = _unpacked(packed, where).splitlines() or [b""]
        data = _json(head, where)
        fitted = [_json(line, where) for line in lines]
        try:
            report, values = data["report"], {**data["learned"], "fitted": fitted}
            if data["format"] != FORMAT or not isinstance(report, dict):
                raise ValueError("it was written by another release")
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{where} cannot be parsed: {error!r}") from None
        try:
            learned = Learned.from_dict(values)
            _check_numbers(learned)
        except StateError as error:
            raise StateError(f"{where}: {error}") from None
        if learned.version != version:
            raise StateError(f"{where} claims to be version {learned.version}")
        return Saved(learned, report)

    def _read(self, folder: int, name: str) -> bytes:
        where = f"{self.path / name}"
        try:
            # O_NONBLOCK: a FIFO in the file's place must not block the reader
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StateError(f"{where} is not used: {error.strerror}; it must be a regular file") from None
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise StateError(f"{where} is not used: it is not a regular file")
            self._check(status, where)
            if status.st_size > MOST_BYTES:
                raise StateError(f"{where} is not used: {status.st_size} bytes are more than {MOST_BYTES}")
            with os.fdopen(file, "rb", closefd=False) as stream:
                return stream.read(MOST_BYTES)
        except OSError as error:
            raise StateError(f"{where} cannot be read: {error.strerror}") from None
        finally:
            os.close(file)

    def _check(self, status: os.stat_result, where: str) -> None:
        if status.st_uid not in self._uids:
            raise StateError(f"{where} is not used: it belongs to uid {status.st_uid}, not to root or migbatchd's user")
        if status.st_mode & 0o022:
            raise StateError(f"{where} is not used: it is writable by others; chmod go-w {where}")


def _name(version: int) -> str:
    return f"model-{version}.json.gz"


def _versions(folder: int) -> list[int]:
    names = os.listdir(folder)
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def _write(folder: int, name: str, content: bytes) -> None:
    """Write a file that every user may read: every user may run `migbatch explain`."""
    atomicfile.write(name, content, 0o644, _owner(folder), folder=folder)
    os.fsync(folder)


def _owner(folder: int) -> tuple[int, int] | None:
    """Return migbatchd's user, who owns the directory, if root writes for it."""
    owner = os.fstat(folder)
    return (owner.st_uid, owner.st_gid) if os.geteuid() == 0 and owner.st_uid != 0 else None


def _packed(saved: Saved) -> bytes:
    # one model a line: parsing a line holds the interpreter for microseconds only, so the submit service is not delayed
    values = saved.learned.to_dict()
    fitted = values.pop("fitted")
    head = {"format": FORMAT, "report": dict(saved.report), "learned": values}
    lines = [json.dumps(part, separators=(",", ":"), allow_nan=False) for part in (head, *fitted)]
    return gzip.compress("\n".join(lines).encode(), mtime=0)


def _unpacked(packed: bytes, where: str) -> bytes:
    reader = zlib.decompressobj(wbits=31)
    try:
        text = reader.decompress(packed, MOST_UNPACKED)
    except zlib.error:
        raise StateError(f"{where} is not gzip, or damaged") from None
    if reader.unconsumed_tail:
        raise StateError(f"{where} is not used: unpacked it is larger than {MOST_UNPACKED} bytes")
    if not reader.eof or reader.unused_data:
        raise StateError(f"{where} is incomplete or has trailing data")
    return text


def _json(text: bytes, where: str) -> Any:
    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no number")

    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{where} cannot be parsed: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise StateError(f"{where} cannot be parsed: an object is needed")
    return value


def _check_numbers(learned: Learned) -> None:
    """Check what `Learned.from_dict` does not: that predictions from these numbers remain finite."""
    for fit in learned.fitted.values():
        for figure, belief in fit.beliefs.items():
            where = f"the {figure} of {fit.model!a} on {fit.gpu!a}"
            _check_parameters(belief.mean, belief.covariance, where)
            _check_parameters(np.concatenate([belief.places.ravel(), belief.offsets, belief.noise]), None, where)
        if fit.points < 0:
            raise StateError(f"{fit.model!a} on {fit.gpu!a} was measured at {fit.points} points")
    for (figure, kind), population in learned.populations.items():
        where = f"the population of {figure}/{kind}"
        if population.covariance is not None:
            _check_parameters(np.zeros(0), population.covariance, where)
        for effect in (*population.levels.values(), *population.own.values()):
            _check_parameters(effect.mean, np.diag(effect.variance), where)
        for array in (population.slopes, population.centre):
            if array is not None and not np.all(np.abs(array) <= LARGEST_LOG):
                raise StateError(f"{where} has parameters out of range")


def _check_parameters(mean: Array, covariance: Array | None, where: str) -> None:
    if not np.all(np.abs(mean) <= LARGEST_LOG):
        raise StateError(f"{where} has parameters out of range")
    if covariance is None:
        return
    if not np.allclose(covariance, covariance.T) or not np.all(np.abs(covariance) <= LARGEST_LOG**2):
        raise StateError(f"{where} has an invalid variance")
    if np.linalg.eigvalsh(covariance)[0] < -1e-6:
        raise StateError(f"{where} has an invalid variance")
