"""Write the files in which the site's GPU exporters look up jobs by slice; off unless configured.

- `JobMapDir`: dcgm-exporter's `--hpc-job-mapping-dir`. A file `<gpu>.<gi>` (NVML's index of the GPU, id of the GPU
  instance) has one job id per line; two if two training jobs share the slice.
- `GpustatDir`: jobstats' `/run/gpustat`. A file `MIG-<uuid>` has `JOBID UID`; of two jobs it can name only the first.

Ids of GPU instances are reused, so a file is deleted before its slice is, and written when the job owns the slice.
The files follow from the journal alone: every change of holders calls `sync` afterwards, and if
a hook is killed in between, the next one or the agent corrects the files. Files with other names are not touched.

Faults here never affect a job: they are kept in `problem`, for the log. A directory is used only if only root can write
it and it is on RunDir's file system, so that it cannot block a hook in a new way.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH116

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

from slurm_migbatch.node import conf, effects, paths
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.deadline import Deadline, TooLate, locked
from slurm_migbatch.node.journal import Journal, JournalError
from slurm_migbatch.node.journal_rows import JournalSlice
from slurm_migbatch.node.paths import Paths, PathsError

LOCK = "job-maps"
WAIT_S = 0.5
"""How long a hook waits for another one that writes these files."""
MOST_FILES = 4096
"""Most directory entries to read; more are not from these programs."""
MOST_BYTES = 4096
_SLICE = re.compile(r"[0-9]+\.[0-9]+", re.ASCII)
_MIG = re.compile(r"MIG-[0-9A-Fa-f-]{36}", re.ASCII)
Files = Mapping[str, bytes]


class _JobMapError(RuntimeError):
    """A directory cannot be used; the message says which, why, and what to do."""


class JobMaps:
    """The job maps of one node. `problem` says why they are outdated; empty if they are not."""

    def __init__(self, config: NodeConfig, node_paths: Paths) -> None:
        self._slices = config.job_map_dir
        self._gpustat = config.gpustat_dir
        self._lock = node_paths.lock
        self._device = os.fstat(node_paths.run).st_dev
        self.problem = ""

    @property
    def wanted(self) -> bool:
        """Whether any is configured."""
        return bool(self._slices or self._gpustat)

    def sync(self, journal: Journal, indices: Mapping[str, int] | None = None, *, dry: bool = False) -> list[str]:
        """Write the files according to the journal. Returns what was (or would be) done, as sentences; never raises.

        `indices` has NVML's index of each GPU by UUID. Without it, if the driver is not to be queried, no file
        `<gpu>.<gi>` is created, but the jobs that no longer hold anything here are removed from existing ones.
        """
        return self._follow(lambda: _held(journal), indices, dry) if self.wanted else []

    def empty(self) -> None:
        """Remove all entries, because nothing survives a boot; never raises."""
        if self.wanted:
            self._follow(list, None, False)

    def _follow(
        self, held: Callable[[], Sequence[JournalSlice]], indices: Mapping[str, int] | None, dry: bool
    ) -> list[str]:
        done: list[str] = []
        try:
            with locked(self._lock, [LOCK], Deadline(WAIT_S)):
                rows = held()
                if self._gpustat:
                    done += self._update(self._gpustat, _MIG, lambda _: _owners(rows), dry)
                if self._slices and indices is not None:
                    done += self._update(self._slices, _SLICE, lambda _: _jobs(rows, indices), dry)
                elif self._slices:
                    done += self._update(self._slices, _SLICE, lambda now: _remaining(rows, now), dry)
        except (OSError, JournalError, PathsError, TooLate, _JobMapError) as error:
            self.problem = str(error)
            return []
        self.problem = ""
        return done

    def clear(self, gpu: int, gi: int, mig_uuid: str | None) -> None:
        """Remove the entries of a GPU instance that is about to be destroyed or given to another job; never raises."""
        entries = ((self._slices, _SLICE, f"{gpu}.{gi}"), (self._gpustat, _MIG, mig_uuid or ""))
        for path, form, name in entries:
            if not path or not form.fullmatch(name):
                continue
            try:
                with _opened(path, self._device) as handle:
                    _unlink(handle, name)
            except (OSError, PathsError, _JobMapError) as error:
                self.problem = str(error)

    def _update(self, path: str, form: re.Pattern[str], wanted: Callable[[Files], Files], dry: bool) -> list[str]:
        with _opened(path, self._device) as handle:
            names = _names(path, handle)
            current = {name: _read(handle, name) for name in names if form.fullmatch(name)}
            files = wanted(current)
            stale = sorted(current.keys() - files.keys())
            new = sorted(name for name, text in files.items() if current.get(name) != text)
            if not dry:
                unfinished = [name for name in names if name[0] == "." and form.fullmatch(name[1:])]
                for name in [*stale, *unfinished]:
                    _unlink(handle, name)
                for name in new:
                    paths.replace(handle, name, files[name], "job map", _readable, durable=False)
        return [f"{path}/{name}: removed" for name in stale] + [f"{path}/{name}: written" for name in new]


def problems(config: NodeConfig) -> list[str]:
    """Return which directories cannot be used and why, as sentences; a missing one is created by the next hook."""
    errors = []
    for path in filter(None, (config.job_map_dir, config.gpustat_dir)):
        try:
            device = os.stat(config.run_dir).st_dev
            if os.path.lexists(path):
                with _opened(path, device) as handle:
                    _names(path, handle)
            else:
                _check_above(path)
        except (OSError, PathsError, _JobMapError) as error:
            errors.append(str(error))
    return errors


@contextmanager
def _opened(path: str, device: int) -> Iterator[int]:
    """Open the directory, which must be on the file system `device`; create it if missing."""
    _check_above(path)
    handle = paths.public(path)
    try:
        if os.fstat(handle).st_dev != device:
            raise _JobMapError(f"{path} is not used: it must be in the file system of RunDir, such as /run")
        yield handle
    finally:
        os.close(handle)


def _check_above(path: str) -> None:
    reason = conf.insecure(path.rpartition("/")[0] or "/")
    if reason:
        raise _JobMapError(f"{path} is not used: {reason}")


def _names(path: str, handle: int) -> list[str]:
    with os.scandir(handle) as entries:
        names = [entry.name for entry in islice(entries, MOST_FILES + 1)]
    if len(names) > MOST_FILES:
        raise _JobMapError(f"{path} has more than {MOST_FILES} entries; use a directory for job maps only")
    return names


def _held(journal: Journal) -> list[JournalSlice]:
    """Return the slices of running jobs, second holders last."""
    running = {(run.job, run.restart) for run in journal.runs("state='running'")}
    rows = [row for row in journal.slices("state='held'") if (row.job, row.restart) in running]
    return sorted(rows, key=lambda row: (row.beside is not None, row.job or 0))


def _jobs(rows: Sequence[JournalSlice], indices: Mapping[str, int]) -> Files:
    files: dict[str, bytes] = {}
    for row in rows:
        if row.gi is not None and row.gpu in indices:
            name = f"{indices[row.gpu]:d}.{row.gi:d}"
            files[name] = files.get(name, b"") + b"%d\n" % (row.job or 0)
    return files


def _remaining(rows: Sequence[JournalSlice], now: Files) -> Files:
    """Return the current files, without the jobs that hold nothing."""
    holders = {b"%d\n" % (row.job or 0) for row in rows}
    kept = {name: b"".join([line for line in text.splitlines(True) if line in holders]) for name, text in now.items()}
    return {name: text for name, text in kept.items() if text}


def _owners(rows: Sequence[JournalSlice]) -> Files:
    files: dict[str, bytes] = {}
    for row in rows:
        if row.mig_uuid is not None and _MIG.fullmatch(row.mig_uuid):
            files.setdefault(row.mig_uuid, b"%d %d\n" % (row.job or 0, row.uid or 0))
    return files


def _read(directory: int, name: str) -> bytes:
    """Return the file's text; nothing for anything but a plain file of root's, so that it is replaced."""
    try:
        return paths.read(name, MOST_BYTES, directory)
    except OSError:
        return b""


def _readable(file: int) -> None:
    """Let everyone read an open file, whatever the umask."""
    os.fchmod(file, 0o644)


def _unlink(directory: int, name: str) -> None:
    effects.point("job map unlink")
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
