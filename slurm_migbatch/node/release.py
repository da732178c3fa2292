"""Release a run's slices: the part of a release after the journal has the run as ending.

It can be interrupted at any instant and repeated, by an Epilog, the next hook or the agent. It takes no lock of a
GPU: the hook that takes an idle slice does, and checks the driver then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from slurm_migbatch.node import handoff, progress, usage
from slurm_migbatch.node.caps import Caps, CapsError
from slurm_migbatch.node.jobmaps import JobMaps
from slurm_migbatch.node.journal import Journal
from slurm_migbatch.node.journal_rows import JournalRun, JournalSlice
from slurm_migbatch.node.paths import Paths


class Releaser:
    """End runs on one node."""

    def __init__(self, journal: Journal, paths: Paths, caps: Caps, maps: JobMaps) -> None:
        self._journal = journal
        self._maps = maps
        self._paths = paths
        self._caps = caps

    def finish(self, run: JournalRun) -> list[str]:
        """Finish a release: job maps, devices to root, hand-off void, slices idle, the run ended.

        The run must be `ending` in the journal already, so that no run begins to share its slices. A shared
        slice stays open, to the other holder. Returns errors, as sentences; a slice whose devices
        could not be closed is parked.
        """
        slices = self._journal.slices_of(run)
        if slices:
            self._maps.sync(self._journal)  # while no other run can have them
        closed = self._close(slices, {})
        if slices:
            reason = "it was requeued and restarted before this node was ready for it"
            handoff.write(self._paths.job, handoff.Handoff(run.job, run.restart, run.uid, (), reason))
        else:
            handoff.remove(self._paths.job, run.job, run.restart)
        run_usage = usage.gather(self._paths, run, slices)
        while (problems := self._end(run, run_usage, closed)) is None:
            closed = self._close(self._journal.slices_of(run), closed)  # the other holder of a slice has left meanwhile
        progress.remove(self._paths.progress, run.job, run.restart)
        return problems

    def _close(self, slices: Iterable[JournalSlice], closed: Mapping[int | None, str]) -> dict[int | None, str]:
        """Close the devices of slices without another holder; return the closed ones by row, and errors."""
        results = dict(closed)
        for row in slices:
            if row.id in results or not self._is_sole_holder(row):
                continue
            minors = [minor for minor in (row.cap_gi, row.cap_ci) if minor is not None]
            results[row.id] = ""
            if minors:
                try:
                    self._caps.assign(minors, 0)
                except CapsError as error:
                    results[row.id] = str(error)
        return results

    def _is_sole_holder(self, row: JournalSlice) -> bool:
        return row.state == "held" and row.beside is None and self._journal.guest_of(row) is None

    def _end(self, run: JournalRun, run_usage: usage.RunUsage, closed: Mapping[int | None, str]) -> list[str] | None:
        """Record the end in the journal; None, without changes, if a slice to free was not closed."""
        with self._journal.write():
            slices = self._journal.slices_of(run)
            if any(row.id not in closed and self._is_sole_holder(row) for row in slices):
                return None
            failed = [row for row in slices if closed.get(row.id) and self._is_sole_holder(row)]
            for row in slices:
                if row in failed:
                    zombie = self._journal.put(row.freed("zombie", closed[row.id]))
                    self._journal.event("zombie", {**zombie.place, "reason": closed[row.id]})
                elif row.state in ("held", "lost"):
                    self._journal.leave(row)
            self._journal.put_run(run._replace(state="ended", owner="", since=time.time()))
            reported = [p for p in sorted(slices, key=lambda p: p.ordinal or 0) if p.state in ("held", "lost")]
            if reported:
                run_usage.spool(self._journal, run)
                fields: dict[str, object] = {"job": run.job, "restart": run.restart, "exit_code": run.exit_code}
                fields |= _sharing_fields(reported)
                fields |= {"slices": [row.event_fields for row in reported], **run_usage.stop_fields}
                self._journal.event("stop", fields)
        return [f"{row}: {closed[row.id]}" for row in failed]


def _sharing_fields(slices: Iterable[JournalSlice]) -> dict[str, object]:
    """Return the `stop` fields of a run that shared a slice: its speed and memory are not its slice's alone."""
    return {"shared": True} if any(row.shared for row in slices) else {}
