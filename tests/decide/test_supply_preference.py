"""The offers of idle GPUs follow the preference when it changes; slots in use or planned for a job do not."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.supply.stage import SupplySettings
from tests.support.supply_gpus import P
from tests.support.supply_world import World, backed


def test_idle_gpus_offer_the_new_profiles_when_the_preference_changes() -> None:
    world = World()
    world.step()
    world.loop.prefer((P("3g.40gb"),))
    world.step()
    assert world.nodes.free("n1") == Counter({P("3g.40gb"): 4})
    world.slurm.calls.clear()
    world.loop.prefer((P("3g.40gb"),))
    world.steps(3)
    assert world.slurm.calls["set_gres"] == 0


def test_administrators_preference_is_not_replaced() -> None:
    world = World(settings=SupplySettings(preference=(P("1g.10gb"),)))
    world.step()
    before = world.nodes.free("n1")
    world.loop.prefer((P("3g.40gb"),))
    world.steps(2)
    assert world.nodes.free("n1") == before == Counter({P("1g.10gb"): 14})


def test_gpu_with_a_running_job_keeps_its_offer() -> None:
    world = World()
    world.step()
    world.slurm.submit("mig:1g.10gb:1", runs=30)
    world.steps(2)
    world.loop.prefer((P("3g.40gb"),))
    world.steps(2)
    free = world.nodes.free("n1")
    assert free[P("3g.40gb")] == 2 and free[P("4g.40gb")] == free[P("2g.20gb")] == 1


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", ""]), st.integers(1, 8)),
        max_size=25,
    )
)
def test_no_change_of_preference_makes_a_misfit(steps: list[tuple[str, int]]) -> None:
    world = World()
    world.step()
    for i, (kind, runs) in enumerate(steps):
        if kind:
            world.slurm.submit(f"mig:{kind}:1", runs=runs)
        else:
            world.loop.prefer((P(("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb")[i % 4]),))
        world.step()
        backed(world.slurm.real, world.nodes)
    world.steps(30)
    assert not world.nodes.misfits and not world.slurm.queue
