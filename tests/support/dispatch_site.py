"""A small site for the tests of dispatch: A30s and H100s, promises, pending jobs, and free capacity."""

from __future__ import annotations

from collections import Counter

from slurm_migbatch.decide.capacity.free import FreeCapacity, NodeCapacity
from slurm_migbatch.decide.dispatch.pending import Pending, marked
from slurm_migbatch.decide.dispatch.promises import Promise, promise_of
from slurm_migbatch.decide.snapshot import WeighedProfile
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.mig.grant import Grant
from slurm_migbatch.mig.layout import EMPTY, Layout
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow

P = Profile.parse
H100, A30 = geometry("h100-80gb"), geometry("a30")
GPUS = {"h1": H100, "h2": H100, "a1": A30}
EVERYWHERE = frozenset(GPUS)
NOW = 1_000_000.0

#: a small model: what can be counted on of one slice
RATES = {"1g.6gb": 10.0, "1g.10gb": 12.0, "1g.20gb": 12.0, "2g.12gb": 18.0, "2g.20gb": 19.0, "3g.40gb": 26.0}
MEMORY = {"1g.6gb": 6000, "1g.10gb": 9856, "1g.20gb": 19968, "2g.12gb": 12000, "2g.20gb": 19968, "3g.40gb": 40448}


def candidates(bad: tuple[str, ...] = (), rates: dict[str, float] | None = None) -> list[WeighedProfile]:
    rates = RATES if rates is None else rates
    return [WeighedProfile(P(name), MEMORY[name], rates.get(name), name not in bad) for name in MEMORY]


def promise(
    granted: str = "1g.6gb", items: int | None = 600, deadline_s: int | None = 120, bad: tuple[str, ...] = ()
) -> Promise:
    made = promise_of(P(granted), candidates(bad), items, deadline_s)
    assert made is not None
    return made


def job(number: int, profile: str = "1g.6gb", each: int = 1, **changes: object) -> JobRow:
    """Return a pending job to which the filter has granted `profile`."""
    grant = Grant([(P(profile), each)], "abc12345")
    fields: dict[str, object] = {
        "job_id": number,
        "user": "ann",
        "partition": "mig",
        "submit": NOW - 1.0,
        "gres": "gres/" + grant.gres,
        "comment": grant.attach("migbatch: model=resnet-50 items=600 deadline=2m"),
        "reason": "Resources",
    }
    return JobRow(**{**fields, **changes})  # type: ignore[arg-type]


def pending(row: JobRow, copies: int = 1, pool: frozenset[str] = EVERYWHERE) -> Pending:
    grant = marked(row.comment)
    assert grant is not None
    return Pending(row, grant, pool, copies)


def free_capacity(**used: Layout | None) -> FreeCapacity:
    """Return the free capacity of the GPUs beside what is used; None: the whole GPU is used."""
    capacities = {
        name: NodeCapacity([(gpu, used.get(name) or EMPTY)], Counter())
        for name, gpu in GPUS.items()
        if name not in used or used[name] is not None
    }
    profiles = {name: frozenset(info.profile for info in gpu.profiles) for name, gpu in GPUS.items()}
    return FreeCapacity(profiles, lambda name: capacities.get(name) or NodeCapacity())
