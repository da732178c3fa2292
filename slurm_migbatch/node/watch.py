"""The agent's look at running jobs: what they use and what they say of their progress.

Every SampleEvery seconds it asks the driver how much memory is in use on each slice that a job holds, and reads the
jobs' progress files. What is new goes to the controller as `progress` events, of one run at most every ProgressEvery
seconds; what a run said last is told at its end in any case (`figures.py`). It takes no lock and changes no slice, and
no hook waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from slurm_migbatch.mig.driver import DriverError, Instance
from slurm_migbatch.node import peaks, progress
from slurm_migbatch.node.config import Config
from slurm_migbatch.node.figures import progress_event
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.journal import NAME, Journal, JournalError, Run, Slice
from slurm_migbatch.node.paths import Paths, PathsError

SHARE = 20.0
"""A round that takes t seconds is followed by a pause of at least SHARE * t: at most a twentieth of one core."""

log = logging.getLogger("migbatch.node")


class Watcher:
    """Looks at the running jobs of one node."""

    def __init__(self, config: Config, gpus: Gpus) -> None:
        self._config = config
        self._gpus = gpus
        self._peaks: dict[peaks.RunId, peaks.Peak] = {}
        self._told: dict[peaks.RunId, tuple[float, progress.Report]] = {}
        self._complained: set[str] = set()

    def thread(self, stopping: threading.Event) -> threading.Thread | None:
        """The thread, not yet started; None where SampleEvery=0 switches this off."""
        if not self._config.sample_every:
            return None
        return threading.Thread(target=self._loop, args=(stopping,), name="watch", daemon=True)

    def _loop(self, stopping: threading.Event) -> None:
        pause = self._config.sample_every
        while not stopping.wait(pause):
            try:
                pause = self._rounds(stopping)
            except (JournalError, PathsError, OSError) as error:
                self._complain(f"running jobs cannot be looked at: {error}")
                pause = self._config.sample_every

    def _rounds(self, stopping: threading.Event) -> float:
        """Look now and again until the journal is replaced or it is time to stop; the pause to make then."""
        paths = Paths.open(self._config)
        try:
            journal = Journal(f"{self._config.state_dir}/{NAME}")
            try:
                self._peaks = peaks.load(paths.run)
                while True:
                    begun = time.monotonic()
                    self.look(journal, paths, time.time())
                    pause = max(self._config.sample_every, SHARE * (time.monotonic() - begun))
                    if journal.replaced or stopping.wait(pause):
                        return pause
            finally:
                journal.close()
        finally:
            paths.close()

    def look(self, journal: Journal, paths: Paths, now: float) -> None:
        """One round. Raises JournalError, OSError."""
        runs = {(run.job, run.restart): run for run in journal.runs("state='running'")}
        held: dict[peaks.RunId, list[Slice]] = {}
        for row in journal.slices("state='held'"):
            if (row.job or 0, row.restart or 0) in runs:
                held.setdefault((row.job or 0, row.restart or 0), []).append(row)
        self._sample(held)
        if held or self._peaks:
            self._peaks = {run: peak for run, peak in self._peaks.items() if run in held}
            peaks.store(paths.run, self._peaks, held)
        self._told = {run: told for run, told in self._told.items() if run in runs}
        for run, pieces in held.items():
            self._progress(journal, paths, runs[run], pieces, now)

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

    # -- progress ------------------------------------------------------------------------------------------------

    def _progress(self, journal: Journal, paths: Paths, run: Run, pieces: Sequence[Slice], now: float) -> None:
        try:
            content = progress.read(paths.progress, run.job, run.restart, run.uid)
            if content is None or not content.size:
                return
            long = content.size > progress.MAX_BYTES
            report = progress.understand(content, min(piece.since for piece in pieces))
            if report is not None:
                self._tell(journal, run, report, now, at_once=report.done or long)
            if long:
                progress.shorten(paths.progress, run.job, run.restart, run.uid)
        except progress.ProgressError as error:
            self._complain(f"{run}: {error}")

    def _tell(self, journal: Journal, run: Run, report: progress.Report, now: float, *, at_once: bool) -> None:
        id = run.job, run.restart
        when, before = self._told.get(id, (0.0, None))
        if report == before or (now - when < self._config.progress_every and not at_once):
            return
        with journal.write():
            # an Epilog that has begun since then tells the rest; this must not come after it
            if not journal.runs("job=? AND restart=? AND state='running'", id):
                return
            journal.event("progress", progress_event(run, report, final=False))
        self._told[id] = now, report

    def _complain(self, what: str) -> None:
        """Once each, and not without end."""
        if what not in self._complained and len(self._complained) < 1000:
            self._complained.add(what)
            log.warning("%s", what)


def _instance(piece: Slice) -> Instance | None:
    if piece.gi is None or piece.mig_uuid is None:
        return None
    return Instance(piece.gi, piece.slot.profile, piece.slot.placement, piece.ci, piece.mig_uuid)
