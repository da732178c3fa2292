"""Events between two queries of the loop: no order of them may make a misfit.

migbatchd queries the queue first and the nodes second, the nodes' reports arrive at any time, and jobs start and end
all the time, also between the shrinking of an offer and the query that checks it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slurm_migbatch.slurm.client import JobRow, NodeRow
from tests.support.controllers import SupplyController
from tests.support.supply_world import World, backed

NAMES = ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.10gb.me")


class Restless:
    """A Slurm in which events happen before and after every answer."""

    def __init__(self, world: RacyWorld) -> None:
        self._world = world

    def jobs(self) -> list[JobRow]:
        self._world.happen()
        found = self._world.slurm.jobs()
        self._world.happen()
        return found

    def jobs_on(self, nodes: frozenset[str]) -> list[JobRow]:
        self._world.happen()
        found = self._world.slurm.jobs_on(nodes)
        self._world.happen()
        return found

    def nodes(self) -> list[NodeRow]:
        self._world.happen()
        found = self._world.slurm.nodes()
        self._world.happen()
        return found

    def set_gres(self, updates: Mapping[str, str]) -> None:
        self._world.happen()
        self._world.slurm.set_gres(updates)
        self._world.happen()


class RacyWorld(World):
    """Jobs start, end and are reported one by one, in any order that Slurm and the nodes allow."""

    def new_loop(self, last_counts: dict[str, dict[str, int]] | None = None) -> None:
        self.ending: list[int] = []
        self.loop = SupplyController(Restless(self), self.nodes, self.clock, self.settings)

    def run_round(self) -> None:
        """One round as migbatchd runs it: it queries the queue, then the nodes, and then decides."""
        client = Restless(self)
        jobs = client.jobs()
        rows = client.nodes()
        self.loop.round(jobs, rows)

    def happen(self) -> None:
        """Up to three events."""
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 3))):
            self.random.choice(
                (self.start, self.prolog_one, self.prolog_one, self.end, self.epilog, self.tell, self.hear)
            )()

    def submit(self, rnd: random.Random) -> None:
        several = rnd.random() < 0.2
        want = f"mig:{rnd.choice(NAMES)}:1" + (f",mig:{rnd.choice(NAMES[:3])}:2" if several else "")
        self.slurm.submit(want, priority=rnd.randint(1, 3), tasks=rnd.choice([1, 1, 3]))

    def prolog_one(self) -> None:
        """One of the started jobs gets its slices."""
        if self.to_start:
            self.prolog(self.to_start.pop(self.random.randrange(len(self.to_start))))

    def end(self) -> None:
        """Slurm counts the slices of one job as free; its nodes are completing until the Epilogs are through."""
        if self.ends:
            job = self.random.choice(sorted(self.ends))
            del self.ends[job]
            self.slurm.completed(job)
            self.ending.append(job)

    def epilog(self) -> None:
        if self.ending:
            self.leave(self.ending.pop(self.random.randrange(len(self.ending))))

    def tell(self) -> None:
        """The reports of one node so far arrive."""
        self.nodes.report(self.random.choice(sorted(self.nodes.gpus)))

    def hear(self) -> None:
        name = self.random.choice(sorted(self.nodes.gpus))
        if name not in self.nodes.deaf:
            self.nodes.pull(name)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 3), gpus=st.integers(1, 2))
def test_no_event_between_two_queries_makes_a_misfit(seed: int, nodes: int, gpus: int) -> None:
    world = RacyWorld(nodes=nodes, gpus=gpus, seed=seed)
    rnd = world.random
    for name, machine in world.slurm.real.items():
        world.slurm.set_node(name, gres={"none": sum(machine.conf.values())})  # no node backs the offer in slurm.conf
    for _ in range(150):
        action = rnd.randrange(8)
        if action == 0:
            world.submit(rnd)
        elif action == 1 and rnd.random() < 0.2:
            world.nodes.deaf ^= {f"n{rnd.randint(1, nodes)}"}
        elif action < 5:
            world.happen()
        else:
            world.clock.sleep(1)
            world.run_round()
        assert not world.nodes.misfits, world.slurm.queue[world.nodes.misfits[0]]
    assume(world.slurm.stepped.started)  # an example in which no job starts checks nothing


def test_start_that_is_reported_late_hides_no_free_slot() -> None:
    """A job started and ended unreported and its slot was offered anew; then its start is reported, but not its end.

    The slots of the new plan overlap the slot that it seems to hold. Slurm goes on starting jobs on them, so they
    are withdrawn like any others: no job of their profiles starts before the plan changes, and jobs that did start
    keep their slots.
    """
    world = RacyWorld(nodes=1, gpus=1)
    world.random = random.Random(5)
    world.happen = lambda: None  # type: ignore[method-assign]
    slurm, nodes = world.slurm, world.nodes
    slurm.submit("mig:7g.80gb:1")
    world.run_round()
    world.start()
    world.prolog_one()
    world.end()
    world.epilog()
    for _ in range(3):
        slurm.submit("mig:2g.20gb:1")
    world.run_round()
    assert slurm.machines["n1"].gres["2g.20gb"] == 3
    nodes.report("n1", 2)  # its slice was made, and it has started
    jobs, rows = slurm.jobs(), slurm.nodes()
    world.start()
    world.prolog_one()
    world.loop.round(jobs, rows)
    assert len(slurm.stepped.started) == 4
    for _ in range(2):
        world.prolog_one()
    assert not nodes.misfits and len(world.ends) == 3
    world.tell()
    world.run_round()
    (known,), (held,) = nodes.known["n1"].values(), nodes.held["n1"].values()
    assert len(held) == 3 and set(held) <= set(known.slots)


def test_slot_backed_only_by_an_outdated_lease_is_not_offered() -> None:
    """The same, but a job is seen to run: the node is left alone, and a slot that it reportedly holds is no offer."""
    world = RacyWorld(nodes=1, gpus=1)
    world.happen = lambda: None  # type: ignore[method-assign]
    slurm, nodes = world.slurm, world.nodes
    slurm.submit("mig:7g.80gb:1")
    world.run_round()
    world.start()
    world.prolog_one()
    world.end()
    world.epilog()
    for _ in range(2):
        slurm.submit("mig:2g.20gb:1")
    world.run_round()
    nodes.report("n1", 2)  # its slice was made, and it has started
    world.start()
    slurm.submit("mig:7g.80gb:1")
    world.run_round()
    backed(slurm.real, nodes)
    assert "7g.80gb" not in slurm.machines["n1"].gres
    world.start()
    for _ in range(3):
        world.prolog_one()
    assert not nodes.misfits and len(world.ends) == 2
