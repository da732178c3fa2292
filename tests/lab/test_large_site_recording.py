"""Recording of a large site: a segment begins with the full state, and then has only changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.advertiser import Advertiser
from slurm_migbatch.daemon.controller import Controller
from slurm_migbatch.daemon.flightrecorder import FlightRecorder, read_entries, segments
from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.daemon.settings import settings_of
from slurm_migbatch.decide.recording.replay import replay
from slurm_migbatch.decide.snapshot import LendingPast
from slurm_migbatch.lab.bench.largesite import LargeSite, NoRecord
from slurm_migbatch.lab.sim.gpus import geometry


class SiteClock:
    """The site's own time."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, site: LargeSite) -> None:
        self._site = site

    def time(self) -> float:
        return self._site.now


def test_segment_holds_many_rounds_even_if_one_full_round_nearly_fills_it(tmp_path: Path) -> None:
    config = Config()
    site: Any = LargeSite(geometry("h100-80gb"), 20, 8, 200, seed=1)
    settings = settings_of(config)
    advertiser = Advertiser(site, site.plans, config.supply.ack_wait_s)
    observer = Observer(site.view, site.plans, advertiser.total, silence_s=config.supply.node_silence_s)
    observer.remember(LendingPast())
    loop = Controller(settings, site, observer, advertiser, NoRecord(), SiteClock(site))  # type: ignore[arg-type]
    recorder = loop.recorder = FlightRecorder(tmp_path, settings, 12.0, 0.1)
    for _ in range(60):
        site.poll()
        loop.round(site.jobs(), site.nodes())
        recorder.flush()
        site.now += 1.0
        site.end(2)
        site.start()
        site.submit()
    recorder.close()
    kept = [list(replay(read_entries(path))) for path in segments(tmp_path)]
    assert sum(map(len, kept)) == 60
    assert len(kept) <= 3
    assert not any(replayed.differences for rounds in kept for replayed in rounds)
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 100_000
