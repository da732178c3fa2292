"""Run the retries of jobs that ran out of memory beside rounds, each recorded before it begins and when it is done."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from slurm_migbatch.daemon.ended import StillHeld
from slurm_migbatch.daemon.retrying import HOLD, OomRetries, was_tried
from slurm_migbatch.daemon.tasks import BackgroundTasks
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.recurring import PastRun
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.store.recurring import RecurringRun
from slurm_migbatch.workload.catalog import ProfileOffer

log = logging.getLogger(__name__)

#: retries of jobs at a time; each makes several calls of Slurm, and rounds must not wait for a free thread
_RETRIES: Final = 4


class RetryRunner:
    """Retries in threads of their own."""

    def __init__(
        self,
        retries: OomRetries,
        writer: StoreWriter,
        tasks: BackgroundTasks,
        requeued: Callable[[int], None],
        nudge: Callable[[], None],
    ) -> None:
        """Set up. `requeued` is told of each job that starts again, `nudge` that the queue has changed."""
        self._retries, self._writer, self._tasks = retries, writer, tasks
        self._requeued, self._nudge = requeued, nudge
        self._threads = ThreadPoolExecutor(_RETRIES, thread_name_prefix="retry")

    def recall(self, actions: Sequence[Mapping[str, Any]]) -> None:
        """Find in the record's actions the jobs that were held for their retry when an earlier service was killed."""
        self._retries.recall(actions)

    def retry(self, rows: Sequence[RecurringRun], past: Callable[[str], Sequence[PastRun]]) -> None:
        """Begin to retry those of these runs that are due; `past`: the runs of a recurring job."""
        for row, offer in self._retries.due(rows, past):
            self._tasks.start(self._retry(row, offer))

    def release_held(self, queue: Sequence[JobRow]) -> None:
        """Begin to release the jobs of the queue that were left held."""
        for row, profile in self._retries.left_held(queue):
            self._tasks.start(self._release(row, profile))

    def close(self) -> None:
        """Begin no further retry."""
        self._threads.shutdown(wait=False)

    async def _retry(self, row: RecurringRun, offer: ProfileOffer) -> None:
        action = _action(row.job, row.restart + 1, row.profile or "", offer.profile)
        hold = {**action, "kind": HOLD, "outcome": "not released yet"}
        try:
            if was_tried(row, await self._writer.answer(lambda store: store.actions([row.job]), "actions")):
                return
            await self._writer.answer(lambda store: store.save_loans((), [hold]), "actions")
        except Exception as error:
            log.warning(
                "job %d ran out of memory and is not retried, because it cannot be recorded: %s", row.job, error
            )
            return
        with contextlib.suppress(StillHeld):
            self._done(action, await self._in_thread(self._retries.send, row, offer))
        self._nudge()

    async def _release(self, row: JobRow, profile: Profile) -> None:
        action = _action(row.job_id, row.restarts, next(iter(map(str, slices(row.gres))), ""), profile)
        with contextlib.suppress(StillHeld):
            self._done(action, await self._in_thread(self._retries.release, row, profile))
            self._nudge()

    async def _in_thread(self, work: Callable[..., str], *args: object) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args))

    def _done(self, action: Mapping[str, Any], trouble: str) -> None:
        if not trouble:
            self._requeued(action["job_id"])
        row = {**action, "ts": time.time(), "outcome": trouble or None}
        self._writer.post(lambda store: store.save_loans((), [row]), "actions")


def _action(job: int, restart: int, before: str, profile: Profile) -> dict[str, Any]:
    """Return the record's row of a retry of a job that ran out of memory."""
    return {
        "ts": time.time(), "job_id": job, "restart": restart, "kind": "retype", "before": before, "after": profile.name,
        "why": "it ran out of memory, and the job has the hint retry=oom", "dry_run": False, "outcome": None,
    }  # fmt: skip
