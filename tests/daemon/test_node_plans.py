"""Plans per node: versions only grow, polls wait for a new version, acknowledgements can be awaited."""

import asyncio
import json
import threading

from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.daemon.plans import NodePlans
from slurm_migbatch.node import plan
from tests.support.waiting import PATIENCE_S

A = {"GPU-1": [("1g.10gb", 0, 1)]}
B = {"GPU-1": [("2g.20gb", 0, 2)]}


def test_unchanged_plan_keeps_its_version():
    node_plans = NodePlans()
    first = node_plans.publish("n1", A)
    assert node_plans.publish("n1", A) == first
    assert node_plans.publish("n1", B) > first
    assert node_plans.publish("n2", A) != 0


def test_plan_is_sent_with_its_version_and_slots():
    node_plans = NodePlans(wall=lambda: 5.0)
    node_plans.publish("n1", A)
    assert node_plans.current("n1").to_wire() == {"version": 5000, "gpus": {"GPU-1": [["1g.10gb", 0, 1]]}}


def test_guests_that_may_share_are_part_of_the_plan():
    node_plans = NodePlans(wall=lambda: 5.0)
    first = node_plans.publish("n1", A)
    guests = {18: ("GPU-1", "1g.10gb", 0, 1, 17, 0)}
    second = node_plans.publish("n1", A, guests)
    assert second > first and node_plans.publish("n1", A, dict(guests)) == second
    assert node_plans.current("n1").to_wire()["guests"] == {"18": ["GPU-1", "1g.10gb", 0, 1, 17, 0]}
    node = plan.parse(json.loads(json.dumps(node_plans.current("n1").to_wire())))
    assert node.guests[18].host == (17, 0) and node.guests[18].slot in node.slots["GPU-1"]
    node_plans.confirm("n1", second + 5)
    assert node_plans.current("n1").guests == guests, "a version from an earlier process only raises the number"
    assert node_plans.publish("n1", A) > second and "guests" not in node_plans.current("n1").to_wire()


def test_versions_grow_after_a_restart_with_the_clock_set_back():
    old = NodePlans(wall=lambda: 9000.0)
    version = old.publish("n1", A)
    new = NodePlans(wall=lambda: 10.0)
    assert new.publish("n1", A) < version
    new.confirm("n1", version)  # the node still has the plan of the former process
    assert new.current("n1").version == version + 1
    assert asyncio.run(new.newer("n1", version, 0)).version == version + 1


def test_poll_of_a_service_that_stops_is_answered_at_once():
    node_plans = NodePlans()
    node_plans.close()
    assert asyncio.run(asyncio.wait_for(node_plans.newer("n1", 0, 3600), PATIENCE_S)) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([A, B]), st.integers(0, 10**6)), max_size=30))
def test_versions_never_shrink(steps):
    now = [0.0]
    node_plans = NodePlans(wall=lambda: now[0])
    seen = 0
    for kind, slots, number in steps:
        if kind == 0:
            now[0] = number / 1000
        elif kind == 1:
            node_plans.confirm("n", number)
        else:
            node_plans.publish("n", slots)
        plan = node_plans.current("n")
        if plan is not None:
            assert plan.version >= seen
            assert plan.version >= node_plans.acked("n")
            seen = plan.version


def test_long_poll_returns_a_published_plan_and_none_without():
    async def scenario():
        node_plans = NodePlans()
        assert await node_plans.newer("n1", 0, 0.01) is None
        waiting = asyncio.create_task(node_plans.newer("n1", 0, 120))
        await asyncio.sleep(0.01)
        thread = threading.Thread(target=node_plans.publish, args=("n1", A))
        thread.start()
        plan = await waiting
        thread.join()
        assert plan.version == node_plans.current("n1").version
        node_plans.publish("other", B)
        assert await node_plans.newer("n1", plan.version, 0.01) is None

    asyncio.run(scenario())


def test_acknowledgement_is_awaited_across_threads():
    node_plans = NodePlans()
    version = node_plans.publish("n1", A)
    assert not node_plans.wait_acked("n1", version, 0.01)
    threading.Timer(0.02, node_plans.confirm, args=("n1", version)).start()
    assert node_plans.wait_acked("n1", version, 120)
    assert node_plans.acked("n1") == version


def test_silence_is_the_time_since_the_node_was_heard():
    now = [100.0]
    node_plans = NodePlans(clock=lambda: now[0])
    assert node_plans.silence("n1") == float("inf")
    node_plans.note_contact("n1")
    now[0] = 130.0
    assert node_plans.silence("n1") == 30.0
    assert node_plans.nodes() == ("n1",)
