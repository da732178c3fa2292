"""Record the last hours of migbatchd's input and decisions on disk, for `migbatch replay`.

Rounds only queue objects that they have created anyway; a thread does the rest. A round is not recorded if the thread
is too far behind, and a new segment begins when it has caught up. Each segment is a separate file, JSON lines in one
gzip member, so that the oldest can be removed and `cat` joins several into one recording.

Errors here only cause a warning: decisions do not wait for their recording. If a round cannot be recorded, another
segment begins some time later.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.decide.core import Decision, Outcomes, Settings
from slurm_migbatch.decide.recording import memory as memory_state
from slurm_migbatch.decide.recording.codec import CodecError
from slurm_migbatch.decide.recording.segments import Asked, AskedPredictions, SegmentWriter
from slurm_migbatch.decide.snapshot import ClusterSnapshot, Predictions

log = logging.getLogger(__name__)

DIRECTORY: Final = "decisions"
"""Directory of recordings, in the service's run_dir."""
SUFFIX: Final = ".jsonl.gz"
_STAMP: Final = "%Y%m%dT%H%M%S.%fZ"
_SEGMENTS: Final = 8
"""Number of segments into which the allowed time and size are divided."""
_WHOLES: Final = 2.0
"""Minimum size of a segment in whole rounds: it begins with one, followed by changes."""
_LARGEST: Final = 0.5
"""Share of the allowed size above which a segment always ends."""
_WAITING: Final = 64
"""Maximum number of rounds waiting for the thread."""
_FLUSH_S: Final = 10.0
"""Minimum seconds between two flushes to the file: what a killed service loses."""
_AT_ONCE: Final = 1000
"""Maximum number of list elements that are encoded in one call."""
_LONGEST_LINE: Final = 1 << 28
"""Maximum bytes of an entry when reading; foreign files may contain anything."""
_STOP_S: Final = 5.0
_FIRST_WAIT_S: Final = 10.0
"""Seconds after an error until the next try; each further error doubles them."""
_LONGEST_WAIT_S: Final = 600.0


class _TooSmall(Exception):
    """A single segment exceeds the maximum total size."""


@dataclass(frozen=True)
class _Begin:
    """Start of a segment: the encoded decision memory; None if there is none."""

    state: memory_state.State | None


@dataclass(frozen=True)
class _RecordedRound:
    snapshot: ClusterSnapshot
    decision: Decision
    outcomes: Outcomes
    asked: tuple[Asked, ...]


class FlightRecorder:
    """Records rounds for later replay.

    Args:
        directory: where the segments are; created if missing.
        hours: how long a segment is kept after its end.
        megabytes: maximum total size.
        clock: seconds, never set back.
    """

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        hours: float,
        megabytes: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._fault = FaultReporter(
            "decisions are not recorded",
            f"recording continues in another segment, once {directory} is writable",
            log,
            first=_FIRST_WAIT_S,
            longest=_LONGEST_WAIT_S,
            clock=clock,
        )
        self._due: float | None = None  # when to try again after an error
        self._files = _Segments(directory, hours * 3600.0, int(megabytes * 1e6))
        self._queue: queue.Queue[_Begin | _RecordedRound | threading.Event | None] = queue.Queue(_WAITING)
        self._queue.put(_Begin(None))
        self._asked: AskedPredictions | None = None
        self._missed = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flight recorder", daemon=True)

    # -- in the thread of the rounds -------------------------------------------------------------------------------

    def predictions(self, predictions: Predictions) -> Predictions:
        """Return predictions whose queries are recorded until the next round."""
        if self._stopped.is_set():
            return predictions
        if self._thread.ident is None:  # this is the first round
            self._thread.start()
        self._asked = AskedPredictions(predictions)
        return self._asked

    def round(self, snapshot: ClusterSnapshot, decision: Decision, outcomes: Outcomes) -> None:
        """Record a round after its outcomes. Does not wait."""
        if self._stopped.is_set():
            return
        if self._due is not None:
            if self._clock() < self._due:
                return
            self._due, self._missed = None, True
        queries = tuple(self._asked.asked) if self._asked is not None else ()
        try:
            if not self._missed:
                self._queue.put_nowait(_RecordedRound(snapshot, decision, outcomes, queries))
            if self._missed or self._files.full:
                self._files.full = False
                self._queue.put_nowait(_Begin(memory_state.take(decision.memory)))
                self._missed = False
        except queue.Full:
            self._missed = True
        except Exception as error:
            self._failed(error)

    def flush(self) -> None:
        """Wait until everything is written, or recording has stopped."""
        written = threading.Event()
        self._queue.put(written)
        while not written.wait(0.05) and not self._stopped.is_set():
            pass

    def close(self) -> None:
        """Write the rest, and stop."""
        if self._thread.ident is None:
            return
        try:
            self._queue.put(None, timeout=_STOP_S)
        except queue.Full:
            self._stopped.set()
        self._thread.join(_STOP_S)

    # -- in the thread of the recorder -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write()
        except _TooSmall as error:
            log.warning("decisions are no longer recorded: %s", error)
        except Exception as error:
            log.warning("decisions are no longer recorded: %s", error or type(error).__name__, exc_info=True)
        finally:
            self._stopped.set()
            self._files.close()

    def _write(self) -> None:
        writer = SegmentWriter()
        begin: _Begin | None = None  # as after an error: the rounds until the next segment are left out
        while (item := self._queue.get()) is not None and not self._stopped.is_set():
            if isinstance(item, threading.Event):
                item.set()
                continue
            if isinstance(item, _Begin):
                self._files.close()
                writer, begin = SegmentWriter(), item
            elif begin is not None:
                try:
                    self._write_round(item, writer, begin)
                    if self._due is None:
                        self._fault.succeeded()
                except _TooSmall:
                    raise
                except Exception as error:
                    self._files.close()
                    begin = None
                    self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, OSError) and not self._fault.open:
            log.error("a round cannot be recorded", exc_info=error)
        self._due = self._clock() + self._fault.failed(error)

    def _write_round(self, item: _RecordedRound, writer: SegmentWriter, begin: _Begin) -> None:
        now, first = item.snapshot.now, not self._files.open
        if first:
            self._files.begin(now)
            self._files.write(writer.begin(self._settings, begin.state), now)
        entry = writer.round(item.snapshot, item.decision, item.outcomes, item.asked)
        self._files.write(entry, now, whole=first)


class _Segments:
    """Files of segments, of which the oldest are removed."""

    def __init__(self, directory: Path, seconds: float, size: int) -> None:
        self._directory, self._seconds, self._size = directory, seconds, size
        self._file: int | None = None
        self._path = directory
        self._begun = self._flushed = self._latest = 0.0
        self._written = self._whole = 0
        self._zip = zlib.compressobj(wbits=31)
        #: whether the segment has reached its size or age, and another should begin; reset by the caller
        self.full = False
        self._announced = False

    @property
    def open(self) -> bool:
        """Whether a segment is being written."""
        return self._file is not None

    def begin(self, now: float) -> None:
        """Open the file of a segment that begins `now`."""
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._file, self._path = _created(self._directory, now)
        self._zip = zlib.compressobj(wbits=31)
        self._begun = self._flushed = self._latest = now
        self._written, self._whole, self._announced = 0, 0, False

    def write(self, entry: Any, now: float, *, whole: bool = False) -> None:
        """Append an entry; `whole`: it is the segment's first round. Raises OSError, _TooSmall."""
        data = b"".join([self._zip.compress(part.encode()) for part in chain(_pieces(entry), "\n")])
        if whole or not 0 <= now - self._flushed < _FLUSH_S:
            data += self._zip.flush(zlib.Z_SYNC_FLUSH)
            self._flushed = now
        self._append(data)
        self._latest = now
        self._delete_old_segments(now)
        if whole:
            self._whole = self._written
        large = self._written >= max(self._size / _SEGMENTS, min(_WHOLES * self._whole, _LARGEST * self._size))
        if not self._announced and (large or not 0 <= now - self._begun < self._seconds / _SEGMENTS):
            self._announced = self.full = True

    def close(self) -> None:
        """End the segment and count the compressed data written last. A segment without a round is removed."""
        if self._file is None:
            return
        try:
            self._append(self._zip.flush())
            self._delete_old_segments(self._latest)
        except (OSError, _TooSmall) as error:
            log.debug("cannot write the end of %s: %s", self._path, error)
        file, self._file = self._file, None
        try:
            os.close(file)
            if not self._whole:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            log.debug("cannot close or remove %s: %s", self._path, error)

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        _write_all(self._file, data)
        self._written += len(data)

    def _delete_old_segments(self, now: float) -> None:
        """Remove segments that are too old, and the oldest while all together are too large."""
        others = [path for path in segments(self._directory) if path != self._path]
        sizes = {path: path.stat().st_size for path in others}
        free_bytes = self._size - self._written - sum(sizes.values())
        for path, following in pairwise([*others, self._path]):  # a segment ends where the following one begins
            if free_bytes >= 0 and _begun(following) > now - self._seconds:
                break
            path.unlink(missing_ok=True)
            free_bytes += sizes[path]
        if free_bytes < 0:
            raise _TooSmall(f"[daemon] record_mb is too small: {self._path.name} alone is larger")


def _pieces(value: Any, depth: int = 2) -> Iterator[str]:
    """Yield the JSON text of a value in pieces.

    One call of `json.dumps` holds the interpreter lock, and the first round of a large site is over 100 MB of text.
    Mappings down to `depth`, and long lists in them, are encoded in parts.
    """
    if isinstance(value, dict) and depth:
        start = "{"
        for name, item in value.items():
            yield f"{start}{json.dumps(name)}:"
            yield from _pieces(item, depth - 1)
            start = ","
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) > _AT_ONCE:
        for place in range(0, len(value), _AT_ONCE):
            yield f"{',' if place else '['}{_json(value[place : place + _AT_ONCE])[1:-1]}"
        yield "]"
    else:
        yield _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _created(directory: Path, now: float) -> tuple[int, Path]:
    moment = datetime.fromtimestamp(now, timezone.utc)
    while True:
        path = directory / (moment.strftime(_STAMP) + SUFFIX)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        except FileExistsError:
            moment += timedelta(microseconds=1)
            continue
        os.fchmod(file, 0o640)
        return file, path


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def segments(directory: Path) -> list[Path]:
    """Return the files of a directory's recordings, the oldest first."""
    dated = [(start, path) for path in directory.glob(f"*{SUFFIX}") if (start := _begun(path))]
    return [path for _, path in sorted(dated)]


def _begun(path: Path) -> float:
    """Return when a segment began, from its file name; 0 for a file of another name."""
    try:
        moment = datetime.strptime(path.name[: -len(SUFFIX)], _STAMP)
    except ValueError:
        return 0.0
    return moment.replace(tzinfo=timezone.utc).timestamp()


# -- reading -----------------------------------------------------------------------------------------------------------


def read_entries(path: Path) -> Iterator[Any]:
    """Yield the entries of a recording; a truncated end is skipped.

    Raises:
        OSError: it cannot be read, or is not a gzip file.
        CodecError: a line is not JSON.
    """
    broken = ""
    with gzip.open(path, "rb") as file:
        for line in _lines(file):
            if broken:
                raise CodecError(broken)
            try:
                entry = json.loads(line, parse_constant=_no_number)
            except (ValueError, RecursionError) as error:
                broken = f"{path}: {error}"  # the last line may be truncated
            else:
                yield entry


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number of JSON")


def _lines(file: gzip.GzipFile) -> Iterator[bytes]:
    while True:
        try:
            line = file.readline(_LONGEST_LINE)
        except EOFError:  # the service was killed, or is still writing the segment
            return
        except zlib.error as error:
            raise OSError(f"damaged: {error}") from error
        if not line:
            return
        if len(line) >= _LONGEST_LINE:
            raise CodecError("a line is too long")
        yield line
