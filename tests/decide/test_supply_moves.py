"""Training jobs moved for larger slices: which one, the steps, and whole runs on the simulated Slurm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.settings import settings_of
from slurm_migbatch.decide.actions import MoveOrder
from slurm_migbatch.decide.capacity.model import ClusterPlan, Demand, Gpu, Lease, Node, Restartable
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.decide.snapshot import ClusterSnapshot, Report
from slurm_migbatch.decide.supply import resources
from slurm_migbatch.decide.supply.moves import Move, MoveMemory, MoveRules, restartable, why_moved
from slurm_migbatch.decide.supply.planner import Moving, Planner
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.slurm.controller import ServiceController, pace_of
from slurm_migbatch.lab.slurm.run import ControllerInput, SimulatedSite, SiteNode, SlurmSimulation, Submission
from slurm_migbatch.lab.slurm.work import Fixed, SimulatedTraining, Work
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import WHOLE, JobRow, NodeRow, SlurmRefused
from tests.support.examples import examples
from tests.support.supply_gpus import H100, P, layouts, slot

NOW = 10_000.0
RULES = MoveRules()
HINTS = "migbatch: role=train signal=usr1"
WHY = "job 9 needs a larger slice"


# -- which job is moved ------------------------------------------------------------------------------------------------


def gpu(name: str, used: str, first: int) -> Gpu:
    leases = tuple(Lease(slot(word), first + i, NOW + 5000) for i, word in enumerate(used.split()))
    return Gpu(name, H100, leases)


def node(name: str, *gpus: Gpu) -> Node:
    used: dict[Profile, int] = {}
    for lease in (lease for some in gpus for lease in some.leases):
        used[lease.slot.profile] = used.get(lease.slot.profile, 0) + 1
    return Node(name, gpus, used)


def may_move(
    nodes: Iterable[Node], jobs: Iterable[int], pool: Sequence[str] = ("n1",), elsewhere: Sequence[str] | None = None
) -> tuple[Restartable, ...]:
    found = {lease.job: (node.name, gpu.uuid, lease) for node in nodes for gpu in node.gpus for lease in gpu.leases}
    return tuple(
        Restartable(
            Demand(job, ((lease.slot.profile, 1),), frozenset(pool)),
            name,
            uuid,
            lease.slot,
            lease.until,
            frozenset(pool if elsewhere is None else elsewhere),
        )
        for job in jobs
        for name, uuid, lease in [found[job]]
    )


def wants(job: int, profile: str, pool: Sequence[str] = ("n1",)) -> Demand:
    return Demand(job, ((P(profile), 1),), frozenset(pool))


def plan(nodes: Sequence[Node], demands: Sequence[Demand], moving: Moving) -> ClusterPlan:
    return Planner().plan(nodes, demands, NOW, moving=moving)


TWO_HALVES = (node("n1", gpu("a", "3g.40gb@0", 1), gpu("b", "3g.40gb@0", 2)),)


def test_training_job_that_fits_elsewhere_is_moved() -> None:
    moving = Moving(wanting=frozenset({9}), candidates=may_move(TWO_HALVES, [2]))
    found = plan(TWO_HALVES, [wants(9, "7g.80gb")], moving)
    assert [(move.job, move.waiting) for move in found.moves] == [(2, 9)]
    assert P("3g.40gb") in found.nodes["n1"].offers, "a slot is reserved for it"


def test_no_move_if_the_job_fits_has_not_waited_or_no_job_is_movable() -> None:
    both = may_move(TWO_HALVES, [1, 2])
    assert not plan(TWO_HALVES, [wants(9, "3g.40gb")], Moving((), frozenset({9}), both)).moves
    assert not plan(TWO_HALVES, [wants(9, "7g.80gb")], Moving((), frozenset({8}), both)).moves
    assert not plan(TWO_HALVES, [wants(9, "7g.80gb")], Moving((), frozenset({9}), ())).moves


def test_no_move_if_it_frees_no_usable_room_or_the_job_fits_nowhere_else() -> None:
    nodes = (*TWO_HALVES, node("n2", gpu("c", "", 3)))
    full = (node("n1", gpu("a", "3g.40gb@0", 1), gpu("b", "4g.40gb@0 3g.40gb@4", 2)),)
    assert not plan(full, [wants(9, "7g.80gb")], Moving((), frozenset({9}), may_move(full, [1]))).moves
    elsewhere = Moving((), frozenset({9}), may_move(nodes, [1, 2], ("n1",)))
    assert not plan(nodes, [wants(9, "7g.80gb", ("n2",)), wants(10, "7g.80gb", ("n2",))], elsewhere).moves


def test_no_move_to_a_node_without_free_cpus_for_the_job() -> None:
    nodes = (node("n1", gpu("a", "3g.40gb@0", 1)), node("n2", gpu("b", "4g.40gb@0", 2)))
    queue = [wants(9, "7g.80gb", ("n1",))]
    for elsewhere, moves in ((["n2"], 1), ([], 0)):
        candidates = may_move(nodes, [1], ("n1", "n2"), elsewhere)
        assert len(plan(nodes, queue, Moving((), frozenset({9}), candidates)).moves) == moves


def test_place_for_a_training_job_that_is_being_moved_is_kept() -> None:
    nodes = (node("n1", gpu("a", "4g.40gb@0", 1)),)
    leaving = Moving(leaving=(wants(5, "3g.40gb"),))
    found = plan(nodes, [wants(9, "2g.20gb"), wants(10, "1g.10gb")], leaving)
    assert found.nodes["n1"].offers == {P("3g.40gb"): 1}
    assert set(found.placed) == set(), "a running job is not a placed one"


@st.composite
def crowded(draw: st.DrawFn) -> tuple[list[Node], list[int], list[Demand]]:
    """Nodes with jobs anywhere, the jobs that may be moved, and a queue."""
    nodes, jobs = [], 0
    for name in ("n1", "n2"):
        gpus = []
        for number in range(draw(st.integers(1, 2))):
            taken = draw(layouts(most=4))
            leases = tuple(Lease(some, jobs + i, NOW + 5000) for i, some in enumerate(taken.slots))
            jobs += len(leases)
            gpus.append(Gpu(f"{name}-{number}", H100, leases))
        nodes.append(node(name, *gpus))
    movable = [job for job in range(jobs) if draw(st.booleans())]
    profiles = [info.profile for info in H100.profiles if not info.profile.suffix]
    pools = st.sampled_from([("n1",), ("n2",), ("n1", "n2")])
    queue = [wants(100 + i, draw(st.sampled_from(profiles)).name, draw(pools)) for i in range(draw(st.integers(1, 4)))]
    return nodes, movable, queue


@given(crowded())
@settings(max_examples=examples(200), deadline=None)
def test_every_move_makes_room_and_moved_job_fits_elsewhere(world: tuple[list[Node], list[int], list[Demand]]) -> None:
    nodes, movable, queue = world
    candidates = may_move(nodes, movable, ("n1", "n2"))
    without = plan(nodes, queue, Moving())
    found = plan(nodes, queue, Moving((), frozenset(demand.job for demand in queue), candidates))
    assert len(found.moves) <= 1
    for move in found.moves:
        assert move.job in movable
        assert move.waiting in without.waiting
        target = next(demand for demand in queue if demand.job == move.waiting)
        run = next(run for run in candidates if run.demand.job == move.job)
        held = next(gpu for node in nodes for gpu in node.gpus if gpu.uuid == run.gpu)
        assert run.node in target.pool
        rest = held.occupied.remove(run.slot)
        assert _has_room(rest, target.slices[0])
        others = [gpu.occupied if gpu is not held else rest for node in nodes for gpu in node.gpus]
        assert any(_has_room(taken, run.slot.profile) for taken in others)
    for name, planned in found.nodes.items():  # whatever moves, a running job keeps its slot until it has ended
        for some in next(node for node in nodes if node.name == name).gpus:
            assert all(not planned_slot.placement.mask & some.occupied.mask or planned_slot in some.occupied
                       for planned_slot in planned.layouts[some.uuid].slots)  # fmt: skip


def _has_room(taken: Layout, profile: Profile) -> bool:
    return any(H100.fits(taken, candidate) for candidate in H100.info(profile).slots)


# -- the steps of a move -----------------------------------------------------------------------------------------------


def row(job: int = 5, **more: Any) -> JobRow:
    fields = {"state": "RUNNING", "gres": "gres/mig:3g.40gb:1", "comment": HINTS, "nodes": ("n1",), "start": NOW - 900}
    return JobRow(job, **{**fields, **more})


def followed(memory: MoveMemory, *rows: JobRow, now: float, reports: Any = ()) -> tuple[MoveOrder, ...]:
    queue = JobQueue.of(rows)
    memory.follow(ClusterSnapshot(now, jobs=rows, reports=reports), queue)
    return memory.due(now, RULES, queue)


def moving() -> MoveMemory:
    return MoveMemory(moves={5: Move(5, 0, 9, WHY)}, loaded=True)


def test_moved_job_is_signalled_and_requeued_after_its_checkpoint() -> None:
    memory = moving()
    (order,) = followed(memory, row(), now=NOW)
    assert (order.signal, order.restart) == ("USR1", 0)
    assert "job 9 needs a larger slice" in order.why
    assert not followed(memory, row(), now=NOW + 3)
    assert not followed(memory, row(), now=NOW + 4, reports=[((5, 0), Report(checkpoint=NOW - 60))]), "an older one"
    (order,) = followed(memory, row(), now=NOW + 5, reports=[((5, 0), Report(checkpoint=NOW + 4))])
    assert not order.signal
    assert not followed(memory, row(state="COMPLETING", restarts=1), now=NOW + 6)
    queue = JobQueue.of([row(state="PENDING", reason="BeginTime", restarts=1, nodes=())])
    (start,) = memory.follow(ClusterSnapshot(NOW + 7, jobs=tuple(queue.jobs)), queue)
    assert (start, memory.moves) == (5, {})


@pytest.mark.parametrize(
    ("shown", "starts"),
    [
        ({"reason": "BeginTime"}, True),
        ({"reason": "None", "eligible": NOW + 120}, True),
        ({"reason": "Resources"}, False),
        ({"reason": "BeginTime", "gres": "gres:mig:3g.40gb:1"}, False),
    ],
    ids=["its begin", "unknown yet", "no delay", "an old slurmd may take it for its last run"],
)
def test_moved_job_restarts_at_once_where_slurm_allows_it(shown: dict[str, Any], starts: bool) -> None:
    memory = moving()
    queue = JobQueue.of([row(**{"state": "PENDING", "restarts": 1, "nodes": (), **shown})])
    found = memory.follow(ClusterSnapshot(NOW, jobs=tuple(queue.jobs)), queue)
    assert found == [5] * starts
    assert not memory.moves


@pytest.mark.parametrize(("restarts", "ran", "may"), [(0, 299, 0), (0, 300, 1), (1, 300, 0), (1, 600, 1), (3, 2399, 0)])
def test_each_restart_lengthens_the_time_before_the_next_move(restarts: int, ran: int, may: int) -> None:
    shown = row(restarts=restarts, start=NOW - ran)
    held = Gpu("a", H100, (Lease(slot("3g.40gb@0"), 5),))
    snapshot, queue = ClusterSnapshot(NOW, jobs=(shown,)), JobQueue.of([shown])
    found = restartable(MoveMemory(), snapshot, queue, {"n1": node("n1", held)}, again, RULES)
    assert [run.demand.job for run in found] == [5] * may


@pytest.mark.parametrize(("used", "named"), [(60, {"n1", "n2"}), (62, {"n1"})])
def test_job_may_move_only_to_nodes_with_enough_free_cpus(used: int, named: set[str]) -> None:
    held = Gpu("a", H100, (Lease(slot("3g.40gb@0"), 5),))
    rows = (NodeRow("n1", frozenset(), cpus=64), NodeRow("n2", frozenset(), cpus=64, cpus_used=used))
    snapshot = ClusterSnapshot(NOW, jobs=(row(cpus=4),), nodes=rows)
    queue = JobQueue.of(snapshot.jobs)
    (run,) = restartable(MoveMemory(), snapshot, queue, {"n1": node("n1", held)}, on_both, RULES)
    assert run.elsewhere == named


@pytest.mark.parametrize(("kinds", "known"), [(1, 8), (8, 3)])
def test_nodes_are_looked_at_a_limited_number_of_times(monkeypatch: pytest.MonkeyPatch, kinds: int, known: int) -> None:
    """Thousands of training jobs may run, and their users choose what they request."""
    monkeypatch.setattr(resources, "MOST_REQUESTS", 3)
    looks: list[str] = []
    has_resources_on = JobRow.has_resources_on

    def counted(row: JobRow, node: NodeRow) -> bool:
        looks.append(node.name)
        return has_resources_on(row, node)

    monkeypatch.setattr(JobRow, "has_resources_on", counted)
    gpus = [Gpu(f"g{job}", H100, (Lease(slot("3g.40gb@0"), job),)) for job in range(1, 9)]
    jobs = tuple(row(job, cpus=1 + job % kinds) for job in range(1, 9))
    rows = (NodeRow("n1", frozenset(), cpus=64), NodeRow("n2", frozenset(), cpus=64))
    snapshot = ClusterSnapshot(NOW, jobs=jobs, nodes=rows)
    found = restartable(MoveMemory(), snapshot, JobQueue.of(jobs), {"n1": node("n1", *gpus)}, on_both, RULES)
    assert sorted(len(run.elsewhere) for run in found) == [0] * (8 - known) + [2] * known
    assert len(looks) == 2 * min(kinds, 3)


def test_cpus_of_loans_count_as_free_for_the_job_that_gets_the_place() -> None:
    held = Gpu("a", H100, (Lease(slot("3g.40gb@0"), 5),))
    loan = row(6, cpus=8, comment="migbatch: role=train [mig:loan:1]")
    snapshot = ClusterSnapshot(NOW, (row(cpus=4), loan), (NodeRow("n1", frozenset(), cpus=64, cpus_used=60),))
    (run,) = restartable(MoveMemory(), snapshot, JobQueue.of(snapshot.jobs), {"n1": node("n1", held)}, again, RULES)
    assert (run.cpus, run.cpus_free) == (4, 12)


def test_no_move_for_a_job_that_then_lacks_memory_or_to_a_node_without_memory() -> None:
    held = Gpu("a", H100, (Lease(slot("3g.40gb@0"), 5),))
    rows = (
        NodeRow("n1", frozenset(), cpus=64, memory=500, memory_used=450),
        NodeRow("n2", frozenset(), cpus=64, memory=500, memory_used=450),
    )
    loan = row(6, memory_per_node=50, comment="migbatch: role=train [mig:loan:1]")
    for memory, named in ((50, {"n1", "n2"}), (100, set())):
        snapshot = ClusterSnapshot(NOW, (row(memory_per_node=memory), loan), rows)
        queue = JobQueue.of(snapshot.jobs)
        (run,) = restartable(MoveMemory(), snapshot, queue, {"n1": node("n1", held)}, on_both, RULES)
        assert run.elsewhere == named
        fits = [
            (asked, moves)
            for asked in (100, 101, 100 + memory, 101 + memory, WHOLE)
            for moves in (False, True)
            if run.leaves_resources(JobRow(9, memory_per_node=asked), moves=moves)
        ]
        assert fits == [(100, False), (100, True), (101, True), (100 + memory, True)]
    candidates = [replace(run, memory_free=100.0, memory_all=500) for run in may_move(TWO_HALVES, [2])]
    for asked, planned in ((100, 1), (101, 0), (WHOLE, 0)):
        moving = Moving((), frozenset({9}), tuple(candidates), {9: JobRow(9, memory_per_node=asked)})
        assert len(plan(TWO_HALVES, [wants(9, "7g.80gb")], moving).moves) == planned


def on_both(shown: JobRow) -> Demand:
    return wants(shown.job_id, "3g.40gb", ("n1", "n2"))


def again(shown: JobRow) -> Demand:
    return wants(shown.job_id, "3g.40gb")


def test_why_names_the_job_that_is_moved_for_a_pending_job() -> None:
    assert why_moved(9, moving()) == "job 5 is moved for it", "nothing of the other user's hints"
    assert why_moved(5, moving()) == why_moved(8, moving()) == ""


def test_moved_job_is_requeued_when_its_grace_time_is_over() -> None:
    memory = moving()
    followed(memory, row(), now=NOW)
    assert not followed(memory, row(), now=NOW + RULES.grace_s - 1)
    assert [order.signal for order in followed(memory, row(), now=NOW + RULES.grace_s)] == [""]


def test_moved_job_is_requeued_although_its_user_has_stopped_it() -> None:
    """A user may stop it by `scancel --signal=STOP` and continue it himself: its move stayed for good."""
    memory = moving()
    followed(memory, row(), now=NOW)
    stopped = row(state="STOPPED")
    assert not followed(memory, stopped, now=NOW + RULES.grace_s - 1)
    assert [order.signal for order in followed(memory, stopped, now=NOW + RULES.grace_s)] == [""]
    assert not followed(memory, row(state="STOPPED", restarts=1), now=NOW + RULES.grace_s + 1)
    assert not memory.moves


def test_move_does_not_wait_for_a_clock_that_was_set_back() -> None:
    memory = moving()
    followed(memory, row(), now=NOW)
    assert [order.signal for order in followed(memory, row(), now=NOW - 3600)] == [""]


def test_job_that_cannot_be_requeued_is_never_moved_again() -> None:
    memory = moving()
    steps, now = [], NOW
    for _ in range(200):
        steps += [order.signal for order in followed(memory, row(), now=now)]
        now += 1
    assert steps == ["USR1", "", "", ""]
    assert memory.fixed == {5}
    assert not memory.moves
    followed(memory, now=now)
    assert not memory.fixed, "forgotten with the job"


def no_ending(_job: int) -> None:
    """No job is preempted."""


def recorded(after: str, ts: float, **more: Any) -> dict[str, Any]:
    return {"kind": "move", "outcome": "", "ts": ts, "job_id": 5, "restart": 0, "why": WHY, "after": after, **more}


def test_restarted_service_continues_the_moves_in_the_record() -> None:
    actions = [recorded("USR1", NOW - 10)]
    memory = MoveMemory()
    memory.load(actions, NOW, no_ending)
    assert not followed(memory, row(), now=NOW)
    (order,) = followed(memory, row(), now=NOW + RULES.grace_s - 10)
    assert not order.signal
    memory = MoveMemory()
    memory.load([*actions, recorded("PENDING", NOW - 5)], NOW, no_ending)
    queue = JobQueue.of([row(state="PENDING", reason="BeginTime", restarts=1, nodes=())])
    assert memory.follow(ClusterSnapshot(NOW, jobs=tuple(queue.jobs)), queue) == [5]
    for other in (recorded("USR1", NOW - 900), recorded("USR1", NOW, outcome="no"), recorded("x", NOW, kind="signal")):
        memory = MoveMemory()
        memory.load([other], NOW, no_ending)
        assert memory.loaded and not memory.moves


@pytest.mark.parametrize(
    "rows", [(), (row(restarts=1),), (row(state="COMPLETED"),), (row(state="PENDING"),), (row(state="SUSPENDED"),)]
)
def test_a_move_ends_with_the_run(rows: tuple[JobRow, ...]) -> None:
    memory = moving()
    followed(memory, row(), now=NOW)
    assert not followed(memory, *rows, now=NOW + 1)
    assert not memory.moves


def test_a_move_ends_if_a_process_of_the_run_cannot_be_killed() -> None:
    """As of jobs that stay in COMPLETING for days: while it lasted no other training job was moved for that job."""
    memory = moving()
    followed(memory, row(), now=NOW)
    (order,) = followed(memory, row(), now=NOW + RULES.grace_s)
    assert not order.signal
    ending = row(state="COMPLETING", restarts=1)
    followed(memory, ending, now=NOW + RULES.grace_s + 600)
    assert memory.moves
    followed(memory, ending, now=NOW + RULES.grace_s + 601)
    assert not memory.moves


# -- whole simulated runs ----------------------------------------------------------------------------------------------

A100 = geometry("a100-80gb")
SITE = SimulatedSite((SiteNode("n1", (A100, A100)),))


def training(seconds: float) -> Work:
    return SimulatedTraining(seconds, lambda _profile: 1.0, start_s=0.0, restart_s=30.0, checkpoint_s=5.0)


def submit(at: float, profile: str, seconds: float, comment: str = "", limit: float = 2.0, **fields: Any) -> Submission:
    work = partial(training if comment else Fixed, seconds)
    job_fields = {"cpus": 1, "comment": comment, **fields}
    return Submission(
        at, f"mig:{profile}:1", work, limit_s=int(seconds * limit), name=f"{profile}@{at:g}", fields=job_fields
    )


#: run time of the training job of `halves`
TRAINS_S = 1800.0


def halves(comment: str = HINTS, **more: Any) -> list[Submission]:
    """Jobs that leave a training job on half of one GPU and another on half of the next; then one for a whole GPU."""
    return [
        submit(0, "4g.40gb", 400),
        submit(0, "3g.40gb", TRAINS_S, comment),
        submit(5, "4g.40gb", 2200),
        submit(420, "7g.80gb", 300, **more),
    ]


class Site:
    """A simulation with migbatchd; `restart_at`: at that second it is killed and another starts."""

    def __init__(self, jobs: Sequence[Submission], config: Config | None = None, restart_at: float = math.inf) -> None:
        self.simulation = SlurmSimulation(SITE, jobs)
        self.config = config or Config()
        self.controller = ServiceController(self.simulation, self.config)
        self.restart_at = restart_at
        outcome = self.simulation.run(self.round, pace_of(self.config))
        self.jobs = [outcome.jobs[job] for job in outcome.submissions if job is not None]
        self.begin = outcome.begin

    def round(self, seen: ControllerInput) -> bool:
        if seen.now - self.simulation.begin >= self.restart_at:
            self.restart_at = math.inf
            self.controller = ServiceController(self.simulation, self.config)
        return self.controller(seen)

    @property
    def waits(self) -> list[float]:
        return [(job.start or math.inf) - job.submit for job in self.jobs]


def test_training_job_is_moved_to_free_a_whole_gpu() -> None:
    site = Site(halves())
    assert site.waits[3] < 45
    assert [job.restarts for job in site.jobs] == [0, 1, 0, 0]
    assert all(job.state == "COMPLETED" for job in site.jobs)
    trained = site.jobs[1].end - site.begin
    assert TRAINS_S < trained < TRAINS_S + 100, "it continued from its checkpoint"
    assert site.controller.record.actions["move"] == 2, "signalled, and requeued"


@pytest.mark.parametrize(
    ("jobs", "config"),
    [
        (halves(), replace(Config(), moves=replace(Config().moves, enabled=False))),
        (halves("migbatch: role=train"), Config()),
        (halves("migbatch: role=infer signal=usr1"), Config()),
        (halves("signal=usr1 role=train"), Config()),
        (halves(), replace(Config(), moves=replace(Config().moves, gain_s=20_000.0))),
        (halves(), replace(Config(), moves=replace(Config().moves, rest_s=7000.0))),
    ],
    ids=["off", "no signal", "inference", "no hints", "no gain", "too young"],
)
def test_no_job_is_moved_without_permission_and_gain(jobs: list[Submission], config: Config) -> None:
    site = Site(jobs, config)
    assert site.waits[3] > TRAINS_S - 500, "it started when the training had ended"
    assert not any(job.restarts for job in site.jobs)
    assert all(job.state == "COMPLETED" for job in site.jobs)


@pytest.mark.parametrize(("cpus", "moves"), [(5, 1), (6, 0)])
def test_no_job_is_moved_for_one_that_lacks_cpus_there(cpus: int, moves: int) -> None:
    jobs = halves(cpus=cpus)
    jobs[2] = submit(5, "4g.40gb", 2200, cpus=250)  # of the 256 of the node; the training job has 1
    assert sum(job.restarts for job in Site(jobs).jobs) == moves


@pytest.mark.parametrize(
    ("comment", "enabled", "most"),
    [(HINTS, True, 2), ("migbatch: role=train", True, 1), (HINTS, False, 1)],
    ids=["movable", "no signal", "off"],
)
def test_more_is_reserved_while_a_movable_training_job_runs(comment: str, enabled: bool, most: int) -> None:
    jobs = [submit(0, "4g.40gb", 600, comment if number == 0 else "") for number in range(8)]
    jobs += [submit(60, "7g.80gb", 60) for _ in range(4)]
    simulation = SlurmSimulation(SimulatedSite((SiteNode("n1", (A100,) * 8),)), jobs)
    config = replace(Config(), moves=replace(Config().moves, enabled=enabled))
    service, reserved = ServiceController(simulation, config), [0]

    def round_of(seen: ControllerInput) -> bool:
        again = service(seen)
        if seen.now - simulation.begin < 600:  # while the training runs
            reserved.append(len(service.controller.memory.supply.reservations))
        return again

    simulation.run(round_of, pace_of(config))
    assert max(reserved) == most


@pytest.mark.parametrize("at", [427.0, 430.0, 433.0, 440.0, 445.0, 450.0])
def test_move_survives_a_restart_of_migbatchd(at: float) -> None:
    site = Site(halves(), restart_at=at)
    assert all(job.state == "COMPLETED" for job in site.jobs)
    assert site.waits[3] < 300
    assert site.jobs[1].restarts <= 2
    assert site.jobs[1].end - site.begin < TRAINS_S + 300


def test_refused_requeue_leaves_every_job_running(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(_self: object, jobs: Iterable[str]) -> None:
        asked.append(list(jobs))
        raise SlurmRefused(dict.fromkeys(asked[-1], "Requested operation is presently disabled"), len(asked[-1]))

    monkeypatch.setattr("slurm_migbatch.lab.slurm.client.SimulatedSlurm.requeue_all", refuse)
    site = Site(halves())
    assert len(asked) == 3
    assert all(job.state == "COMPLETED" and not job.restarts for job in site.jobs)
    assert site.controller.record.actions["move"] == 1, "signalled, and no further change that Slurm accepted"


def test_moves_are_enabled_by_default() -> None:
    supply = settings_of(Config()).supply
    assert supply is not None
    assert supply.moves == RULES
