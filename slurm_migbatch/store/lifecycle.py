"""Transitions of runs and leases: start, stop, loss. Used for node events and for Slurm's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from slurm_migbatch.mig.grant import CHANGED
from slurm_migbatch.slurm.states import ENDED
from slurm_migbatch.store.decisions import copy_decision
from slurm_migbatch.store.models import Job, Run, StoredDecision, StoredGpu, StoredLease
from slurm_migbatch.store.runquery import RETURNED

#: final states of a run in Slurm
FINAL_STATES = frozenset({*ENDED, "LAUNCH_FAILED", "RECONFIG_FAIL", "REQUEUED", "UNKNOWN"})
#: signals with which Slurm and users stop jobs
STOP_SIGNALS = frozenset({2, 9, 15})
#: Slurm's times are in whole seconds
SLURM_TICK_S = 1.0
#: upper bound of the difference between the clocks of a cluster: munge refuses older credentials
CLOCKS_DIFFER_S = 300.0
#: Slurm's delay between a job's time limit and its kill, seconds
_LIMIT_SLACK_S = 1.0
#: fields that all runs of a job have in common
_OF_JOB = (
    "uid", "gid", "user", "account", "partition", "qos", "wckey", "name", "array_job", "array_task", "het_job", "asked",
)  # fmt: skip
#: maximum number of runs of one job id that nodes' reports create (Slurm may list more), and of jobs with one id
_MOST_RUNS, _MOST_REUSES = 10_000, 100
#: maximum number of slices that one node holds at a time, and that one run has had on one node; above any real node's
_MOST_OPEN, _MOST_OF_RUN = 2048, 512


@dataclass(frozen=True)
class SliceFacts:
    """One slice in an event."""

    gpu: str
    profile: str
    start: int
    size: int
    gi: int | None
    ci: int | None
    mig_uuid: str | None


@dataclass(frozen=True)
class RunEvent:
    """What an event of a node's journal says of a run: its slices there at a moment."""

    node: str
    journal: str
    moment: float
    slices: Sequence[SliceFacts]


def run_of(
    session: Session, job: int, restart: int, moment: float, *, starts: bool, known: list[Run] | None = None
) -> Run:
    """Return the run (job, restart), created if unknown.

    Slurm may restart its job ids (lost state, wrapped counter). A run that had started and ended before `moment` cannot
    start again under the same restart count: with `starts` this is a new job with the same id. Nor can one that ended
    without a start have been submitted at `moment`, if this is Slurm's time of submission. A job that was never
    requeued keeps that time: if it is later than that of the newest run, the ids were restarted while nobody watched.

    Args:
        known: the newest run of that job id, and those with that restart count, if the caller has them; a new one is
            added to it. Otherwise a node reports the run.

    Raises:
        ValueError: nodes have reported too many runs of the job.
    """
    reported_by_node = known is None
    if known is None:
        known = _newest(session, job, restart)
    newest = max(known, key=lambda run: (run.reuse, run.restart), default=None)
    same_restart = max((run for run in known if run.restart == restart), key=lambda run: run.reuse, default=None)
    is_new_job = (
        starts
        and same_restart is not None
        and _is_over(same_restart, moment, started=reported_by_node)
        and _is_past(newest, moment)
        and (_is_begun_again if reported_by_node else _is_submitted_later)(same_restart, moment)
    )
    # Slurm counts a restart before it sets the new time, so a restarted job may change it
    is_resubmitted = (
        not reported_by_node
        and starts
        and restart == 0
        and newest is not None
        and newest.submitted is not None
        and moment > newest.submitted
    )
    if same_restart is not None and (not (is_new_job or is_resubmitted) or same_restart.reuse >= _MOST_REUSES):
        return same_restart
    if reported_by_node and (session.scalar(select(func.count()).where(Run.job_id == job)) or 0) >= _MOST_RUNS:
        raise ValueError(f"job {job} has {_MOST_RUNS} runs already")
    is_taken = same_restart is not None and newest is not None and same_restart.reuse == newest.reuse
    reuse = 0 if newest is None else newest.reuse + (1 if is_taken or is_resubmitted else 0)
    if is_resubmitted and newest is not None:
        end_forgotten(session, newest, moment)
    run = Run(job_id=job, restart=restart, reuse=reuse, latest=True, state="PENDING", state_from="node", slice_count=0)
    if newest is not None:
        _follow(run, newest, known, moment)
        is_known = run.latest and newest.reuse == reuse and newest.placed is not None
        if reported_by_node and is_known and not _has_left_unseen(session, newest):
            run.placed = False  # Slurm lists the job, and not this run of it
    known.append(run)
    session.add(run)
    return run


def _has_left_unseen(session: Session, newest: Run) -> bool:
    """Return whether Slurm no longer has a job of which it has listed no end: `newest` may not be its last run."""
    job = session.get(Job, newest.job_id)
    is_live = job is not None and job.live
    return not is_live and not (newest.state_from == "slurm" and newest.state in FINAL_STATES)


def _follow(run: Run, newest: Run, known: Sequence[Run], moment: float) -> None:
    """Give a new run what it has in common with the newest run of its job id, and mark the earlier of both."""
    run.latest = (newest.reuse, newest.restart) < (run.reuse, run.restart)
    is_same_job = newest.reuse == run.reuse
    if run.latest:
        for other in known:
            other.latest = False
        if is_same_job:
            _requeued(newest, moment)
    elif is_same_job and not _is_past(newest, moment):
        # Slurm listed the next run first: migbatchd was down, or the run was shorter than the time between two queries
        run.state = "REQUEUED"
    else:
        return
    for name in _OF_JOB if is_same_job else ():
        setattr(run, name, getattr(newest, name))


def complete_earlier(run: Run, known: Sequence[Run]) -> None:
    """Give earlier runs of a job what is known only since a later one, if they ran between two queries of Slurm."""
    for other in known:
        if other.reuse == run.reuse and other.restart < run.restart:
            other.placed = other.placed or None  # it may have run between two queries
            for name in _OF_JOB:
                if getattr(other, name) is None:
                    setattr(other, name, getattr(run, name))
            other.array_task = run.array_task  # it was listed with all tasks of its array that had not started


def _newest(session: Session, job: int, restart: int) -> list[Run]:
    """Return a job id's newest run, and the newest with this restart count."""
    runs = select(Run).where(Run.job_id == job).limit(1)
    newest = session.scalars(runs.order_by(Run.reuse.desc(), Run.restart.desc())).all()
    if newest and newest[0].restart == restart:
        return list(newest)
    return [*newest, *session.scalars(runs.where(Run.restart == restart).order_by(Run.reuse.desc()))]


def _is_over(run: Run, moment: float, *, started: bool) -> bool:
    """Return whether a run was over before `moment`; with `started` only if it had started."""
    return (run.started is not None or not started) and run.state != "UNKNOWN" and _has_ended(run, moment)


def _has_ended(run: Run, moment: float) -> bool:
    return run.ended is not None and moment > run.ended + (0.0 if run.ended % 1.0 else SLURM_TICK_S)


def _is_past(newest: Run | None, moment: float) -> bool:
    """Return whether a job's newest run was over before `moment`, so that a run that began then is of another job.

    A node may report an earlier run after Slurm has listed the next one, which may still be pending and was submitted
    when Slurm requeued the job. So a pending run counts as past if `moment` is later than its submission by more than
    clocks differ.
    """
    if newest is None or _has_ended(newest, moment):
        return True
    waits = newest.ended is None and newest.started is None and newest.submitted is not None
    return waits and moment > (newest.submitted or 0.0) + CLOCKS_DIFFER_S


def _is_submitted_later(run: Run, submitted: float) -> bool:
    """Return whether Slurm's time of a submission is not that of `run`, which has ended.

    The run's own times may be those of its node's clock, which may be behind.
    """
    if run.submitted is None:
        return _has_ended(run, submitted - CLOCKS_DIFFER_S)
    return submitted > run.submitted


def _is_begun_again(run: Run, moment: float) -> bool:
    """Return whether a start that a node reports is not that of `run`, which has ended: its own is reported already, or
    was earlier even if the node's clock is ahead of slurmctld's.
    """
    return run.slice_count > 0 or _has_ended(run, moment - CLOCKS_DIFFER_S)


def _requeued(run: Run, moment: float) -> None:
    """Mark an earlier run of a restarted job as requeued, however its script ended."""
    if run.state_from != "slurm" or run.state not in FINAL_STATES:
        run.state, run.state_from = "REQUEUED", "node"
        run.ended = moment if run.ended is None else run.ended


def start_run(
    session: Session, run: Run, event: RunEvent, lost_at: float | None, host_run: tuple[int, int] | None
) -> None:
    """Record that `run` has the slices of `event`; with `lost_at`, that they were lost at that time.

    `host_run` is the run (job, restart) that it shares them with: both have them until one of the two ends.

    Raises:
        ValueError: the node has reported too many slices that it holds, or that the run has had.
    """
    node, moment, slices = event.node, event.moment, event.slices
    _check_slice_limits(session, run, node, len(slices))
    run.started = moment if run.started is None else run.started
    if run.state_from == "poll":
        # it was considered ended, but it exists
        run.state, run.ended, run.state_from = "RUNNING", None, "node"
    if run.ended is None and run.state not in FINAL_STATES:
        run.state = "RUNNING"
    nodes = dict.fromkeys((run.nodes or "").split(",")) if run.nodes else {}
    if node not in nodes and not run.placed:
        run.nodes = ",".join(sorted([*nodes, node]))
    session.flush()
    # a node gives a slot to one run at a time: if two leases overlap, the end of the earlier one has not arrived yet
    relevant = or_(StoredLease.run_id == run.id, StoredLease.gpu.in_({facts.gpu for facts in slices}))
    held = session.scalars(
        select(StoredLease).where(StoredLease.node == node, StoredLease.until.is_(None), relevant)
    ).all()
    rivals = [
        lease
        for lease in held
        if lease.run_id != run.id
        and (lease.job_id, lease.restart) != host_run
        and any(_overlaps(lease, facts) for facts in slices)
    ]
    later = [lease.since for lease in rivals if lease.since is not None and lease.since > moment]
    lost_at = min(later) if later and lost_at is None else lost_at
    kept = _open_slices(session, run, event, lost_at)
    for lease in held:
        if lease.run_id == run.id and lease.id not in kept:
            _close(lease, moment, "moved")
    for lease in rivals if lost_at is None else ():
        _close(lease, moment, "lost")
        finish_if_free(session, lease.run_id, moment, None)
    if lost_at is not None:
        finish_if_free(session, run.id, lost_at, None)
    summarise(session, run)


def _check_slice_limits(session: Session, run: Run, node: str, more: int) -> None:
    """Raise ValueError if `more` further slices exceed the limit of the node, or that of the run on the node."""
    leases = select(func.count()).where(StoredLease.node == node)
    if (session.scalar(leases.where(StoredLease.until.is_(None))) or 0) + more > _MOST_OPEN:
        raise ValueError(f"the node holds more than {_MOST_OPEN} slices")
    if (session.scalar(leases.where(StoredLease.run_id == run.id)) or 0) + more > _MOST_OF_RUN:
        raise ValueError(f"job {run.job_id} run {run.restart} has had more than {_MOST_OF_RUN} slices on the node")


def _open_slices(session: Session, run: Run, event: RunEvent, lost_at: float | None) -> set[int]:
    node, moment = event.node, event.moment
    known = {
        (lease.gpu, lease.slot_start): lease
        for lease in session.scalars(
            select(StoredLease).where(
                StoredLease.run_id == run.id, StoredLease.node == node, StoredLease.outcome.is_distinct_from("moved")
            )
        )
    }
    indexes = dict(session.execute(select(StoredGpu.uuid, StoredGpu.gpu_index).where(StoredGpu.node == node)).all())
    kept = set()
    for position, facts in enumerate(event.slices):
        lease = known.get((facts.gpu, facts.start))
        if lease is None:
            lease = StoredLease(run_id=run.id, job_id=run.job_id, restart=run.restart, node=node, until=lost_at)
            lease.outcome = None if lost_at is None else "lost"
            session.add(lease)
        elif lease.outcome == "lost" and lost_at is None:
            # it was lost with the node's journal; a repaired node found it again
            lease.until = lease.outcome = None
        lease.journal, lease.position = event.journal, position
        lease.gpu, lease.gpu_index = facts.gpu, indexes.get(facts.gpu)
        lease.profile, lease.slot_start, lease.slot_size = facts.profile, facts.start, facts.size
        lease.gi, lease.ci, lease.mig_uuid = facts.gi, facts.ci, facts.mig_uuid
        lease.since = moment if lease.since is None else lease.since
        session.flush()
        kept.add(lease.id)
    return kept


def _overlaps(lease: StoredLease, facts: SliceFacts) -> bool:
    return (
        lease.gpu == facts.gpu
        and lease.slot_start < facts.start + facts.size
        and facts.start < lease.slot_start + lease.slot_size
    )


def stop_run(session: Session, run: Run, event: RunEvent, exit_code: int | None) -> None:
    """Record that `run` has released what it had on the node; it ends once no node holds anything for it."""
    node, moment = event.node, event.moment
    session.flush()
    leases = session.scalars(select(StoredLease).where(StoredLease.run_id == run.id, StoredLease.node == node)).all()
    for lease in leases:
        if lease.until is None or lease.outcome == "lost":
            _close(lease, moment, "released")
    if not leases:
        # its start was lost with a journal: only this event says what it held
        _open_slices(session, run, event, moment)
        for lease in session.scalars(select(StoredLease).where(StoredLease.run_id == run.id, StoredLease.node == node)):
            lease.since, lease.outcome = run.started, "released"
        run.nodes = run.nodes or node
    summarise(session, run)
    finish_if_free(session, run.id, moment, exit_code, reported=True)


def lose_leases(leases: Iterable[StoredLease], moment: float) -> set[int]:
    """End leases that the node did not report as released; return the ids of their runs."""
    runs = set()
    for lease in leases:
        _close(lease, moment, "lost")
        runs.add(lease.run_id)
    return runs


def lose_run(session: Session, run: Run, node: str) -> None:
    """Set NODE_FAIL for a run whose end the node inferred from its own reboot, and mark its leases there as lost."""
    if run.state == "UNKNOWN" and run.state_from == "node":
        run.state = "NODE_FAIL"
    for lease in session.scalars(select(StoredLease).where(StoredLease.run_id == run.id, StoredLease.node == node)):
        lease.outcome = "lost" if lease.outcome == "released" else lease.outcome


def give_back(session: Session, run: Run, nodes: Collection[str]) -> None:
    """Note that Slurm has taken these nodes from a run (`scontrol update JobId= NumNodes=`), which has used them."""
    if nodes:
        its = (StoredLease.run_id == run.id, StoredLease.node.in_(nodes))
        for lease in session.scalars(select(StoredLease).where(*its)):
            lease.outcome = RETURNED if lease.outcome in (None, "released") else lease.outcome


def finish_if_free(
    session: Session,
    run_id: int,
    moment: float,
    exit_code: int | None,
    *,
    reported: bool = False,
    state: str | None = None,
) -> None:
    """End a run if no node holds a slice for it any more.

    Args:
        exit_code: of its script, 128 + n after signal n; None if unknown.
        reported: the node itself reports the end, which corrects an inferred end.
        state: final state; derived from exit code and time limit if not given.
    """
    session.flush()
    run = session.get_one(Run, run_id)
    complete = run.state_from == "slurm" and run.state in FINAL_STATES and run.exit_code is not None
    if exit_code is not None and not complete:
        run.exit_code, run.signal = (0, exit_code - 128) if 128 < exit_code < 193 else (exit_code, 0)
    open_leases = select(StoredLease.id).where(StoredLease.run_id == run_id, StoredLease.until.is_(None)).limit(1)
    if session.scalar(open_leases) is not None:
        return
    concluded = run.state == "UNKNOWN" or run.state_from == "poll" or (run.state == "NODE_FAIL" and reported)
    if run.state in FINAL_STATES and (run.state_from == "slurm" or not concluded):
        run.ended = moment if run.ended is None else run.ended
        return
    run.ended = moment
    run.state, run.state_from = state or _end_state(run, moment), "node"


def end_forgotten(session: Session, run: Run, moment: float) -> None:
    """End a run that Slurm no longer has, unless a node holds a slice for it, which will report its end."""
    if run.ended is not None:
        return
    if run.started is None:
        run.state, run.state_from, run.ended = "CANCELLED", "poll", moment
    elif (
        session.scalar(select(StoredLease.id).where(StoredLease.run_id == run.id, StoredLease.until.is_(None)).limit(1))
        is None
    ):
        run.state = "RUNNING"
        finish_if_free(session, run.id, moment, None)
        run.state_from = "poll"


def _end_state(run: Run, moment: float) -> str:
    """Guess Slurm's final state, because an Epilog sees neither a cancellation nor a time limit."""
    if run.time_limit_s and run.started is not None and moment - run.started >= run.time_limit_s - _LIMIT_SLACK_S:
        return "TIMEOUT"
    if run.exit_code is None:
        return "UNKNOWN"
    if run.signal:
        return "CANCELLED" if run.signal in STOP_SIGNALS else "FAILED"
    return "FAILED" if run.exit_code else "COMPLETED"


def _close(lease: StoredLease, moment: float, outcome: str) -> None:
    lease.until = moment if lease.since is None else max(moment, lease.since)
    lease.outcome = RETURNED if lease.outcome == RETURNED else outcome


def is_elsewhere(run: Run, node: str) -> bool:
    """Return whether, according to Slurm, the run was on other nodes only: root of a node can report any job."""
    return bool(run.placed) and node not in (run.nodes or "").split(",")


def summarise(session: Session, run: Run) -> None:
    """Update `profile` and `slice_count` of a run from its leases on the nodes that Slurm gave it."""
    session.flush()
    leases = session.execute(
        select(StoredLease.profile, StoredLease.node, StoredLease.outcome).where(
            StoredLease.run_id == run.id, StoredLease.outcome.is_distinct_from("moved")
        )
    )
    counts = Counter(profile for profile, node, outcome in leases if outcome == RETURNED or not is_elsewhere(run, node))
    run.slice_count = sum(counts.values())
    before = run.profile
    run.profile = ",".join(name if n == 1 else f"{name}:{n}" for name, n in sorted(counts.items()))[:512] or None
    if run.profile != before:
        _copy_decision(session, run)


def link(session: Session, run: Run, decision_id: str | None) -> None:
    """Link a run to the decision in its marker, the last one before its start; the decision may arrive later."""
    decision_id = (decision_id or "").removeprefix(CHANGED)
    if decision_id and (run.decision is None or (run.started is None and run.decision != decision_id)):
        run.decision = decision_id
        _copy_decision(session, run)


def _copy_decision(session: Session, run: Run) -> None:
    if run.decision and (decision := session.get(StoredDecision, run.decision)) is not None:
        copy_decision(decision, run)
