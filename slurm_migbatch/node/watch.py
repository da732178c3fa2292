"""The agent's look at running jobs: what they use and what they say of their progress.

Every SampleEvery seconds it asks the driver how much memory is in use on each slice that a job holds, and reads the
jobs' progress files. What is new goes to the controller as `progress` events, of one run at most every ProgressEvery
seconds; what a run said last is told at its end in any case (`usage.py`). It takes no lock and changes no slice, and
no hook waits for it. It also looks who has devices open that are another's by now (`open_devices.py`).

Whoever takes a slice back waits for a new checkpoint. So between two samples the kernel says which progress files are
written (`inotify.py`); these are read at once, though no more often than every GLANCE_S seconds, and a checkpoint or a
last report is sent at once. For a job that reports them without end this happens as often as AT_ONCE and AGAIN_S allow.
On a node whose jobs report nothing, nothing is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

from slurm_migbatch.mig.driver import DriverError, Instance
from slurm_migbatch.node import open_devices, peaks, progress
from slurm_migbatch.node.caps import Caps, CapsError
from slurm_migbatch.node.config import Config
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.inotify import Notice
from slurm_migbatch.node.journal import NAME, Journal, JournalError, Run, Slice
from slurm_migbatch.node.paths import Paths, PathsError
from slurm_migbatch.node.usage import progress_event

SHARE = 20.0
"""A round that takes t seconds is followed by a pause of at least SHARE * t: at most a twentieth of one core."""

GLANCE_S = 0.5
"""Seconds between two readings of progress files that are being written."""

AT_ONCE = 8
"""How many reports of a run are told at once, one after the other."""

AGAIN_S = 20.0
"""Seconds after which one more of them is."""

KEPT_S = 0.1
"""Seconds of one round that are spent on looking through processes."""

log = logging.getLogger("migbatch.node")


class Watcher:
    """Looks at the running jobs of one node."""

    def __init__(self, config: Config, gpus: Gpus) -> None:
        self._config = config
        self._gpus = gpus
        self._peaks: dict[peaks.RunId, peaks.Peak] = {}
        self._told: dict[peaks.RunId, tuple[float, progress.Report]] = {}
        self._at_once: dict[peaks.RunId, tuple[float, float]] = {}
        self._complained: set[str] = set()
        self._caps = Caps(config.proc_root, config.dev_root)
        self._kept = open_devices.Look()

    def thread(self, stopping: threading.Event, wake: int) -> threading.Thread | None:
        """The thread, not yet started; None where SampleEvery=0 switches this off.

        When `stopping` is set, the descriptor `wake` must become readable.
        """
        if not self._config.sample_every:
            return None
        return threading.Thread(target=self._loop, args=(stopping, wake), name="watch", daemon=True)

    def _loop(self, stopping: threading.Event, wake: int) -> None:
        pause = 0.0
        while not stopping.wait(pause):
            try:
                self._rounds(stopping, wake)
                pause = 0.0
            except (JournalError, PathsError, OSError) as error:
                self._complain(f"running jobs cannot be looked at: {error}")
                pause = self._config.sample_every

    def _rounds(self, stopping: threading.Event, wake: int) -> None:
        """Look now and again until the journal is replaced or it is time to stop."""
        with ExitStack() as opened:
            paths = Paths.open(self._config)
            opened.callback(paths.close)
            journal = Journal(f"{self._config.state_dir}/{NAME}")
            opened.callback(journal.close)
            notice = self._notice(paths, opened)
            self._peaks = peaks.load(paths.run)
            pause = self._config.sample_every
            while True:
                if notice is None:
                    stopping.wait(pause)
                else:
                    self._attend(notice, journal, paths, pause, (stopping, wake))
                if stopping.is_set() or journal.replaced:
                    return
                begun = time.monotonic()
                self.look(journal, paths, time.time())
                pause = max(self._config.sample_every, SHARE * (time.monotonic() - begun))

    def _notice(self, paths: Paths, opened: ExitStack) -> Notice | None:
        """None where the kernel gives none: then what is written is seen at the next look."""
        try:
            notice = Notice(paths.progress)
        except OSError as error:
            self._complain(f"checkpoints of jobs are noticed every {self._config.sample_every:g} s only: {error}")
            return None
        opened.callback(notice.close)
        return notice

    def _attend(
        self, notice: Notice, journal: Journal, paths: Paths, seconds: float, stop: tuple[threading.Event, int]
    ) -> None:
        """Read what is written in the meantime, as it comes."""
        stopping, wake = stop
        end = time.monotonic() + seconds
        while not stopping.is_set() and not journal.replaced and (left := end - time.monotonic()) > 0:
            if notice.wait(left, wake):
                begun = time.monotonic()
                self.glance(journal, paths, notice.written(), time.time())
                stopping.wait(max(GLANCE_S, SHARE * (time.monotonic() - begun)))

    def look(self, journal: Journal, paths: Paths, now: float) -> None:
        """One round. Raises JournalError, OSError."""
        runs, held = self._holders(journal)
        self._sample(held)
        if held or self._peaks:
            self._peaks = {run: peak for run, peak in self._peaks.items() if run in held}
            peaks.store(paths.run, self._peaks, held)
        self._told = {run: told for run, told in self._told.items() if run in runs}
        self._at_once = {run: left for run, left in self._at_once.items() if run in runs}
        for run, pieces in held.items():
            self._progress(journal, paths, runs[run], pieces, now)
        if self._config.check_open_files:
            self._look_for_kept(journal, held)

    def glance(self, journal: Journal, paths: Paths, written: Collection[peaks.RunId] | None, now: float) -> None:
        """Only what these runs say, or all of them. Raises JournalError, OSError."""
        if written is not None and not written:
            return
        runs, held = self._holders(journal)
        for run, pieces in held.items():
            if written is None or run in written:
                self._progress(journal, paths, runs[run], pieces, now)

    @staticmethod
    def _holders(journal: Journal) -> tuple[dict[peaks.RunId, Run], dict[peaks.RunId, list[Slice]]]:
        """The runs that go on, and the slices that each of them holds."""
        runs = {(run.job, run.restart): run for run in journal.runs("state='running'")}
        held: dict[peaks.RunId, list[Slice]] = {}
        for row in journal.slices("state='held'"):
            if (row.job or 0, row.restart or 0) in runs:
                held.setdefault((row.job or 0, row.restart or 0), []).append(row)
        return runs, held

    # -- memory --------------------------------------------------------------------------------------------------

    def _sample(self, held: dict[peaks.RunId, list[Slice]]) -> None:
        if not held:
            return
        try:
            gpus = {gpu.uuid: gpu for gpu in self._gpus.listed()}
        except DriverError as error:
            self._complain(f"memory in use cannot be read: {error}")
            return
        for run, pieces in held.items():
            found = {}
            try:
                for piece in pieces:
                    gpu, instance = gpus.get(piece.gpu), _instance(piece)
                    if gpu is not None and instance is not None and gpu.processes(instance):
                        found[instance.mig_uuid or ""] = gpu.memory_used(instance)
            except DriverError as error:
                self._complain(f"memory in use cannot be read: {error}")
                continue
            self._peaks[run] = self._peaks.get(run, peaks.Peak(0.0, {})).seen(found, self._config.sample_every)

    # -- devices -------------------------------------------------------------------------------------------------

    def _look_for_kept(self, journal: Journal, held: Mapping[peaks.RunId, Sequence[Slice]]) -> None:
        """Log, once each, who has the devices of another user's slice open. Raises JournalError."""
        slices = {
            minor: piece
            for pieces in held.values()
            for piece in pieces
            for minor in (piece.cap_gi, piece.cap_ci)
            if minor is not None
        }
        try:
            owners = {minor: piece.uid or 0 for minor, piece in slices.items()}
            found = self._kept.look(self._caps.major(), owners, KEPT_S)
        except CapsError as error:
            self._complain(f"it cannot be seen who has devices open: {error}")
            return
        for one in found:
            piece = slices[one.minor]
            what = (
                f"process {one.pid} of uid {one.uid} has nvidia-cap{one.minor} open, which is job {piece.job}'s of uid "
                f"{piece.uid}: {piece}; end that process"
            )
            if self._complain(what):
                fault = {"gpu": piece.gpu, "what": what, "action": "noted", "drain": False}
                with journal.write():
                    journal.event("fault", fault)

    # -- progress ------------------------------------------------------------------------------------------------

    def _progress(self, journal: Journal, paths: Paths, run: Run, pieces: Sequence[Slice], now: float) -> None:
        try:
            content = progress.read(paths.progress, run.job, run.restart, run.uid)
            if content is None or not content.size:
                return
            long = content.size > progress.MAX_BYTES
            report = progress.understand(content, min(piece.since for piece in pieces))
            try:
                if report is not None:
                    self._tell(journal, run, report, now, long=long)
            finally:  # whoever writes so much may lose a word; his file must not fill up for it
                if long:
                    progress.shorten(paths.progress, run.job, run.restart, run.uid)
        except progress.ProgressError as error:
            self._complain(f"{run}: {error}")

    def _tell(self, journal: Journal, run: Run, report: progress.Report, now: float, *, long: bool) -> None:
        """Tell it where it is new and its time has come."""
        id = run.job, run.restart
        when, before = self._told.get(id, (0.0, None))
        if report == before:
            return
        safe = report.checkpoint is not None and (before is None or report.checkpoint != before.checkpoint)
        urgent = (safe or report.done or long) and self._may_hurry(id, now)
        if now - when < self._config.progress_every and not urgent:
            return
        with journal.write():
            # an Epilog that has begun since then tells the rest; this must not come after it
            if not journal.runs("job=? AND restart=? AND state='running'", id):
                return
            journal.event("progress", progress_event(run, report, final=False))
        self._told[id] = now, report

    def _may_hurry(self, id: peaks.RunId, now: float) -> bool:
        """One of the run's reports at once, if it has one left."""
        left, when = self._at_once.get(id, (float(AT_ONCE), now))
        left = min(float(AT_ONCE), left + max(0.0, now - when) / AGAIN_S)
        self._at_once[id] = (left - 1.0 if left >= 1.0 else left), now
        return left >= 1.0

    def _complain(self, what: str) -> bool:
        """Once each, and not without end; whether it did."""
        new = what not in self._complained and len(self._complained) < 1000
        if new:
            self._complained.add(what)
            log.warning("%s", what)
        return new


def _instance(piece: Slice) -> Instance | None:
    if piece.gi is None or piece.mig_uuid is None:
        return None
    return Instance(piece.gi, piece.slot.profile, piece.slot.placement, piece.ci, piece.mig_uuid)
