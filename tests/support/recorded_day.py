"""A scripted period of the lending world, recorded by the flight recorder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_migbatch.daemon.flightrecorder import FlightRecorder
from tests.support.loan_world import LoanWorld


def record(
    w: LoanWorld,
    directory: Path,
    hours: float = 24.0,
    megabytes: float = 64.0,
    clock: Callable[[], float] = time.monotonic,
) -> FlightRecorder:
    """Record a world's service from its next round on, which must be its first."""
    recorder = FlightRecorder(directory, w.control.settings, hours, megabytes, clock)
    w.control.recorder = recorder
    return recorder


def play_day(w: LoanWorld, recorder: FlightRecorder, steps: int = 260) -> None:
    """Training fills the GPUs, inference comes and takes slices back, a requeue is refused."""
    slurm: Any = w.slurm
    script: dict[int, Any] = {
        1: lambda: [w.train(needs=120, hints="signal=usr1 max=1g.10gb") for _ in range(5)],
        20: lambda: w.train(needs=300, hints="max=3g.40gb", after=None),
        40: lambda: [w.infer("2g.20gb", runs=25) for _ in range(2)],
        60: lambda: w.infer("7g.80gb", runs=20),
        75: lambda: slurm.refuse.add("requeue_all"),
        90: slurm.refuse.clear,
        120: lambda: w.train(needs=60, hints="signal=usr1", tasks=3),
        150: lambda: w.infer("3g.40gb", runs=40),
        200: lambda: [w.infer("1g.10gb", runs=10) for _ in range(6)],
    }
    for number in range(steps):
        script.get(number, lambda: None)()
        w.step()
        recorder.flush()  # the recorder skips rounds while it is behind
