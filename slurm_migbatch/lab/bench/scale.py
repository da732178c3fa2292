"""How long a round of the supply loop takes on a large site: plan and advertise, Slurm and nodes answering at once."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, Final

from slurm_migbatch.lab.bars import Bar
from slurm_migbatch.lab.bench.largesite import measure as rounds_of
from slurm_migbatch.lab.sim.gpus import geometry

TARGET_S: Final = 1.0
_COUNTS: Final = ("updates", "pending")


def measure(
    gpu: str = "h100-80gb", nodes: int = 1000, gpus: int = 8, pending: int = 10_000, rounds: int = 5
) -> dict[str, Any]:
    """Seconds of each round by part. The first finds everything new; between the others one in a hundred jobs changes.

    Nothing in a round waits, so where this process got only a share of a processor (`cpu_share`), the bars hold what
    the rounds would have taken with all of it.

    Returns:
        {"gpu", "nodes", "gpus", "pending", "cpu_share", "bars",
        "rounds": [{part: seconds by the clock, "total_s", "updates", "pending"}]}.
    """
    found = []
    wall, cpu = time.perf_counter(), time.process_time()
    measured = rounds_of(geometry(gpu), nodes=nodes, gpus=gpus, pending=pending, rounds=rounds)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    for timings in measured:
        total = sum(seconds for part, seconds in timings.items() if part not in _COUNTS)
        found.append({**{part: round(value, 4) for part, value in timings.items()}, "total_s": round(total, 4)})
    later = [timings["total_s"] for timings in found[1:]] or [found[0]["total_s"]]
    name = f"plan and advertise {nodes} nodes x {gpus} GPUs, {pending} pending, median round [s]"
    bars = [
        Bar(name, share * median(later), TARGET_S),
        Bar("the first round, everything new [s]", share * found[0]["total_s"], TARGET_S),
    ]
    return {
        "gpu": gpu,
        "nodes": nodes,
        "gpus": gpus,
        "pending": pending,
        "cpu_share": round(share, 3),
        "rounds": found,
        "bars": [bar.to_dict() for bar in bars],
    }
