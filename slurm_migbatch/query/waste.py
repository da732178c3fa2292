"""`migbatch waste`: what was held but not used, what to request next time, and how long that would have waited.

It shows how users use what they requested, so users see only their own jobs and those of accounts that they
coordinate; operators see all. The wait of others is given as two figures over several runs, if runs of others may be
seen at all.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection

from slurm_migbatch.daemon.recurring import past_run
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.predict.recurring import WINDOW, PastRun, RunsPolicy
from slurm_migbatch.query.collection import no_collection
from slurm_migbatch.query.questions import WasteQuestion
from slurm_migbatch.query.reading import reading
from slurm_migbatch.query.redact import allowed
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.selected import check_users, selection
from slurm_migbatch.query.show import job_id, name_of
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report import wastelines
from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.report.lines import pair_lines
from slurm_migbatch.report.waste import SliceUse, WasteVerdict, judge, slice_mib, waited
from slurm_migbatch.report.wastelines import JudgedRun, WasteSum
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.store.queries import RunFilter, any_run, geometries
from slurm_migbatch.store.waste import UsedRun, runs_alike, used_runs, waits
from slurm_migbatch.values import replace

WORST = 20
"""Default number of lines of a table."""
AROUND_S = 86400.0
"""Seconds before and after a run's submission from which other submissions estimate its wait."""


def answer(question: WasteQuestion, rights: Rights, site: QuerySite) -> Reply:
    """Answer about one job, or with a table of the worst."""
    now = time.time()
    wanted = _run_filter(question, rights, now)
    recurring = site.config.recurring
    policy = RunsPolicy(recurring.runs, recurring.slowdown)
    others = allowed(rights, RunFilter())
    with no_collection(), reading(site) as connection:
        check_users(question.users, rights, partial(any_run, connection))
        total = WasteSum()
        judged = _added(_judged(connection, wanted, policy, now), total)
        runs = judged if question.job else _worst(judged, question.limit or WORST)
        shown = list(_with_waits(connection, others, map(_shown, runs)))
    if question.job and not shown:
        raise Unanswerable(
            f"the record has no run of job {name_of(wanted.jobs[0])} with slices, or it is not yours; "
            "`migacct -X -S now-7days` lists your jobs of the last week"
        )
    return Reply(list(_lines(question, shown, total, wanted, now)))


def _run_filter(question: WasteQuestion, rights: Rights, now: float) -> RunFilter:
    if question.job:
        wanted = RunFilter(jobs=(job_id(question.job),))
    else:
        try:
            wanted = selection(question, now, rights.uid, allusers=not question.users, duplicates=True).wanted
        except ReportError as error:
            raise Unanswerable(str(error), 2) from None
    return wanted if rights.everything else replace(wanted, only=(rights.uid, tuple(sorted(rights.coordinates))))


class _Judged(NamedTuple):
    """A run with its result, of which only the worst are shown."""

    row: Any
    use: SliceUse
    verdict: WasteVerdict
    geometry: Geometry | None


def _judged(connection: Connection, wanted: RunFilter, policy: RunsPolicy, now: float) -> Iterator[_Judged]:
    geometry_of = geometries(connection)
    runs = used_runs(connection, wanted, now)
    for run, past in _with_past_of(connection, list(runs)) if wanted.jobs else _with_past(runs):
        use, geometry = _use(run, now), geometry_of.get(run.gpu)
        yield _Judged(run.shown, use, judge(use, past or (run.own,), geometry, policy), geometry)


def _with_past_of(connection: Connection, runs: Sequence[UsedRun]) -> Iterator[tuple[UsedRun, Sequence[PastRun]]]:
    """Yield the runs of one job, each with the newest runs of its recurring job in the whole record, newest last."""
    before = max((run.shown.ended for run in runs if run.shown.ended is not None), default=0.0)
    past_runs: dict[str, list[PastRun]] = {}
    for run in runs_alike(connection, {run.recurring for run in runs if run.recurring}, before, WINDOW):
        if run.recurring and run.ended and run.profile is not None:
            past_runs.setdefault(run.recurring, []).append(past_run(run))
    for used in runs:
        yield used, tuple(past_runs.get(used.recurring, ()))


def _with_past(runs: Iterable[UsedRun]) -> Iterator[tuple[UsedRun, Sequence[PastRun]]]:
    """Yield runs, each with the newest of these runs of its recurring job, newest last.

    The runs of a recurring job follow each other, newest first. A record has millions of runs, so they are passed on
    as soon as these newest ones are known.
    """
    for key, alike in groupby(runs, key=attrgetter("recurring")):
        if not key:
            yield from ((run, ()) for run in alike)
            continue
        held_back: list[UsedRun] = []
        newest: list[PastRun] = []
        for run in alike:
            held_back.append(run)
            if run.own.ended and run.own.profile:
                newest.append(run.own)
            if len(newest) == WINDOW:
                break
        past = tuple(reversed(newest))
        yield from ((run, past) for run in chain(held_back, alike))


def _added(runs: Iterable[_Judged], total: WasteSum) -> Iterator[_Judged]:
    for run in runs:
        total.add(run.verdict)
        yield run


def _worst(runs: Iterable[_Judged], limit: int) -> list[_Judged]:
    found = (run for run in runs if run.verdict.findings)
    return heapq.nsmallest(limit, found, key=lambda run: (-run.verdict.wasted_gpu_hours, run.row.job_id, run.row.id))


def _use(run: UsedRun, now: float) -> SliceUse:
    row = run.shown
    until = row.ended
    hours = max(0.0, (now if until is None else until) - row.started) / 3600
    nodes = (row.nodes or "").count(",") + 1
    return SliceUse(
        _parts(row.profile or ""), nodes, hours, run.own, run.shared, until is None, run.given_back_s / 3600
    )


@lru_cache(maxsize=4096)
def _parts(profile: str) -> tuple[tuple[str, int], ...]:
    """Return the GRES types in `Run.profile` and their counts; a month's runs have few different ones."""
    return tuple(map(_part, filter(None, profile.replace("+", ".").split(","))))


def _part(text: str) -> tuple[str, int]:
    name, _, count = text.partition(":")
    return name, int(count) if count.isdigit() else 1


def _shown(run: _Judged) -> JudgedRun:
    row, use, verdict, geometry = run
    memory = None if geometry is None else slice_mib(geometry, use.profile)
    wait = None if row.submitted is None else max(0.0, row.started - row.submitted)
    return JudgedRun(row, use, verdict, memory, wait)


def _with_waits(connection: Connection, others: RunFilter, runs: Iterable[JudgedRun]) -> Iterator[JudgedRun]:
    for run in runs:
        row, profile, count = run.shown, run.verdict.profile, run.use.slices
        if not profile or row.submitted is None:
            yield run
            continue
        # the record has NVML's spelling; a recommended profile has no suffix, so it is also the GRES type
        allocation = profile if count == 1 else f"{profile}:{count}"
        window = (row.submitted - AROUND_S, row.submitted + AROUND_S)
        yield run._replace(would=waited(waits(connection, others, row.partition or "", allocation, window)))


def _lines(
    question: WasteQuestion, runs: Sequence[JudgedRun], total: wastelines.WasteSum, wanted: RunFilter, now: float
) -> Iterator[str]:
    if question.as_json:
        yield wastelines.document(runs, total, (wanted.start, wanted.end), now)
    elif question.as_csv:
        yield from wastelines.as_csv(runs, header=question.header)
    elif question.delimiter is not None:
        yield from wastelines.separated(runs, question.delimiter, header=question.header)
    elif question.job:
        for number, run in enumerate(runs):
            yield from ("",) if number else ()
            yield from pair_lines(wastelines.pairs(run))
    else:
        yield from wastelines.table(runs, total, header=question.header)
