"""Compute every few minutes, from the history of requests and the queue, how free space is offered while no job waits.

`decide.paris_elsa.preference` computes it in a thread; [supply] preference of the administrator has precedence.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.daemon.poll import SlurmView
from slurm_migbatch.daemon.tasks import attempt
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.decide.capacity.demand import could_run, slices
from slurm_migbatch.decide.paris_elsa.preference import HORIZON_S, Class, preference
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.store.work import PastRuns, past_work
from slurm_migbatch.workload.loans import is_marked

log = logging.getLogger(__name__)

EVERY_S: Final = 300.0
"""Seconds between two reads of the history; the first comes soon after the start."""
SOON_S: Final = 10.0
HISTORY_S: Final = 14 * 86400.0
"""How far back the history is used."""
LEAST: Final = 20
"""Minimum number of slices of ended runs and pending jobs; with fewer, one of each size is the better guess."""
USUAL_S: Final = 600.0
"""Assumed duration of a pending job if no job of its profile has ended recently."""


class OfferTuner:
    """Updates supply's preference according to demand."""

    def __init__(
        self,
        observer: Observer,
        writer: StoreWriter,
        latest: Callable[[], SlurmView | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Set up. `latest`: the newest view of Slurm."""
        self._observer, self._writer, self._latest, self._clock = observer, writer, latest, clock
        self._fault = FaultReporter("cannot compute how to offer free space", "it is unchanged until then", log)

    async def run(self) -> None:
        """Tune forever."""
        await asyncio.sleep(SOON_S)
        while True:
            await attempt(self._fault, self.tune(), EVERY_S)
            await asyncio.sleep(EVERY_S)

    async def tune(self) -> tuple[Profile, ...]:
        """Compute the preference and pass it to supply; leave it unchanged if there is too little data."""
        now = self._clock()
        past = await self._writer.answer(lambda store: store.read(past_work, now - HISTORY_S), "history")
        snapshot = self._latest()
        gpus = Counter(
            gpu.geometry for node in self._observer.view.facts().values() if node.healthy for gpu in node.gpus
        )
        rows = () if snapshot is None else snapshot.jobs
        classes = classes_of(past, rows, now)
        if sum(past_runs.runs * past_runs.slices for past_runs in past) + sum(asked_for(rows, now).values()) < LEAST:
            return ()
        preferred = await asyncio.to_thread(preference, gpus, classes)
        if preferred and preferred != self._observer.preference:
            names = ",".join(profile.name for profile in preferred)
            log.info(
                "free space is offered with a new preference", extra={"order": names, "runs": sum(p.runs for p in past)}
            )
            self._observer.preference = preferred
        return preferred


def classes_of(past: Sequence[PastRuns], jobs: Iterable[JobRow], now: float) -> list[Class]:
    """Return history and queue in the policy's form: arrivals in `HORIZON_S`, and pending jobs.

    Runs on different slices are ignored; training jobs that wait for a loan request no supply.
    """
    classes: list[Class] = []
    lasted: dict[Profile, tuple[float, int]] = {}
    for past_runs in past:
        counts = slices(",".join(f"mig:{part}" for part in past_runs.profile.split(",")))
        if len(counts) == 1 and past_runs.seconds > 0:
            profile = next(iter(counts))
            classes.append(Class(past_runs.runs * past_runs.slices * HORIZON_S / HISTORY_S, past_runs.seconds, profile))
            seconds, runs = lasted.get(profile, (0.0, 0))
            lasted[profile] = (seconds + past_runs.seconds * past_runs.runs, runs + past_runs.runs)
    for profile, count in sorted(asked_for(jobs, now).items()):
        seconds, runs = lasted.get(profile, (USUAL_S, 1))
        classes.append(Class(float(count), seconds / runs, profile))
    return classes


def asked_for(jobs: Iterable[JobRow], now: float) -> Counter[Profile]:
    """Count the slices of pending jobs that could start."""
    waiting: Counter[Profile] = Counter()
    for row in jobs:
        if could_run(row, now) and not is_marked(row.comment):
            for profile, count in slices(row.gres).items():
                waiting[profile] += count * row.num_nodes * row.tasks
    return waiting
