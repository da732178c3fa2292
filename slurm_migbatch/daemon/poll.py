"""Poll Slurm's queue and nodes once per interval, for all components of the service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from slurm_migbatch.daemon.garbage import uncollected
from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.daemon.tasks import with_timeout
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmClient, SlurmError
from slurm_migbatch.slurm.gpu_defaults import GpuDefaults
from slurm_migbatch.slurm.preemption import NO_PREEMPTION, PreemptionRules
from slurm_migbatch.slurm.settings import BACKFILL_WINDOW_S

if TYPE_CHECKING:  # SQLAlchemy takes longer to import than all that the submit worker needs
    from slurm_migbatch.store.db import Store

log = logging.getLogger(__name__)
_ADVICE = "running jobs and submissions are not affected; check slurmctld, and [cluster] slurm_bin and slurm_conf"
#: minimum seconds between two queries, whatever the number of nudges; pause as a multiple of a query's duration
_CLOSEST_S, _SHARE = 0.2, 4.0
#: seconds between two queries of the settings of partitions, QOS and backfill, which administrators change
_CONFIG_S = 60.0


@dataclass(frozen=True)
class SlurmView:
    """The queue and the nodes at one time, and what changes rarely.

    Attributes:
        at: monotonic seconds.
        gpu_defaults: what partitions give jobs for each GPU.
        hidden: the partitions that are not suggested to users.
        preemption: the site's rules, if they are needed.
        backfill_window_s: how far ahead Slurm plans starts; 0: it does not backfill.
    """

    at: float
    jobs: tuple[JobRow, ...]
    nodes: tuple[NodeRow, ...]
    gpu_defaults: Mapping[str, GpuDefaults] = field(default_factory=dict)
    hidden: Collection[str] = ()
    preemption: PreemptionRules = NO_PREEMPTION
    backfill_window_s: float = BACKFILL_WINDOW_S


class Poller:
    """Queries Slurm in a thread and calls `act` after each query; slows down while Slurm does not answer.

    A nudge requests an early query. The pause between queries grows with their cost, so that neither a busy cluster nor
    a slow slurmctld is queried more often than it can handle.
    """

    def __init__(
        self,
        client: SlurmClient,
        interval_s: float,
        act: Callable[[SlurmView], Awaitable[bool]],
        *,
        preempts: bool = False,
    ) -> None:
        """Set up; `preempts`: whether the site's rules of preemption are needed."""
        self._client, self._interval, self._act, self._preempts = client, interval_s, act, preempts
        self._nudged = asyncio.Event()
        self._kept = KeptRows()
        self._defaults: Mapping[str, GpuDefaults] = {}
        self._hidden: Collection[str] = ()
        self._preemption = NO_PREEMPTION
        self._backfill_window_s = BACKFILL_WINDOW_S
        self._config_until = -math.inf
        self.latest: SlurmView | None = None
        self.fault = FaultReporter("Slurm does not answer", _ADVICE, log, first=interval_s, longest=30.0)

    def nudge(self) -> None:
        """Query soon instead of at the end of the interval."""
        self._nudged.set()

    async def run(self) -> None:
        """Query forever."""
        while True:
            self._nudged.clear()
            wait, soon = self._interval, False
            began = time.monotonic()
            try:
                snapshot = await asyncio.to_thread(self._query)
            except Exception as error:
                wait = self.fault.failed(error)
            else:
                self.fault.succeeded()
                self.latest = snapshot
                soon = await self._act(snapshot)
            distance = min(wait, max(_CLOSEST_S, _SHARE * (time.monotonic() - began)))
            await asyncio.sleep(distance)
            if soon:
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                await with_timeout(self._nudged.wait(), wait - distance)

    @uncollected()
    def _query(self) -> SlurmView:
        began, jobs = time.monotonic(), self._client.jobs()
        nodes = tuple(self._client.nodes())
        if began >= self._config_until:
            self._config_until = began + _CONFIG_S
            try:  # the client may get jobs and nodes in another way
                self._defaults = self._client.gpu_defaults()
                self._hidden = self._client.hidden_partitions()
                self._preemption = self._client.preemption() if self._preempts else NO_PREEMPTION
                self._backfill_window_s = self._client.backfill_window_s()
            except SlurmError as error:
                log.warning("settings of partitions, QOS and backfill stay those of the last query: %s", error)
        rows = self._kept.of(jobs)
        settings = self._defaults, self._hidden, self._preemption, self._backfill_window_s
        return SlurmView(began, rows, nodes, *settings)


class KeptRows:
    """Replaces rows of unchanged jobs by the previous row objects, so that changes can be found by identity."""

    def __init__(self) -> None:
        self._rows: dict[int, JobRow] = {}

    def of(self, jobs: Iterable[JobRow]) -> tuple[JobRow, ...]:
        """Return the queue, with the previous object for each unchanged job."""
        before, self._rows = self._rows, {}
        queue = []
        for row in jobs:
            earlier = before.get(row.job_id)
            queue.append(earlier if earlier is not None and (earlier is row or earlier == row) else row)
            self._rows[row.job_id] = queue[-1]
        return tuple(queue)


class UnsavedJobs:
    """Changes of the queue that the database does not have yet: the newest of each job."""

    def __init__(self) -> None:
        self._seen: dict[int, JobRow] = {}
        self._rows: dict[int, JobRow] = {}
        self._left = True  # jobs may have left the queue while the service was down
        self._lock = threading.Lock()

    def update(self, queue: Iterable[JobRow]) -> tuple[bool, frozenset[int]]:
        """Process the current queue.

        Returns:
            Whether there is something to write; the ids of jobs that have left since the last query.
        """
        now = {row.job_id: row for row in queue}
        with self._lock:
            seen = self._seen
            self._rows.update(
                (job, row)
                for job, row in now.items()
                if (earlier := seen.get(job)) is not row and earlier != row and not row.unread
            )
            departed = frozenset(self._seen.keys() - now.keys())
            self._left = self._left or bool(departed)
            self._seen = now
            return bool(self._rows) or self._left, departed

    def lists(self, job_id: int) -> bool:
        """Return whether the job was in the queue at the last update."""
        with self._lock:
            return job_id in self._seen

    def save(self, store: Store) -> None:
        """Write the pending changes; on failure they are kept."""
        with self._lock:
            batch, live, self._left = list(self._rows.values()), frozenset(self._seen), False
        try:
            store.upsert_jobs([asdict(row) for row in batch], live=live)
        except BaseException:
            self._left = True
            raise
        with self._lock:
            for row in batch:
                if self._rows.get(row.job_id) is row:
                    del self._rows[row.job_id]
