"""How long a round of the supply loop takes on a large site: plan and advertise, Slurm and nodes answering at once."""

from __future__ import annotations

from statistics import median
from typing import Any, Final

from slurm_migbatch.bench.bars import Bar
from slurm_migbatch.sim.gpus import geometry
from slurm_migbatch.supply.bench import measure as rounds_of

TARGET_S: Final = 1.0
_COUNTS: Final = ("updates", "pending")


def measure(
    gpu: str = "h100-80gb", nodes: int = 1000, gpus: int = 8, pending: int = 10_000, rounds: int = 5
) -> dict[str, Any]:
    """Seconds of each round by part. The first finds everything new; between the others one in a hundred jobs changes.

    Returns:
        {"gpu", "nodes", "gpus", "pending", "rounds": [{part: seconds, "total_s", "updates", "pending"}], "bars"}.
    """
    found = []
    for each in rounds_of(geometry(gpu), nodes=nodes, gpus=gpus, pending=pending, rounds=rounds):
        total = sum(seconds for part, seconds in each.items() if part not in _COUNTS)
        found.append({**{part: round(value, 4) for part, value in each.items()}, "total_s": round(total, 4)})
    later = [each["total_s"] for each in found[1:]] or [found[0]["total_s"]]
    name = f"plan and advertise {nodes} nodes x {gpus} GPUs, {pending} pending, median round [s]"
    bars = [
        Bar(name, median(later), TARGET_S),
        Bar("the first round, everything new [s]", found[0]["total_s"], TARGET_S),
    ]
    return {
        "gpu": gpu,
        "nodes": nodes,
        "gpus": gpus,
        "pending": pending,
        "rounds": found,
        "bars": [bar.to_dict() for bar in bars],
    }
