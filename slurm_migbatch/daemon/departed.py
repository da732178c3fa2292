"""Find out how jobs ended that Slurm no longer lists, and record it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from typing import Final

from slurm_migbatch.daemon.ended import HistoryClient
from slurm_migbatch.daemon.poll import SlurmView
from slurm_migbatch.daemon.rounds import Rounds
from slurm_migbatch.daemon.tasks import BackgroundTasks
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.store.queries import unconfirmed_ends

log = logging.getLogger(__name__)

#: maximum number of ended jobs to query Slurm about at a time; for others the record has only what nodes reported
MOST: Final = 100_000
#: seconds for which slurmctld may keep an ended job; 300 by default (MinJobAge)
_KEPT_S: Final = 3600.0


class DepartedJobs:
    """Jobs that have left the queue, or ended before they were listed, until Slurm was asked how they ended."""

    def __init__(self, client: HistoryClient, writer: StoreWriter, tasks: BackgroundTasks) -> None:
        self._client, self._writer, self._tasks = client, writer, tasks
        self._jobs: set[int] = set()
        self._asking = False
        self._previous: SlurmView | None = None
        #: of those that ran when they were last listed: when this was, and their rows
        self._last_running: dict[int, tuple[float, JobRow]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, jobs: Collection[int]) -> None:
        """Add jobs of which a node has reported the end, unless there are too many."""
        if len(self._jobs) + len(jobs) <= MOST:
            self._jobs.update(jobs)

    def follow(self, snapshot: SlurmView, departed: Iterable[int]) -> None:
        """Add the jobs that the queue no longer has, and begin to ask Slurm about all of them."""
        gone = set(departed)
        self._jobs |= gone
        if gone and self._previous is not None:
            self._last_running |= {
                row.job_id: (self._previous.at, row)
                for row in self._previous.jobs
                if row.job_id in gone and row.active and row.state != "COMPLETING"
            }
        self._previous = snapshot
        if self._jobs and not self._asking:
            self._asking = True
            self._tasks.start(self._ask(frozenset(self._jobs)))

    async def recall(self, rounds: Rounds) -> None:
        """Find in the record the jobs whose ends Slurm has not told: they may have ended while no service ran."""
        subject = "cannot read whose ends Slurm has not told"
        since = time.time() - _KEPT_S
        self._jobs |= await rounds.read(
            lambda store: store.read(unconfirmed_ends, since, MOST), subject, "they stay as nodes told them"
        )

    async def _ask(self, jobs: frozenset[int]) -> None:
        """Record how jobs ended that Slurm no longer lists; those that slurmctld has lost count as cancelled."""
        try:
            rows = await asyncio.to_thread(self._client.ended, jobs)
            unknown = jobs.difference(row["job_id"] for row in rows)
            running = {job: self._last_running[job] for job in unknown if job in self._last_running}
            lost = await asyncio.to_thread(self._client.lost, {job: at for job, (at, _) in running.items()})
        except Exception as error:  # retried after the next query
            log.debug("cannot determine yet how jobs ended: %s", error)
        else:
            self._jobs -= jobs
            for job in jobs:
                self._last_running.pop(job, None)
            if lost:
                log.warning(
                    "slurmctld has lost jobs that ran, they are recorded as cancelled: %s",
                    ", ".join(map(str, sorted(lost)[:20])),
                )
            # as slurmdbd has them; the exit code is that of the node
            rows += [{"job_id": job, "restarts": running[job][1].restarts, "state": "CANCELLED"} for job in lost]
            if rows:
                self._writer.post(lambda store: store.upsert_jobs(rows), "jobs")
        finally:
            self._asking = False
