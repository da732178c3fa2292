"""Preemption for slices of other profiles: which jobs are chosen, how their runs end, and whole simulated runs."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.flightrecorder import FlightRecorder, read_entries, segments
from slurm_migbatch.decide.actions import MoveOrder
from slurm_migbatch.decide.capacity.model import Demand, Gpu, Lease, Mode, Node, PlannedMove, Reservation
from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.decide.recording.pseudonyms import CollectedNames, Pseudonyms, without_names
from slurm_migbatch.decide.recording.replay import replay
from slurm_migbatch.decide.snapshot import ClusterSnapshot
from slurm_migbatch.decide.supply.moves import MoveMemory, MoveRules, wanting, why_moved
from slurm_migbatch.decide.supply.preemption import AGAIN_S, GAIN_S, preempted_for
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.slurm.controller import ServiceController, pace_of
from slurm_migbatch.lab.slurm.run import ControllerInput, SimulatedSite, SiteNode, SlurmSimulation, Submission
from slurm_migbatch.lab.slurm.work import Fixed
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.preemption import Ending, PreemptedPartition, PreemptingQos, PreemptionRules
from tests.support.supply_gpus import H100, P, layouts, slot

NOW = 10_000.0
REQUEUED, CANCELLED = Ending(cancel=False), Ending(cancel=True, grace_s=20)
URGENT = 99


def site(ending: Ending = REQUEUED, exempt_s: float = 0.0) -> PreemptionRules:
    partitions = {"gpu": PreemptedPartition(10), "train": PreemptedPartition(1, ending)}
    return PreemptionRules("preempt/partition_prio", "REQUEUE", exempt_s, partitions)


class World:
    """Nodes of one or more H100s with running jobs, and a pending job of the partition gpu.

    Args:
        nodes: for each node the used slots of each GPU, such as "3g.40gb@0 1g.10gb@4"; jobs are numbered in order.
        wants: the slices of the pending job.
        ran_s: for how long jobs have run; 600 s by default.
        other: fields of the rows of jobs.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[str]],
        wants: Mapping[str, int],
        ran_s: Mapping[int, float] | None = None,
        other: Mapping[int, Mapping[str, object]] | None = None,
        **waiting: object,
    ) -> None:
        self.nodes: dict[str, Node] = {}
        rows, job = [], 0
        for number, words in enumerate(nodes, 1):
            gpus = []
            for index, text in enumerate(words):
                leases = []
                for word in text.split():
                    job += 1
                    leases.append(Lease(slot(word), job, NOW + 5000))
                    fields: dict[str, object] = {
                        "partition": "train",
                        "state": "RUNNING",
                        "nodes": (f"n{number}",),
                        "cpus": 1,
                        "start": NOW - (ran_s or {}).get(job, 600.0),
                        "gres": f"gres/mig:{leases[-1].slot.profile}",
                        **(other or {}).get(job, {}),
                    }
                    rows.append(JobRow(job, **fields))  # type: ignore[arg-type]
                gpus.append(Gpu(f"{number}{'abcd'[index]}", H100, tuple(leases)))
            self.nodes[f"n{number}"] = Node(f"n{number}", tuple(gpus))
        parts = tuple((P(profile), count) for profile, count in wants.items())
        self.demand = Demand(URGENT, parts, frozenset(self.nodes))
        self.rows = {row.job_id: row for row in rows}
        waiting = {"partition": "gpu", "gres": "gres/mig:x:1", "cpus": 1, **waiting}
        self.rows[URGENT] = JobRow(URGENT, **waiting)  # type: ignore[arg-type]
        self.later: dict[int, float] = {}
        self.reservations = [Reservation(URGENT, 0, (), None)]

    def chosen(
        self,
        rules: PreemptionRules | None = None,
        now: float = NOW,
        cpus_used: int = 0,
        fixed: Collection[int] = (),
        cpus: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[int, Ending]:
        states, of_node = frozenset({"MIXED"}), dict.fromkeys(self.nodes, 64) | dict(cpus)
        slurm_nodes = tuple(
            NodeRow(name, states, partitions=("gpu", "train"), cpus=of_node[name], cpus_used=cpus_used)
            for name in self.nodes
        )
        snapshot = ClusterSnapshot(now, tuple(self.rows.values()), slurm_nodes, preemption=rules or site())
        memory = MoveMemory(loaded=True, waits={URGENT: NOW - 60}, fixed=set(fixed), later=self.later)
        jobs = wanting(memory, self.reservations, now, replace(MoveRules(), gain_s=GAIN_S))
        found = preempted_for(snapshot, jobs, self.reservations, [self.demand], self.nodes, self.rows, memory)
        assert {move.waiting for move in found} <= {URGENT}
        return {move.job: move.ending for move in found if move.ending is not None}


FULL = ["4g.40gb@0 3g.40gb@4"]


def test_jobs_in_the_place_of_a_larger_slice_are_preempted() -> None:
    assert World([FULL], {"7g.80gb": 1}).chosen() == {1: REQUEUED, 2: REQUEUED}
    assert World([FULL], {"7g.80gb": 1}).chosen(site(CANCELLED)) == {1: CANCELLED, 2: CANCELLED}


def test_the_jobs_that_lose_least_are_chosen() -> None:
    gpus = [["4g.40gb@0 3g.40gb@4", "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 3g.40gb@4"]]
    assert set(World(gpus, {"7g.80gb": 1}, {1: 9000}).chosen()) == {3, 4, 5, 6, 7}
    assert set(World(gpus, {"7g.80gb": 1}, {7: 9000}).chosen()) == {1, 2}
    assert set(World(gpus, {"2g.20gb": 1}, {2: 100, 3: 900, 4: 900, 5: 300, 6: 200}).chosen()) == {2}
    assert set(World(gpus, {"2g.20gb": 1}, {3: 900, 4: 900, 5: 30, 6: 20}).chosen()) == {5, 6}


def test_several_slices_are_freed_on_one_node() -> None:
    nodes = [["7g.80gb@0", "4g.40gb@0 3g.40gb@4"], ["4g.40gb@0 3g.40gb@4", "4g.40gb@0 3g.40gb@4"]]
    assert set(World(nodes, {"7g.80gb": 2}).chosen()) == {1, 2, 3}
    assert set(World(nodes, {"7g.80gb": 2}, {1: 9000}).chosen()) == {4, 5, 6, 7}
    world = World(nodes, {"7g.80gb": 1}, other={1: {"partition": "gpu"}})
    world.demand = replace(world.demand, nodes=2)
    assert len(world.chosen()) == 4, "two jobs on each node"


def test_nothing_if_slurm_can_preempt_by_itself() -> None:
    assert not World([[*FULL, "7g.80gb@0"]], {"7g.80gb": 1}).chosen()
    assert World([[*FULL, "7g.80gb@0"]], {"7g.80gb": 1}, other={3: {"partition": "gpu"}}).chosen()


@pytest.mark.parametrize(
    ("first", "chosen"), [("7g.80gb@0", {1, 2, 3}), ("", {1, 2})], ids=["slurm could preempt there", "idle"]
)
def test_slurm_cannot_preempt_for_a_job_on_two_nodes_on_one_of_them_alone(first: str, chosen: set[int]) -> None:
    world = World([[first], FULL], {"7g.80gb": 1})
    world.demand = replace(world.demand, nodes=2)
    assert set(world.chosen()) == chosen
    by_itself = World([["7g.80gb@0"], ["7g.80gb@0"], FULL], {"7g.80gb": 1})
    by_itself.demand = replace(by_itself.demand, nodes=2)
    assert not by_itself.chosen()
    by_itself.later.clear()
    by_itself.nodes["n1"] = Node("n1", (Gpu("1a", H100, (), Layout([slot("7g.80gb@0")])),))
    assert not by_itself.chosen(), "one offers the slice"


def test_slurm_cannot_preempt_where_others_have_the_cpus() -> None:
    world = World([["7g.80gb@0"], FULL], {"7g.80gb": 1}, cpus=4)
    assert not world.chosen(cpus_used=8)
    world.later.clear()
    assert set(world.chosen(cpus_used=8, cpus={"n1": 10})) == {2, 3}


@pytest.mark.parametrize(
    "fields",
    [
        {"partition": "gpu"},
        {"state": "COMPLETING"},
        {"state": "SUSPENDED"},
        {"het_job": 1},
        {"comment": "migbatch: role=train signal=usr1 [mig:loan:1#loan0001]"},
        {"start": None},
    ],
    ids=["of a higher tier", "ending", "suspended", "heterogeneous", "on loan", "starting"],
)
def test_other_jobs_are_not_preempted(fields: Mapping[str, object]) -> None:
    assert not World([FULL], {"7g.80gb": 1}, other={2: fields}).chosen()


def test_not_before_the_exempt_time() -> None:
    assert not World([FULL], {"7g.80gb": 1}, {1: 1700, 2: 1900}).chosen(site(exempt_s=1800))
    assert World([FULL], {"7g.80gb": 1}, {1: 1800, 2: 1900}).chosen(site(exempt_s=1800))


def test_only_if_the_node_then_has_the_cpus() -> None:
    assert World([FULL], {"7g.80gb": 1}, cpus=3).chosen(cpus_used=63)
    assert not World([FULL], {"7g.80gb": 1}, cpus=4).chosen(cpus_used=63)
    assert not World([FULL], {"7g.80gb": 1}, exclusive=True).chosen()


def test_slots_of_jobs_that_end_anyway_and_unknown_ones_are_left() -> None:
    for change in (
        {"guest": True},
        {"stopping": True},
        {"job": None},
    ):
        world = World([FULL], {"7g.80gb": 1})
        (gpu,) = world.nodes["n1"].gpus
        leases = (gpu.leases[0]._replace(**change), gpu.leases[1])  # type: ignore[arg-type]
        world.nodes["n1"] = Node("n1", (Gpu(gpu.uuid, H100, leases),))
        assert not world.chosen(), change
    world = World([FULL], {"7g.80gb": 1})
    for node in (replace(world.nodes["n1"], mode=Mode.FROZEN), replace(world.nodes["n1"], used={P("1g.10gb"): 1})):
        world.nodes["n1"] = node
        assert not world.chosen()


def test_a_job_that_cannot_be_stopped_is_left() -> None:
    assert not World([FULL], {"7g.80gb": 1}).chosen(fixed={2})


@pytest.mark.parametrize("place", [0, 511, 512, 1100])
def test_every_node_of_a_large_site_is_looked_at(place: int) -> None:
    kept: dict[int, Mapping[str, object]] = {job + 1: {"partition": "gpu"} for job in range(1101) if job != place}
    world = World([["7g.80gb@0"]] * 1101, {"1g.10gb": 1}, other=kept)
    assert any(world.chosen(now=NOW + 15 * number) == {place + 1: REQUEUED} for number in range(6))


def test_slots_that_are_reserved_for_others_are_left() -> None:
    world = World([[*FULL, *FULL]], {"7g.80gb": 1})
    world.rows[98] = JobRow(98, partition="train")
    world.reservations.append(Reservation(98, 0, (("n1", "1a", slot("3g.40gb@4")),), None))
    assert set(world.chosen()) == {3, 4}


def test_a_job_that_does_not_start_all_the_same_has_no_more_jobs_preempted_soon() -> None:
    world = World([[*FULL, *FULL]], {"7g.80gb": 1})
    assert world.chosen()
    assert not world.chosen(now=NOW + AGAIN_S - 1)
    assert world.chosen(now=NOW + AGAIN_S)
    for soon in (NOW + 30, NOW - 30):  # by time limits
        world = World([FULL], {"7g.80gb": 1})
        world.reservations = [Reservation(URGENT, 0, (), soon)]
        assert not world.chosen()


def test_one_pending_job_is_served_in_a_round() -> None:
    world = World([[*FULL, *FULL]], {"7g.80gb": 1})
    world.rows[98] = replace(world.rows[URGENT], job_id=98, uid=7)
    demands = [world.demand, replace(world.demand, job=98)]
    reservations = [*world.reservations, Reservation(98, 0, (), None)]
    snapshot = ClusterSnapshot(NOW, nodes=(NodeRow("n1", frozenset()),), preemption=site())
    memory = MoveMemory(loaded=True)
    for waiting, victims in ((URGENT, {1, 2}), (98, {3, 4})):
        found = preempted_for(snapshot, {URGENT, 98}, reservations, demands, world.nodes, world.rows, memory)
        assert {(move.waiting, move.job) for move in found} == {(waiting, victim) for victim in victims}
        memory.begin(found, JobQueue.of(world.rows.values()))
        leaving = [
            lease._replace(stopping=lease.job in victims) for gpu in world.nodes["n1"].gpus for lease in gpu.leases
        ]
        first, second = world.nodes["n1"].gpus
        gpus = (replace(first, leases=tuple(leaving[:2])), replace(second, leases=tuple(leaving[2:])))
        world.nodes["n1"] = Node("n1", gpus)


@st.composite
def crowded(draw: st.DrawFn) -> World:
    """Nodes with jobs anywhere, of which some may be preempted."""
    nodes, count = [], 0
    for _ in range(draw(st.integers(1, 2))):
        words = []
        for _ in range(draw(st.integers(1, 2))):
            taken = draw(layouts())
            words.append(" ".join(f"{s.profile.name}@{s.placement.start}" for s in taken.slots))
            count += len(taken.slots)
        nodes.append(words)
    profiles = [info.profile.name for info in H100.profiles if not info.profile.suffix]
    wants = {draw(st.sampled_from(profiles)): draw(st.integers(1, 2))}
    fixed = {job: {"partition": "gpu"} for job in range(1, count + 1) if draw(st.booleans())}
    return World(nodes, wants, {job: draw(st.integers(0, 9000)) for job in range(1, count + 1)}, fixed)


@given(crowded())
def test_what_is_preempted_makes_room_and_no_more_than_that(world: World) -> None:
    found = world.chosen()
    if not found:
        return
    assert all(world.rows[job].partition == "train" for job in found)
    (name,) = {world.rows[job].nodes[0] for job in found}

    def fits(without: set[int]) -> bool:
        wanted = list(world.demand.slices)
        for gpu in world.nodes[name].gpus:
            taken = Layout(lease.slot for lease in gpu.leases if lease.job not in without)
            for profile in list(wanted):
                for some in H100.info(profile).slots:
                    if H100.fits(taken, some):
                        taken = taken.add(some)
                        wanted.remove(profile)
                        break
        return not wanted

    assert fits(set(found))
    assert not fits(set()) or len(world.demand.slices) > 1


# -- the steps ---------------------------------------------------------------------------------------------------------


def stopping(ending: Ending) -> MoveMemory:
    memory = MoveMemory(loaded=True)
    memory.begin([PlannedMove(5, URGENT, ending)], JobQueue.of([low(), JobRow(URGENT)]))
    return memory


def low(**fields: object) -> JobRow:
    values: dict[str, object] = {"state": "RUNNING", "nodes": ("n1",), "start": NOW - 600, **fields}
    return JobRow(5, **values)  # type: ignore[arg-type]


def orders(memory: MoveMemory, *rows: JobRow, now: float) -> tuple[MoveOrder, ...]:
    queue = JobQueue.of(rows)
    assert not memory.follow(ClusterSnapshot(now, jobs=rows), queue), "no preempted job is started sooner"
    return memory.due(now, MoveRules(), queue)


def test_a_job_is_requeued_at_once_without_a_grace_time() -> None:
    memory = stopping(REQUEUED)
    assert why_moved(URGENT, memory) == "job 5 is preempted for it"
    (order,) = orders(memory, low(), JobRow(URGENT), now=NOW)
    assert (order.signal, order.cancel, order.preempts) == ("", False, True)
    assert not orders(memory, low(state="PENDING", restarts=1, nodes=()), JobRow(URGENT), now=NOW + 1)
    assert not memory.moves


def test_a_job_is_cancelled_after_its_grace_time() -> None:
    memory = stopping(CANCELLED)
    (order,) = orders(memory, low(), JobRow(URGENT), now=NOW)
    assert (order.signal, order.cancel) == ("TERM", False)
    assert not orders(memory, low(), JobRow(URGENT), now=NOW + 19)
    (order,) = orders(memory, low(), JobRow(URGENT), now=NOW + 20)
    assert (order.signal, order.cancel) == ("", True)


def test_a_job_that_cannot_be_requeued_is_cancelled_like_by_slurm() -> None:
    memory, now, found = stopping(REQUEUED), NOW, []
    for _ in range(100):
        found += [order.cancel for order in orders(memory, low(), JobRow(URGENT), now=now)]
        now += 1
    assert found == [False, False, True]
    assert memory.fixed == {5} and not memory.moves


@pytest.mark.parametrize("rows", [(), (JobRow(URGENT, state="RUNNING"),)], ids=["cancelled", "started elsewhere"])
def test_a_job_goes_on_if_the_other_one_no_longer_waits(rows: tuple[JobRow, ...]) -> None:
    memory = stopping(CANCELLED)
    orders(memory, low(), JobRow(URGENT), now=NOW)
    assert not orders(memory, low(), *rows, now=NOW + 30)
    assert not memory.moves


def test_a_restarted_service_ends_the_job_that_the_record_says_is_preempted() -> None:
    """Otherwise it chose again, perhaps other jobs, and those that had got SIGTERM went on."""
    signalled: dict[str, Any] = {
        "kind": "preempt", "outcome": "", "ts": NOW - 10, "job_id": 5, "restart": 0, "why": "", "after": "TERM",
    }  # fmt: skip
    memory = MoveMemory()
    memory.load([signalled, {**signalled, "job_id": 6}], NOW, {5: CANCELLED}.get)
    assert memory.moves.keys() == {5}, "the other one is no longer listed"
    assert not orders(memory, low(), JobRow(URGENT), now=NOW)
    (order,) = orders(memory, low(), JobRow(URGENT), now=NOW + 10)
    assert (order.signal, order.cancel, order.preempts) == ("", True, True)
    again = MoveMemory()
    again.load([signalled, {**signalled, "ts": NOW - 1, "after": "CANCELLED"}], NOW, {5: CANCELLED}.get)
    assert not orders(again, low(state="COMPLETING"), JobRow(URGENT), now=NOW + 1)
    assert again.moves and not orders(again, JobRow(URGENT), now=NOW + 2)
    assert not again.moves


# -- whole simulated runs ----------------------------------------------------------------------------------------------

A100 = geometry("a100-80gb")


def submit(at: float, profile: str, partition: str) -> Submission:
    qos = {"gpu": "secret-urgent", "train": "secret-low"}[partition]
    fields = {"cpus": 1, "comment": "", "qos": qos}
    work = partial(Fixed, 900.0)
    return Submission(at, f"mig:{profile}:1", work, partition, limit_s=7200, name=f"{profile}@{at:g}", fields=fields)


def simulated(rules: PreemptionRules | None, recordings: Path | None = None) -> tuple[float, list[int], dict[str, int]]:
    """Fill two GPUs with jobs of low tier, one of them later, then submit one for a whole GPU.

    Args:
        recordings: directory for the recorded decisions; None: they are not recorded.

    Returns:
        Its wait, the restarts of the others, and the number of actions of each kind.
    """
    early = [submit(0, "4g.40gb", "train"), submit(0, "3g.40gb", "train")]
    late = [submit(300, "2g.20gb", "train") for _ in range(3)]
    jobs = [*early, *late, submit(400, "7g.80gb", "gpu")]
    simulation = SlurmSimulation(SimulatedSite((SiteNode("n1", (A100, A100), ("gpu", "train")),)), jobs)
    controller = ServiceController(simulation, Config())
    if rules is not None:
        controller.observer.preemption = rules
    control = controller.controller
    if recordings is not None:
        control.recorder = FlightRecorder(recordings, control.settings, hours=1, megabytes=10)

    def run_round(seen: ControllerInput) -> bool:
        again = controller(seen)
        if control.recorder is not None:
            control.recorder.flush()
        return again

    outcome = simulation.run(run_round, pace_of(Config()))
    if control.recorder is not None:
        control.recorder.close()
    ran = [outcome.jobs[job] for job in outcome.submissions if job is not None]
    assert [job.state for job in ran] == ["COMPLETED"] * len(ran)
    return (ran[-1].start or math.inf) - ran[-1].submit, [job.restarts for job in ran], dict(controller.record.actions)


def test_a_job_of_a_higher_tier_gets_the_place_of_those_that_lose_least() -> None:
    wait, restarts, actions = simulated(site())
    assert wait < 45
    assert restarts == [0, 0, 1, 1, 1, 0]
    assert actions["preempt"] == 3


@pytest.mark.slow
def test_recorded_preemptions_by_qos_are_decided_alike_also_without_names(tmp_path: Path) -> None:
    qos = {"secret-urgent": PreemptingQos(frozenset({"secret-low"})), "secret-low": PreemptingQos(grace_s=5)}
    _, restarts, actions = simulated(PreemptionRules("preempt/qos", "REQUEUE", qos=qos), tmp_path)
    assert restarts == [0, 0, 1, 1, 1, 0] and actions["preempt"] == 6, "signalled, and requeued"
    entries = [entry for path in segments(tmp_path) for entry in read_entries(path)]
    names = CollectedNames()
    assert list(without_names(entries, names))
    without = list(without_names(entries, Pseudonyms(names)))
    assert "secret" in json.dumps(entries) and "secret" not in json.dumps(without)
    for recording in (entries, without):
        rounds = list(replay(json.loads(json.dumps(recording))))
        assert any("moves" in entry.get("actions", ()) for entry in recording)
        assert rounds and not any(recorded.differences or recorded.unknown for recorded in rounds)


def test_without_rules_no_job_is_preempted() -> None:
    wait, restarts, actions = simulated(None)
    assert wait > 300 and not any(restarts) and not actions.get("preempt")


def crowd(*urgent: Submission, blocked: bool, hours: float) -> tuple[list[int], dict[int, str]]:
    """Submit these jobs while long jobs of low tier fill two GPUs.

    Args:
        blocked: Slurm starts no job of the partition gpu, as if other users' jobs kept it from the node.

    Returns:
        The restarts of the long jobs, and the states of the other jobs and tasks that are left.
    """
    long = [replace(submit(0, "3g.40gb", "train"), limit_s=172800, work=partial(Fixed, 172000.0)) for _ in range(4)]
    simulation = SlurmSimulation(SimulatedSite((SiteNode("n1", (A100, A100), ("gpu", "train")),)), [*long, *urgent])
    controller = ServiceController(simulation, Config())
    controller.observer.preemption = site()
    placing = simulation.slurm._placing
    fit = placing.fit

    def fit_unless_blocked(shape: Any, *arguments: Any, **options: Any) -> tuple[str, ...] | None:
        return None if blocked and shape.partition == "gpu" else fit(shape, *arguments, **options)

    placing.fit = fit_unless_blocked  # type: ignore[method-assign]
    simulation.run(controller, pace_of(Config()), until=hours * 3600)
    rows = simulation.slurm.jobs()
    low = sorted((row for row in rows if row.partition == "train"), key=lambda row: row.job_id)
    return [row.restarts for row in low], {row.job_id: row.state for row in rows if row.partition == "gpu"}


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 6])
def test_less_and_less_is_preempted_for_a_user_whose_jobs_do_not_start_all_the_same(jobs: int) -> None:
    waiting = [submit(100 + number, "7g.80gb", "gpu") for number in range(jobs)]
    restarts, states = crowd(*waiting, blocked=True, hours=12)
    assert set(states.values()) == {"PENDING"}
    assert 0 < sum(restarts) <= 14, "two jobs each time, after 10, 20, 40, 80, 160 and 320 minutes"


def test_tasks_of_an_array_preempt_one_after_the_other() -> None:
    array = replace(submit(100, "7g.80gb", "gpu"), tasks=2, work=partial(Fixed, 7000.0))
    restarts, states = crowd(array, blocked=False, hours=0.1)
    assert restarts == [1, 1, 1, 1] and set(states.values()) == {"RUNNING"}
