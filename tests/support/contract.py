"""What every SlurmClient does, whatever is behind it: real Slurm by its commands or by pyslurm, or a fake.

A test module makes a `World` and takes over the classes of behaviours that its client has:

    class TestFake(Looking):
        @pytest.fixture
        def world(self): ...

Worlds have the nodes n1 and n2, each with 14 of `1g.10gb` offered and of nothing else, a DOWN node that lists every
profile, and the partitions `gpu` (tier 10) and `train` (tier 1) over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmClient, SlurmError, SlurmRefused

NOBODY = 10**8
"""A job that does not exist."""


class World(Protocol):
    """A cluster to look at and to change; every test leaves it without jobs and with the offers it found."""

    client: SlurmClient
    nodes: tuple[str, ...]

    def submit(self, want: str, *, partition: str = "gpu", hold: bool = False, comment: str = "") -> int:
        """A batch job that asks for `want` ("mig:1g.10gb:1"), does not end by itself and may be requeued; its id."""

    def passes(self) -> Iterator[None]:
        """Time, in steps in which Slurm schedules; ends when it has had time enough for anything."""


def row(world: World, job: int) -> JobRow | None:
    return next((r for r in world.client.jobs() if r.job_id == job), None)


def until(world: World, job: int, *states: str) -> JobRow:
    """The row as soon as the job is in one of the states."""
    found = None
    for _ in world.passes():
        found = row(world, job)
        if found is not None and found.state in states:
            return found
    raise AssertionError(f"job {job} is {found}, not {' or '.join(states)}")


def node(world: World, name: str) -> NodeRow:
    return next(n for n in world.client.nodes() if n.name == name)


def offer(world: World, name: str, **counts: int) -> str:
    """A GRES string of so many slices, 1g_10gb=2, with as much filler as keeps the sum."""
    wanted = {kind.replace("_", "."): count for kind, count in counts.items()}
    rest = sum(node(world, name).gres.values()) - sum(wanted.values())
    return ",".join(f"mig:{kind}:{count}" for kind, count in {**wanted, "none": rest}.items())


def refused(call: Any, *names: str) -> dict[str, str]:
    """What the call was refused for these names, and for no other."""
    with pytest.raises(SlurmRefused) as caught:
        call()
    assert isinstance(caught.value, SlurmError)
    assert set(caught.value.refused) == set(names)
    assert all(name in str(caught.value) for name in names)
    return dict(caught.value.refused)


class Looking:
    """Jobs and nodes as they are, and what nodes offer."""

    def test_a_job_that_runs_is_seen_with_what_it_holds(self, world: World) -> None:
        job = world.submit("mig:1g.10gb:2", comment="a comment, with: everything")
        running = until(world, job, "RUNNING")
        assert running.active and not running.pending
        assert (len(running.nodes), running.nodes[0] in world.nodes) == (1, True)
        assert gres.counts(running.gres, "mig") == {"1g.10gb": 2}
        assert (running.partition, running.comment, running.restarts) == ("gpu", "a comment, with: everything", 0)
        assert (running.array_job, running.array_task, running.het_job, running.tasks) == (None, None, None, 1)
        assert running.start is not None and running.submit <= running.start
        assert node(world, running.nodes[0]).used["1g.10gb"] == 2

    def test_a_job_that_waits_holds_nothing(self, world: World) -> None:
        job = world.submit("mig:3g.40gb:1")
        waiting = until(world, job, "PENDING")
        assert waiting.pending and not waiting.active
        assert waiting.nodes == ()
        assert gres.counts(waiting.gres, "mig") == {"3g.40gb": 1}
        assert all(not n.used.get("3g.40gb") for n in world.client.nodes())

    def test_what_is_offered_starts_what_waits(self, world: World) -> None:
        job = world.submit("mig:3g.40gb:1")
        until(world, job, "PENDING")
        world.client.set_gres({world.nodes[0]: offer(world, world.nodes[0], **{"3g_40gb": 1, "1g_10gb": 2})})
        assert node(world, world.nodes[0]).gres["3g.40gb"] == 1
        assert until(world, job, "RUNNING").nodes == world.nodes[:1]

    def test_an_unknown_node_is_named_and_the_others_have_their_offer(self, world: World) -> None:
        first, second = world.nodes
        wanted = {
            first: offer(world, first, **{"2g_20gb": 1}),
            "nosuchnode": "mig:none:1",
            second: offer(world, second, **{"2g_20gb": 1}),
            "another": offer(world, second, **{"2g_20gb": 1}),
        }
        said = refused(lambda: world.client.set_gres(wanted), "nosuchnode", "another")
        assert set(said.values()) == {"Invalid node name specified"}
        assert [node(world, name).gres["2g.20gb"] for name in world.nodes] == [1, 1]

    def test_less_than_is_in_use_may_be_offered(self, world: World) -> None:
        job = world.submit("mig:1g.10gb:2")
        name = until(world, job, "RUNNING").nodes[0]
        world.client.set_gres({name: offer(world, name, **{"1g_10gb": 1})})
        assert node(world, name).gres["1g.10gb"] == 1
        assert node(world, name).used["1g.10gb"] == 2
        assert until(world, job, "RUNNING").nodes == (name,)

    def test_jobs_that_wait_come_in_the_order_of_slurm(self, world: World) -> None:
        jobs = [world.submit("mig:3g.40gb:1") for _ in range(3)]
        listed = [r.job_id for r in world.client.jobs() if r.pending]
        assert listed == jobs


class Changing:
    """Many jobs changed, requeued and signalled at once; what is refused is named and keeps nothing else from it."""

    def test_a_job_that_waits_is_typed_anew_and_keeps_its_place(self, world: World) -> None:
        jobs = [world.submit("mig:3g.40gb:1", comment=f"c{number}") for number in range(3)]
        before = {r.job_id: r for r in world.client.jobs()}
        fields = {"Gres": "mig:2g.20gb:1", "Comment": "c1"}
        world.client.update_jobs({str(jobs[1]): fields})
        after = {r.job_id: r for r in world.client.jobs()}
        assert gres.counts(after[jobs[1]].gres, "mig") == {"2g.20gb": 1}
        assert gres.counts(after[jobs[0]].gres, "mig") == {"3g.40gb": 1}
        for job in jobs:
            assert (after[job].submit, after[job].priority) == (before[job].submit, before[job].priority)
            assert (after[job].eligible, after[job].comment) == (before[job].eligible, before[job].comment)
        assert [r.job_id for r in world.client.jobs() if r.pending] == jobs

    def test_jobs_that_run_or_are_not_there_are_named_and_the_others_changed(self, world: World) -> None:
        running, waiting = world.submit("mig:1g.10gb:1"), world.submit("mig:3g.40gb:1")
        until(world, running, "RUNNING")
        fields = {"Gres": "mig:2g.20gb:1", "Comment": ""}
        updates = {str(running): fields, str(NOBODY): fields, str(waiting): fields}
        said = refused(lambda: world.client.update_jobs(updates), str(running), str(NOBODY))
        assert said[str(running)] == "Job is no longer pending execution"
        assert said[str(NOBODY)] == "Invalid job id specified"
        found = {r.job_id: gres.counts(r.gres, "mig") for r in world.client.jobs()}
        assert found == {running: {"1g.10gb": 1}, waiting: {"2g.20gb": 1}}

    def test_a_requeued_job_is_the_same_job_once_more_and_waits_first(self, world: World) -> None:
        job = world.submit("mig:1g.10gb:1", comment="kept")
        first = until(world, job, "RUNNING")
        world.client.requeue_all([job])
        again = until(world, job, "PENDING")
        assert (again.job_id, again.restarts, again.comment, again.nodes) == (job, 1, "kept", ())
        assert again.eligible is not None and first.start is not None and again.eligible > first.start
        assert again.reason in ("BeginTime", "None")
        assert all(not n.used.get("1g.10gb") for n in world.client.nodes())

    def test_a_requeued_job_may_be_typed_anew_at_once(self, world: World) -> None:
        job = world.submit("mig:1g.10gb:1")
        until(world, job, "RUNNING")
        world.client.requeue_all([job])
        assert until(world, job, "COMPLETING", "PENDING").restarts in (0, 1)
        until(world, job, "PENDING")
        world.client.update_jobs({str(job): {"Gres": "mig:3g.40gb:1", "Comment": ""}})
        assert gres.counts(until(world, job, "PENDING").gres, "mig") == {"3g.40gb": 1}

    def test_what_waits_or_is_not_there_is_not_requeued(self, world: World) -> None:
        running, waiting = world.submit("mig:1g.10gb:1"), world.submit("mig:3g.40gb:1")
        until(world, running, "RUNNING")
        before = row(world, waiting)
        said = refused(lambda: world.client.requeue_all([waiting, NOBODY, running]), str(NOBODY))
        assert said == {str(NOBODY): "Invalid job id specified"}
        assert until(world, running, "PENDING").restarts == 1
        after = row(world, waiting)
        assert before is not None and after is not None
        assert (after.restarts, after.submit, after.priority) == (0, before.submit, before.priority)

    def test_a_signal_to_what_does_not_run_is_no_error(self, world: World) -> None:
        running, waiting = world.submit("mig:1g.10gb:1"), world.submit("mig:3g.40gb:1")
        until(world, running, "RUNNING")
        world.client.signal_all([waiting, NOBODY, running], "USR1")
        found = row(world, waiting)
        assert found is not None
        assert (found.state, found.restarts) == ("PENDING", 0)

    def test_nothing_to_do_is_nothing(self, world: World) -> None:
        world.client.update_jobs({})
        world.client.requeue_all([])
        world.client.signal_all([], "USR1")
        world.client.set_gres({})
