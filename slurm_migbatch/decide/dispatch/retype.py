"""Which pending `auto` job is given another profile, because its own has no room and that one is idle.

ELSA's two ideas (Kim et al., DAC 2022; `decide.paris_elsa.assignment`): the cheapest slice first, and a dearer one as
soon as the slack of the cheap one is used up or nobody else wants it. Slurm keeps the order of jobs and starts them;
what changes here is only the type that a job asks for, and only within what its decision promised: profiles that keep
its memory need, its latency limit, its deadline, its min and max, with at least the memory of the one first granted
(what the job was told of batch and copies was for that), and not slower than it where nothing else was promised.

Limits of the policy are from a job's submission, its promise from its start. A job with a deadline is wanted done that
long after its submission; one without in `PATIENCE` times what it takes. That decides who goes first and never what a
job may become.

Slurm up to 23.02 does not forget what a pending job asked for before (`workload.loans`), so there nothing is re-typed.
Left alone are jobs whose user named the profile, that have found a place, of several nodes, of several profiles,
components of heterogeneous jobs, and those that wait for anything but room.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

from slurm_migbatch.decide.capacity.demand import GRES, slices
from slurm_migbatch.decide.capacity.free import FreeCapacity
from slurm_migbatch.decide.capacity.model import Demand
from slurm_migbatch.decide.paris_elsa.assignment import StockCosts, Waiting, WorkClass, assign
from slurm_migbatch.decide.snapshot import WeighedProfile
from slurm_migbatch.mig.grant import Grant, GrantError, parse_comment, strip
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.excluded import user_text
from slurm_migbatch.workload.loans import LOAN, forgets

PATIENCE: Final = 2.0
"""A job without a deadline is wanted done within so many times what it takes where it was granted."""
USUAL_S: Final = 600.0
"""What a job is taken to last whose items nobody told and that has no time limit."""
MOST: Final = 256
"""Jobs that are weighed in one round, the first in Slurm's order that could go elsewhere."""
CHOSEN: Final = frozenset({"fits", "batch_chosen", "by_memory", "unknown_model", "no_hints", "runs_few"})
"""Reasons of decisions (`predict.selection.REASONS`, `predict.recurring.SENTENCES`) that kept what they promised with a
profile that nobody named."""
UNNAMED: Final = "auto"
"""The decision's name where the compiled table chose: there is no record of it."""
SLURM_LIMIT: Final = 1024
"""Bytes that Slurm takes in one string of a job."""
LONGEST_LIST: Final = 2000
"""Characters of a list of tasks that is handed to scontrol."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9 =._:/+-]*")
"""What hints are written in. A comment with anything else is its user's own and stays untouched."""


@dataclass(frozen=True)
class Option:
    """A profile that a job may have; `rate` is what can be counted on of one slice, items a second, None: unknown."""

    profile: Profile
    rate: float | None = None


@dataclass(frozen=True)
class ServiceGuarantee:
    """What a decision leaves open: the profile first granted and all that keep what was promised, it included.

    `items` of the whole job (None: not told), `deadline_s` from its start; `terms` says in words what is kept. `retry`:
    it may be run again on a larger slice (retry=oom).
    """

    granted: Profile
    options: tuple[Option, ...]
    items: int | None = None
    deadline_s: int | None = None
    terms: str = ""
    retry: bool = False

    def seconds(self, profile: Profile, slice_count: int = 1) -> float | None:
        """Return what the job takes on `slice_count` slices of a profile, at most; None where nobody can say."""
        rate = next((option.rate for option in self.options if option.profile == profile), None)
        return None if not rate or self.items is None else self.items / (rate * slice_count)

    def within(self, seconds: float, slice_count: int = 1) -> ServiceGuarantee:
        """Return the promise of a job that has to be done in so many seconds, on `slice_count` slices."""
        options = (o for o in self.options if (takes := self.seconds(o.profile, slice_count)) and takes <= seconds)
        return replace(self, options=tuple(options))


def promise_of(
    granted: Profile, candidates: Iterable[WeighedProfile], items: int | None, deadline_s: int | None, terms: str = ""
) -> ServiceGuarantee | None:
    """Return what else a job may have that was granted this profile; None where there is nothing."""
    listed = list(candidates)
    granted_candidate = next((c for c in listed if c.profile == granted), None)
    if granted_candidate is None or not granted_candidate.ok:
        return None

    def keeps(other: WeighedProfile) -> bool:
        if not other.ok or other.memory_mib < granted_candidate.memory_mib:
            return False
        if granted_candidate.rate is None or other.rate is None:
            return other.rate == granted_candidate.rate and other.profile.compute >= granted.compute
        return deadline_s is not None or other.rate >= granted_candidate.rate

    options = tuple(Option(c.profile, c.rate) for c in listed if keeps(c))
    return ServiceGuarantee(granted, options, items, deadline_s, terms) if len(options) > 1 else None


def promise_from_record(row: Mapping[str, Any]) -> ServiceGuarantee | None:
    """Return the promise of a decision as the store keeps it (`Store.decision`); None where it leaves nothing open."""
    facts, hints = row.get("facts"), row.get("hints")
    facts, hints = (part if isinstance(part, dict) else {} for part in (facts, hints))
    if facts.get("reason") not in CHOSEN:
        return None
    counts = slices(str(row.get("chosen") or ""))
    if len(counts) != 1:
        return None
    candidates = []
    for candidate in row.get("candidates") or ():
        try:
            profile, memory = Profile.parse(str(candidate["profile"])), int(candidate["capacity_mib"])
            bounds = candidate.get("throughput_per_s_range")
            candidates.append(
                WeighedProfile(profile, memory, float(bounds[0]) if bounds else None, bool(candidate["ok"]))
            )
        except (KeyError, TypeError, ValueError, IndexError):  # a record from before, or by hand
            return None
    made = promise_of(next(iter(counts)), candidates, hints.get("items"), hints.get("deadline_s"), _terms(hints))
    return made and replace(made, retry=hints.get("retry") == "oom")


def _terms(hints: Mapping[str, Any]) -> str:
    terms = []
    if hints.get("slo_us"):
        terms.append(f"slo={hints['slo_us'] / 1000:g}ms")
    if hints.get("deadline_s"):
        terms.append(f"deadline={hints['deadline_s']}s")
    if hints.get("pipeline"):
        terms.append(f"pipeline={hints['pipeline']}")
    if hints.get("mem_mib"):
        terms.append(f"mem={hints['mem_mib']}MiB")
    terms += [f"{end}={hints[end]}" for end in ("min", "max") if hints.get(end)]
    return " ".join(terms)


# -- who waits ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """A pending job, or tasks of an array, without a place.

    `copies` tasks of it have none; `slice_count` slices of `profile` are what one asks for.
    """

    row: JobRow
    grant: Grant
    pool: frozenset[str]
    copies: int

    @property
    def profile(self) -> Profile:
        """What it asks for now."""
        return self.grant.parts[0][0]

    @property
    def slice_count(self) -> int:
        """Return how many slices of it one asks for."""
        return self.grant.parts[0][1]

    @property
    def arrived(self) -> float:
        """Since when it could have started, unix seconds."""
        return max(self.row.submit, self.row.eligible or 0.0)


def without_place(
    demands: Iterable[Demand], jobs: Mapping[int, JobRow], placed: Mapping[int, int]
) -> Iterator[Pending]:
    """Yield the pending jobs that may be re-typed, as far as Slurm's rows tell, in Slurm's order.

    Args:
        demands: what could start if there were supply.
        jobs: the queue by job id.
        placed: how many tasks of a job have found room.
    """
    for demand in demands:
        copies = demand.copies - placed.get(demand.job, 0)
        if copies < 1 or demand.apart is not None or demand.nodes != 1 or len(demand.parts) != 1:
            continue
        row = jobs.get(demand.job)
        grant = None if row is None else marked(row.comment)
        if row is None or grant is None or grant.parts[0] != demand.parts[0] or not forgets(row.gres):
            continue
        yield Pending(row, grant, demand.pool, copies)


@lru_cache(maxsize=1 << 15)
def marked(comment: str) -> Grant | None:
    """Return what the filter granted a job whose profile may be its choice.

    None for every other job, and where the text before the marker holds more than hints do.
    """
    try:
        grant = parse_comment(comment)
    except GrantError:
        return None
    if grant is None or not grant.decision or grant.decision.startswith(LOAN) or len(grant.parts) != 1:
        return None
    return grant if _PLAIN.fullmatch(user_text(comment)) else None


# -- what is done about it ---------------------------------------------------------------------------------------------


def regranted(row: JobRow, grant: Grant) -> dict[str, str] | None:
    """Return the fields of `scontrol update` that give a waiting job another grant: the GRES, other GRES of the job
    kept, and the marker; None where its comment has no room for that."""
    entries = [gres_list.prefix_of(entry)[1] for entry in gres_list.split(row.gres)]
    others = [entry for entry in entries if re.split("[:=]", entry)[0] not in (GRES, "")]
    comment = grant.attach(strip(row.comment))
    if len(comment) > SLURM_LIMIT:
        return None
    return {"Gres": ",".join([*others, grant.gres]), "Comment": comment}


@dataclass(frozen=True)
class Retype:
    """Another profile for a job, or for `tasks` of an array (all that have not started where empty)."""

    pending: Pending
    tasks: tuple[int, ...]
    after: Profile
    why: str

    @property
    def targets(self) -> tuple[str, ...]:
        """The job as scontrol takes it: 12, 12_3, 12_[3,5-9] for all tasks that have not started.

        Of an array either all of these are named together or single tasks one by one: where a list names some of them
        Slurm gives the new GRES to the first alone, and the new comment to all (24.11, 26.05). An array's own id would
        write the comment of tasks that run, too.
        """
        row = self.pending.row
        if row.array_job is None or row.array_task is None:
            return (str(row.job_id),)
        if not self.tasks and row.tasks > 1:
            return (f"{row.array_job}_[{ranges(tasks_of(row.array_task))}]",)
        return tuple(f"{row.array_job}_{task}" for task in self.tasks or tasks_of(row.array_task))

    @property
    def names(self) -> tuple[str, ...]:
        """Names by `name_of` of the rows from now on: a task that was a part of an array has its own."""
        row = self.pending.row
        if self.tasks:
            return tuple(f"{row.array_job}_{task}" for task in self.tasks)
        return (name_of(row),)

    def fields(self) -> dict[str, str] | None:
        """Return the fields for `scontrol update`, see `regranted`."""
        return regranted(self.pending.row, Grant([(self.after, self.pending.slice_count)], self.pending.grant.decision))

    def profile_text(self, profile: Profile) -> str:
        """Return a profile as the record of runs spells what a job got."""
        return profile.name if self.pending.slice_count == 1 else f"{profile.name}:{self.pending.slice_count}"


@dataclass
class RetypeHistory:
    """When each job was last re-typed, and which profiles it may not get again, so that none flaps.

    `hold_s` is how long a job keeps what it was given. What Slurm refused, or what a limit of the user then kept from
    starting, is barred for that job. Jobs are known by `name_of`.
    """

    hold_s: float = 60.0
    last: dict[str, tuple[float, Profile]] = field(default_factory=dict)
    barred: dict[str, frozenset[Profile]] = field(default_factory=dict)

    def free(self, row: JobRow, now: float) -> bool:
        """Return whether the job may be re-typed again."""
        known = self.last.get(name_of(row))
        return known is None or now - known[0] >= self.hold_s

    def note(self, change: Retype, now: float) -> None:
        """Note that a job was re-typed."""
        for name in change.names:
            self.last[name] = (now, change.pending.profile)

    def bar(self, change: Retype) -> None:
        """Note that the job must not get this profile again."""
        for name in change.names:
            self.barred[name] = self.barred.get(name, frozenset()) | {change.after}

    def forget_but(self, jobs: Iterable[JobRow]) -> None:
        """Forget all jobs but these."""
        present = {name_of(row) for row in jobs}
        for known in (self.last, self.barred):
            for name in [name for name in known if name not in present]:
                del known[name]


def name_of(row: JobRow) -> str:
    """Return the name that a job is known by.

    12 of a job, and of the common row of an array's tasks; 12_3 of a task that has a row of its own.
    """
    if row.array_job is not None and row.array_task is not None and row.array_task.isdigit():
        return f"{row.array_job}_{row.array_task}"
    return str(row.job_id)


def retypes(
    now: float,
    waiting: Iterable[Pending],
    promises: Callable[[Pending], ServiceGuarantee | None],
    space: FreeCapacity,
    turns: RetypeHistory,
    max_weighed: int = MOST,
) -> list[Retype]:
    """Return which jobs get another profile now; takes what they will need from `space`.

    Args:
        now: unix seconds.
        waiting: jobs without a place, in Slurm's order.
        promises: what each may become; None for nothing, or not known yet.
        space: room that nobody is meant to have.
        turns: what was done before.
        max_weighed: of the jobs that could go elsewhere this many are weighed.
    """
    groups: dict[tuple[frozenset[str], int], list[tuple[Pending, ServiceGuarantee]]] = {}
    idle: dict[tuple[frozenset[str], int], frozenset[Profile]] = {}
    weighed = 0
    for pending in waiting:
        if weighed == max_weighed:
            break
        key = (pending.pool, pending.slice_count)
        if key not in idle:
            kinds = space.kinds(pending.pool)
            idle[key] = frozenset(k for k in kinds if space.count(pending.pool, k, pending.slice_count, 1))
        if not idle[key] or not turns.free(pending.row, now):
            continue
        promise = promises(pending)
        if promise is None:
            continue
        barred = turns.barred.get(name_of(pending.row), frozenset())
        # what runs again because its slice was too small asks for what holds it
        least = pending.profile.memory_gb if promise.retry and pending.row.restarts else 0
        options = (o for o in promise.options if o.profile not in barred and o.profile.memory_gb >= least)
        promise = replace(promise, options=tuple(options))
        if any(o.profile in idle[key] and o.profile != pending.profile for o in promise.options):
            groups.setdefault(key, []).append((pending, promise))
            weighed += 1
    changes: list[Retype] = []
    for (pool, slice_count), members in groups.items():
        changes += _of_pool(now, pool, slice_count, members, space)
    return changes


def _of_pool(
    now: float,
    pool: frozenset[str],
    slice_count: int,
    members: Sequence[tuple[Pending, ServiceGuarantee]],
    space: FreeCapacity,
) -> list[Retype]:
    kinds = sorted({option.profile for _, promise in members for option in promise.options} & space.kinds(pool))
    works: dict[WorkClass, int] = {}
    waiting: list[Waiting] = []
    owners: list[int] = []
    for number, (pending, promise) in enumerate(members):
        work = works.setdefault(_work(pending, promise, kinds), len(works))
        for _ in range(min(pending.copies, MOST)):
            waiting.append(Waiting(pending.arrived, work, len(owners)))
            owners.append(number)
    board = StockCosts(list(works), [float(kind.compute) for kind in kinds], [1] * len(kinds))
    idle = [space.count(pool, kind, slice_count, len(waiting)) for kind in kinds]
    chosen: dict[tuple[int, Profile], list[str]] = {}
    for job, kind in assign(now, waiting, idle, board):
        node = space.take(pool, kinds[kind], slice_count)
        if node is not None and kinds[kind] != members[owners[job.name]][0].profile:
            chosen.setdefault((owners[job.name], kinds[kind]), []).append(node)
    changes = []
    tasks_left: dict[int, list[int]] = {}
    for (number, profile), nodes in sorted(chosen.items()):
        pending, promise = members[number]
        row = pending.row
        tasks: tuple[int, ...] = ()
        if row.array_task is not None:
            # Slurm starts tasks in their order, so that those without a place are the last
            open_tasks = tasks_left.setdefault(number, list(tasks_of(row.array_task)))
            if len(nodes) < row.tasks or (row.tasks > 1 and len(ranges(open_tasks)) > LONGEST_LIST):
                tasks = tuple(open_tasks[len(open_tasks) - len(nodes) :])
                del open_tasks[len(open_tasks) - len(nodes) :]
        changes.append(Retype(pending, tasks, profile, _why(pending, promise, profile, nodes)))
    return changes


def _work(pending: Pending, promise: ServiceGuarantee, kinds: Sequence[Profile]) -> WorkClass:
    """Return a job as the policy sees it; it takes for ever on kinds on which it may not run."""
    granted_rate = next((option.rate for option in promise.options if option.profile == promise.granted), None)
    known = promise.seconds(promise.granted, pending.slice_count)
    usual = known or float(pending.row.time_limit_s or USUAL_S)
    rates = {option.profile: option.rate for option in promise.options}
    times = [
        math.inf
        if kind not in rates
        else usual * (granted_rate / rate if granted_rate and (rate := rates[kind]) else 1.0)
        for kind in kinds
    ]
    limit = float(promise.deadline_s) if promise.deadline_s is not None else PATIENCE * usual
    # kinds that keep the promise count as in time, whatever rounding makes of them
    return WorkClass(1.0, limit, tuple(min(t, limit) if t < math.inf else t for t in times))


def _why(pending: Pending, promise: ServiceGuarantee, profile: Profile, nodes: Sequence[str]) -> str:
    where = ", ".join(list(dict.fromkeys(nodes))[:3])
    text = f"no room for {pending.profile}, and {profile} is idle on {where}"
    seconds = promise.seconds(profile, pending.slice_count)
    if seconds is not None and promise.deadline_s is not None:
        return f"{text}; {seconds:.3g} s at most of deadline={promise.deadline_s}s"
    return f"{text}; it meets {promise.terms}" if promise.terms else text


def undone(jobs: Iterable[JobRow], turns: RetypeHistory) -> list[Retype]:
    """Return the re-types to undo: of jobs that a limit of their user keeps from starting since.

    None gets the same profile once more. (Slurm refuses no update because of such a limit; the job gets
    QOSMaxGRESPerUser.)
    """
    changes = []
    for row in jobs:
        known = turns.last.get(name_of(row))
        if known is None or not row.pending or not row.reason.startswith(("QOS", "Assoc")):
            continue
        grant = marked(row.comment)
        if grant is not None and grant.parts[0][0] != known[1] and dict(grant.parts) == dict(slices(row.gres)):
            pending = Pending(row, grant, frozenset(), row.tasks)
            turns.bar(Retype(pending, (), grant.parts[0][0], ""))
            changes.append(Retype(pending, (), known[1], f"a limit prevents it from starting ({row.reason})"))
    return changes


def mended(jobs: Iterable[JobRow], arrays: Collection[int]) -> dict[str, dict[str, str]]:
    """Return the updates for tasks of these arrays whose marker differs from their GRES.

    A task that starts while its array is re-typed keeps its GRES and gets the array's new comment; run again it would
    be given slices that Slurm did not allocate to it.
    """
    fields_of = {}
    for row in jobs:
        if row.array_job in arrays and row.array_task is not None and (row.pending or row.active):
            grant, has = marked(row.comment), dict(slices(row.gres))
            if grant is not None and len(has) == 1 and dict(grant.parts) != has:
                right = Grant(has.items(), grant.decision).attach(strip(row.comment))
                task = row.array_task if row.array_task.isdigit() else f"[{ranges(tasks_of(row.array_task))}]"
                fields_of[f"{row.array_job}_{task}"] = {"Comment": right}
    return fields_of


# -- tasks of arrays ---------------------------------------------------------------------------------------------------


def tasks_of(expression: str) -> tuple[int, ...]:
    """Return the numbers in an array expression such as "4-400:2%4" or "[1,3-5]". Raises ValueError."""
    tasks: list[int] = []
    for part in expression.partition("%")[0].strip("[]").split(","):
        span, _, step = part.partition(":")
        low, dash, high = span.partition("-")
        tasks.extend(range(int(low), int(high) + 1, int(step or 1)) if dash else [int(low)])
    return tuple(tasks)


def ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: 1,3-5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
