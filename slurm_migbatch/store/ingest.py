"""Node events: stored once each, applied in order.

Events of one journal are numbered without gaps, and a node resends everything that was not acknowledged. So an event
that arrives early waits for the previous ones. A gap that the node sends a second time will never be filled (the events
were acknowledged, and the database has been restored to an earlier state since); it is skipped then.

The state of a node is known as long as no event is missing since its last `state`, which contains everything it holds.
If a node's claim does not match (another or restored database), it is asked for a new `state`; the node is right.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, func, insert, select
from sqlalchemy.orm import Session

from slurm_migbatch.store import clean, measured
from slurm_migbatch.store.lifecycle import (
    RunEvent,
    SliceFacts,
    finish_if_free,
    is_elsewhere,
    link,
    lose_leases,
    lose_run,
    run_of,
    start_run,
    stop_run,
)
from slurm_migbatch.store.models import (
    DatabaseIdentity,
    NodeEvent,
    NodeJournal,
    Run,
    StoredGpu,
    StoredLease,
    StoredNode,
    portions,
)
from slurm_migbatch.store.receipt import NodeReceipt, Receipt
from slurm_migbatch.store.runquery import MISFIT

log = logging.getLogger(__name__)

#: maximum number of slices in one event, above the slots of all GPUs of any node; longer lists are truncated
_MAX_SLICES = 256
#: maximum number of events that arrived early which one message applies
_MOST_EARLY = 500
#: number of GPUs remembered for one node, unless more are present: the present and the most recently replaced ones
_MOST_GPUS = 128


def ingest(
    session: Session,
    node: str,
    journal_id: str,
    boot_id: str,
    events: Sequence[Mapping[str, Any]],
    now: float,
    claim: NodeReceipt,
) -> Receipt:
    """See `Store.ingest`."""
    name, id = clean.text(node, 255), clean.text(journal_id, 64)
    if not name or not id:
        raise ValueError("events need the names of their node and journal")
    fresh = _fresh(events, now)
    machine, journal = _sender(session, name, id, boot_id, fresh, now)
    database = session.scalars(select(DatabaseIdentity.id)).one()
    if claim.database != database or claim.acked > journal.contiguous or machine.journal != id:
        if machine.told is not None:
            log.warning("%s: its events are incomplete here (another or older database); it resends them", name)
        machine.told = None
    stored, new = _store(session, journal, fresh, now)
    _apply(session, machine, journal, sorted(seq for seq in new if seq <= journal.contiguous))
    before, limit = journal.contiguous, len(fresh) + _MOST_EARLY
    reached = _highest_complete(session, journal, limit)
    if reached == before and fresh and min(fresh) > before + 1 and min(fresh) in stored:
        log.warning("%s: events %d-%d of journal %s are lost", name, before + 1, min(fresh) - 1, id)
        journal.contiguous = min(fresh) - 1
        machine.told = None
        reached = _highest_complete(session, journal, limit)
    if reached > journal.contiguous:
        next_ones = _events(journal, NodeEvent.seq).where(NodeEvent.seq > journal.contiguous, NodeEvent.seq <= reached)
        _apply(session, machine, journal, session.scalars(next_ones.order_by(NodeEvent.seq)).all())
    journal.contiguous = reached
    if claim.incomplete:
        machine.told = None
    return Receipt(reached, database, machine.told is not None)


def _sender(
    session: Session, name: str, id: str, boot_id: str, fresh: Mapping[int, Mapping[str, Any]], now: float
) -> tuple[StoredNode, NodeJournal]:
    """Return the rows of a node and its journal, new ones if they are unknown; a new journal replaces the node's."""
    machine = session.get(StoredNode, name, with_for_update=True)
    if machine is None:
        # an unknown node cannot have rebooted since it was last seen
        machine = StoredNode(node=name, seen=now, boot_id=clean.text(boot_id, 64))
        session.add(machine)
        session.flush()
    machine.seen = now
    journal = session.get(NodeJournal, (name, id))
    if journal is None:
        journal = NodeJournal(node=name, journal=id, contiguous=0)
        session.add(journal)
        _supersede(session, machine, min((row["ts"] for row in fresh.values()), default=now))
        machine.journal, machine.told = id, None
        session.flush()
    return machine, journal


def _store(
    session: Session, journal: NodeJournal, fresh: Mapping[int, Mapping[str, Any]], now: float
) -> tuple[set[int], Collection[int]]:
    """Store the events that are not stored yet; return the numbers of those that were, and of the new ones."""
    stored = {
        seq
        for portion in portions(list(fresh))
        for seq in session.scalars(_events(journal, NodeEvent.seq).where(NodeEvent.seq.in_(portion)))
    }
    new = {seq: row for seq, row in fresh.items() if seq not in stored and seq > (journal.forgotten or 0)}
    if new:
        of_journal = {"node": journal.node, "journal": journal.journal, "received": now}
        session.execute(insert(NodeEvent), [{**of_journal, **row} for row in new.values()])
    return stored, new.keys()


def _fresh(events: Sequence[Mapping[str, Any]], now: float) -> dict[int, dict[str, Any]]:
    """Return the rows to store, by number. Events without one are dropped: a repeated one could not be recognized."""
    rows: dict[int, dict[str, Any]] = {}
    for event in events:
        seq = clean.whole(event.get("seq"), 1) if isinstance(event, Mapping) else None
        if seq is None:
            log.warning("dropped an event without a valid number: %.200r", event)
            continue
        rows.setdefault(
            seq,
            {
                "seq": seq,
                "ts": clean.moment(event.get("ts")) or now,
                "kind": clean.text(event.get("kind"), 64) or "?",
                "payload": clean.document({key: value for key, value in event.items() if key not in ("seq", "kind")}),
            },
        )
    return rows


def _events(journal: NodeJournal, *columns: Any) -> Select[Any]:
    """Return the SELECT of columns of the stored events of a journal."""
    return select(*columns).where(NodeEvent.node == journal.node, NodeEvent.journal == journal.journal)


def _highest_complete(session: Session, journal: NodeJournal, most: int) -> int:
    """Return the number up to which all events after `journal.contiguous` are stored; consider only the next `most`.

    Any number of events may have arrived early, and other nodes wait for the writer; later messages apply the rest.
    """
    reached = journal.contiguous
    next_ones = (NodeEvent.seq > reached, NodeEvent.seq <= reached + most)
    count, highest = session.execute(_events(journal, func.count(), func.max(NodeEvent.seq)).where(*next_ones)).one()
    if not count or highest == reached + count:
        return highest or reached
    for seq in session.scalars(_events(journal, NodeEvent.seq).where(*next_ones).order_by(NodeEvent.seq)):
        if seq != reached + 1:
            break
        reached = seq
    return reached


def _supersede(session: Session, machine: StoredNode, moment: float) -> None:
    """Mark a node's current journal as superseded and its leases as lost: no event will report their release."""
    for other in session.scalars(
        select(NodeJournal).where(NodeJournal.node == machine.node, NodeJournal.superseded.is_(None))
    ):
        if other.journal == machine.journal:
            other.superseded = moment
            log.warning(
                "%s has lost its journal %s; slices that it does not report again are lost", machine.node, other.journal
            )
            lose_leases(_held(session, machine, StoredLease.journal == other.journal), moment)


def _held(session: Session, machine: StoredNode, *conditions: ColumnElement[bool]) -> Sequence[StoredLease]:
    """Return the open leases of a node that meet all conditions."""
    open_leases = select(StoredLease).where(StoredLease.node == machine.node, StoredLease.until.is_(None), *conditions)
    return session.scalars(open_leases).all()


def _apply(session: Session, machine: StoredNode, journal: NodeJournal, seqs: Sequence[int]) -> None:
    """Apply stored events to the record, in their order; an event that cannot be used is logged and skipped."""
    unusable: list[str] = []
    for portion in portions(seqs):
        rows = session.execute(
            _events(journal, NodeEvent.seq, NodeEvent.ts, NodeEvent.kind, NodeEvent.payload)
            .where(NodeEvent.seq.in_(portion))
            .order_by(NodeEvent.seq)
        ).all()
        for seq, ts, kind, payload in rows:
            effect = _EFFECTS.get(kind)
            if effect is None or not isinstance(payload, dict):
                continue
            try:
                with session.begin_nested():
                    effect(session, machine, journal, ts, {**payload, "seq": seq})
                    session.flush()
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                unusable.append(f"event {seq} ({kind}) cannot be used: {error}")
    if unusable:
        others = f" (and {len(unusable) - 1} more)" if len(unusable) > 1 else ""
        log.warning("%s: %s%s", machine.node, unusable[0], others)


def _boot(session: Session, machine: StoredNode, journal: NodeJournal, ts: float, event: dict[str, Any]) -> None:
    boot = clean.text(event.get("boot_id"), 64)
    if boot is None or boot == machine.boot_id or journal.superseded is not None:
        return
    for id in sorted(lose_leases(_held(session, machine), ts)):
        finish_if_free(session, id, ts, None, state="NODE_FAIL")
    for job, restart in _ended_by_boot(session, journal, event["seq"]):
        lose_run(session, run_of(session, job, restart, ts, starts=False), machine.node)
    machine.boot_id, machine.booted = boot, ts


def _ended_by_boot(session: Session, journal: NodeJournal, seq: int) -> Iterator[tuple[int, int]]:
    """Yield the runs with a `stop` without exit code directly before a boot: those the journal held at the reboot."""
    earlier = _events(journal, NodeEvent.seq, NodeEvent.kind, NodeEvent.payload).where(NodeEvent.seq < seq)
    rows = session.execute(earlier.order_by(NodeEvent.seq.desc()).limit(_MAX_SLICES)).all()
    for number, (found, kind, payload) in enumerate(rows, 1):
        # a gap: progress reports that were removed
        if found != seq - number or kind != "stop" or not isinstance(payload, dict):
            return
        if payload.get("exit_code") is not None:
            return
        with contextlib.suppress(ValueError):
            yield _identity(payload)


def _is_late(journal: NodeJournal, event: Mapping[str, Any]) -> bool:
    """Return whether later events of the node may already have been applied; only then is their order taken from times.

    Otherwise times do not matter, because the node's clock may have been ahead.
    """
    return journal.superseded is not None or event["seq"] <= journal.contiguous


def _inventory(session: Session, machine: StoredNode, journal: NodeJournal, ts: float, event: dict[str, Any]) -> None:
    known = {gpu.uuid: gpu for gpu in session.scalars(select(StoredGpu).where(StoredGpu.node == machine.node))}
    if _is_late(journal, event) and any(gpu.seen > ts for gpu in known.values()):
        return
    unavailable = [gpu for gpu in known.values() if not (gpu.present and gpu.mig)]
    _describe(session, machine, known, ts, event)
    if any(gpu.present and gpu.mig for gpu in unavailable):
        machine.told = None  # a GPU reappeared: what is held on it is not known here


def _describe(
    session: Session, machine: StoredNode, known: dict[str, StoredGpu], ts: float, event: dict[str, Any]
) -> None:
    for gpu in known.values():
        gpu.present = False
    own = ("uuid", "minor", "index", "name", "mig", "geometry")
    for facts in event["gpus"]:
        uuid = clean.text(facts.get("uuid"), 128)
        if uuid is None:
            continue
        if uuid not in known:
            known[uuid] = StoredGpu(node=machine.node, uuid=uuid, geometry=None)
            session.add(known[uuid])
        gpu = known[uuid]
        gpu.minor, gpu.gpu_index = clean.small(facts.get("minor")), clean.small(facts.get("index"))
        gpu.name, gpu.mig = clean.text(facts.get("name"), 128), facts.get("mig") is True
        if "mig" in facts or not facts.get("problem"):  # else its node cannot describe it now
            gpu.geometry = facts.get("geometry")
        gpu.facts = {key: value for key, value in facts.items() if key not in own}
        gpu.present, gpu.seen = True, ts
    replaced = sorted((gpu for gpu in known.values() if not gpu.present), key=lambda gpu: gpu.seen)
    for gpu in replaced[: max(0, len(known) - _MOST_GPUS)]:
        session.delete(known.pop(gpu.uuid))
    session.flush()
    for lease in _held(session, machine, StoredLease.gpu_index.is_(None)):
        lease.gpu_index = known[lease.gpu].gpu_index if lease.gpu in known else None


def _state(session: Session, machine: StoredNode, journal: NodeJournal, ts: float, event: dict[str, Any]) -> None:
    """Store everything that the node holds: end the leases that it does not list, and record new ones."""
    if machine.journal != journal.journal:
        _supersede(session, machine, ts)
        machine.journal, journal.superseded = journal.journal, None
    known = {gpu.uuid: gpu for gpu in session.scalars(select(StoredGpu).where(StoredGpu.node == machine.node))}
    _describe(session, machine, known, ts, event)
    reported = [(*_identity(facts), facts, _slices(facts)) for facts in event["runs"]]
    held = {
        (job, restart, mig_slice.gpu, mig_slice.start) for job, restart, _, slices in reported for mig_slice in slices
    }
    ended = [
        lease
        for lease in _held(session, machine)
        if (lease.job_id, lease.restart, lease.gpu, lease.slot_start) not in held
    ]
    for id in sorted(lose_leases(ended, ts)):
        finish_if_free(session, id, ts, None)
    for job, restart, facts, slices in sorted(reported, key=lambda row: _host_run(row[2]) is not None):
        since = clean.moment(facts.get("since")) or ts
        run = _holder(session, machine, job, restart) or run_of(session, job, restart, since, starts=True)
        _fill_in_user(session, run, facts)
        _note_sharing(session, machine, run, facts)
        start_run(session, run, RunEvent(machine.node, journal.journal, since, slices), None, _host_run(facts))
    machine.told = event["seq"]


def _fill_in_user(session: Session, run: Run, event: dict[str, Any]) -> None:
    run.uid = clean.whole(event.get("uid")) if run.uid is None else run.uid
    for field in ("user", "account", "partition"):
        if getattr(run, field) is None:
            setattr(run, field, Run.fitting(field, event.get(field)))
    link(session, run, clean.text(event.get("decision"), 16))


def _start(session: Session, machine: StoredNode, journal: NodeJournal, ts: float, event: dict[str, Any]) -> None:
    job, restart = _identity(event)
    run = run_of(session, job, restart, ts, starts=True)
    _fill_in_user(session, run, event)
    warm = clean.truth(event.get("warm"))
    run.warm = warm if run.warm is None else bool(run.warm and warm)
    setup = clean.real(event.get("elapsed_ms"))
    run.setup_ms = setup if run.setup_ms is None else max(run.setup_ms, setup or 0.0)
    lost_at = journal.superseded
    if machine.booted is not None and ts < machine.booted and _is_late(journal, event):
        lost_at = machine.booted
    _note_sharing(session, machine, run, event)
    start_run(session, run, RunEvent(machine.node, journal.journal, ts, _slices(event)), lost_at, _host_run(event))


def _note_sharing(session: Session, machine: StoredNode, guest: Run, event: dict[str, Any]) -> None:
    """Mark a guest and the run that shares its slice with it, long before their ends, which repeat it."""
    host_run = _host_run(event)
    host = None if host_run is None else _holder(session, machine, *host_run)
    for run in () if host is None else (host, guest):
        if not is_elsewhere(run, machine.node):
            measured.mark_shared(run)


def _stop(session: Session, machine: StoredNode, journal: NodeJournal, ts: float, event: dict[str, Any]) -> None:
    job, restart = _identity(event)
    run = _holder(session, machine, job, restart) or run_of(session, job, restart, ts, starts=False)
    code, slices = clean.whole(event.get("exit_code"), 0, 255), _slices(event)
    if not is_elsewhere(run, machine.node):
        if event.get("shared") is True:
            measured.mark_shared(run)
        measured.keep_memory(run, machine.node, event.get("memory_mib"), [facts.profile for facts in slices])
        measured.keep_activity(run, machine.node, event.get("activity"))
        measured.keep_energy(run, machine.node, event.get("energy_j"))
    stop_run(session, run, RunEvent(machine.node, journal.journal, ts, slices), code)


def _progress(session: Session, machine: StoredNode, journal: NodeJournal, ts: float, event: dict[str, Any]) -> None:
    job, restart = _identity(event)
    run = measured.known_run(session, job, restart)
    if run is None:
        raise ValueError(f"job {job} has no run {restart}")
    held_here = select(StoredLease.id).where(StoredLease.run_id == run.id, StoredLease.node == machine.node).limit(1)
    if session.scalar(held_here) is None or is_elsewhere(run, machine.node):
        raise ValueError(f"job {job} has held nothing on this node")
    measured.keep_report(run, machine.node, ts, event, late=_is_late(journal, event))


def _misfit(session: Session, machine: StoredNode, _journal: NodeJournal, ts: float, event: dict[str, Any]) -> None:
    job, restart = _identity(event)
    run = run_of(session, job, restart, ts, starts=True)
    run.reason = clean.text(f"{MISFIT}{machine.node}: {event.get('reason') or event.get('grant') or '?'}", 512)
    # for a job on several nodes the others report their own part; and root of this node must not end their runs
    elsewhere = (StoredLease.run_id == run.id, StoredLease.node != machine.node, StoredLease.until.is_(None))
    if run.ended is None and session.scalar(select(StoredLease.id).where(*elsewhere).limit(1)) is None:
        run.state, run.ended = "REQUEUED", ts


def _holder(session: Session, machine: StoredNode, job: int, restart: int) -> Run | None:
    """Return the run that holds slices on the node; Slurm may have given its job's id to another job since."""
    lease = (
        StoredLease.node == machine.node,
        StoredLease.until.is_(None),
        StoredLease.job_id == job,
        StoredLease.restart == restart,
    )
    return session.scalars(
        select(Run).join(StoredLease, StoredLease.run_id == Run.id).where(*lease).order_by(StoredLease.id)
    ).first()


def _identity(event: dict[str, Any]) -> tuple[int, int]:
    job, restart = clean.whole(event.get("job"), 1), clean.small(event.get("restart") or 0)
    if job is None or restart is None:
        raise ValueError(f"it names no job ({event.get('job')!r}, restart {event.get('restart')!r})")
    return job, restart


def _host_run(event: dict[str, Any]) -> tuple[int, int] | None:
    """Return the run with which a guest shares its slice."""
    host = event.get("beside")
    if not isinstance(host, list) or len(host) != 2:
        return None
    job, restart = clean.whole(host[0], 1), clean.small(host[1])
    return None if job is None or restart is None else (job, restart)


def _slices(event: dict[str, Any]) -> list[SliceFacts]:
    by_slot = {}
    slices = event.get("slices")
    for facts in slices[:_MAX_SLICES] if isinstance(slices, list) else ():
        if not isinstance(facts, dict):
            continue
        gpu, profile = clean.text(facts.get("gpu"), 128), clean.text(facts.get("profile"), 32)
        start, size = clean.small(facts.get("start")), clean.small(facts.get("size"))
        if gpu and profile and start is not None and size:
            by_slot[gpu, start] = SliceFacts(
                gpu, profile, start, size, clean.small(facts.get("gi")), clean.small(facts.get("ci")),
                clean.text(facts.get("mig_uuid"), 128),
            )  # fmt: skip
    return list(by_slot.values())


_EFFECTS = {
    "boot": _boot,
    "inventory": _inventory,
    "state": _state,
    "start": _start,
    "stop": _stop,
    "misfit": _misfit,
    "progress": _progress,
}
