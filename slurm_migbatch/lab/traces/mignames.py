"""Find the profile of the simulated GPU that a GRES type of a site means.

A site's types are not always the driver's names. AutoDetect=nvml of slurmd writes the memory that a slice has, in GiB,
`3g.39gb` on an A100 with 80 GB, where the driver says `3g.40gb`; drivers differ by as much between their versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from slurm_migbatch.lab.sim import gpus
from slurm_migbatch.lab.traces.trace import Trace
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile


@lru_cache(maxsize=1 << 12)
def profile_on(geometry: Geometry, profile: Profile) -> Profile:
    """Return the geometry's profile that is meant; `profile` itself if it has none of that name or memory."""
    return geometry.other_names.get(profile, profile)


def on_nearest(trace: Trace, geometry: Geometry) -> Trace:
    """Return the trace with slices of other GPU models replaced by slices of this one.

    The slice is the smallest with at least the share of the compute and of the memory that the job had on its model.
    Profiles of no known model stay.
    """
    counts = Counter(job.profile for job in trace.jobs if job.profile is not None)
    models = _by_use(counts)
    found = {profile: nearest(geometry, profile, models) for profile in sorted(counts) if profile not in geometry}
    instead = {profile: chosen for profile, chosen in found.items() if chosen is not None}
    jobs = tuple(
        job if job.profile not in instead else replace(job, profile=instead[job.profile]) for job in trace.jobs
    )
    notices = [f"{counts[old]} jobs on slices {old} are replayed on {new}" for old, new in instead.items()]
    return replace(trace, jobs=jobs, notices=(*trace.notices, *notices))


def with_notice(trace: Trace, geometry: Geometry) -> Trace:
    """Return the trace with a notice of slices that this GPU model does not have, if there are any."""
    found = Counter(job.profile for job in trace.jobs if job.profile is not None and job.profile not in geometry)
    if not found:
        return trace
    names = ", ".join(map(str, sorted(found)))
    notice = (
        f"{found.total()} jobs are on slices of another model than {geometry.name} ({names}), which most policies do "
        'not run: set cluster.gpu to the model of the trace, or workload.slices = "nearest"'
    )
    return replace(trace, notices=(*trace.notices, notice))


def _by_use(counts: Counter[Profile]) -> list[Geometry]:
    """Return all models, those first that have the profiles of most jobs: the same profile is another share of each."""

    def used(model: Geometry) -> tuple[int, int]:
        meant = sum(count for profile, count in counts.items() if profile_on(model, profile) in model)
        return meant, sum(count for profile, count in counts.items() if profile in model)

    return sorted(map(gpus.geometry, gpus.models()), key=used, reverse=True)


def nearest(geometry: Geometry, profile: Profile, models: Iterable[Geometry]) -> Profile | None:
    """Return the smallest profile with as large a share of the GPU as `profile` has on the first model that has it.

    None if no model has it.
    """
    model = next((model for model in models if profile_on(model, profile) in model), None)
    if model is None:
        return None
    had = model.info(profile_on(model, profile))
    enough = [
        info
        for info in geometry.profiles
        if not info.profile.suffix
        and info.compute_slices * model.compute_slices >= had.compute_slices * geometry.compute_slices
        and info.memory_slices * model.memory_slices >= had.memory_slices * geometry.memory_slices
    ]
    return min(enough, key=lambda info: (info.memory_slices, info.compute_slices)).profile
