"""Read Gavel's measurements of two jobs on one GPU (stanford-futuredata/gavel, throughputs converted to CSV)."""

from __future__ import annotations

from pathlib import Path

from slurm_migbatch.lab.traces.csvlines import TraceError, lines


def pairs(path: Path, gpu: str = "v100") -> dict[tuple[str, str], float]:
    """Return the pairs on one GPU type: `Paired` names are its job types, `ResNet-18 (batch size 16)`.

    Pairs that did not fit together (0 steps a second) are skipped, as are jobs of several workers. A job that was
    faster next to another one (noise) counts as not slowed down. Raises TraceError.
    """
    alone: dict[str, float] = {}
    paired: dict[tuple[str, str], float] = {}
    columns = ("gpu", "job1", "workers1", "job2", "workers2", "steps_per_s_1", "steps_per_s_2")
    for line in lines(path, columns):
        if line.text("gpu") != gpu or line.text("workers1") != "1":
            continue
        first, second = line.text("job1"), line.text("job2")
        rate = line.number_of("steps_per_s_1", 0)
        if not second:
            alone[first] = rate
        elif rate and line.number_of("steps_per_s_2", 0):
            paired[first, second] = rate
            paired[second, first] = line.number_of("steps_per_s_2", 0)
    if not alone:
        raise TraceError(path, 0, f"has no measurement alone on a {gpu}")
    return {
        (model, other): max(1.0, alone[model] / rate)
        for (model, other), rate in paired.items()
        if alone.get(model, 0.0) > 0
    }
