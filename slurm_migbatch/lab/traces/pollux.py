"""Read Pollux's workloads and the measurements that give the duration of their jobs.

A workload states application, number of replicas (whole GPUs) and global batch, but no durations. Those come from the
measured profiles: the iterations until the target metric at a batch (`validation-<batch>`), times the measured step
time of that many replicas with their shares of the batch (`placements`, nodes of four GPUs; `scalability` for more than
four nodes).

Note: if a replica's share of the batch is larger than the largest measured one, it is processed in several equal steps,
the last of which exchanges gradients. Iterations of an unmeasured batch are interpolated. The files do not state the
hardware.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.traces.csvlines import CsvLine, TraceError, lines
from slurm_migbatch.lab.traces.trace import Trace

PER_NODE: Final = 4


@dataclass(frozen=True)
class StepTime:
    """Duration of one step with a batch on each replica, and the part of it that exchanges gradients; seconds."""

    batch: int
    seconds: float
    sync: float


@dataclass(frozen=True)
class ApplicationProfile:
    """Measured profile of one application.

    Attributes:
        steps: by (nodes, replicas), the measured steps in ascending order of a replica's batch.
        iterations: (global batch, iterations to the target), ascending.
    """

    name: str
    steps: dict[tuple[int, int], tuple[StepTime, ...]]
    iterations: tuple[tuple[int, float], ...]

    def step_s(self, replicas: int, batch: int) -> float:
        """Return the seconds of an iteration of the global batch on this many replicas on the fewest nodes.

        Raises KeyError if neither this many nor more replicas were measured.
        """
        nodes = -(-replicas // PER_NODE)
        points = self.steps.get((nodes, replicas))
        if points is None:
            points = self._nearest_steps(nodes, replicas)
        local = batch / replicas
        max_batch = points[-1].batch
        micro_steps = max(1, math.ceil(local / max_batch))
        step = _interpolate(points, local / micro_steps)
        return step.seconds + (micro_steps - 1) * (step.seconds - step.sync)

    def iterations_of(self, batch: int) -> float:
        """Return the iterations to the target with a global batch, interpolated log-linearly between measured ones."""
        measured = self.iterations
        upper = min(max(1, bisect_left(measured, (batch, 0.0))), len(measured) - 1)
        if len(measured) == 1:
            return measured[0][1]
        (b0, i0), (b1, i1) = measured[upper - 1], measured[upper]
        share = math.log(batch / b0) / math.log(b1 / b0)
        return float(i0 * (i1 / i0) ** share)

    def seconds(self, replicas: int, batch: int) -> float:
        """Return the seconds to the target metric."""
        return self.iterations_of(batch) * self.step_s(replicas, batch)

    def _nearest_steps(self, nodes: int, replicas: int) -> tuple[StepTime, ...]:
        """Return the steps of the fewest nodes and replicas that were measured and are at least as many as these."""
        larger = [key for key in self.steps if key[0] >= nodes and key[1] >= replicas]
        if not larger:
            raise KeyError(f"{self.name} was not measured on {replicas} GPUs")
        return self.steps[min(larger)]


def profiles(folder: Path) -> dict[str, ApplicationProfile]:
    """Read the applications, a subdirectory for each (`bert/placements.csv.gz` ...). Raises TraceError."""
    by_app = {}
    for app_folder in sorted(path for path in folder.glob("*") if path.is_dir()):
        names = {path.name.removesuffix(".gz").removesuffix(".csv"): path for path in sorted(app_folder.glob("*.csv*"))}
        validations = {int(match[1]): path for name, path in names.items() if (match := _VALIDATION.fullmatch(name))}
        if "placements" not in names or not validations:
            continue
        iterations = tuple((batch, _last_iteration(path)) for batch, path in sorted(validations.items()))
        by_app[app_folder.name] = ApplicationProfile(app_folder.name, _steps(names), iterations)
    if not by_app:
        raise TraceError(folder, 0, "holds no folders with placements.csv and validation-<batch>.csv")
    return by_app


def read(path: Path, known: Mapping[str, ApplicationProfile]) -> Trace:
    """Read a workload `name,time,application,num_replicas,batch_size`. Raises TraceError."""
    jobs = []
    for line in lines(path, ("name", "time", "application", "num_replicas", "batch_size")):
        app, gpus, batch = line.text("application"), line.count_of("num_replicas", 1), line.count_of("batch_size", 1)
        work = profiled_s(line, known, app, gpus, batch)
        arrival = line.number_of("time", 0)
        jobs.append(SimulatedJob(line.number, line.text("name"), arrival, work, gpus=gpus, app=app, batch=batch))
    jobs.sort(key=lambda job: (job.arrival, job.id))
    return Trace(tuple(jobs))


def profiled_s(line: CsvLine, known: Mapping[str, ApplicationProfile], app: str, gpus: int, batch: int) -> float:
    """Return the seconds of training by its application's profile. Raises TraceError about the line."""
    if app not in known:
        raise line.wrong(f"application {app!r} has no profile; there are {', '.join(sorted(known))}")
    try:
        return known[app].seconds(gpus, batch)
    except KeyError as error:
        raise line.wrong(str(error.args[0])) from None


_VALIDATION = re.compile(r"validation-([1-9][0-9]*)")


def _steps(names: dict[str, Path]) -> dict[tuple[int, int], tuple[StepTime, ...]]:
    measured: dict[tuple[int, int], dict[int, list[StepTime]]] = {}
    if "scalability" in names:
        for line in lines(names["scalability"], ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")):
            key = line.count_of("num_nodes", 1), line.count_of("num_replicas", 1)
            step = StepTime(
                line.count_of("local_bsz", 1), line.number_of("step_time", 0), line.number_of("sync_time", 0)
            )
            measured.setdefault(key, {}).setdefault(step.batch, []).append(step)
    for line in lines(names["placements"], ("placement", "local_bsz", "step_time", "sync_time")):
        digits = line.text("placement")
        if not digits.isdecimal() or "0" in digits:
            raise line.wrong(f"placement must be one digit for each node, not {digits!r}")
        key = len(digits), sum(map(int, digits))
        step = StepTime(line.count_of("local_bsz", 1), line.number_of("step_time", 0), line.number_of("sync_time", 0))
        measured.setdefault(key, {}).setdefault(step.batch, []).append(step)
    return {key: tuple(_mean(steps) for _, steps in sorted(by_batch.items())) for key, by_batch in measured.items()}


def _mean(steps: Sequence[StepTime]) -> StepTime:
    count = len(steps)
    return StepTime(steps[0].batch, sum(s.seconds for s in steps) / count, sum(s.sync for s in steps) / count)


def _last_iteration(path: Path) -> float:
    last = 0.0
    for line in lines(path, ("iteration",)):
        last = line.number_of("iteration", 0)
    if not last:
        raise TraceError(path, 0, "names no iteration that reached the target")
    return last


def _interpolate(points: Sequence[StepTime], batch: float) -> StepTime:
    """Interpolate between the two nearest batches; below the smallest use that, because a step has a fixed part."""
    if batch <= points[0].batch:
        return points[0]
    upper = min(bisect_left([point.batch for point in points], batch), len(points) - 1)
    low, high = points[upper - 1], points[upper]
    share = (batch - low.batch) / (high.batch - low.batch)
    return StepTime(
        high.batch, low.seconds + share * (high.seconds - low.seconds), low.sync + share * (high.sync - low.sync)
    )
