"""Re-type pending `auto` jobs whose profile has no capacity to another profile that is idle.

ELSA's two ideas (Kim et al., DAC 2022; `decide.paris_elsa.assignment`): the cheapest slice first, and a more expensive
one as soon as the slack of the cheap one is used up or no other job wants it. Slurm keeps the order of jobs and starts
them; only the requested type changes here, and only within what the decision promised: profiles that meet its memory
need, its latency limit, its deadline, its min and max, with at least the memory of the first one (for which batch and
copies were recommended), and not slower than it if nothing else was promised.

Limits of the policy count from a job's submission, its promise from its start. A job with a deadline should be done
that long after its submission; one without in `PATIENCE` times its duration. This decides the order and never the
possible profiles.

Slurm up to 23.02 keeps a pending job's former request (`workload.loans`), so there nothing is re-typed. Not changed are
jobs with an explicit profile, jobs with a place, with several nodes or several profiles, components of heterogeneous
jobs, and those that wait for anything but capacity.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.capacity.free import FreeCapacity
from slurm_migbatch.decide.dispatch.pending import Pending, marked, name_of
from slurm_migbatch.decide.dispatch.promises import ProfileOption, Promise
from slurm_migbatch.decide.paris_elsa.assignment import StockCosts, Waiting, WorkClass, assign
from slurm_migbatch.decide.snapshot import passed_s
from slurm_migbatch.mig.grant import CHANGED, Grant, strip
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.client import SLURM_LIMIT, JobRow
from slurm_migbatch.slurm.taskexpr import expand_tasks, fold_tasks
from slurm_migbatch.workload.loans import GRES

PATIENCE: Final = 2.0
"""A job without a deadline should be done within so many times its duration on the granted slice."""
USUAL_S: Final = 600.0
"""Assumed duration of a job without items and time limit."""
MOST: Final = 256
"""Jobs considered in one round, the first in Slurm's order with alternatives."""
LONGEST_LIST: Final = 2000
"""Maximum characters of a list of tasks passed to scontrol."""
_LONGEST_NAME: Final = 16
"""Maximum characters of a decision's name in a marker."""


def regranted(row: JobRow, grant: Grant) -> dict[str, str] | None:
    """Return the fields of `scontrol update` that give a pending job another grant: the GRES, keeping other GRES of the
    job, and the marker; None if its comment has no space for that.
    """
    entries = [gres_list.prefix_of(entry)[1] for entry in gres_list.split(row.gres)]
    others = [entry for entry in entries if re.split("[:=]", entry)[0] not in (GRES, "")]
    comment = grant.attach(strip(row.comment))
    if len(comment) > SLURM_LIMIT:
        return None
    return {"Gres": ",".join([*others, grant.gres]), "Comment": comment}


@dataclass(frozen=True)
class Retype:
    """Another profile for a job, or for `tasks` of an array (all that have not started if empty)."""

    pending: Pending
    tasks: tuple[int, ...]
    after: Profile
    why: str

    @property
    def targets(self) -> tuple[str, ...]:
        """The job as scontrol takes it: 12, 12_3, 12_[3,5-9] for all tasks that have not started.

        For an array either all of these are named together or single tasks one by one: if a list names some of them
        Slurm gives the new GRES to the first alone, and the new comment to all (24.11, 26.05). An array's own id would
        also write the comment of running tasks.
        """
        row = self.pending.row
        if row.array_job is None or row.array_task is None:
            return (str(row.job_id),)
        if not self.tasks and row.tasks > 1:
            return (f"{row.array_job}_[{fold_tasks(expand_tasks(row.array_task))}]",)
        return tuple(f"{row.array_job}_{task}" for task in self.tasks or expand_tasks(row.array_task))

    @property
    def names(self) -> tuple[str, ...]:
        """Names (`name_of`) of the rows after the update: a task split from an array has its own row."""
        row = self.pending.row
        if self.tasks:
            return tuple(f"{row.array_job}_{task}" for task in self.tasks)
        return (name_of(row),)

    def fields(self) -> dict[str, str] | None:
        """Return the fields for `scontrol update`, see `regranted`."""
        return regranted(self.pending.row, Grant([(self.after, self.pending.slice_count)], self.pending.grant.decision))

    def profile_text(self, profile: Profile) -> str:
        """Return a profile as the record of runs spells an allocation."""
        return profile.name if self.pending.slice_count == 1 else f"{profile.name}:{self.pending.slice_count}"


@dataclass
class RetypeHistory:
    """When each job was last re-typed, and which profiles it must not get again, to avoid flapping.

    `hold_s` is how long a job keeps a new profile. A profile that Slurm refused, or with which a limit of the user
    prevented the start, is excluded for that job. Jobs are identified by `name_of`.
    """

    hold_s: float = 60.0
    last: dict[str, tuple[float, Profile]] = field(default_factory=dict)
    #: the profile that each job got then; if it has another one now, its user has changed it since
    given: dict[str, Profile] = field(default_factory=dict)
    barred: dict[str, frozenset[Profile]] = field(default_factory=dict)

    def free(self, row: JobRow, now: float) -> bool:
        """Return whether the job may be re-typed again."""
        last = self.last.get(name_of(row))
        return last is None or passed_s(last[0], now) >= self.hold_s

    def note(self, change: Retype, now: float) -> None:
        """Record that a job was re-typed."""
        for name in change.names:
            self.last[name] = (now, change.pending.profile)
            self.given[name] = change.after

    def bar(self, change: Retype) -> None:
        """Record that the job must not get this profile again."""
        for name in change.names:
            self.barred[name] = self.barred.get(name, frozenset()) | {change.after}

    def possible(self, pending: Pending, promise: Promise) -> tuple[ProfileOption, ...]:
        """Return the alternatives of a job that are not excluded for it."""
        excluded_profiles = self.barred.get(name_of(pending.row), frozenset())
        # a job retried because its slice was too small requests one that holds it
        min_memory_gb = pending.profile.memory_gb if promise.retry and pending.row.restarts else 0
        return tuple(
            option
            for option in promise.options
            if option.profile not in excluded_profiles and option.profile.memory_gb >= min_memory_gb
        )

    def forget_but(self, jobs: Iterable[JobRow]) -> None:
        """Remove all jobs but these."""
        if not (self.last or self.given or self.barred):
            return
        present = {name_of(row) for row in jobs}
        for by_name in (self.last, self.given, self.barred):
            for name in [name for name in by_name if name not in present]:
                del by_name[name]


def retypes(
    now: float,
    waiting: Iterable[Pending],
    promises: Callable[[Pending], Promise | None],
    free_capacity: FreeCapacity,
    history: RetypeHistory,
) -> list[Retype]:
    """Return which jobs get another profile now; take the capacity for them from `free_capacity`.

    At most MOST jobs with alternatives are considered.

    Args:
        now: unix seconds.
        waiting: jobs without a place, in Slurm's order.
        promises: the alternatives of each; None for nothing, or unknown.
    """
    groups: dict[tuple[frozenset[str], int], list[tuple[Pending, Promise]]] = {}

    @cache
    def fits(pool: frozenset[str], profile: Profile, slice_count: int) -> bool:
        return free_capacity.count(pool, profile, slice_count, 1) > 0

    considered = 0
    for pending in waiting:
        if considered == MOST:
            break
        pool, slice_count = pending.pool, pending.slice_count
        if not history.free(pending.row, now):
            continue
        promise = promises(pending)
        if promise is None:
            continue
        options = [o for o in history.possible(pending, promise) if _ends_in_time(pending, promise, o.profile)]
        promise = replace(promise, options=tuple(options))
        if any(o.profile != pending.profile and fits(pool, o.profile, slice_count) for o in promise.options):
            groups.setdefault((pool, slice_count), []).append((pending, promise))
            considered += 1
    changes: list[Retype] = []
    for (pool, slice_count), members in groups.items():
        changes += _of_pool(now, pool, slice_count, members, free_capacity)
    return changes


def _ends_in_time(pending: Pending, promise: Promise, profile: Profile) -> bool:
    """Return whether a job ends within its time limit on a profile, or is no slower there than on the present one."""
    limit_s, seconds = pending.row.time_limit_s, promise.seconds(profile, pending.slice_count)
    if limit_s is None or seconds is None or seconds <= limit_s:
        return True
    present_s = promise.seconds(pending.profile, pending.slice_count)
    return present_s is None or seconds <= present_s


def _of_pool(
    now: float,
    pool: frozenset[str],
    slice_count: int,
    members: Sequence[tuple[Pending, Promise]],
    free_capacity: FreeCapacity,
) -> list[Retype]:
    """Return the jobs of one pool that get another profile, those that ELSA assigns to idle slices of it."""
    kinds = sorted({option.profile for _, promise in members for option in promise.options} & free_capacity.kinds(pool))
    works: dict[WorkClass, int] = {}
    waiting: list[Waiting] = []
    owners: list[int] = []
    for number, (pending, promise) in enumerate(members):
        work = works.setdefault(_work(pending, promise, kinds), len(works))
        for _ in range(min(pending.copies, MOST)):
            waiting.append(Waiting(pending.arrived, work, len(owners)))
            owners.append(number)
    stock_costs = StockCosts(list(works), [float(kind.compute) for kind in kinds], [1] * len(kinds))
    idle = [free_capacity.count(pool, kind, slice_count, len(waiting)) for kind in kinds]
    chosen: dict[tuple[int, Profile], list[str]] = {}
    for job, kind in assign(now, waiting, idle, stock_costs):
        node = free_capacity.take(pool, kinds[kind], slice_count)
        if node is not None and kinds[kind] != members[owners[job.name]][0].profile:
            chosen.setdefault((owners[job.name], kinds[kind]), []).append(node)
    changes = []
    tasks_left: dict[int, list[int]] = {}
    for (number, profile), nodes in sorted(chosen.items()):
        pending, promise = members[number]
        row = pending.row
        tasks: tuple[int, ...] = ()
        if row.array_task is not None:
            # Slurm starts tasks in order, so those without a place are the last
            open_tasks = tasks_left.setdefault(number, list(expand_tasks(row.array_task)))
            if len(nodes) < row.tasks or (row.tasks > 1 and len(fold_tasks(open_tasks)) > LONGEST_LIST):
                tasks = tuple(open_tasks[len(open_tasks) - len(nodes) :])
                del open_tasks[len(open_tasks) - len(nodes) :]
        changes.append(Retype(pending, tasks, profile, _why(pending, promise, profile, nodes)))
    return changes


def _work(pending: Pending, promise: Promise, kinds: Sequence[Profile]) -> WorkClass:
    """Return a job as the policy sees it; infinite duration on profiles on which it may not run."""
    granted_rate = next((option.rate for option in promise.options if option.profile == promise.granted), None)
    granted_s = promise.seconds(promise.granted, pending.slice_count)
    usual_s = granted_s or float(pending.row.time_limit_s or USUAL_S)
    rates = {option.profile: option.rate for option in promise.options}
    times = [
        math.inf
        if kind not in rates
        else usual_s * (granted_rate / rate if granted_rate and (rate := rates[kind]) else 1.0)
        for kind in kinds
    ]
    limit_s = float(promise.deadline_s) if promise.deadline_s is not None else PATIENCE * usual_s
    # profiles that meet the promise count as in time, whatever the rounding
    return WorkClass(1.0, limit_s, tuple(min(t, limit_s) if t < math.inf else t for t in times))


def _why(pending: Pending, promise: Promise, profile: Profile, nodes: Sequence[str]) -> str:
    node_names = ", ".join(list(dict.fromkeys(nodes))[:3])
    text = f"no room for {pending.profile}, and {profile} is idle on {node_names}"
    seconds = promise.seconds(profile, pending.slice_count)
    if seconds is not None and promise.deadline_s is not None:
        return f"{text}; {seconds:.3g} s at most of deadline={promise.deadline_s}s"
    return f"{text}; it meets {promise.terms}" if promise.terms else text


def undone(jobs: Iterable[JobRow], history: RetypeHistory) -> list[Retype]:
    """Return the changes that undo re-types of jobs that a limit of their user has prevented from starting since.

    These jobs do not get the same profile again. (Slurm does not refuse the update because of such a limit; the job
    gets the pending reason QOSMaxGRESPerUser.)
    """
    changes = []
    for row in jobs if history.last else ():
        last = history.last.get(name_of(row))
        if last is None or not row.pending or not row.reason.startswith(("QOS", "Assoc")) or not can_be_named(row):
            continue
        if last[1] in history.barred.get(name_of(row), frozenset()):  # undone already, and it still waits
            continue
        grant = marked(row.comment)
        given = history.given.get(name_of(row))
        if grant is not None and grant.parts[0][0] == given != last[1] and dict(grant.parts) == dict(slices(row.gres)):
            pending = Pending(row, grant, frozenset(), row.tasks)
            history.bar(Retype(pending, (), grant.parts[0][0], ""))
            changes.append(Retype(pending, (), last[1], f"a limit prevents it from starting ({row.reason})"))
    return changes


def marker_corrections(jobs: Iterable[JobRow], arrays: Collection[int]) -> dict[str, dict[str, str]]:
    """Return the updates for tasks of these arrays whose marker differs from their GRES.

    A task that starts while its array is re-typed keeps its GRES but gets the array's new comment; after a requeue it
    would be given slices that Slurm did not allocate to it. Its user may change the GRES of a pending task before Slurm
    gets the new comment, so the marker's decision begins with `CHANGED`: its readers ask slurmctld for the GRES.
    """
    fields_of = {}
    for row in jobs:
        if row.array_job in arrays and row.array_task and (row.pending or row.active) and can_be_named(row):
            grant, counts = marked(row.comment), dict(slices(row.gres))
            if grant is not None and len(counts) == 1 and dict(grant.parts) != counts:
                comment = Grant(counts.items(), (CHANGED + grant.decided)[:_LONGEST_NAME]).attach(strip(row.comment))
                task = row.array_task if row.array_task.isdigit() else f"[{fold_tasks(expand_tasks(row.array_task))}]"
                fields_of[f"{row.array_job}_{task}"] = {"Comment": comment}
    return fields_of


# -- tasks of arrays ---------------------------------------------------------------------------------------------------


def can_be_named(row: JobRow) -> bool:
    """Return whether one command can name all pending tasks of a row; steps (`0-9998:2`) have to be expanded."""
    text = "" if row.array_task is None else row.array_task.partition("%")[0]
    return len(text) <= LONGEST_LIST and (":" not in text or len(fold_tasks(expand_tasks(text))) <= LONGEST_LIST)
