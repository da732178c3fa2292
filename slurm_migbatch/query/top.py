"""`migbatch top`: one page of the cluster, as far as the user may see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.lending.reasons import without_estimates
from slurm_migbatch.query import loans as lending
from slurm_migbatch.query.nodes import GpuView, NodeView, fault_sentence, free_counts
from slurm_migbatch.query.overview import Overview, expectation, overview, reason
from slurm_migbatch.query.questions import TopQuestion
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.show import row_name
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report.page import (
    FAULTY,
    LOAN,
    OFFERED,
    USED,
    EventRow,
    GpuRow,
    LoanRow,
    NameRow,
    Page,
    ProfileRow,
    QueueRow,
    SlotRow,
    Totals,
)
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.store.queries import LeaseRow

#: rows of each part of a page
_GPUS: Final = 10_000
_QUEUE: Final = 40
_LOANS: Final = 200
_EVENTS: Final = 40
_WORDS: Final = 200
#: kinds of actions whose text repeats what a user wrote
_OWN: Final = frozenset({"retype", "throttle", "share"})


def answer(question: TopQuestion, rights: Rights, site: QuerySite) -> Reply:
    """Answer with one page, as JSON."""
    try:
        names = frozenset(expand(question.names)) if question.names else None
    except NodeListError as error:
        raise Unanswerable(f"--nodes: {error}", 2) from None
    seen = overview(site)
    asked = _Selection(seen, rights, names, question.user, question.only.replace("+", "."))
    remarks = tuple(remark.removeprefix("migbatch: ") for remark in seen.remarks)
    if not rights.nodes:
        remarks = (*remarks, "nodes are private (PrivateData=nodes)")
    gpus = list(_gpus(asked)) if rights.nodes else []
    events = tuple(sorted([*_node_events(asked), *_actions(asked)], key=lambda row: row.at))[-_EVENTS:]
    page = Page(
        seen.at,
        seen.cluster,
        _totals(seen) if rights.nodes else Totals(),
        tuple(_profiles(seen)) if rights.nodes else (),
        sum(row.tasks for row in asked.rows if row.pending),
        tuple(gpus[:_GPUS]),
        tuple(_queue(asked, site)),
        tuple(_loans(asked))[:_LOANS],
        events,
        max(0, len(gpus) - _GPUS),
        tuple(_names(asked, gpus[:_GPUS], events)),
    )
    return Reply([page.write()], remarks)


@dataclass(frozen=True)
class _Selection:
    """The part of an overview that a user may see and has selected by a `TopQuestion`."""

    seen: Overview
    rights: Rights
    names: frozenset[str] | None
    user: str
    only: str

    @cached_property
    def queue(self) -> dict[int, JobRow]:
        """The visible jobs in Slurm's queue, in its order."""
        return {row.job_id: row for row in self.rights.jobs(self.seen.queue or ())}

    @cached_property
    def rows(self) -> list[JobRow]:
        """The selected jobs of `queue`."""
        return [row for row in self.queue.values() if self.of_user(row.user, row.uid) and self.of_kind(row)]

    @cached_property
    def partitions(self) -> Mapping[str, Sequence[str]]:
        """The partitions of each node."""
        return {node.name: node.partitions for node in self.seen.nodes or ()}

    def of_user(self, user: str | None, uid: int | None) -> bool:
        """Return whether a user is selected."""
        return not self.user or self.user == user or self.user == str(uid)

    def of_kind(self, row: JobRow) -> bool:
        """Return whether a job's profile or partition is selected."""
        kinds = {profile.gres_type for profile in slices(row.gres)}
        return not self.only or self.only in kinds or self.only in row.partitions

    def of_job(self, job: int, profile: str = "") -> bool:
        """Return whether a job, which may have left the queue, is selected."""
        row = self.queue.get(job)
        uid, _, user = self.owner(job)
        user_selected = self.of_user(user, uid) if row is None else self.of_user(row.user, row.uid)
        if not user_selected or not self.only:
            return user_selected
        return self.only == profile.replace("+", ".") or (row is not None and self.of_kind(row))

    def owner(self, job: int) -> tuple[int | None, str | None, str | None]:
        """Return the uid, account and user of a job in events and loans, as far as known."""
        return self.seen.owners.get(job, (None, None, None))

    def names_job(self, job: int) -> bool:
        """Return whether a job may be named: squeue shows it, or the record may be read."""
        return self.rights.runs or job in self.queue

    def sentence(self, text: str | None) -> str:
        """Return a sentence without hidden jobs; nothing if nodes are private, because it may name nodes."""
        return self.rights.sentence(text or "", self.queue.keys(), self.jobid)[:_WORDS] if self.rights.nodes else ""

    def jobid(self, job: int) -> str:
        """Return a job as Slurm prints it."""
        row = self.queue.get(job)
        return self.seen.names.get(job, str(job)) if row is None else row_name(row)


def _names(asked: _Selection, gpus: Iterable[GpuRow], events: Iterable[EventRow]) -> Iterator[NameRow]:
    """Yield the jobs of these rows that Slurm does not print as their number."""
    jobs = {job for gpu in gpus for slot in gpu.slots for job in (slot.job, slot.guest)}
    for job in sorted(jobs | {event.job for event in events}):
        name = asked.seen.names.get(job, str(job))
        if name != str(job):
            yield NameRow(job, name)


# -- GPUs --------------------------------------------------------------------------------------------------------


def _totals(seen: Overview) -> Totals:
    slots = sum(gpu.slices for view in seen.views for gpu in view.gpus)
    # a slice shared by two jobs is one slot
    held = {(lease.node, lease.gpu, lease.start): lease.size for lease in seen.leases}
    closed = {node.name for node in seen.nodes or () if not node.open}
    return Totals(
        len(seen.views),
        sum(view.name in closed for view in seen.views),
        sum(len(view.gpus) for view in seen.views),
        slots,
        sum(held.values()),
    )


def _profiles(seen: Overview) -> Iterator[ProfileRow]:
    profiles = {(lease.node, lease.gpu, lease.start): lease.profile.replace("+", ".") for lease in seen.leases}
    used = Counter(profiles.values())
    offered: Counter[str] = Counter()
    mig_nodes = {view.name for view in seen.views}
    for node in seen.nodes or ():
        if node.open and node.name in mig_nodes:
            offered.update(free_counts(node))
    for profile in sorted({*used, *offered}, key=_by_size):
        yield ProfileRow(profile, used[profile], offered[profile])


def _by_size(profile: str) -> tuple[int, str]:
    compute = profile.partition("g")[0]
    return (int(compute) if compute.isdigit() else 0, profile)


def _gpus(asked: _Selection) -> Iterator[GpuRow]:
    seen = asked.seen
    rows = {node.name: node for node in seen.nodes or ()}
    leases: dict[tuple[str, str], list[LeaseRow]] = {}
    for lease in seen.leases:
        leases.setdefault((lease.node, lease.gpu), []).append(lease)
    for view in seen.views:
        if asked.names is not None and view.name not in asked.names:
            continue
        for gpu in view.gpus:
            row = _gpu(asked, view, gpu, rows.get(view.name), leases.get((view.name, gpu.uuid), ()))
            if _is_selected(asked, row):
                yield row


def _gpu(asked: _Selection, view: NodeView, gpu: GpuView, node: NodeRow | None, leases: Sequence[LeaseRow]) -> GpuRow:
    closed = gpu.closed or (node is not None and not node.open)
    held = _held(asked, leases)
    faulty = [SlotRow(FAULTY, slot.start, slot.size, slot.profile, 0, 0, "", 0.0) for slot in gpu.held]
    taken = [*held, *faulty]
    plan = asked.seen.plans.get(view.name, {}).get(gpu.uuid, ()) if node is not None and node.open else ()
    offered = [
        SlotRow(OFFERED, start, size, profile, 0, 0, "", 0.0)
        for profile, start, size in plan
        if not any(start < slot.start + slot.size and slot.start < start + size for slot in taken)
    ]
    trouble = asked.sentence("; ".join(reason for reason in view.reasons if gpu.uuid in reason or "GPU" not in reason))
    slots = tuple(sorted([*taken, *offered], key=lambda slot: (slot.start, slot.size)))
    number = -1 if gpu.index is None else gpu.index
    return GpuRow(view.name, number, gpu.slices, view.state or "?", closed, trouble, slots)


def _held(asked: _Selection, leases: Iterable[LeaseRow]) -> list[SlotRow]:
    """Return the slots of leases; the second lease of a slot is its guest."""
    slots: dict[tuple[int, int], SlotRow] = {}
    for lease in leases:
        job = lease.job if asked.names_job(lease.job) else 0
        slot = (lease.start, lease.size)
        if slot in slots:
            slots[slot] = slots[slot]._replace(guest=job)
            continue
        row = asked.queue.get(lease.job)
        kind = LOAN if job and lease.job in asked.seen.trainings else USED
        user = row.user if row is not None else ""
        slots[slot] = SlotRow(kind, lease.start, lease.size, lease.profile, job, 0, user, lease.since or 0.0)
    return list(slots.values())


def _is_selected(asked: _Selection, row: GpuRow) -> bool:
    if asked.user and not any(slot.job and asked.of_job(slot.job) for slot in row.slots):
        return False
    if not asked.only or asked.only in asked.partitions.get(row.node, ()):
        return True
    return any(slot.profile.replace("+", ".") == asked.only for slot in row.slots)


# -- pending jobs ----------------------------------------------------------------------------------------------------


def _queue(asked: _Selection, site: QuerySite) -> Iterator[QueueRow]:
    groups: dict[str, list[JobRow]] = {}
    for row in asked.rows:
        wants = _wants(row)
        if row.pending and wants and row.job_id not in asked.seen.trainings:
            groups.setdefault(wants, []).append(row)
    for wants, rows in list(groups.items())[:_QUEUE]:
        first = rows[0]
        reasons: Counter[str] = Counter()
        for row in rows:
            reasons[row.reason] += row.tasks
        commonest = reasons.most_common(1)[0][0]
        start, expected = _start(asked, site, first)
        in_full = asked.rights.in_full(first.uid, first.account)
        why = asked.sentence(reason(site, first).shown(in_full=in_full)) if asked.rights.nodes else ""
        since = min(row.submit for row in rows)
        yield QueueRow(wants, sum(row.tasks for row in rows), since, commonest[:_WORDS], why, start, expected)


def _wants(row: JobRow) -> str:
    wants = ",".join(f"{profile}:{n}" if n > 1 else str(profile) for profile, n in sorted(slices(row.gres).items()))
    return f"{row.num_nodes} x {wants}" if wants and row.num_nodes > 1 else wants


def _start(asked: _Selection, site: QuerySite, row: JobRow) -> tuple[str, float]:
    """Return the latest start of a job, for users who may see all running jobs."""
    rights = asked.rights
    if not rights.nodes or not (rights.everything or "jobs" not in rights.private):
        return "", 0.0
    expected = expectation(site, asked.seen, row)
    if expected is None:
        return "", 0.0
    if not expected.blockers:
        return "now", 0.0
    return ("open", 0.0) if expected.at is None else ("at", expected.at)


# -- loans -------------------------------------------------------------------------------------------------------


def _loans(asked: _Selection) -> Iterator[LoanRow]:
    seen, rights = asked.seen, asked.rights
    job_views = {job: view for job, view in seen.trainings.items() if job in asked.queue}
    visible = [loan for loan in seen.loans if lending.may_see(rights, loan, job_views)]
    names = lending.queue_names(job_views)
    indexes = {gpu.uuid: gpu.index for view in seen.views for gpu in view.gpus if gpu.index is not None}
    views = lending.redacted(rights, lending.view(job_views, visible, seen.reasons, indexes), job_views, visible)
    for view in views:
        if view.state == "ended" or not asked.of_job(view.job, view.profile):
            continue
        report = seen.progress.get(view.job)
        training = job_views.get(view.job)
        in_full = training is not None and rights.in_full(training.row.uid, training.row.account)
        goal = training.hints.items if in_full and training is not None else None
        yield LoanRow(
            names.get(view.job, str(view.job)),
            view.user,
            view.profile,
            view.node if rights.nodes else "",
            view.gpu if rights.nodes else "",
            view.since,
            view.state,
            view.restarts,
            _known(report.steps if report else None),
            _known(report.items if report else None),
            _known(goal),
            asked.sentence(view.why),
        )


def _known(value: Any) -> Any:
    return -1 if value is None else value


# -- events ------------------------------------------------------------------------------------------------------


def _node_events(asked: _Selection) -> Iterator[EventRow]:
    rights = asked.rights
    for event in asked.seen.events:
        job = event.payload.get("job")
        if asked.names is not None and event.node not in asked.names:
            continue
        if not isinstance(job, int):
            if rights.nodes and not (asked.user or asked.only):
                text = asked.sentence(_event_details(event.kind, event.payload))
                yield EventRow(event.ts, event.kind, event.node, 0, "", text)
            continue
        slices = event.payload.get("slices") or () if event.kind in ("start", "stop") else ()
        profiles = [str(entry.get("profile")) for entry in slices]
        if _may_see(asked, job) and asked.of_job(job, profiles[0] if profiles else ""):
            text = asked.sentence(_event_details(event.kind, event.payload)) or ",".join(profiles)
            node = event.node if rights.nodes else ""
            yield EventRow(event.ts, event.kind, node, job, _user(asked, job), text[:_WORDS])


def _actions(asked: _Selection) -> Iterator[EventRow]:
    for row in asked.seen.actions if asked.names is None else ():
        job = int(row["job_id"])
        if not _may_see(asked, job) or not asked.of_job(job):
            continue
        uid, account, _ = asked.owner(job)
        why = row["why"] or ""
        if not asked.rights.in_full(uid, account):
            why = "" if row["kind"] in _OWN else without_estimates(why)
        yield EventRow(float(row["ts"]), str(row["kind"]), "", job, _user(asked, job), asked.sentence(why))


def _may_see(asked: _Selection, job: int) -> bool:
    uid, account, _ = asked.owner(job)
    return job in asked.queue or asked.rights.run(uid, account)


def _user(asked: _Selection, job: int) -> str:
    row = asked.queue.get(job)
    return row.user if row is not None else str(asked.owner(job)[2] or "")


def _event_details(kind: str, payload: Mapping[str, Any]) -> str:
    """Return the details of an event."""
    if kind == "fault":
        return fault_sentence(payload)
    if kind == "zombie":
        return f"{payload.get('profile')} cannot be destroyed: {payload.get('reason')}"
    if kind in ("misfit", "cleared"):
        return str(payload.get("reason") or "")
    code = payload.get("exit_code")  # 0 also for runs that were cancelled or requeued, whose Epilog knows no other
    return f"exit code {code}" if kind == "stop" and isinstance(code, int) and code else ""
