"""Pairs on one slice, with a simulated Slurm that only counts: no job starts on a slot that is not free."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.daemon.audit import audit
from slurm_migbatch.daemon.nodesview import LiveView
from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.decide.capacity.sharing import ALONE, NodeGuests, ends, is_guest, sharing, whose
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.slurm.client import JobRow
from tests.support.supply_gpus import H100, P, slot
from tests.support.supply_world import World

ONE = {"2g.20gb": 3, "none": 20}


def waiting(world: World, user: str = "", runs: float = 100.0) -> int:
    """A training job that waits to be released."""
    return world.slurm.submit("gres/mig:loan:1", runs=runs, reason="ReqNodeNotAvail", user=user)


def release(world: World, job: int, node: str = "n1") -> None:
    """Let the job share from now on, on that node."""
    world.slurm.change(job, gres="gres/mig:guest:1", reason="None", requested_nodes=node)


def paired(gpus: int = 1, host_runs: float = 1000.0, guest_runs: float = 1000.0) -> tuple[World, int, int]:
    """A world in which a job shares the only used slice."""
    world = World(gpus=gpus)
    world.step()
    host = world.slurm.submit("gres/mig:2g.20gb:1", runs=host_runs)
    world.steps(2)
    assert host in world.running()
    guest = waiting(world, runs=guest_runs)
    world.loop.share({guest: host})
    world.step()
    release(world, guest)
    world.steps(2)
    assert guest in world.running() and not world.nodes.misfits
    return world, host, guest


def count(world: World, kind: str, node: str = "n1") -> int:
    return world.slurm.machines[node].gres.get(kind, 0)


def test_guest_is_offered_only_once_the_node_has_the_plan() -> None:
    world = World(gpus=1)
    world.step()
    host = world.slurm.submit("gres/mig:2g.20gb:1", runs=1000)
    world.steps(2)
    guest = waiting(world)
    world.loop.share({guest: host})
    world.nodes.deaf.add("n1")
    world.round()
    assert count(world, "guest") == 0, "the node has not confirmed the plan yet"
    assert world.loop.shared == {guest: "n1"}
    world.nodes.deaf.clear()
    world.steps(2)
    assert count(world, "guest") == 1
    (place,) = world.nodes.guests["n1"].values()
    assert place[1] == "2g.20gb" and place[4:] == (host, 0)
    world.loop.share({})
    world.steps(2)
    assert count(world, "guest") == 0 and not world.nodes.guests["n1"] and not world.loop.shared


def test_guest_start_changes_no_counts_and_leaves_nothing_unexplained() -> None:
    world, host, guest = paired()
    assert set(world.nodes.second.values()) == {(guest, 0)}
    reports = world.steps(5)
    assert not any(r.notes or r.changes for r in reports)
    assert not audit(world.nodes.view.facts(), world.slurm.jobs())
    assert count(world, "guest") == 1, "it is counted as in use"
    assert host in world.running() and not world.nodes.guests["n1"]


def test_slot_is_never_counted_as_free_if_the_host_ends_first() -> None:
    world, host, guest = paired(host_runs=8, guest_runs=40)
    small = [world.slurm.submit("gres/mig:7g.80gb:1", runs=5), world.slurm.submit("gres/mig:2g.20gb:1", runs=200)]
    for _ in range(12):
        # the end is reported one round after Slurm has begun to use what is free
        world.clock.sleep(1)
        world.finish()
        world.start()
        world.prologs()
        world.step()
    assert host not in world.running() and guest in world.running()
    assert not world.nodes.misfits
    report = world.step()
    assert not report.notes and not audit(world.nodes.view.facts(), world.slurm.jobs())
    world.steps(60)
    assert not world.nodes.misfits and guest not in world.running() and small


def test_count_is_restored_if_the_guest_ends_first() -> None:
    world, host, guest = paired(guest_runs=10)
    held_back = count(world, "2g.20gb")
    world.steps(12)
    assert guest not in world.running() and host in world.running()
    assert count(world, "2g.20gb") == held_back + 1 and count(world, "guest") == 0
    assert not world.nodes.misfits


def test_free_slices_of_a_shared_profile_stay_available_to_other_jobs() -> None:
    world, _, _ = paired()
    jobs = [world.slurm.submit("gres/mig:2g.20gb:1", runs=1000) for _ in range(2)]
    world.steps(6)
    assert set(jobs) <= world.running() and not world.nodes.misfits


def test_pair_whose_host_has_ended_is_not_offered() -> None:
    world = World(gpus=1)
    world.step()
    host = world.slurm.submit("gres/mig:2g.20gb:1", runs=5)
    world.steps(2)
    guest = waiting(world)
    world.steps(8)
    world.loop.share({guest: host})
    world.steps(2)
    assert count(world, "guest") == 0 and not world.loop.shared


def test_jobs_of_two_users_are_not_paired() -> None:
    world = World(gpus=1)
    world.step()
    host = world.slurm.submit("gres/mig:2g.20gb:1", runs=100, user="alice")
    world.steps(2)
    guest = waiting(world, user="bob")
    world.loop.share({guest: host})
    world.steps(2)
    assert not world.loop.shared and count(world, "guest") == 0


def test_second_guest_on_the_same_slice_is_not_offered() -> None:
    world, host, _ = paired()
    other = waiting(world)
    world.loop.share({other: host})
    world.steps(2)
    assert not world.loop.shared


def test_no_misfit_if_the_host_ends_while_the_service_is_down() -> None:
    world, host, guest = paired(host_runs=6, guest_runs=60)
    last_counts = {"n1": dict(world.slurm.machines["n1"].gres)}
    another = world.slurm.submit("gres/mig:2g.20gb:1", runs=10, priority=1)
    for _ in range(10):  # no rounds run; the host ends meanwhile
        world.clock.sleep(1)
        world.finish()
        world.start()
        world.prologs()
    assert host not in world.running() and guest in world.running()
    world.new_loop(last_counts)
    world.steps(6)
    assert not world.nodes.misfits and (another in world.running() or another not in world.slurm.queue)
    assert not world.step().notes


@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_starts_and_ends_makes_a_misfit(seed: int) -> None:
    """Pairs, their ends in any order, and jobs of the same profile, with ends that are reported a round late."""
    world = World(nodes=2, gpus=1, seed=seed)
    rng = random.Random(seed)
    world.step()
    trains = [world.slurm.submit("gres/mig:2g.20gb:1", runs=rng.randint(3, 25), priority=5000) for _ in range(4)]
    world.steps(3)
    pairs: dict[int, int] = {}
    for _ in range(40):
        action = rng.choice(["pair", "step", "late", "early", "other", "drop"])
        free = [job for job in trains if job in world.running() and job not in pairs.values()]
        if action == "pair" and free:
            pairs[waiting(world, runs=rng.randint(3, 25))] = rng.choice(free)
        elif action == "other":
            trains.append(world.slurm.submit("gres/mig:2g.20gb:1", runs=rng.randint(3, 10)))
        elif action == "drop" and pairs:
            pairs.popitem()
        elif action == "late":
            world.clock.sleep(1)
            world.finish()
            world.nodes.poll()
            world.loop.share(pairs)
            world.round()
        elif action == "early":  # Slurm uses what has become free before the next round
            world.clock.sleep(1)
            world.finish()
            world.start()
            world.prologs()
        world.loop.share(pairs)
        for job, row in list(world.slurm.queue.items()):  # as the stage that decides on pairs does
            if row.pending and is_guest(row.gres) and job not in world.loop.shared:
                world.slurm.change(job, gres="gres/mig:loan:1", requested_nodes="")
            elif row.pending and "loan" in row.gres and job in world.loop.shared:
                release(world, job, world.loop.shared[job])
        report = world.step()
        assert not report.error and not report.notes
        assert not audit(world.nodes.view.facts(), world.slurm.jobs())
        assert not world.nodes.misfits


# -- single functions


def row(job: int, kind: str, state: str = "RUNNING", nodes: tuple[str, ...] = ("n1",), **kw: object) -> JobRow:
    values: dict[str, object] = {"gres": f"gres/mig:{kind}:1", "state": state, "nodes": nodes, **kw}
    return JobRow(job, **values)  # type: ignore[arg-type]


SLOT = slot("2g.20gb@0")
HELD = NodeFacts((GpuFacts("g", H100, ((SLOT, (1, 0)),)),))
SHARED = NodeFacts((GpuFacts("g", H100, ((SLOT, (1, 0)),), guests=((SLOT, (2, 0)),)),))
LEFT = NodeFacts((GpuFacts("g", H100, ((SLOT, (2, 0)),)),))
PLACE = ("g", "2g.20gb", 0, 2, 1, 0)
P2 = P("2g.20gb")


def shared(facts: NodeFacts, *rows: JobRow, used: int = 0, pairs: object = None, present: object = None) -> NodeGuests:
    jobs = {r.job_id: r for r in rows}
    started = {r.job_id for r in rows if r.active and is_guest(r.gres)}
    return sharing("n1", facts, {2: 1} if pairs is None else pairs, jobs, started, used, present or {})  # type: ignore[arg-type]


def test_sharing_before_during_and_after_a_guest_runs() -> None:
    host, pending, guest = row(1, "2g.20gb"), row(2, "loan", "PENDING", ()), row(2, "guest")
    assert shared(HELD, host, pending) == NodeGuests({2: PLACE}, 1, 0, {P2: 1})
    # it starts: the plan keeps its place until the node has reported that it has it
    assert shared(HELD, host, guest, used=1, present={2: PLACE}) == NodeGuests({2: PLACE}, 0, 1, {P2: 1})
    assert shared(SHARED, host, guest, used=1, present={2: PLACE}) == NodeGuests({}, 0, 1, {P2: 1})
    assert shared(LEFT, guest, used=1) == NodeGuests({}, 0, 1)
    # the host has ended while the guest is starting: its slot is not free, although no run holds it
    assert shared(NodeFacts((GpuFacts("g", H100),)), guest, used=1, present={2: PLACE}) == NodeGuests(
        {2: PLACE}, 0, 1, {}, {}, {P2: 1}
    )
    assert shared(HELD, host, pairs={}) == ALONE
    assert shared(HELD, host, row(2, "guest", nodes=("n2",)), present={2: PLACE}) == ALONE


@pytest.mark.parametrize(
    ("used", "free", "back", "due", "shown"),
    [(1, 0, 1, 0, 0), (1, 2, 1, 0, 2), (1, 2, 1, 1, 2), (1, 1, 1, 1, 2), (1, 1, 1, 0, 1), (2, 1, 2, 3, 3), (0,) * 5],
)
def test_count_that_is_shown_for_a_profile(used: int, free: int, back: int, due: int, shown: int) -> None:
    assert NodeGuests(held_back={P2: back}, due={P2: due}).shown(P2, used, free) == shown


def test_shared_slot_is_free_when_the_later_of_two_runs_ends() -> None:
    (gpu,) = SHARED.gpus
    assert ends(gpu, {1: 10.0, 2: 30.0}, 5.0) == (30.0,)
    assert ends(gpu, {1: 10.0, 2: None}, 5.0) == (None,)
    assert ends(gpu, {1: 10.0}, 5.0) == (10.0,)
    assert whose(gpu, ()) == () and whose(gpu, {2}) == (False,) and whose(LEFT.gpus[0], {2}) == (True,)


def test_audit_allows_a_guest_only_one_slice() -> None:
    def held(*slots: Slot) -> dict[str, NodeFacts]:
        return {"n1": NodeFacts((GpuFacts("g", H100, tuple((taken, (2, 0)) for taken in slots)),))}

    assert not audit(held(SLOT), [row(2, "guest")])
    (excess,) = audit(held(SLOT, slot("3g.40gb@4")), [row(2, "guest")])
    assert excess.job == 2
    assert audit(held(SLOT), [row(2, "1g.10gb")])


@given(st.lists(st.tuples(st.sampled_from(["start", "join", "stop"]), st.integers(1, 4)), max_size=20))
def test_view_lists_the_remaining_runs_of_a_shared_slice(steps: list[tuple[str, int]]) -> None:
    view = LiveView()
    view.apply("n1", [{"kind": "inventory", "gpus": [{"uuid": "g", "mig": True, "geometry": H100.to_dict()}]}])
    holders: list[int] = []
    slice_fields = {"gpu": "g", "profile": "2g.20gb", "start": 0, "size": 2}
    for kind, job in steps:
        event: dict[str, object] = {"kind": "start", "job": job, "restart": 0, "slices": [slice_fields]}
        if kind == "start" and not holders:
            holders.append(job)
        elif kind == "join" and len(holders) == 1 and job not in holders:
            event["beside"] = [holders[0], 0]
            holders.append(job)
        elif kind == "stop" and job in holders:
            event["kind"] = "stop"
            holders.remove(job)
        else:
            continue
        view.apply("n1", [event])
        (gpu,) = view.facts()["n1"].gpus
        assert [run[0] for _, run in gpu.holders] == holders
        reloaded = LiveView()
        reloaded.load({"n1": [{"uuid": "g", "mig": True, "geometry": H100.to_dict()}]}, [Held(job) for job in holders])
        (loaded,) = reloaded.facts()["n1"].gpus
        assert (loaded.leases, loaded.guests) == (gpu.leases, gpu.guests)


class Held:
    """A lease as it is in the store."""

    node, gpu, profile, start, size, restart = "n1", "g", "2g.20gb", 0, 2, 0

    def __init__(self, job: int) -> None:
        self.job = job
