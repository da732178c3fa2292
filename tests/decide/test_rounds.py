"""Invariants of a lending round, for any cluster and any queue."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.demand import demands
from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.decide.capacity.model import Gpu, Lease, Node
from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.elastic_jobs import ElasticJobs
from slurm_migbatch.decide.lending.idleness import Idleness
from slurm_migbatch.decide.lending.inputs import LendingInputs, job_views_of
from slurm_migbatch.decide.lending.ledger import Ledger
from slurm_migbatch.decide.lending.loan import Cause, Loan, State
from slurm_migbatch.decide.lending.model import LendingRules, LendingView, OrderKind
from slurm_migbatch.decide.lending.round import decide
from slurm_migbatch.decide.lending.view import view_of
from slurm_migbatch.decide.supply.planner import Planner
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.slurm.client import JobRow, NodeRow
from tests.support.examples import examples
from tests.support.layouts import layouts
from tests.support.supply_gpus import A30, H100

T = TypeVar("T")

NOW = 1_000_000.0
LAYOUTS = {
    geometry.name: [layout for layout in layouts(geometry) if all(not p.suffix for p in layout.profiles)]
    for geometry in (H100, A30)
}
RULES = LendingRules(hysteresis=Hysteresis(loan_s=600, idle_s=0, rest_s=0), most_releases=4, quota={"a": 3})
STATES = [State.RUNNING, State.RUNNING, State.SIGNALLED, State.REQUEUED]


# To construct and validate a strategy takes longer than to draw from it.
BOOLEAN = st.booleans()
RESERVE = st.dictionaries(st.sampled_from([info.profile for info in H100.profiles[:3]]), st.integers(0, 2))
between = cache(st.integers)


@cache
def among(*values: T) -> st.SearchStrategy[T]:
    return st.sampled_from(values)


class Site:
    """A cluster in any state: inference jobs and loans on GPUs, a queue of both, loans that are ending."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.rows: list[JobRow] = []
        self.ledger = Ledger()
        facts, nodes, planned, self.job = {}, [], [], 1
        for number in range(draw(between(1, 3))):
            name = f"n{number}"
            gpus = []
            for index in range(draw(between(1, 2))):
                geometry = draw(among(H100, H100, A30))
                layout = draw(among(*LAYOUTS[geometry.name]))
                leases = [(slot, self._holder(draw, name, slot)) for slot in layout.slots if draw(BOOLEAN)]
                gpus.append(GpuFacts(f"GPU-{name}-{index}", geometry, tuple(sorted(leases))))
            facts[name] = NodeFacts(tuple(gpus))
            nodes.append(NodeRow(name, frozenset({"IDLE"}), partitions=("gpu", "train")))
            views = [
                Gpu(gpu.uuid, gpu.geometry, tuple(Lease(slot, run[0], NOW + 500) for slot, run in gpu.leases))
                for gpu in gpus
            ]
            planned.append(Node(name, tuple(views)))
        for _ in range(draw(between(0, 6))):
            self._waits(draw)
        wanted = demands(self.rows, nodes, list(facts), NOW)
        plan = Planner().plan(planned, wanted, NOW)
        self.geometry = {(name, i): gpu.geometry for name, node in facts.items() for i, gpu in enumerate(node.gpus)}
        scene = LendingInputs(NOW, self.rows, nodes, facts, plan, wanted)
        elastic_jobs = ElasticJobs(30.0, 10.0)
        elastic_jobs.gpus(self.geometry.values())
        job_views = job_views_of(self.rows, ["train"])
        reserve = draw(RESERVE)
        self.view: LendingView = view_of(scene, job_views, self.ledger, Idleness(), elastic_jobs, reserve)

    def _holder(self, draw: st.DrawFn, node: str, slot: Slot) -> tuple[int, int]:
        job, self.job = self.job, self.job + 1
        kind = slot.profile.gres_type
        if draw(BOOLEAN):
            state = draw(among("RUNNING", "RUNNING", "COMPLETING"))
            self.rows.append(JobRow(job, partition="gpu", gres=f"gres/mig:{kind}:1", state=state, nodes=(node,)))
            return job, 0
        restarts = draw(between(0, 4))
        comment = f"migbatch: role=train {draw(among('', 'signal=usr1 '))}[mig:{kind}:1#loan1]"
        account = draw(among("a", "b"))
        begun = NOW - draw(among(10.0, 10_000.0))
        row = JobRow(
            job, partition="train", gres=f"gres/mig:{kind}:1", state="RUNNING", nodes=(node,), comment=comment,
            restarts=restarts, account=account, start=begun,
        )  # fmt: skip
        self.rows.append(row)
        state = draw(among(*STATES))
        sent = None if state is State.RUNNING else draw(among(None, NOW - 5, NOW - 100))
        loan = Loan(
            job, restarts, begun, slot.profile.name, state, account=account, released=begun, started=begun,
            signalled=sent if state is State.SIGNALLED else None, requeued=sent if state is State.REQUEUED else None,
            cause=Cause.NONE if state is State.RUNNING else Cause.RECLAIM, why_ended="job 0",
        )  # fmt: skip
        self.ledger.load([loan])
        return job, restarts

    def _waits(self, draw: st.DrawFn) -> None:
        job, self.job = self.job, self.job + 1
        if draw(BOOLEAN):
            kind = draw(among("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb", "2g.12gb"))
            count = draw(among(1, 1, 2))
            nodes = draw(among(1, 1, 2))
            self.rows.append(
                JobRow(job, partition="gpu", gres=f"gres/mig:{kind}:{count}", reason="Resources", num_nodes=nodes)
            )
            return
        hints = draw(among("", "max=2g.20gb ", "min=3g.40gb ", "signal=usr2 "))
        self.rows.append(
            JobRow(
                job,
                partition="train",
                gres="gres/mig:loan:1",
                reason="ReqNodeNotAvail",
                comment=f"migbatch: role=train {hints}[mig:loan:1#loan1]",
                account=draw(among("a", "b")),
            )
        )


sites = st.composite(Site)()
any_site = settings(
    max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@any_site
@given(sites)
def test_job_gets_at_most_one_order_and_only_one_that_its_state_allows(site: Site) -> None:
    found = decide(site.view, RULES)
    assert all(count == 1 for count in Counter(order.job for order in found.orders).values())
    for order in found.orders:
        job_view, loan = site.view.job_views[order.job], site.view.loans.get(order.job)
        if order.kind is OrderKind.RELEASE:
            assert job_view.row.pending and job_view.hints.waiting and loan is None
        elif order.kind is OrderKind.SIGNAL:
            assert loan is not None and job_view.hints.signal and loan.signalled is None
        elif order.kind is OrderKind.REQUEUE:
            assert loan is not None and job_view.row.active
            ready = not job_view.hints.signal or loan.state is State.REQUEUED
            grace_over = loan.signalled is not None and NOW - loan.signalled >= RULES.grace_s
            assert ready or grace_over or site.view.starting(order.job, RULES.starting_s)
        assert order.restart == job_view.row.restarts
        assert order.why
    assert not found.lacking.keys() & {order.job for order in found.orders}
    waiting = {int(str(elastic_job.job)) for elastic_job in site.view.elastic_jobs if elastic_job.place is None}
    assert waiting == found.lacking.keys() | {order.job for order in found.orders if order.kind is OrderKind.RELEASE}


@any_site
@given(sites)
def test_released_loans_fit_beside_running_jobs_and_planned_inference(site: Site) -> None:
    """Beside running jobs, the slots that supply plans for inference, and as much of the reserve as has room."""
    found = decide(site.view, RULES)
    wishes = [order.profile for order in found.orders if order.kind is OrderKind.RELEASE and order.profile is not None]
    if not wishes:
        return
    free = [(capacity.geometry, capacity.used) for capacity in site.view.capacities]
    assert _fit(free, sorted(wishes, reverse=True)), (wishes, free)


def _fit(free: list[tuple[Geometry, Layout]], wishes: list) -> bool:  # type: ignore[type-arg]
    if not wishes:
        return True
    for index, (geometry, used) in enumerate(free):
        if wishes[0] in geometry:
            slots = plan_free(geometry, used, (wishes[0],)).slots
            for slot in [s for s in geometry.info(wishes[0]).slots if slots and geometry.fits(used, s)]:
                rest = [*free[:index], (geometry, used.add(slot)), *free[index + 1 :]]
                if _fit(rest, wishes[1:]):
                    return True
    return False


@any_site
@given(sites)
def test_no_release_takes_an_account_over_its_quota(site: Site) -> None:
    found = decide(site.view, RULES)
    lent = Counter(site.view.lent)
    released = Counter[str]()
    for order in found.orders:
        if order.kind is OrderKind.RELEASE and order.profile is not None:
            released[site.view.job_views[order.job].row.account] += order.profile.compute
    assert not released["a"] or lent["a"] + released["a"] <= RULES.quota["a"]
    if lent["a"] >= RULES.quota["a"]:
        grown = [order.job for order in found.orders if order.cause is Cause.GROW]
        assert not [job for job in grown if site.view.loans[job].account == "a"]
    assert sum(order.kind is OrderKind.RELEASE for order in found.orders) <= RULES.most_releases


@any_site
@given(sites)
def test_loans_are_reclaimed_only_for_pending_inference_and_if_allowed(site: Site) -> None:
    found = decide(site.view, RULES)
    ended = {order.job for order in found.orders if order.cause is Cause.RECLAIM and order.job not in _leaving(site)}
    if not ended:
        return
    assert site.view.starts
    assert ended <= {int(str(loan.job)) for capacity in site.view.capacities for loan in capacity.lent}
    no_reclaim = replace(RULES, reclaim=False)
    still_ended = {order.job for order in decide(site.view, no_reclaim).orders if order.cause is Cause.RECLAIM}
    assert not still_ended & ended


def _leaving(site: Site) -> set[int]:
    return {job for job, loan in site.view.loans.items() if loan.leaving}


@any_site
@given(sites)
def test_next_round_reclaims_no_further_loans_for_the_same_inference(site: Site) -> None:
    found = decide(site.view, RULES)
    for order in found.orders:
        if order.kind is OrderKind.SIGNAL:
            site.ledger.signal(order.job, order.cause, order.why, order.inference)
            site.ledger.confirm(order.job, NOW)
        elif order.kind is OrderKind.REQUEUE:
            site.ledger.requeue(order.job, order.cause, order.why, order.inference)
            site.ledger.confirm(order.job, NOW)
    reclaimed = {order.job for order in found.orders if order.cause is Cause.RECLAIM}
    later = replace(site.view, loans=dict(site.ledger.open), ends_for=dict(site.ledger.ends_for))
    again = decide(later, RULES)
    reclaimed_again = {order.job for order in again.orders if order.cause is Cause.RECLAIM}
    assert reclaimed_again <= reclaimed | _leaving(site), "only loans that already end are reclaimed"


@any_site
@given(sites)
def test_same_snapshot_gives_the_same_decision(site: Site) -> None:
    assert decide(site.view, RULES) == decide(site.view, RULES)


@any_site
@given(sites)
def test_blackout_hours_stop_releases_but_not_reclaims(site: Site) -> None:
    normal, in_blackout = decide(site.view, RULES), decide(replace(site.view, blackout=True), RULES)
    assert not [order for order in in_blackout.orders if order.kind is OrderKind.RELEASE]
    reclaims = [order for order in normal.orders if order.cause is Cause.RECLAIM]
    assert [order for order in in_blackout.orders if order.cause is Cause.RECLAIM] == reclaims
