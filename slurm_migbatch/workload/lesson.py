"""Describe one ended run, as it is read from the record for the predictor to learn from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lesson:
    """One ended run. None: unknown (a job without reports, an explicit profile, a run on different slices).

    Attributes:
        number: its position in the order of lessons; `run` stays the same when it is returned again.
        model, role, batch, input, unit, items_hint: the user's hints; `role` is "infer" if a model was given without
        one,
            `batch` is the job's reported one if any.
        profile, gpu: of its slices, if they are all the same; `gpu` is NVML's name of the model.
        slices: total, over all nodes.
        elapsed_s: from its start to its end; the whole job, including loading.
        throughput_per_s, items, latency_s, latency_p99_s: of the whole run, as reported by the job.
        memory_mib: the peak of one slice, from the driver.
            A run that shared its slice with another job has no such figures: they would not be those of one job.
        engine: a program in its script that takes a fixed share of any slice; empty if none is known.
        oom: the job reported that it ran out of memory.
    """

    number: int
    run: int
    job: int
    user: str | None
    state: str
    model: str | None
    role: str | None
    batch: int | None
    input: int | None
    unit: str
    items_hint: int | None
    profile: str | None
    gpu: str | None
    slices: int
    elapsed_s: float
    throughput_per_s: float | None
    latency_s: float | None
    latency_p99_s: float | None
    memory_mib: float | None
    items: float | None
    engine: str = ""
    oom: bool = False
