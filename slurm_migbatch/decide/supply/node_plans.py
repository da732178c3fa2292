"""Turn the claims of a plan into the new plan of each node: its slots and its offers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from slurm_migbatch.decide.capacity.model import Mode, Node, NodePlan
from slurm_migbatch.decide.supply.fleet import Fleet
from slurm_migbatch.decide.supply.gpu_state import unchanged
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.profile import Profile


def node_plans(
    fleet: Fleet,
    preference: tuple[Profile, ...],
    before: Mapping[str, NodePlan],
    uncounted: Mapping[str, Counter[Profile]],
    *,
    anew: bool,
) -> dict[str, NodePlan]:
    """Return the plan of every node; one that equals the one in `before` is the same object.

    `uncounted`: slices in use by node that are not counted for another reason than a reservation (`planned_starts`).
    """
    plans: dict[str, NodePlan] = {}
    touched = fleet.touched()
    for name, admission in fleet.admissions.items():
        cached = admission.plan
        keeps = not anew and name not in touched and name not in uncounted
        if keeps and cached is not None and cached[0] == preference:
            plans[name] = cached[1]
            continue
        plan, previous = _node_plan(fleet, admission.node, preference, anew=anew), before.get(name)
        if name in uncounted and not plan.fixed:
            plan = replace(plan, held_back=Counter(plan.held_back) | uncounted[name])
        plans[name] = plan = previous if previous == plan and previous is not None else plan
        if keeps:
            admission.plan = preference, plan
    return plans


def _node_plan(fleet: Fleet, node: Node, preference: tuple[Profile, ...], *, anew: bool) -> NodePlan:
    """Return the plan of a node: its claims, and offers in the space that they leave."""
    layouts: dict[str, Layout] = {}
    withdrawn: set[Profile] = set()
    free: Counter[Profile] = Counter()
    held_back: Counter[Profile] = Counter()
    optional: list[tuple[Layout, str]] = []
    anew = anew and not node.unmatched  # a job that is just starting may be on any slot
    book, keeps_offers = fleet.book, node.mode is not Mode.WITHDRAWN
    fixed = keeps_offers and not fleet.plannable(node.name)
    for gpu_claims in fleet.on(node.name):
        gpu = gpu_claims.gpu
        if fixed or not keeps_offers:
            final = unchanged(gpu.leased, gpu.free, keeps_offers)
        else:
            final = book.final(
                gpu_claims.shape, gpu.occupied, gpu.leased, gpu.free, preference, gpu_claims.hidden, anew=anew
            )
            optional.append((final.optional, gpu.uuid))
        for profile, count in final.free.items():
            free[profile] = free.get(profile, 0) + count
        layouts[gpu.uuid] = final.layout
        if gpu_claims.held_back:
            held_back.update(gpu_claims.held_back)
        if final.withdrawn:
            withdrawn |= final.withdrawn
        if gpu.offered is not gpu.free:  # slots that overlap something, or did by the last report
            withdrawn.update(slot.profile for slot in gpu.offered.slots if slot not in final.layout)
    _keep_total(node, layouts, free, optional)
    unmatched = node.unmatched
    offers = {p: n - unmatched[p] for p, n in free.items() if n > unmatched[p]}
    is_open = node.mode is not Mode.CLOSED
    return NodePlan(node.name, layouts, offers, frozenset(withdrawn), fixed, is_open, held_back)


def _keep_total(
    node: Node, layouts: dict[str, Layout], free: Counter[Profile], optional: list[tuple[Layout, str]]
) -> None:
    """Drop unclaimed slots that Slurm's constant sum leaves no room to offer."""
    excess = free.total() + sum(n for n in node.used.values() if n > 0) - node.total
    for extra, uuid in optional:
        for slot in extra.slots:
            if excess <= 0:
                return
            layouts[uuid] = layouts[uuid].remove(slot)
            free[slot.profile] -= 1
            excess -= 1
