"""The supply loop with a simulated Slurm that only counts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.daemon.audit import audit
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.supply import resources
from slurm_migbatch.decide.supply.stage import UNEXPLAINED_S, SupplySettings
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.slurm.client import UNREAD, WHOLE, JobRow, NodeRow
from tests.support.supply_gpus import A30, H100, P, slot
from tests.support.supply_world import World, backed


def test_a_fresh_node_offers_a_mix_that_can_be_placed() -> None:
    world = World()
    report = world.step()
    assert not report.error
    assert world.slurm.machines["n1"].gres == {"4g.40gb": 2, "2g.20gb": 2, "1g.10gb": 2, "none": 22}
    assert world.nodes.free("n1") == Counter({P("4g.40gb"): 2, P("2g.20gb"): 2, P("1g.10gb"): 2})


def test_unchanged_offers_cause_no_slurm_updates() -> None:
    world = World()
    world.steps(2)
    world.slurm.calls.clear()
    reports = world.steps(5)
    assert world.slurm.calls == Counter(jobs=5, nodes=5)
    assert [r.slurm_calls for r in reports] == [0] * 5
    assert not any(r.changes for r in reports)


def test_profile_not_on_offer_is_offered_for_a_pending_job() -> None:
    world = World()
    world.step()
    job = world.slurm.submit("gres:mig:7g.80gb:1")
    world.steps(2)
    assert job in world.running()
    assert world.records[-1][2] == f"for job {job}"


def test_next_job_of_the_same_profile_needs_no_update() -> None:
    world = World(gpus=1)
    world.step()
    for _ in range(3):
        world.slurm.submit("mig:2g.20gb:1", runs=3)
    world.slurm.updates.clear()
    world.steps(4)  # the second cannot start beside the first without a re-plan, for which there is room
    before = len(world.slurm.updates)
    world.steps(12)
    assert not world.slurm.queue
    assert len(world.slurm.updates) == before
    assert not world.nodes.misfits


def test_slice_in_use_that_a_job_of_another_profile_has_waited_for_is_not_counted() -> None:
    world = World(gpus=2)
    world.step()
    large = [world.slurm.submit("mig:7g.80gb:1", runs=runs, limit=limit) for runs, limit in ((80, 90), (60, 130))]
    world.steps(3)
    assert world.running() == set(large)
    node = world.slurm.machines["n1"]
    assert node.gres["7g.80gb"] == node.used["7g.80gb"] == 2
    small = world.slurm.submit("mig:1g.10gb:1", runs=3, limit=3)
    later = [world.slurm.submit("mig:7g.80gb:1", runs=10) for _ in range(3)]
    world.steps(10)
    assert node.gres["7g.80gb"] == node.used["7g.80gb"] == 2
    world.steps(42)
    assert node.gres["7g.80gb"] == 1, "that of the GPU that should be free first"
    assert node.used["7g.80gb"] == 2
    world.steps(90)
    assert not world.slurm.queue
    assert [job for job, _ in world.slurm.stepped.started] == [*large, small, *later]
    assert not world.nodes.misfits


def test_used_slots_stay_where_they_are_while_the_rest_is_rearranged() -> None:
    world = World(gpus=1)
    world.step()
    small = world.slurm.submit("mig:1g.10gb:1", runs=1000)
    world.steps(2)
    held = {s for s, run in world.nodes.held["n1"]["GPU-n1-0"].items() if run[0] == small}
    world.slurm.submit("mig:3g.40gb:1", runs=1000)
    world.steps(3)
    assert held <= set(world.nodes.known["n1"]["GPU-n1-0"].slots)
    assert len(world.running()) == 2


def test_reset_by_reconfigure_is_corrected_next_round_without_a_new_plan() -> None:
    world = World()
    world.steps(2)
    wanted = dict(world.slurm.machines["n1"].gres)
    version = world.nodes.node_plans.current("n1").version
    world.slurm.reconfigure()
    assert world.slurm.machines["n1"].states == {"IDLE"}
    world.round()
    assert world.slurm.machines["n1"].gres == wanted
    assert world.nodes.node_plans.current("n1").version == version
    assert "reconfigure" in world.records[-1][2]


def test_slice_that_a_restarted_slurmctld_does_not_count_is_not_offered() -> None:
    """It counts of a type with count 0 in slurm.conf only the slices of the first job."""
    world = World()
    world.step()
    for _ in range(3):
        world.slurm.submit("mig:7g.80gb:1")
    world.steps(3)
    assert len(world.running()) == 2 and world.slurm.machines["n1"].gres["7g.80gb"] == 2
    rows = [replace(row, used={"7g.80gb": 1}) if row.name == "n1" else row for row in world.slurm.nodes()]
    world.loop.round(rows=rows)
    assert world.slurm.machines["n1"].gres["7g.80gb"] == 1


def test_registration_that_restores_some_types_does_not_raise_the_sum() -> None:
    world = World(conf={"1g.10gb": 28})
    world.steps(2)
    wanted = dict(world.slurm.machines["n1"].gres)
    for _ in range(3):
        world.slurm.restart_slurmd()
        assert sum(world.slurm.machines["n1"].gres.values()) > 28
        world.loop.round()
        assert world.slurm.machines["n1"].gres == wanted
    assert world.slurm.machines["n1"].states == {"IDLE"}


def test_the_sum_is_known_after_a_restart_of_the_service() -> None:
    world = World(conf={"1g.10gb": 28})
    world.steps(2)
    last_counts = {node: counts for node, counts, _ in world.records}
    world.slurm.restart_slurmd()
    world.new_loop(last_counts)
    world.loop.round()
    world.steps(2)
    assert sum(world.slurm.machines["n1"].gres.values()) == 28
    assert world.slurm.machines["n1"].states == {"IDLE"}


@pytest.mark.parametrize("total", [20, 40])
def test_new_sum_in_slurm_conf_is_adopted(total: int) -> None:
    world = World(conf={"1g.10gb": 28})
    world.steps(2)
    world.slurm.set_node("n1", conf={"1g.10gb": total}, gres={"1g.10gb": total})
    world.steps(2)
    world.slurm.register()
    assert world.slurm.machines["n1"].states == {"IDLE"}
    assert sum(world.slurm.machines["n1"].gres.values()) == total


def test_job_with_an_unreadable_row_keeps_its_slice_for_an_unknown_time() -> None:
    world = World(gpus=1)
    world.step()
    holder = world.slurm.submit("mig:1g.10gb:1", runs=1000, limit=600)
    world.steps(2)
    waiting = world.slurm.submit("mig:7g.80gb:1")
    assert "free in 0:0" in (world.round() and world.loop.why(waiting))
    unread = JobRow(holder, state=UNREAD, reason="odd")
    rows = [unread if row.job_id == holder else row for row in world.slurm.jobs()]
    report = world.loop.round(rows, world.slurm.nodes())
    assert report.error == ""
    assert audit(world.nodes.view.facts(), rows) == []
    assert "the start cannot be predicted" in world.loop.why(waiting)
    assert "cannot be parsed (odd)" in world.loop.why(holder)
    world.steps(3)
    assert (holder in world.running(), waiting in world.running()) == (True, False)
    assert not world.nodes.misfits


def test_node_that_does_not_acknowledge_offers_only_what_both_plans_have() -> None:
    world = World(gpus=1)
    world.steps(2)
    world.nodes.deaf.add("n1")
    world.slurm.submit("mig:7g.80gb:1")
    report = world.round()
    assert report.unacknowledged == ("n1",)
    assert set(world.slurm.machines["n1"].gres) == {"none"}
    for _ in range(3):
        world.clock.sleep(1)
        world.round()
        backed(world.slurm.real, world.nodes)
        assert set(world.slurm.machines["n1"].gres) == {"none"}
    world.nodes.deaf.clear()
    world.steps(2)
    assert len(world.running()) == 1


def test_silent_node_keeps_its_offer_and_gets_no_new_plan() -> None:
    world = World(gpus=1, silence_s=10)
    world.steps(2)
    before = dict(world.slurm.machines["n1"].gres)
    world.nodes.deaf.add("n1")
    world.clock.sleep(60)
    world.slurm.submit("mig:7g.80gb:1")
    world.loop.round()
    assert world.slurm.machines["n1"].gres == before
    job = world.slurm.submit("mig:2g.20gb:1")
    world.start()
    world.prologs()
    assert job in world.running()


def test_powered_down_node_is_planned_for_and_keeps_the_offer_while_it_boots() -> None:
    """Power saving: Slurm starts jobs on such nodes, but only on what they offer; nothing there reads a plan."""
    world = World(gpus=1)
    world.steps(2)
    world.nodes.deaf.add("n1")
    world.slurm.set_node("n1", states={"IDLE", "POWERED_DOWN"})
    world.clock.sleep(600)
    world.new_loop()  # migbatchd forgets what it did not store
    world.slurm.submit("mig:7g.80gb:1")
    world.round()
    assert world.slurm.machines["n1"].gres["7g.80gb"] == 1
    for states in ({"MIXED", "NOT_RESPONDING", "POWERING_UP"}, {"MIXED", "POWERING_UP"}):
        world.slurm.set_node("n1", states=states)
        for _ in range(3):
            world.clock.sleep(1)
            world.round()
            assert world.slurm.machines["n1"].gres["7g.80gb"] == 1
    world.slurm.set_node("n1", states={"IDLE"})
    world.nodes.deaf.clear()
    world.steps(2)
    assert len(world.running()) == 1 and not world.nodes.misfits


def test_powered_down_node_stays_so_while_another_has_room() -> None:
    world = World(nodes=2, gpus=1)
    world.steps(2)
    world.nodes.deaf.add("n1")
    world.slurm.set_node("n1", states={"IDLE", "POWERED_DOWN"})
    world.slurm.submit("mig:7g.80gb:1")
    world.round()
    assert {name for name, machine in world.slurm.real.items() if machine.gres.get("7g.80gb")} == {"n2"}


def test_node_that_is_drained_or_being_powered_down_gets_no_new_offer() -> None:
    for state in ({"IDLE", "DRAIN", "POWERED_DOWN"}, {"IDLE", "POWERING_DOWN"}, {"DOWN", "POWERED_DOWN"}):
        world = World(gpus=1)
        world.steps(2)
        world.slurm.set_node("n1", states=state)
        world.slurm.submit("mig:7g.80gb:1")
        world.round()
        assert "7g.80gb" not in world.slurm.machines["n1"].gres


def test_a_job_that_starts_while_its_type_is_withdrawn_keeps_its_slot() -> None:
    world = World(gpus=1)
    world.steps(2)
    quick = world.slurm.submit("mig:4g.40gb:1", priority=1)
    world.slurm.submit("mig:7g.80gb:1", priority=9)
    real = world.slurm.set_gres

    def late(updates: dict[str, str]) -> None:
        world.slurm.set_gres = real  # type: ignore[method-assign]
        world.start()  # Slurm starts it before the offer shrinks
        real(updates)

    world.slurm.set_gres = late  # type: ignore[method-assign,assignment]
    world.round()
    assert [row.job_id for row in world.to_start] == [quick]
    world.prologs()
    assert world.running() == {quick}
    assert not world.nodes.misfits
    world.steps(3)
    assert world.running() == {quick}


def test_every_slot_that_a_started_unreported_job_may_hold_is_kept() -> None:
    world = World(gpus=2)
    world.steps(2)
    world.slurm.submit("mig:4g.40gb:1", runs=1000)
    world.start()
    world.prologs()  # the node knows, the controller does not
    world.slurm.submit("mig:7g.80gb:1")
    world.round()
    assert not world.nodes.misfits
    world.steps(3)
    assert len(world.running()) == 2


def test_after_a_restart_of_the_service_jobs_keep_their_slots() -> None:
    world = World(gpus=2)
    world.step()
    for want in ("1g.10gb", "2g.20gb", "4g.40gb"):
        world.slurm.submit(f"mig:{want}:1", runs=1000)
    world.steps(3)
    held = {u: dict(s) for u, s in world.nodes.held["n1"].items()}
    node_plans = type(world.nodes.node_plans)(wall=world.clock.time, clock=world.clock.monotonic)
    node_plans.confirm("n1", world.nodes.node_plans.acked("n1"))
    world.nodes.node_plans = node_plans
    world.new_loop()
    world.slurm.submit("mig:1g.10gb:1", runs=1000)
    world.start()  # on the old offer, before the first round of the new service
    world.prologs()
    odd = "neither on the node nor in its plan"
    assert not any(odd in note for note in world.round().notes), "this is normal for a short time"
    world.clock.sleep(UNEXPLAINED_S)
    assert any(odd in note for note in world.round().notes)
    world.steps(3)
    assert all(held[u].items() <= world.nodes.held["n1"][u].items() for u in held)
    assert len(world.running()) == 4
    assert not world.nodes.misfits


def test_a_drained_node_keeps_its_plan_and_is_not_counted() -> None:
    world = World(nodes=2, gpus=1)
    world.steps(2)
    world.slurm.set_node("n1", states={"IDLE", "DRAIN"})
    before = dict(world.slurm.machines["n1"].gres)
    job = world.slurm.submit("mig:7g.80gb:1")
    world.steps(2)
    assert world.slurm.machines["n1"].gres == before
    assert job in world.running()
    world.slurm.reconfigure()
    world.step()
    assert world.slurm.machines["n1"].gres == before
    assert world.slurm.machines["n1"].states == {"IDLE", "DRAIN"}


def test_slots_blocked_by_a_zombie_are_not_offered() -> None:
    world = World(gpus=1)
    world.steps(2)
    world.nodes.zombie("n1", "GPU-n1-0", slot("1g.10gb@0"))
    world.slurm.submit("mig:7g.80gb:1")
    world.steps(3)
    assert not world.running()
    assert "7g.80gb" not in world.slurm.machines["n1"].gres
    assert slot("1g.10gb@0") not in world.nodes.known["n1"]["GPU-n1-0"].slots


def test_counts_never_exceed_the_constant_sum() -> None:
    world = World(gpus=2, conf={"1g.10gb": 3, "none": 1})
    world.steps(3)
    machine = world.slurm.machines["n1"]
    assert sum(machine.gres.values()) == 4
    world.slurm.submit("mig:1g.10gb:1", runs=1000, tasks=9)
    world.steps(5)
    assert sum(machine.gres.values()) == 4
    assert len(world.running()) == 4


def test_audit_reports_a_run_on_a_slice_that_it_was_not_granted() -> None:
    world = World(gpus=1)
    world.steps(2)
    job = world.slurm.submit("mig:1g.10gb:1", runs=1000)
    world.steps(2)
    (place,) = world.nodes.held["n1"]["GPU-n1-0"]
    for kind, taken in (("stop", place), ("start", slot("3g.40gb@4"))):
        where = {"gpu": "GPU-n1-0", "profile": str(taken.profile), "start": taken.placement.start}
        event = {"kind": kind, "job": job, "restart": 0, "slices": [{**where, "size": taken.placement.size}]}
        world.nodes.view.apply("n1", [event])
    (excess,) = audit(world.nodes.view.facts(), world.slurm.jobs())
    assert (excess.job, excess.node) == (job, "n1")
    assert "3g.40gb" in str(excess)


def test_requeued_misfit_is_started_early_once_it_is_pending_again() -> None:
    world = World()
    world.steps(2)
    job = world.slurm.submit("mig:7g.80gb:1", reason="BeginTime", eligible=world.clock.time() + 121, restarts=1)
    world.loop.observer.ingested("n1", [{"kind": "misfit", "job": job, "restart": 0}], world.clock.time())
    world.steps(5)
    assert world.slurm.calls["shorten_requeue_delay"] == 1
    assert job in world.running()


def test_only_the_requeued_task_of_an_array_is_started_early() -> None:
    """The task that started last has the array's own job id: the others wait for the begin time that they named."""
    world = World()
    world.steps(2)
    later = world.clock.time() + 121
    array = world.slurm.submit("mig:7g.80gb:1", array="0-1", reason="BeginTime", eligible=later)
    world.slurm.change(array, array_task="1", tasks=1, restarts=1)
    asked = []
    world.slurm.shorten_requeue_delay = asked.append  # type: ignore[method-assign]
    world.loop.observer.ingested("n1", [{"kind": "misfit", "job": array, "restart": 0}], world.clock.time())
    world.steps(5)
    assert asked == [f"{array}_1"]


def test_offer_that_slurm_does_not_use_is_made_on_another_node() -> None:
    world = World(nodes=2, gpus=1, settings=SupplySettings(stuck_s=5))
    world.steps(2)
    job = world.slurm.submit("mig:7g.80gb:1")
    world.slurm.schedule = lambda backfill=True: []  # type: ignore[method-assign]
    world.steps(3)
    offered_first = [n for n, m in world.slurm.real.items() if m.gres.get("7g.80gb")]
    assert len(offered_first) == 1
    world.steps(10)
    offered_later = [n for n, m in world.slurm.real.items() if m.gres.get("7g.80gb")]
    assert offered_later
    assert set(offered_later) != set(offered_first) or len(offered_later) == 2
    assert "offered on" in world.loop.why(job)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_offer_is_soon_made_on_another_node_if_other_jobs_have_the_cpus(elsewhere: bool) -> None:
    world = World(nodes=2, gpus=1, settings=SupplySettings(stuck_s=600))
    world.steps(2)
    job = world.slurm.submit("mig:7g.80gb:1", cpus=8)
    schedule = world.slurm.schedule
    world.slurm.schedule = lambda backfill=True: []  # type: ignore[method-assign]
    world.steps(3)
    (offered_first,) = [n for n, m in world.slurm.real.items() if m.gres.get("7g.80gb")]
    for name, machine in world.slurm.real.items():
        machine.cpus_used = machine.cpus - 7 if name == offered_first or not elsewhere else 0
        machine.version += 1
    world.slurm.schedule = schedule  # type: ignore[method-assign]
    world.steps(30)
    row = next(row for row in world.slurm.jobs() if row.job_id == job)
    if elsewhere:
        assert row.nodes and row.nodes != (offered_first,)
    else:
        assert row.pending and not world.loop.memory.supply.avoided, "it starts where CPUs become free first"


def test_job_of_several_nodes_that_slurm_has_given_up_is_examined_again_once_its_slices_are_offered() -> None:
    """Too few nodes listed them when Slurm examined it, as for more nodes than there are catalog nodes."""
    world = World(nodes=3, gpus=1)
    world.slurm.submit("mig:1g.10gb:1", runs=40)
    world.steps(3)
    job, alone = world.slurm.submit("mig:7g.80gb:1", num_nodes=3), world.slurm.submit("mig:3g.40gb:1")
    for number in (job, alone):
        world.slurm.change(number, reason="BadConstraints", priority=0)
    world.steps(30)
    rows = {row.job_id: row for row in world.slurm.jobs()}
    assert rows[job].pending, "one of the nodes has another job"
    assert "it waits without a priority until they are offered" in world.loop.why(job)
    assert world.slurm.calls["shorten_requeue_delay"] == 0
    notes = [note for report in world.steps(30) for note in report.notes if "given up" in note]
    assert len(notes) == 1 and f"job {job} (BadConstraints)" in notes[0] and "catalog_nodes" in notes[0]
    rows = {row.job_id: row for row in world.slurm.jobs()}
    assert rows[job].nodes == ("n1", "n2", "n3")
    assert rows[alone].pending and "another reason (BadConstraints)" in world.loop.why(alone)
    assert world.slurm.calls["shorten_requeue_delay"] == 1


@pytest.mark.parametrize("idle", [True, False])
def test_offer_to_an_exclusive_job_is_soon_made_on_a_node_without_jobs(idle: bool) -> None:
    """Slurm does not start it beside others, however many CPUs they leave."""
    world = World(nodes=8, gpus=1, settings=SupplySettings(stuck_s=600))
    for machine in world.slurm.machines.values():
        machine.cpus_used, machine.version = 1, machine.version + 1
    if idle:
        world.slurm.machines["n7"].cpus_used = 0
    world.steps(2)
    job = world.slurm.submit("mig:7g.80gb:1", exclusive=True)
    world.slurm.schedule = lambda backfill=True: []  # type: ignore[method-assign]
    world.steps(30)
    assert f"its slices are offered on {'n7' if idle else 'n1'};" in world.loop.why(job)


def test_offer_is_soon_made_on_another_node_if_one_is_exclusively_of_another_user() -> None:
    """As in partitions with ExclusiveUser=YES: Slurm starts nobody else's job there, however much is free."""
    world = World(nodes=8, gpus=1, settings=SupplySettings(stuck_s=600))
    nodes = world.slurm.nodes
    owners = {f"n{number}": "ann" for number in (*range(1, 6), 8)} | {"n6": "bob"}
    world.slurm.nodes = lambda: [replace(row, owner=owners.get(row.name, "")) for row in nodes()]  # type: ignore[method-assign]
    world.steps(2)
    jobs = {user: world.slurm.submit("mig:7g.80gb:1", user=user, uid=uid) for uid, user in enumerate(("cid", "bob"), 1)}
    world.slurm.schedule = lambda backfill=True: []  # type: ignore[method-assign]
    world.steps(60)
    offered = {user: re.findall(r"its slices are offered on (\w+);", world.loop.why(job)) for user, job in jobs.items()}
    assert offered == {"cid": ["n7"], "bob": ["n6"]}


@pytest.mark.parametrize(
    "asks",
    [
        {"memory_per_node": 100_000},
        {"memory_per_cpu": 12_500, "cpus": 8},
        {"memory_per_node": WHOLE},
        {"memory_per_node": 100_000, "num_nodes": 2},
    ],
)
def test_offer_is_soon_made_on_another_node_if_a_cpu_job_has_the_memory(asks: dict[str, int]) -> None:
    world = World(nodes=8, gpus=1, settings=SupplySettings(stuck_s=600))
    for machine in world.slurm.machines.values():
        machine.memory = 500_000
    for _ in range(8 - asks.get("num_nodes", 1)):
        world.slurm.submit("", cpus=1, memory_per_node=450_000, runs=10_000, limit=None)
    world.steps(3)
    job = world.slurm.submit("mig:7g.80gb:1", **asks)
    world.steps(60)
    (row,) = [row for row in world.slurm.jobs() if row.job_id == job]
    assert row.nodes == ("n7", "n8")[-row.num_nodes :]


@pytest.mark.parametrize(("requests", "most"), [(1, 1), (50, 10)])
def test_nodes_are_looked_at_a_limited_number_of_times_for_offers_that_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, requests: int, most: int
) -> None:
    """Where jobs without slices have the CPUs of all nodes, as many offers are not taken as there are free slots."""
    monkeypatch.setattr(resources, "MOST_REQUESTS", 10)
    looks: list[int] = []
    world = World(nodes=8, gpus=2, settings=SupplySettings(stuck_s=600))
    for machine in world.slurm.real.values():
        machine.cpus_used = machine.cpus
        machine.version += 1
    world.steps(2)
    for number in range(100):
        world.slurm.submit("mig:1g.10gb:1", cpus=1 + number % requests)
    has_resources_on = JobRow.has_resources_on

    def counted(row: JobRow, node: NodeRow) -> bool:
        looks[-1] += 1
        return has_resources_on(row, node)

    monkeypatch.setattr(JobRow, "has_resources_on", counted)
    for _ in range(30):
        looks.append(0)
        world.steps(1)
    assert 0 < max(looks) <= most * 8
    assert len(world.loop.memory.supply.standing) == 100


def test_offer_that_slurm_does_not_use_is_not_made_for_equal_jobs_one_after_the_other() -> None:
    """A hundred jobs that request too much memory would keep the node from the jobs of others for hours."""
    world = World(nodes=1, gpus=1, settings=SupplySettings(stuck_s=5))
    world.steps(2)
    jobs = [world.slurm.submit("mig:7g.80gb:1", name="too much") for _ in range(3)]
    other = world.slurm.submit("mig:7g.80gb:1", name="other")
    world.slurm.schedule = lambda backfill=True: []  # type: ignore[method-assign]
    world.steps(12)
    assert all(world.loop.why(job).startswith("its slices were offered on n1") for job in jobs)
    assert "its slices are offered on n1" in world.loop.why(other)


@pytest.mark.parametrize(("uid", "offers"), [(1, False), (2, True)])
def test_offers_that_slurm_does_not_use_are_not_made_for_all_jobs_of_a_user(uid: int, offers: bool) -> None:
    """As for `--exclusive=user` where others have jobs: by other names they kept the node from the others for good.

    While no other user waits, his later jobs are offered the node.
    """
    world = World(nodes=1, gpus=1, settings=SupplySettings(stuck_s=5))
    world.steps(2)
    jobs = [world.slurm.submit("mig:7g.80gb:1", name=f"a{number}", uid=1) for number in range(20)]
    other = world.slurm.submit("mig:1g.10gb:1", uid=uid, name="other")
    world.slurm.schedule = lambda backfill=True: []  # type: ignore[method-assign]
    offered = set()
    for _ in range(40):
        world.steps(1)
        offered |= {job for job in (*jobs, other) if "its slices are offered on n1" in world.loop.why(job)}
    assert (other in offered) is offers
    assert len(offered) == 4 if offers else len(offered) > 4


def test_time_in_which_slurm_does_not_answer_does_not_count_for_an_offer() -> None:
    world = World(nodes=2, gpus=1)
    world.steps(2)
    job = world.slurm.submit("mig:7g.80gb:1")
    world.slurm.schedule = lambda backfill=True: []  # type: ignore[method-assign]
    world.steps(3)
    offered = {n: dict(m.gres) for n, m in world.slurm.real.items()}
    for seconds in (3600, -1800):  # slurmctld was restarted; the clock was set back
        world.clock.sleep(seconds)
        world.steps(2)
        assert not world.loop.memory.supply.avoided and "offered on" in world.loop.why(job)
        assert {n: dict(m.gres) for n, m in world.slurm.real.items()} == offered
    world.steps(40)
    assert world.loop.memory.supply.avoided


def test_why_names_the_nodes_on_which_slurm_does_not_use_an_offer() -> None:
    world = World(nodes=1, gpus=1, settings=SupplySettings(stuck_s=5))
    world.steps(2)
    job = world.slurm.submit("mig:7g.80gb:1")
    world.slurm.schedule = lambda backfill=True: []  # type: ignore[method-assign]
    world.steps(12)
    assert world.loop.why(job).startswith("its slices were offered on n1, and Slurm did not start it there")


@pytest.mark.parametrize(
    ("reason", "answer"),
    [("JobHeldUser", "another reason"), ("AssocGrpGRES", "another reason"), ("Dependency", "another reason")],
)
def test_why_names_reasons_that_are_not_about_supply(reason: str, answer: str) -> None:
    world = World()
    world.step()
    job = world.slurm.submit("mig:7g.80gb:1", reason=reason)
    world.round()
    assert answer in world.loop.why(job)
    assert not world.loop.memory.supply.reservations
    assert "7g.80gb" not in world.slurm.machines["n1"].gres


def test_why_names_the_reservation_and_when_it_is_free() -> None:
    world = World(gpus=1)
    world.step()
    world.slurm.submit("mig:1g.10gb:1", runs=1000, limit=3600)
    world.steps(3)
    job = world.slurm.submit("mig:7g.80gb:1")
    world.step()
    assert "reserved: 7g.80gb@0:8 of GPU GPU-n1-0 on n1; free in 0:59" in world.loop.why(job)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 3), gpus=st.integers(1, 2))
def test_no_order_of_events_makes_a_misfit(seed: int, nodes: int, gpus: int) -> None:
    """Every interleaving of cycles, Prologs, reports, polls and rounds keeps counts backed and jobs placed."""
    world = World(nodes=nodes, gpus=gpus, seed=seed)
    names = ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.10gb.me"]
    rnd = world.random
    world.step()
    for _ in range(120):
        action = rnd.randrange(9)
        if action == 0:
            several = rnd.random() < 0.2
            want = f"mig:{rnd.choice(names)}:1" + (f",mig:{rnd.choice(names[:3])}:2" if several else "")
            world.slurm.submit(want, runs=rnd.uniform(1, 20), priority=rnd.randint(1, 3), tasks=rnd.choice([1, 1, 3]))
        elif action == 1:
            world.start()
        elif action == 2:
            world.prologs()
        elif action == 3:
            world.nodes.report()
        elif action == 4:
            world.nodes.poll()
        elif action == 5:
            world.finish()
        elif action == 6 and rnd.random() < 0.3:
            world.nodes.deaf ^= {f"n{rnd.randint(1, nodes)}"}
        else:
            world.clock.sleep(1)
            world.round()
    world.nodes.deaf.clear()
    assert not world.nodes.misfits
    for _ in range(400):
        world.step(5)
        if not world.slurm.queue and not world.to_start:
            break
    left = [r.gres for r in world.slurm.queue.values() if _possible(r.gres, gpus)]
    assert not left
    assert not world.nodes.misfits


def _possible(want: str, gpus: int) -> bool:
    wishes = sorted((p for p, n in slices(want).items() for _ in range(n)), reverse=True)
    for _ in range(gpus):
        for placed in plan_free(H100, EMPTY, wishes).slots:
            wishes.remove(placed.profile)
    return not wishes


def test_an_a30_is_planned_by_its_own_geometry() -> None:
    world = World(gpus=1, geometry=A30, conf={"1g.6gb": 4, "none": 4})
    world.step()
    assert world.slurm.machines["n1"].gres == {"2g.12gb": 1, "1g.6gb": 2, "none": 5}
