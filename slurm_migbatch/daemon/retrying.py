"""Retry jobs with the hint retry=oom that ran out of memory: once, on a larger slice.

A job, and each task of an array, is requeued once: only a first run counts. It keeps its id and its environment. Its
new slice follows from its runs (`predict.recurring`), within its own min and max. Pending tasks of its array keep their
slice. Heterogeneous jobs and jobs of several slices are not retried. Slurm up to 23.02 keeps a job's former request
(`workload.loans`): there only the next submission gets a larger slice.

A job is held from its requeue until it has its new slice. An action of kind `HOLD` is recorded before that, and one of
kind retype after it, so that the next service finishes what a killed one has begun, and retries only what no earlier
one has tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from slurm_migbatch.daemon.actuator import name_of
from slurm_migbatch.daemon.ended import HistoryClient, StillHeld
from slurm_migbatch.daemon.recurring import past_run
from slurm_migbatch.decide.dispatch.retype import regranted
from slurm_migbatch.mig.grant import Grant, GrantError, parse_comment
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.limits import limits_of
from slurm_migbatch.predict.recurring import PastRun, RecurringJob, RunsPolicy, need_of, pick, ran_out
from slurm_migbatch.site import FORGETS
from slurm_migbatch.slurm.client import JobRow, SlurmError
from slurm_migbatch.store.recurring import RecurringRun
from slurm_migbatch.workload.catalog import ProfileOffer, SiteCatalog
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.refusal import Refusal

log = logging.getLogger(__name__)

HOLD: Final = "hold"
_CLOCKS_S: Final = 300.0
"""Largest difference between the clocks of hosts."""


def larger(row: RecurringRun, past: Sequence[PastRun], catalog: SiteCatalog, policy: RunsPolicy) -> ProfileOffer | None:
    """Return the slice for the retry of a run; None if it did not run out of memory or there is no larger one.

    Args:
        past: runs of the same job with this one as the newest; only this one if the job is not recurring.
    """
    names = [name for name in row.partition.split(",") if name in catalog]
    if not names or row.profile is None or not past:
        return None
    partition = catalog.view(names)
    current = partition.offers.get(past[-1].profile)
    if current is None or not ran_out(past[-1], current.memory_mib):
        return None
    try:
        limits = limits_of(Hints(min=row.low or None, max=row.high or None), partition)
    except Refusal:  # profiles that the partition no longer has
        return None
    allowed = [offer for offer in partition.plain if limits.within(offer) and offer.memory_mib > current.memory_mib]
    need = need_of(past, partition.offers, policy.runs) if allowed else None
    return None if need is None else pick(RecurringJob("", tuple(past)), need, allowed, policy)[0]


def changes(row: JobRow, profile: Profile) -> dict[str, str]:
    """Return the update that gives a pending job of one slice another profile.

    Raises:
        ValueError: its comment has no marker of one slice, or no space for another.
    """
    try:
        grant = parse_comment(row.comment)
    except GrantError as error:
        raise ValueError(str(error)) from None
    if grant is None or grant.total != 1:
        raise ValueError("it has no grant of one slice")
    fields = regranted(row, Grant([(profile, 1)], grant.decision))
    if fields is None:
        raise ValueError("its comment has no space for another marker")
    return fields


def was_tried(row: RecurringRun, actions: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a run was retried before, by the record's actions on its job."""
    return any(
        action["kind"] == HOLD and action["restart"] == row.restart + 1 and action["ts"] >= row.until - _CLOCKS_S
        for action in actions
    )


class OomRetries:
    """Requeues jobs whose runs ran out of memory.

    Attributes:
        held: jobs that may have been left held: the restart count that they have then, and their new profile.
    """

    def __init__(self, client: HistoryClient, catalog: Callable[[], SiteCatalog], policy: RunsPolicy) -> None:
        self._client, self._catalog, self._policy = client, catalog, policy
        self._tried: set[int] = set()
        self._own: set[int] = set()
        self.held: dict[int, tuple[int, Profile]] = {}

    def recall(self, actions: Iterable[Mapping[str, Any]]) -> None:
        """Add the jobs that an earlier service may have left held, from the record's actions, oldest first."""
        for action in actions:
            job, restart = int(action["job_id"]), int(action["restart"])
            if action["kind"] == HOLD and job not in self._own:
                self.held[job] = restart, Profile.parse(action["after"])
            elif action["kind"] == "retype" and self.held.get(job, (None,))[0] == restart:
                del self.held[job]

    def due(
        self, rows: Sequence[RecurringRun], past: Callable[[str], Sequence[PastRun]]
    ) -> list[tuple[RecurringRun, ProfileOffer]]:
        """Return the runs to retry, each once, and their new slice.

        Args:
            past: returns the runs of a recurring job by its key.
        """
        retries = []
        for row in rows:
            if not row.retry or row.restart or row.slices != 1 or row.het or row.run in self._tried:
                continue
            run = past_run(row)
            earlier = [prior for prior in past(row.recurring) if prior.run < row.run] if row.recurring else []
            offer = larger(row, [*earlier, run], self._catalog(), self._policy)
            if offer is not None:
                self._tried.add(row.run)
                self._own.add(row.job)
                retries.append((row, offer))
        return retries

    def send(self, row: RecurringRun, offer: ProfileOffer) -> str:
        """Requeue one job or task; return the error, empty if none. Blocks.

        Raises:
            StillHeld: it was requeued, or may be requeued later; `left_held` will return it then.
        """
        try:
            if self._client.version() < FORGETS:
                return "this release of Slurm cannot give a job another slice"
            self._client.requeue_ended(row.job, update=lambda job: changes(job, offer.profile))
        except StillHeld as error:
            log.warning("%s", error)
            self.held[row.job] = row.restart + 1, offer.profile
            raise
        except (SlurmError, ValueError) as error:
            log.warning("job %d ran out of memory and cannot be retried: %s", row.job, error)
            return str(error)
        log.info("job %d ran out of memory on %s and is retried on %s", row.job, row.profile, offer.profile)
        return ""

    def left_held(self, queue: Iterable[JobRow]) -> list[tuple[JobRow, Profile]]:
        """Return the jobs that were left held, and their new profile, each once; `queue`: all that Slurm lists."""
        found = []
        for row in queue if self.held else ():
            if row.job_id not in self.held or row.active or row.unread:
                continue
            restart, profile = self.held.pop(row.job_id)
            if row.restarts == restart and not row.priority:
                found.append((row, profile))
        return found

    def release(self, row: JobRow, profile: Profile) -> str:
        """Give a job that was left held its new profile and release it; return the error, empty if none. Blocks.

        Raises:
            StillHeld: it is still held; `left_held` will return it again.
        """
        job = name_of(row)
        try:
            self._client.release_requeued(row.job_id, job, update=lambda job: changes(job, profile))
        except StillHeld as error:
            log.error("%s; migbatchd tries again after the next query, or run `scontrol release %s`", error, job)
            self.held[row.job_id] = row.restarts, profile
            raise
        except (SlurmError, ValueError) as error:
            log.warning("job %s ran out of memory and is retried on the same slice: %s", job, error)
            return str(error)
        log.info("job %s ran out of memory, was left held and is retried on %s", job, profile)
        return ""
