"""Sample running jobs in the agent: memory, activity of their slices, energy, and their progress reports.

Every SampleEvery seconds it reads from the driver the memory in use on each held slice and, if supported (GPM: Hopper
and later), the share of SMs and memory bandwidth since the last sample, and the energy of GPUs with a single job (NVML
reports it for GPUs, not slices). It reads the jobs' progress files, and keeps them and those of steps from filling up.
New values go to the controller as `progress` events, for one run at most every ProgressEvery seconds; the last report
of a run is always sent at its end (`usage.py`). It takes no lock of hooks and changes no slice, and no hook waits for
it. It also finds processes that have devices of another user open (`open_devices.py`).

A reclaim waits for a new checkpoint. So between two samples the kernel reports which progress files are
written (`inotify.py`); these are read at once, though at most every READ_EVERY_S seconds, and a checkpoint
or a last report is sent at once. For a job that reports continuously this is limited by BURST and
BURST_REFILL_S. If no job of the node reports, this costs nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from slurm_migbatch.mig.driver import Activity, DriverError, DriverMissing, Instance, NotMig
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.node import open_devices, peaks, progress, progressreport
from slurm_migbatch.node.caps import Caps, CapsError
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.inotify import WriteWatch
from slurm_migbatch.node.journal import NAME, Journal, JournalError
from slurm_migbatch.node.journal_rows import JournalRun, JournalSlice
from slurm_migbatch.node.paths import Paths, PathsError
from slurm_migbatch.node.usage import progress_event

if TYPE_CHECKING:
    from slurm_migbatch.mig.nvml import NvmlGpu

PAUSE_FACTOR = 20.0
"""A round that takes t seconds is followed by a pause of at least PAUSE_FACTOR * t: at most a twentieth of one core."""

READ_EVERY_S = 0.5
"""Seconds between two readings of progress files that are being written."""

BURST = 8
"""Reports of a run that are sent at once in succession."""

BURST_REFILL_S = 20.0
"""Seconds after which one more report may be sent at once."""

REMEMBERED = 1000
"""Different warnings of one kind that are logged once each."""

FORGET_S = 3600.0
"""Seconds after which they make room for others."""

OPEN_DEVICES_S = 0.1
"""Seconds of one round for scanning processes."""

log = logging.getLogger("migbatch.node")


class Watcher:
    """Sample the running jobs of one node."""

    def __init__(self, config: NodeConfig, gpus: Gpus) -> None:
        self._config = config
        self._gpus = gpus
        self._peaks: dict[peaks.RunId, peaks.RunPeak] = {}
        self._sampled: float | None = None
        self._untold: set[str] = set()  # GPUs without activity data
        self._unmetered: set[str] = set()  # GPUs without energy data
        self._energy: dict[str, tuple[peaks.RunId, float, float]] = {}  # by GPU: run, when it was read, joules
        self._is_whole: dict[tuple[str, Profile], bool] = {}  # by GPU and profile: it takes all compute slices
        self._last_sent: dict[peaks.RunId, tuple[float, progressreport.ProgressReport]] = {}
        self._burst_left: dict[peaks.RunId, tuple[float, float]] = {}
        self._warned: dict[str, float] = {}  # when each was logged
        self._accused: dict[str, float] = {}  # the same for open devices; apart, so that other warnings cannot fill it
        self._caps = Caps(config.proc_root, config.dev_root)
        self._open_devices = open_devices.OpenDeviceScan()

    def thread(self, stopping: threading.Event, wake: int) -> threading.Thread | None:
        """Create the thread, not yet started; None if SampleEvery=0 disables it.

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
                self._warn_once(f"cannot sample running jobs: {error}")
                pause = self._config.sample_every
            except Exception as error:  # perhaps caused by one job; the others are sampled again
                if self._warn_once(f"running jobs cannot be looked at: {error!r}"):
                    log.exception("this was not foreseen")
                pause = self._config.sample_every

    def _rounds(self, stopping: threading.Event, wake: int) -> None:
        """Sample regularly until the journal is replaced or it is time to stop."""
        with ExitStack() as opened:
            paths = Paths.open(self._config)
            opened.callback(paths.close)
            journal = Journal(f"{self._config.state_dir}/{NAME}")
            opened.callback(journal.close)
            write_watch = self._watch_writes(paths, opened)
            self._peaks = {**peaks.load(paths.run), **self._peaks}  # the ones in memory are newer
            pause = self._config.sample_every
            while True:
                if write_watch is None:
                    stopping.wait(pause)
                else:
                    self._read_until(write_watch, journal, paths, pause, (stopping, wake))
                if stopping.is_set() or journal.replaced:
                    return
                begun = time.monotonic()
                self.run_round(journal, paths, begun)
                pause = max(self._config.sample_every, PAUSE_FACTOR * (time.monotonic() - begun))

    def _watch_writes(self, paths: Paths, opened: ExitStack) -> WriteWatch | None:
        """Watch the progress files; None if inotify fails: then writes are seen in the next round."""
        try:
            write_watch = WriteWatch(paths.progress)
        except OSError as error:
            self._warn_once(f"checkpoints of jobs are detected only every {self._config.sample_every:g} s: {error}")
            return None
        opened.callback(write_watch.close)
        return write_watch

    def _read_until(
        self, write_watch: WriteWatch, journal: Journal, paths: Paths, seconds: float, stop: tuple[threading.Event, int]
    ) -> None:
        """Read progress files as they are written, for this many seconds."""
        stopping, wake = stop
        end = time.monotonic() + seconds
        while not stopping.is_set() and not journal.replaced and (left := end - time.monotonic()) > 0:
            if write_watch.wait(left, wake):
                begun = time.monotonic()
                self.read_written(journal, paths, write_watch.written(), begun)
                stopping.wait(max(READ_EVERY_S, PAUSE_FACTOR * (time.monotonic() - begun)))

    def run_round(self, journal: Journal, paths: Paths, now: float) -> None:
        """Run one round over all running jobs; `now` is monotonic. Raises JournalError, OSError."""
        runs, held = self._holders(journal)
        with self._gpus.using():
            self._sample(held, now)
        if held or self._peaks:
            # a run that is ending is not sampled any more, and its figures were read before
            left = {(row.job or 0, row.restart or 0) for row in journal.slices("state IN ('held','lost')")}
            self._peaks = {run: peak for run, peak in self._peaks.items() if run in left}
            try:
                peaks.store(paths.run, self._peaks, left)
            except OSError as error:
                self._warn_once(f"figures of running jobs cannot be stored in {self._config.run_dir}: {error}")
        self._last_sent = {run: sent for run, sent in self._last_sent.items() if run in runs}
        self._burst_left = {run: left for run, left in self._burst_left.items() if run in runs}
        for run, slices in held.items():
            self._progress(journal, paths, runs[run], slices, now)
            self._shorten_steps(paths, runs[run], slices)
        if self._config.check_open_files:
            self._report_open_devices(journal, held)

    def read_written(self, journal: Journal, paths: Paths, written: Collection[peaks.RunId] | None, now: float) -> None:
        """Read the progress of these runs, or of all if `written` is None; `now`: see `run_round`.

        Raises JournalError, OSError.
        """
        if written is not None and not written:
            return
        runs, held = self._holders(journal)
        for run, slices in held.items():
            if written is None or run in written:
                self._progress(journal, paths, runs[run], slices, now)

    @staticmethod
    def _holders(journal: Journal) -> tuple[dict[peaks.RunId, JournalRun], dict[peaks.RunId, list[JournalSlice]]]:
        """Read the running runs and the slices that each of them holds."""
        runs = {(run.job, run.restart): run for run in journal.runs("state='running'")}
        held: dict[peaks.RunId, list[JournalSlice]] = {}
        for row in journal.slices("state='held'"):
            if (row.job or 0, row.restart or 0) in runs:
                held.setdefault((row.job or 0, row.restart or 0), []).append(row)
        return runs, held

    # -- memory --------------------------------------------------------------------------------------------------

    def _sample(self, held: dict[peaks.RunId, list[JournalSlice]], now: float) -> None:
        """Add the memory, activity and energy of the slices in use to the peaks of their runs."""
        every = self._config.sample_every
        # a busy node is sampled less often
        since = every if self._sampled is None else max(every, now - self._sampled)
        self._sampled = now
        if not held:
            return
        try:
            gpus = {gpu.uuid: gpu for gpu in self._gpus.all()}
        except DriverError as error:
            self._warn_once(f"cannot read memory in use: {error}")
            return
        for run, slices in held.items():
            memory_used = {}
            try:
                for row in slices:
                    gpu, instance = gpus.get(row.gpu), _instance(row)
                    if gpu is not None and instance is not None and gpu.processes(instance):
                        memory_used[instance.mig_uuid or ""] = gpu.memory_used(instance)
            except DriverError as error:
                self._warn_once(f"cannot read memory in use: {error}")
                continue
            known = self._peaks.get(run)
            seconds = since if known else min(since, max(every, time.time() - min(row.since for row in slices)))
            peak = (known or peaks.RunPeak(0.0, {})).with_sample(memory_used, seconds)
            for activity in self._activities(gpus, run, slices):
                peak = peak.with_activity(activity)
            for span_s, joules in self._energy_since(gpus, run, slices, now):
                peak = peak.with_energy(span_s, joules)
            self._peaks[run] = peak
        uuids = {row.mig_uuid for slices in held.values() for row in slices if row.mig_uuid is not None}
        for gpu in gpus.values():
            gpu.keep_activity(uuids)

    def _activities(
        self, gpus: Mapping[str, NvmlGpu], run: peaks.RunId, slices: Sequence[JournalSlice]
    ) -> Iterator[Activity]:
        """Yield the activity of each slice since its last sample; an unsupported GPU is not queried again."""
        for row in slices:
            gpu, instance = gpus.get(row.gpu), _instance(row)
            if gpu is None or instance is None or gpu.uuid in self._untold:
                continue
            try:
                if activity := gpu.activity(instance, run):
                    yield activity
            except (NotMig, DriverMissing):
                self._untold.add(gpu.uuid)
            except DriverError as error:
                self._warn_once(f"cannot read the activity of slices: {error}")

    def _energy_since(
        self, gpus: Mapping[str, NvmlGpu], run: peaks.RunId, slices: Sequence[JournalSlice], now: float
    ) -> Iterator[tuple[float, float]]:
        """Yield seconds and joules of each GPU since its last sample, if every slice of the run is a whole GPU."""
        try:
            whole = [gpu for row in slices if (gpu := gpus.get(row.gpu)) is not None and self._fills_gpu(gpu, row)]
            if len(whole) < len(slices) or any(gpu.uuid in self._unmetered for gpu in whole):
                return
            for gpu in whole:
                try:
                    joules = gpu.energy_j()
                except (NotMig, DriverMissing):
                    self._unmetered.add(gpu.uuid)
                    return
                previous = self._energy.get(gpu.uuid)
                self._energy[gpu.uuid] = run, now, joules
                # the counter restarts when the driver is reloaded
                if previous is not None and previous[0] == run and joules >= previous[2]:
                    yield now - previous[1], joules - previous[2]
        except DriverError as error:
            self._warn_once(f"cannot read the energy of GPUs: {error}")

    def _fills_gpu(self, gpu: NvmlGpu, row: JournalSlice) -> bool:
        """Return whether a slice takes all compute slices of its GPU. Raises DriverError."""
        profile = row.slot.profile
        if (gpu.uuid, profile) not in self._is_whole:
            geometry = gpu.geometry()
            most = geometry.compute_slices
            self._is_whole[gpu.uuid, profile] = profile in geometry and geometry.info(profile).compute_slices == most
        return self._is_whole[gpu.uuid, profile]

    # -- devices -------------------------------------------------------------------------------------------------

    def _report_open_devices(self, journal: Journal, held: Mapping[peaks.RunId, Sequence[JournalSlice]]) -> None:
        """Log, once each, processes that have devices of another user's slice open. Raises JournalError."""
        by_minor = {
            minor: row
            for slices in held.values()
            for row in slices
            for minor in (row.cap_gi, row.cap_ci)
            if minor is not None
        }
        try:
            owners = {minor: row.uid or 0 for minor, row in by_minor.items()}
            detected = self._open_devices.scan(self._caps.major(), owners, OPEN_DEVICES_S)
        except CapsError as error:
            self._warn_once(f"cannot find processes with open devices: {error}")
            return
        for open_device in detected:
            row = by_minor[open_device.minor]
            text = (
                f"process {open_device.pid} of uid {open_device.uid} has nvidia-cap{open_device.minor} open, "
                f"which is job {row.job}'s of uid {row.uid}: {row}; end that process"
            )
            if _is_new(self._accused, text):
                log.warning("%s", text)
                fault = {"gpu": row.gpu, "what": text, "action": "noted", "drain": False}
                with journal.write():
                    journal.event("fault", fault)

    # -- progress ------------------------------------------------------------------------------------------------

    def _progress(
        self, journal: Journal, paths: Paths, run: JournalRun, slices: Sequence[JournalSlice], now: float
    ) -> None:
        try:
            content = progress.read(paths.progress, run.job, run.restart, run.uid)
            if content is None or not content.size:
                return
            long = content.size > progress.MAX_BYTES
            report = progressreport.understand(content, min(row.since for row in slices))
            try:
                if report is not None:
                    sm = None if any(row.shared for row in slices) else self._sm_activity(run)
                    self._send(journal, run, report, now, long=long, sm=sm)
            finally:  # this may lose a report of a user who writes this much, but the file must not fill up
                if long:
                    progress.shorten(paths.progress, run.job, run.restart, run.uid)
        except progress.ProgressError as error:
            self._warn_once(f"{run}: {error}")

    def _shorten_steps(self, paths: Paths, run: JournalRun, slices: Sequence[JournalSlice]) -> None:
        if len(slices) < 2:
            return
        try:
            progress.shorten_steps(paths.progress, run.job, run.restart, run.uid)
        except progress.ProgressError as error:
            self._warn_once(f"{run}: {error}")

    def _sm_activity(self, run: JournalRun) -> float | None:
        """Return the mean SM activity of a run's slices so far; None if the driver does not report it."""
        peak = self._peaks.get((run.job, run.restart))
        activity = None if peak is None else peak.average()
        return None if activity is None else activity.sm

    def _send(
        self,
        journal: Journal,
        run: JournalRun,
        report: progressreport.ProgressReport,
        now: float,
        *,
        long: bool,
        sm: float | None,
    ) -> None:
        """Send the report if it is new and due."""
        id = run.job, run.restart
        sent_at, previous = self._last_sent.get(id, (float("-inf"), None))
        if report == previous:
            return
        new_checkpoint = report.checkpoint is not None and (
            previous is None or report.checkpoint != previous.checkpoint
        )
        urgent = (new_checkpoint or report.done or long) and self._take_burst(id, now)
        if now - sent_at < self._config.progress_every and not urgent:
            return
        with journal.write():
            # an Epilog that has begun meanwhile sends the last report; this one must not follow it
            if not journal.runs("job=? AND restart=? AND state='running'", id):
                return
            journal.event("progress", progress_event(run, report, final=False, sm=sm))
        self._last_sent[id] = now, report

    def _take_burst(self, id: peaks.RunId, now: float) -> bool:
        """Use one of the run's immediate reports, if one is left; return whether one was."""
        left, when = self._burst_left.get(id, (float(BURST), now))
        left = min(float(BURST), left + (now - when) / BURST_REFILL_S)
        self._burst_left[id] = (left - 1.0 if left >= 1.0 else left), now
        return left >= 1.0

    def _warn_once(self, text: str) -> bool:
        """Log a warning once; return whether it was new."""
        new = _is_new(self._warned, text)
        if new:
            log.warning("%s", text)
        return new


def _is_new(known: dict[str, float], text: str) -> bool:
    """Return whether to log a text, and remember it: each text once, and at most `REMEMBERED` within `FORGET_S`."""
    now = time.monotonic()
    if text in known:
        return False
    if len(known) >= REMEMBERED:
        for old in [old for old, when in known.items() if now - when >= FORGET_S]:
            del known[old]
    if len(known) >= REMEMBERED:
        return False
    known[text] = now
    return True


def _instance(row: JournalSlice) -> Instance | None:
    if row.gi is None or row.mig_uuid is None:
        return None
    return Instance(row.gi, row.slot.profile, row.slot.placement, row.ci, row.mig_uuid)
