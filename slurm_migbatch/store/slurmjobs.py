"""Slurm's view of jobs, from migbatchd's poll. For a run's end Slurm has precedence over the node."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import and_, or_, select, update
from sqlalchemy.orm import Session

from slurm_migbatch.mig.grant import CHANGED
from slurm_migbatch.slurm.states import WAITING
from slurm_migbatch.store import clean, measured
from slurm_migbatch.store.lifecycle import (
    FINAL_STATES,
    complete_earlier,
    end_forgotten,
    finish_if_free,
    give_back,
    link,
    lose_leases,
    run_of,
    summarise,
)
from slurm_migbatch.store.models import Job, Run, StoredDecision, StoredLease, StoredLoan, StoredNode, portions
from slurm_migbatch.workload.loans import user_text

#: the fields of a row that runs use; a change of priority alone, for example, changes no run
_USED = (
    "state", "restarts", "submit", "start", "end", "exit_code", "user", "uid", "account", "partition", "name", "reason",
    "array_job", "array_task", "het_job", "time_limit_s", "nodes", "gres", "comment", "gid", "qos", "wckey",
)  # fmt: skip
#: the decision's id in the marker at the end of a granted job's comment (written by mig.grant)
_DECISION = re.compile(r"\[mig:[^\[\]#]{1,512}#([0-9a-z]{1,16})\]\s*\Z")
_TEXTS = ("user", "account", "partition", "name", "qos", "wckey")
_EXIT = re.compile(r"(\d{1,5}):(\d{1,5})\Z")
#: seconds after which a node that reports nothing counts as gone
_GONE_S = 86400.0


def upsert_jobs(session: Session, rows: Sequence[Mapping[str, Any]], live: Collection[int] | None, now: float) -> None:
    """See `Store.upsert_jobs`."""
    for portion in portions(rows):
        with session.no_autoflush:
            _upsert(session, portion, now)
        session.flush()
    if live is not None:
        _left(session, live, now)


def _upsert(session: Session, rows: Sequence[Mapping[str, Any]], now: float) -> None:
    """Update jobs and their runs by rows of Slurm; rows that show nothing new change nothing."""
    ids = [id for row in rows if (id := clean.whole(row.get("job_id"), 1)) is not None]
    jobs = {job.job_id: job for job in session.scalars(select(Job).where(Job.job_id.in_(ids)))}
    runs: dict[int, list[Run]] = {id: [] for id in ids}
    restarts = {_restart(row) for row in rows}
    wanted = or_(Run.latest, Run.restart.in_(restarts))  # of the many runs that a job may have, those for `run_of`
    for run in session.scalars(select(Run).where(Run.job_id.in_(ids), wanted)):
        runs[run.job_id].append(run)
    markers = [marker for row in rows if (marker := _marker(row)) is not None]
    # referenced until all rows are done, so that the session finds them by id without querying the database again
    decisions = session.scalars(select(StoredDecision).where(StoredDecision.id.in_(markers))).all()
    for row in rows:
        job_id = clean.whole(row.get("job_id"), 1)
        if job_id is None:
            continue
        job = jobs.get(job_id)
        if job is None:
            job = jobs[job_id] = Job(job_id=job_id, live=False, facts={})
            session.add(job)
        before = job.facts if isinstance(job.facts, dict) else {}
        state = _state(row)
        if state == "COMPLETING":  # Slurm lists only the nodes that it still waits for
            row = {**row, "nodes": before.get("nodes") or ()}
        facts = clean.document({**before, **row})
        if job.live and facts == before:
            continue
        changed = not job.live or any(facts.get(name) != before.get(name) for name in _USED)
        job.live, job.state, job.seen, job.facts = state not in FINAL_STATES, state, now, facts
        if changed:
            _take_in(session, job_id, state, row, now, runs[job_id])
    del decisions


def _restart(row: Mapping[str, Any]) -> int:
    return clean.small(row.get("restarts") or 0) or 0


def _state(row: Mapping[str, Any]) -> str:
    """Return Slurm's base state without a remark such as "CANCELLED by 1000"."""
    state = (clean.text(row.get("state"), 64) or "PENDING").split()[0].rstrip("+").upper()[:24]
    return "PENDING" if state in WAITING else state


def _marker(row: Mapping[str, Any]) -> str | None:
    """Return the id of the decision in a row's comment."""
    match = _DECISION.search(clean.text(row.get("comment"), 65536) or "")
    return match[1].removeprefix(CHANGED) if match else None


def _take_in(session: Session, job_id: int, state: str, row: Mapping[str, Any], now: float, known: list[Run]) -> None:
    """Update the run of a job by a row of Slurm."""
    restart = _restart(row)
    submitted = clean.moment(row.get("submit"))
    # a job that was submitted after the end of the recorded one with this id is another job
    run = run_of(session, job_id, restart, submitted or now, starts=submitted is not None, known=known)
    run.submitted = submitted or run.submitted
    for field in _TEXTS:
        setattr(run, field, Run.fitting(field, row.get(field)) or getattr(run, field))
    run.array_task = Run.fitting("array_task", _fitting_tasks(row.get("array_task"))) or run.array_task
    if "comment" in row:
        run.comment = Run.fitting("comment", user_text(clean.text(row["comment"], 65536) or ""))
    for field in ("uid", "gid", "array_job", "het_job"):
        value = clean.whole(row.get(field))
        setattr(run, field, getattr(run, field) if value is None else value)
    complete_earlier(run, known)
    run.time_limit_s = _time_limit(run, state, row)
    if run.het_job is not None and run.het_offset is None:
        # Slurm numbers the components of a heterogeneous job consecutively
        run.het_offset = clean.small(run.job_id - run.het_job)
    nodes = row.get("nodes")
    _place(session, run, nodes)
    run.asked = run.asked or Run.fitting("asked", row.get("gres"))
    link(session, run, _marker(row))
    reason = Run.fitting("reason", row.get("reason"))
    if reason and reason != "None" and state == "PENDING":
        run.reason = reason
    started = clean.moment(row.get("start"))
    # for a pending job `start` is a forecast, and for one cancelled before its start (it had no node) that or its end
    if started is not None and state != "PENDING" and (run.started is not None or nodes or state not in FINAL_STATES):
        run.started = started
    _note_suspension(run, state, row, now)
    if state in FINAL_STATES:
        _finish(run, state, row, now)
    elif run.state_from == "poll" or run.state not in FINAL_STATES:
        run.ended = None
        run.state, run.state_from = ("RUNNING" if state == "COMPLETING" else state), "slurm"


def _place(session: Session, run: Run, nodes: Any) -> None:
    """Note the nodes that Slurm has given a run: none yet if they are empty, unknown if they are missing."""
    if nodes:
        listed = nodes.split(",") if isinstance(nodes, str) else list(nodes)
        if run.placed:
            give_back(session, run, {*(run.nodes or "").split(",")} - {*listed})
        run.nodes = ",".join(listed)
        measured.keep_only(run, listed)
    if nodes is not None and not run.placed:
        run.placed = bool(nodes)
        if run.slice_count:  # reported by nodes, of which some may not be the run's
            summarise(session, run)


def _note_suspension(run: Run, state: str, row: Mapping[str, Any], now: float) -> None:
    """Note when the run was suspended, from the first to the last time; Slurm may do this often (gang scheduling)."""
    if state == "SUSPENDED":
        run.suspended, run.resumed = (now if run.suspended is None else run.suspended), None
    elif run.suspended is not None and run.resumed is None:
        end = clean.moment(row.get("end")) if state in FINAL_STATES else None
        run.resumed = max(run.suspended, min(now, end or now))


def _time_limit(run: Run, state: str, row: Mapping[str, Any]) -> int | None:
    """Return the limit of a run. Without one in its row, a pending run may get it later, a running one is unlimited."""
    limit = clean.whole(row.get("time_limit_s"))
    is_unlimited = state == "RUNNING" and "time_limit_s" in row
    return run.time_limit_s if limit is None and not is_unlimited else limit


def _fitting_tasks(tasks: Any) -> Any:
    """Return the list of an array's tasks; one that is too long ends after a whole number, with dots as in squeue."""
    longest = Run.longest("array_task")
    if not isinstance(tasks, str) or len(tasks) <= longest:
        return tasks
    return f"{tasks[: longest - len(',...') + 1].rpartition(',')[0]},..."


def _finish(run: Run, state: str, row: Mapping[str, Any], now: float) -> None:
    run.state, run.state_from = state, "slurm"
    run.ended = clean.moment(row.get("end")) or run.ended or now
    code = row.get("exit_code")
    if isinstance(code, str) and (match := _EXIT.match(code)):
        run.exit_code, run.signal = int(match[1]), int(match[2])
    elif (status := clean.whole(code, 0, 65535)) is not None:
        run.exit_code, run.signal = status >> 8, status & 0x7F


def _left(session: Session, live: Collection[int], now: float) -> None:
    """End jobs that Slurm no longer lists."""
    present = live if isinstance(live, (set, frozenset, dict)) else set(live)
    unlisted = [id for id in session.scalars(select(Job.job_id).where(Job.live)) if id not in present]
    for portion in portions(unlisted):
        for job in session.scalars(select(Job).where(Job.job_id.in_(portion))):
            job.live = False
        # lending itself says more of a loan's end, unless it was disabled meanwhile
        loans = update(StoredLoan).where(StoredLoan.job_id.in_(portion), StoredLoan.ended.is_(None))
        session.execute(loans.values(state="ended", ended=now, cause="left", why_ended="the job is no longer in Slurm"))
        unclear = or_(Run.ended.is_(None), Run.placed.is_(False))
        for run in session.scalars(select(Run).where(Run.job_id.in_(portion), unclear)).all():
            run.placed = run.placed or None  # it may have run since it was last listed: migbatchd was down
            end_forgotten(session, run, now)
    _end_on_gone_nodes(session, now)


def _end_on_gone_nodes(session: Session, now: float) -> None:
    """End leases of jobs that have left Slurm on nodes that are gone: nothing will report their release."""
    held = (
        StoredLease.node == StoredNode.node,
        StoredLease.until.is_(None),
        StoredLease.job_id.not_in(select(Job.job_id).where(Job.live)),
    )
    gone = select(StoredLease, StoredNode).join(StoredNode, and_(*held)).where(StoredNode.seen < now - _GONE_S)
    for lease, machine in session.execute(gone.order_by(StoredLease.id)).all():
        lose_leases([lease], machine.seen)
        run = session.get_one(Run, lease.run_id)
        if run.ended is None:
            finish_if_free(session, run.id, machine.seen, None)
            run.state_from = "poll"
        machine.told = None  # if it comes back it may hold them still
