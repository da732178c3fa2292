"""Advertise supply to Slurm, in an order in which no job can start on a slot that does not exist.

Slurm counts slices per type and node; the node decides which slot a job gets, by its current plan. A plan therefore
changes in these phases:

1. **Shrink.** Types of which a free slot is withdrawn are set to 0, below what is in use (which is harmless), so that
   Slurm starts no more jobs of these types on this node. Setting them to what is in use would not be enough: a job that
   ends in between would let another one start, and that could be given the withdrawn slot.
2. **Check again.** A job that started between the last query and the shrink is in the queue now. If it has slices of
   such a type, its slots are unknown, so the node is left unchanged, and the next round plans with it. Jobs are
   compared, not counts: one that ended in the meantime would hide one that started.
3. **Publish** the plan to the node and wait for its acknowledgement, for a bounded time. Jobs that start meanwhile are
   of types whose slots are all in both the old plan and the new one.
4. **Grow** to the new counts. A node that has not acknowledged stays shrunk until it does.

The configured count of a type is the number of slots of that type in the plan, used and free, so the end of a job and
the next start of the same type need no call: slurmctld places nothing on a node that is still completing a job, and
after the Epilog the slot can be used again.

Except for slices in use for which a job of other slices has waited too long (`NodePlan.held_back`): without a call the
next job of the same type would start there, and the one after it, as long as any are pending. And except for those for
which Slurm would keep the node free, while a job has a place there (`decide.supply.planned_starts`). They are not
counted, unless a slice of their type is offered there, so a start of that type waits for the next round.

The filler type keeps the sum over all types equal to what Slurm has registered; otherwise the next registration of
slurmd would set the node INVAL and drain it. A restart of slurmctld or slurmd or `scontrol reconfigure` resets the
counts to slurm.conf's; this is detected as a difference from the wanted counts and advertised again, without a new
plan. The same is done on nodes that are down or drained, so that their counts are right when they return; their state
is never changed.

A node that is powered down acknowledges nothing, and has no slots that a new plan could take away: it gets the counts
of a new plan as if it had acknowledged it. It boots for its first job, without instances, and reads the plan then.

That sum is learned once and then kept (`Advertiser.total`): on 22.05 a restart of slurmd resets only the types whose
count in gres.conf is not 0 and leaves the others as we set them, so Slurm's counts then add up to more.

Every step is idempotent: if nothing differs, no command is run. All updates of a phase are sent in one command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from slurm_migbatch.daemon.plans import GpuSlots, Plans
from slurm_migbatch.decide.capacity.demand import FILLER, slices
from slurm_migbatch.decide.capacity.model import Node, NodePlan
from slurm_migbatch.decide.capacity.sharing import ALONE, GUEST, NodeGuests, is_guest
from slurm_migbatch.decide.snapshot import PublishedPlan
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmClient, SlurmError
from slurm_migbatch.workload.loans import GRES, LOAN


@dataclass(frozen=True)
class OfferChange:
    """A node whose offer was changed: the counts that Slurm has now, and the plan behind them."""

    node: str
    version: int
    counts: Mapping[str, int]
    reset: bool = False  # the plan is unchanged; Slurm had lost the counts


@dataclass
class Advertised:
    """Result of one call of `advertise`."""

    changes: list[OfferChange] = field(default_factory=list)
    #: nodes whose new plan is published and not yet acknowledged
    unacknowledged: list[str] = field(default_factory=list)
    #: nodes whose counts exceed the constant sum
    cut: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    calls: int = 0


class Advertiser:
    """Applies node plans.

    `ack_timeout`: total seconds that one call of `advertise` waits for acknowledgements.
    """

    def __init__(self, client: SlurmClient, plans: Plans, ack_timeout: float = 0.5) -> None:
        self._client, self._plans, self._ack_timeout = client, plans, ack_timeout
        #: the counts last sent for each node, and their required sum
        self._sent: dict[str, dict[str, int]] = {}
        self._totals: dict[str, int] = {}
        #: the layouts behind a plan's version, to compare with
        self._published: dict[str, tuple[int, Mapping[str, Layout]]] = {}
        #: the counts that a node was reduced to for a plan that it has not acknowledged
        self._shrunk: dict[str, dict[str, int]] = {}
        #: of nodes that needed no change when last examined: the input, and whether it exceeded the constant sum
        self._settled: dict[str, tuple[tuple[object, ...], bool]] = {}
        self._sharing: Mapping[str, NodeGuests] = {}

    def recall(self, sent: Mapping[str, Mapping[str, int]]) -> None:
        """Learn the counts that nodes were given before a restart of the service, including the filler."""
        for node, counts in sent.items():
            if node not in self._sent:
                self._sent[node] = _nonzero(counts)
                self._totals[node] = sum(counts.values())

    def total(self, row: NodeRow) -> int:
        """Return the constant sum of a node's mig counts, as in slurm.conf.

        Slurm's counts may add up differently for two reasons: slurm.conf was changed, or a registration reset some
        types and left the others as they were set. In the second case the types that differ from what was sent are
        those of slurm.conf, so they alone add up to no more than the known sum.
        """
        shown = sum(row.gres.values()) - row.gres.get(LOAN, 0)
        constant_sum = self._totals.get(row.name, shown)
        if shown != constant_sum:
            present = _nonzero(row.gres)
            sent = self._sent.get(row.name, {})
            if shown < constant_sum or sum(n for kind, n in present.items() if sent.get(kind) != n) > constant_sum:
                constant_sum = shown
        self._totals[row.name] = constant_sum
        return constant_sum

    def advertise(
        self,
        plans: Iterable[NodePlan],
        nodes: Mapping[str, Node],
        rows: Mapping[str, NodeRow],
        jobs: Mapping[int, JobRow],
        monotonic: Callable[[], float],
        sharing: Mapping[str, NodeGuests],
    ) -> Advertised:
        """Bring Slurm and the nodes to these plans, as far as possible now.

        Args:
            plans: the planner's result for each node that may be changed.
            nodes: the planner's input about them.
            rows, jobs: Slurm's view of nodes and queue, by name and id, from which the plans were made.
            monotonic: seconds, for the wait.
            sharing: nodes on which jobs share slices, or will.
        """
        result = Advertised()
        self._sharing = sharing
        moving, shrink = self._correct(plans, nodes, rows, result)
        if not moving:
            return result
        current = rows
        started_types: dict[str, set[str]] = {}
        if self._send(shrink, rows, result, record=False):
            current = {row.name: row for row in self._client.nodes()}
            started_types = _started_types(jobs, self._client.jobs_on(frozenset(shrink)))
            result.calls += 2
        published: list[tuple[_Move, int]] = []
        for move in moving:
            plan = move.plan
            current_row = current.get(plan.node)
            if current_row is None or _nonzero(current_row.gres) != shrink[plan.node]:
                continue  # Slurm refused, or somebody else changed the counts; reported in the errors
            if started_types.get(plan.node, set()) & self._risky(plan, rows[plan.node]):
                continue  # a job started while the offer was being withdrawn; planned again in the next round
            self._shrunk[plan.node] = shrink[plan.node]
            published.append((move, self._publish(plan)))
        grow: dict[str, dict[str, int]] = {}
        deadline = monotonic() + self._ack_timeout
        for move, version in published:
            node = move.plan.node
            if rows[node].asleep or self._plans.wait_acked(node, version, max(0.0, deadline - monotonic())):
                self._shrunk.pop(node, None)
                grow[node] = move.wanted
            else:
                result.unacknowledged.append(node)
        self._send(grow, current, result)
        return result

    def _correct(
        self, plans: Iterable[NodePlan], nodes: Mapping[str, Node], rows: Mapping[str, NodeRow], done: Advertised
    ) -> tuple[list[_Move], dict[str, dict[str, int]]]:
        """Correct the counts of nodes with an unchanged plan.

        Returns:
            The new plans, and what to shrink their nodes to.
        """
        moving: list[_Move] = []
        shrink: dict[str, dict[str, int]] = {}
        correct: dict[str, dict[str, int]] = {}
        before, self._settled = self._settled, {}
        for plan in plans:
            row, node, present = rows[plan.node], nodes[plan.node], self._plans.current(plan.node)
            acknowledged = (
                present is None or self._plans.acked(plan.node) >= present.version or _reads_plan_at_boot(row)
            )
            examined = (plan, node, row, present, self._shared(plan.node))  # mostly the same objects as before
            settled = before.get(plan.node)
            if settled is not None and acknowledged and settled[0] == examined:
                self._settled[plan.node] = examined, settled[1]
                if settled[1]:
                    done.cut.append(plan.node)
                continue
            wanted = self._wanted(plan, node, done)
            if not acknowledged:
                done.unacknowledged.append(plan.node)
                correct[plan.node] = self._shrunk.get(plan.node, _filled({}, node.total))
            elif plan.fixed and present is None:
                continue
            elif plan.fixed or self._is_published(plan):
                if not plan.fixed:
                    self._shrunk.pop(plan.node, None)
                backed = wanted if present is None or not plan.fixed else _backed(wanted, present, node.total)
                if backed == _nonzero(row.gres):
                    self._settled[plan.node] = examined, plan.node in done.cut
                else:
                    correct[plan.node] = backed
            else:
                moving.append(_Move(plan, wanted))
                risky = self._risky(plan, row)
                shrunk = {k: min(row.gres.get(k, 0), n) for k, n in wanted.items() if k not in risky}
                shrink[plan.node] = _filled(shrunk, node.total)
        self._send(correct, rows, done, reset=True)
        return moving, shrink

    def _publish(self, plan: NodePlan) -> int:
        version = self._plans.publish(plan.node, _wire(plan.layouts), dict(self._shared(plan.node).places))
        self._published[plan.node] = (version, plan.layouts)
        return version

    def _shared(self, node: str) -> NodeGuests:
        return self._sharing.get(node, ALONE)

    def _is_published(self, plan: NodePlan) -> bool:
        current = self._plans.current(plan.node)
        if current is None or dict(current.guests) != dict(self._shared(plan.node).places):
            return False
        published = self._published.get(plan.node)
        if published is not None and published[0] == current.version:
            return published[1] == plan.layouts
        same_layout = _canonical(current.gpus) == _canonical(_wire(plan.layouts))
        if same_layout:
            self._published[plan.node] = (current.version, plan.layouts)
        return same_layout

    def _risky(self, plan: NodePlan, row: NodeRow) -> frozenset[str]:
        """Return types of which a job that starts now could get a slot that the new plan does not have."""
        current = self._plans.current(plan.node)
        if current is None:
            return frozenset(row.gres)  # the node has an unknown plan from before a restart
        risky = frozenset(profile.gres_type for profile in plan.withdrawn)
        places = self._shared(plan.node).places
        same_guests = all(places.get(guest) == place for guest, place in current.guests.items())
        return risky if same_guests else risky | {GUEST}

    def _wanted(self, plan: NodePlan, node: Node, done: Advertised) -> dict[str, int]:
        """Return counts by GRES type, including the filler, with the registered sum."""
        shared = self._shared(plan.node)
        # a slice that Slurm does not count would be free for it
        leased = node.leased - Counter(node.uncounted) if node.uncounted else node.leased
        counts = {p.gres_type: max(node.used.get(p, 0), leased[p]) for p in {*node.used, *leased}}
        in_use = dict(counts)
        free_count = node.total - sum(counts.values()) - shared.running
        for profile, offered in sorted(plan.offers.items(), reverse=True):
            granted = max(0, min(offered, free_count))
            if granted < offered and plan.node not in done.cut:
                done.cut.append(plan.node)
            counts[profile.gres_type] = counts.get(profile.gres_type, 0) + granted
            free_count -= granted
        if shared is not ALONE:
            for profile in shared.held_back:
                kind = profile.gres_type
                used = in_use.get(kind, 0)
                counts[kind] = shared.shown(profile, used, counts.get(kind, 0) - used)
            counts[GUEST] = shared.running + max(0, min(shared.waiting, free_count))
        for profile, held in plan.held_back.items():
            kind = profile.gres_type
            if counts.get(kind, 0) <= in_use.get(kind, 0):  # none is offered
                counts[kind] = max(0, counts.get(kind, 0) - held)
        return _filled(counts, node.total)

    def _send(
        self,
        wanted: Mapping[str, dict[str, int]],
        rows: Mapping[str, NodeRow],
        done: Advertised,
        *,
        reset: bool = False,
        record: bool = True,
    ) -> bool:
        """Send counts that differ; return whether there were any. Nodes that Slurm refuses wait for the next round."""
        differing = {name: counts for name, counts in wanted.items() if counts != _nonzero(rows[name].gres)}
        if not differing:
            return False
        done.calls += 1
        try:
            self._client.set_gres({name: gres_string(counts, rows[name]) for name, counts in differing.items()})
        except SlurmError as error:
            done.errors.append(str(error))
            return True
        before = {name: self._sent.get(name) for name in differing}
        self._sent.update(differing)
        if record:
            for name, counts in differing.items():
                plan = self._plans.current(name)
                forgotten = reset and before.get(name) != _nonzero(rows[name].gres)
                done.changes.append(OfferChange(name, plan.version if plan else 0, counts, forgotten))
        return True


class _Move(NamedTuple):
    """A new plan of a node, and the counts to set in Slurm once the node has acknowledged it."""

    plan: NodePlan
    wanted: dict[str, int]


def _reads_plan_at_boot(row: NodeRow) -> bool:
    """Return whether a node cannot read its plan before its next job, for which it boots without any instance."""
    return row.asleep or row.waking


def _started_types(before: Mapping[int, JobRow], after: Iterable[JobRow]) -> dict[str, set[str]]:
    """Return by node the GRES types of the jobs that started between two listings; `after` has the nodes' jobs."""
    started: dict[str, set[str]] = {}
    for row in after:
        earlier = before.get(row.job_id)
        if earlier is row or not row.active:
            continue
        if earlier is None or not earlier.active or earlier.restarts != row.restarts:
            kinds = {profile.gres_type for profile in slices(row.gres)} | ({GUEST} if is_guest(row.gres) else set())
            for node in row.nodes:
                started.setdefault(node, set()).update(kinds)
    return started


def gres_string(counts: Mapping[str, int], row: NodeRow) -> str:
    """Return a node's complete Gres= value: other GRES first, then the mig types in a fixed order, the filler last."""
    kinds = sorted(counts, key=lambda kind: (kind == FILLER, kind))
    listed = [f"{GRES}:{kind}:{counts[kind]}" for kind in kinds if counts[kind]]
    if row.gres.get(LOAN):
        listed.append(f"{GRES}:{LOAN}:{row.gres[LOAN]}")
    return ",".join([*([row.other_gres] if row.other_gres else []), *listed])


def _filled(counts: Mapping[str, int], total: int) -> dict[str, int]:
    """Return the counts with the filler that keeps the sum, and without zeros."""
    nonzero = {kind: n for kind, n in counts.items() if n and kind != FILLER}
    spare = total - sum(nonzero.values())
    if spare > 0:
        nonzero[FILLER] = spare
    return nonzero


def _backed(wanted: Mapping[str, int], plan: PublishedPlan, total: int) -> dict[str, int]:
    """Return counts limited to the slots of each type in the node's plan.

    If the plan is not renewed, it may lack the slot of a lease, or of one whose end has not been reported yet.
    """
    slots = Counter(Profile.parse(profile).gres_type for rows in plan.gpus.values() for profile, _, _ in rows)
    return _filled({kind: min(n, slots[kind]) for kind, n in wanted.items()}, total)


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the nonzero counts by type, without `loan`, which only slurm.conf sets."""
    return {kind: n for kind, n in counts.items() if n and kind != LOAN}


def _wire(layouts: Mapping[str, Layout]) -> dict[str, tuple[tuple[str, int, int], ...]]:
    return {uuid: _rows(layout) for uuid, layout in layouts.items()}


@lru_cache(maxsize=1 << 15)
def _rows(layout: Layout) -> tuple[tuple[str, int, int], ...]:
    """Return a layout in the form that nodes read. Equal layouts get the same object."""
    return tuple([(slot.profile.name, slot.placement.start, slot.placement.size) for slot in layout.slots])


def _canonical(gpus: GpuSlots) -> dict[str, frozenset[tuple[str, int, int]]]:
    return {uuid: frozenset((p, s, n) for p, s, n in slots) for uuid, slots in gpus.items()}
