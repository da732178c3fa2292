"""Measure migbatchd's rounds on large, busy sites, and how they grow with the number of GPUs.

A round observes, decides on supply and on pending jobs, and compares with the state of Slurm and the nodes. Nothing in
it waits here, so times are processor times, independent of other work on the machine. Rounds are
recorded as in migbatchd (`daemon.flightrecorder`); that is done in another thread, and counted separately. So is
reading Slurm's queue before the round.
"""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.advertiser import Advertiser
from slurm_migbatch.daemon.controller import Controller
from slurm_migbatch.daemon.flightrecorder import FlightRecorder
from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.daemon.settings import settings_of
from slurm_migbatch.decide.snapshot import LendingPast
from slurm_migbatch.lab.bars import Bar, exponent
from slurm_migbatch.lab.bench.largesite import LargeSite, NoRecord
from slurm_migbatch.lab.bench.queue_reading import checks_s, reading_s
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.lab.shipped import DECIDES, provenance
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.values.quantiles import quantile

NODES: Final = (125, 250, 500, 1000, 12_500)
"""Sizes of the sites, in nodes."""
GPUS: Final = 8
PENDING: Final = 10
"""Pending rows of the queue, for each node."""
ROUNDS: Final = 30
CHURN: Final = 48
"""Jobs that end between two rounds; as many start and are submitted. Rounds are a second apart."""
TARGETS: Final = {8_000: (1.0, 0.1), 100_000: (5.0, 0.5)}
"""Target seconds of the first round and of later ones by number of GPUs; smaller sites use the next larger entry."""
EXPONENT: Final = 1.05
_MOST_RUSHES: Final = 5
_DECIDED_S: Final = 1e-3
"""A shorter time means that no decision on pending jobs was due."""


@dataclass(frozen=True)
class SiteRounds:
    """Rounds on one site; seconds of processor time.

    Attributes:
        gpus, running, pending: GPUs, running jobs, and pending rows, after the rush.
        first_s: the first round, in which everything is new and all free space is offered.
        rush_s: those in which Slurm starts all jobs that have found a place.
        later_s, p99_s: rounds in which `CHURN` jobs ended and as many started: the median, and 99 % of them.
        dispatch_s: time of a decision on pending jobs, in the rounds that had one; in no other figure.
        recording_s: recording of a later round: the median; in no other figure.
        first_reading_s, reading_s, checks_s: before the round: reading squeue's output
            for the first time and again, and the service's checks of all jobs; in no other figure.
        parts: median seconds of the parts of a later round.
        changes: nodes whose offer changed in a later round, on average.
        peak_mib: peak memory of the process so far, the synthetic site included.
    """

    gpus: int
    running: int
    pending: int
    first_s: float
    rush_s: tuple[float, ...]
    later_s: float
    p99_s: float
    dispatch_s: float
    recording_s: float
    first_reading_s: float
    reading_s: float
    checks_s: float
    parts: dict[str, float]
    changes: float
    peak_mib: float


class _Clock:
    """Processor time for measurements; the site's own clock for decisions."""

    monotonic = staticmethod(time.thread_time)

    def __init__(self, site: LargeSite) -> None:
        self._site = site

    def time(self) -> float:
        return self._site.now


def measure(
    nodes: Sequence[int] = (),
    gpus: int = GPUS,
    pending: int | None = None,
    rounds: int = ROUNDS,
    gpu: str = "h100-80gb",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run rounds on sites of these sizes.

    Args:
        pending: pending rows; None: `PENDING` for each node.
        rounds: later rounds on each site.
    """
    config, sites = Config(), []
    for count in nodes or NODES:
        progress(f"{count * gpus} GPUs", len(nodes or NODES))
        site = LargeSite(geometry(gpu), count, gpus, PENDING * count if pending is None else pending, seed=1)
        sites.append(_rounds(config, site, rounds))
    grown = exponent([(site.gpus, site.later_s) for site in sites])
    return {
        "bench": "scale",
        "gpu": gpu,
        "gpus": gpus,
        "sites": [asdict(site) for site in sites],
        "exponent": grown,
        **provenance(DECIDES, config),
        "bars": [bar.to_dict() for bar in _bars(sites, grown)],
    }


def _rounds(config: Config, site: LargeSite, rounds: int) -> SiteRounds:
    settings = settings_of(config)
    advertiser = Advertiser(site, site.plans, config.supply.ack_wait_s)  # type: ignore[arg-type]
    observer = Observer(site.view, site.plans, advertiser.total, silence_s=config.supply.node_silence_s)
    observer.remember(LendingPast())
    loop = Controller(settings, site, observer, advertiser, NoRecord(), _Clock(site))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as directory:
        recorder = FlightRecorder(Path(directory), settings, config.daemon.record_hours, config.daemon.record_mb)
        loop.recorder = recorder
        try:
            return _measured(config, site, loop, recorder, rounds)
        finally:
            recorder.close()


def _measured(config: Config, site: LargeSite, loop: Controller, recorder: FlightRecorder, rounds: int) -> SiteRounds:
    timings: list[dict[str, float]] = []

    def one() -> dict[str, float]:
        site.poll()
        jobs, rows = site.jobs(), site.nodes()
        began, begun = time.process_time(), time.thread_time()
        report = loop.round(jobs, rows)
        spent = time.thread_time() - begun
        recorder.flush()
        recording = time.process_time() - began - (time.thread_time() - begun)
        dispatch = report.seconds.get("dispatch", 0.0)
        site.now += config.cluster.poll_s
        changes = float(len(report.changes))
        times = {"dispatch": dispatch, "supply": spent - dispatch, "recording": recording}
        return {**report.seconds, **times, "changes": changes}

    gc.collect()
    first = one()
    rush: list[dict[str, float]] = []
    while site.start() and len(rush) < _MOST_RUSHES:
        site.submit()
        rush.append(one())
    for _ in range(rounds):
        site.end(CHURN)
        site.start()
        site.submit()
        timings.append(one())
    later = [timing["supply"] for timing in timings]
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    first_reading, reading = reading_s(site.jobs())
    names = ("observe", "plan", "advertise")
    return SiteRounds(
        gpus=site.gpus,
        running=sum(row.active for row in site.jobs()),
        pending=sum(row.pending for row in site.jobs()),
        first_s=first["supply"],
        rush_s=tuple(timing["supply"] for timing in rush),
        later_s=median(later),
        p99_s=quantile(later, 0.99),
        dispatch_s=median([spent for timing in timings if (spent := timing["dispatch"]) > _DECIDED_S] or [0.0]),
        recording_s=median([timing["recording"] for timing in timings]),
        parts={name: median([timing[name] for timing in timings]) for name in names},
        changes=sum(timing["changes"] for timing in timings) / len(timings),
        first_reading_s=first_reading,
        reading_s=reading,
        checks_s=checks_s(site.jobs(), site.view.facts()),
        peak_mib=peak_mib,
    )


def _bars(sites: Sequence[SiteRounds], grown: float | None) -> list[Bar]:
    bars = []
    for site in sites:
        first, later = next((target for gpus, target in TARGETS.items() if site.gpus <= gpus), (None, None))
        if first is not None and later is not None:
            bars.append(Bar(f"{site.gpus} GPUs: first round [s]", site.first_s, first))
            bars.append(Bar(f"{site.gpus} GPUs: later rounds, median [s]", site.later_s, later))
    if grown is not None:
        bars.append(Bar("exponent of later rounds", grown, EXPONENT))
    return bars
