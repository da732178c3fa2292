"""The contract of every SlurmClient: of real Slurm by its commands or by pyslurm, and of a fake.

A test module makes a `World` and inherits the classes of behaviours that its client has:

    class TestFake(Looking):
        @pytest.fixture
        def world(self): ...

`Looking`, `Changing`, `Arrays` and `Order` require only a `World`; `real_slurm.Control` adds tests of what only a real
Slurm can do. Worlds have the nodes n1 and n2, each with 14 of `1g.10gb` offered and nothing else,
DOWN nodes that list every profile, and the partitions `gpu` (tier 10) and `train` (tier 1) over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import pytest

from slurm_migbatch.decide.capacity.demand import could_run
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmClient, SlurmError, SlurmRefused

NOBODY = 10**8
"""A job that does not exist."""


class World(Protocol):
    """A cluster that tests read and change; every test leaves it without jobs and with its initial offers."""

    client: SlurmClient
    nodes: tuple[str, ...]

    def submit(self, want: str, *, partition: str = "gpu", hold: bool = False, comment: str = "") -> int:
        """Submit a job that requests `want` ("mig:1g.10gb:1"), never ends and may be requeued; return its id."""

    def array(self, want: str, tasks: str) -> int:
        """Submit it as a job array with these tasks ("0-9%3")."""

    def het(self, *wants: str) -> int:
        """Submit it as a heterogeneous job with a component for each of `wants`."""

    def timed(self, want: str, minutes: int, nodes: int = 1) -> int:
        """Submit it with a time limit, for `want` on each of some nodes."""

    def dependent(self, want: str, *after: int, comment: str = "") -> int:
        """Submit it to start after other jobs have completed (afterok)."""

    def release(self, job: int) -> None:
        """Release a job that was submitted with `hold`."""

    def suspend(self, job: int) -> None:
        """Suspend a running job, as an administrator does."""

    def refusal(self, want: str) -> str:
        """Return Slurm's message for a submission that it refuses; empty if it accepts the job."""

    def passes(self) -> Iterator[None]:
        """Yield while Slurm schedules; end when it has had enough time for any change."""


def row(world: World, job: int) -> JobRow | None:
    return next((r for r in world.client.jobs() if r.job_id == job), None)


def by_id(rows: Iterable[JobRow]) -> dict[int, JobRow]:
    return {row.job_id: row for row in rows}


def until(world: World, job: int, *states: str) -> JobRow:
    """Wait until the job is in one of the states; return its row."""
    last_row = None
    for _ in world.passes():
        last_row = row(world, job)
        if last_row is not None and last_row.state in states:
            return last_row
    raise AssertionError(f"job {job} is {last_row}, not {' or '.join(states)}")


def tasks(world: World, array: int) -> dict[str, JobRow]:
    return {r.array_task: r for r in world.client.jobs() if r.array_job == array and r.array_task is not None}


def kinds(found: dict[str, JobRow]) -> dict[str, dict[str, int]]:
    return {task: gres.counts(r.gres, "mig") for task, r in found.items()}


def node(world: World, name: str) -> NodeRow:
    return next(n for n in world.client.nodes() if n.name == name)


def only_short_jobs_start(world: World, want: str, running: int, waiting: int) -> None:
    """Assert that backfill starts a job for `want` only if it ends before the limit of the running job, an hour."""
    for _ in world.passes():
        found = row(world, waiting)
        # 23.11 gives such a job no reason, only the expected start
        if backfill_reserves := found is not None and (found.reason == "Resources" or found.start is not None):
            break
    assert backfill_reserves
    long = world.timed(want, 180)
    short = world.timed(want, 20)
    until(world, short, "RUNNING")
    assert {job: (r := row(world, job)) is not None and r.state for job in (running, waiting, long)} == {
        running: "RUNNING",
        waiting: "PENDING",
        long: "PENDING",
    }


def offer(world: World, name: str, **counts: int) -> str:
    """Return a GRES string with these counts (1g_10gb=2) and the filler that keeps the sum constant."""
    requested = {profile.replace("_", "."): count for profile, count in counts.items()}
    filler = sum(node(world, name).gres.values()) - sum(requested.values())
    return ",".join(f"mig:{profile}:{count}" for profile, count in {**requested, "none": filler}.items())


def refused(call: Any, *names: str) -> dict[str, str]:
    """Return Slurm's reason for each of these names; the call must be refused for these names only."""
    with pytest.raises(SlurmRefused) as caught:
        call()
    assert isinstance(caught.value, SlurmError)
    assert set(caught.value.refused) == set(names)
    assert all(name in str(caught.value) for name in names)
    return dict(caught.value.refused)


class Looking:
    """Reading jobs and nodes, and setting what nodes offer."""

    def test_running_job_is_listed_with_its_node_and_slices(self, world: World) -> None:
        job = world.submit("mig:1g.10gb:2", comment="a comment, with: everything")
        running = until(world, job, "RUNNING")
        assert running.active and not running.pending
        assert (len(running.nodes), running.nodes[0] in world.nodes) == (1, True)
        assert gres.counts(running.gres, "mig") == {"1g.10gb": 2}
        assert (running.partition, running.comment, running.restarts) == ("gpu", "a comment, with: everything", 0)
        assert (running.array_job, running.array_task, running.het_job, running.tasks) == (None, None, None, 1)
        assert running.start is not None and running.submit <= running.start
        assert node(world, running.nodes[0]).used["1g.10gb"] == 2

    def test_pending_job_holds_no_slices(self, world: World) -> None:
        job = world.submit("mig:3g.40gb:1")
        waiting = until(world, job, "PENDING")
        assert waiting.pending and not waiting.active
        assert waiting.nodes == ()
        assert gres.counts(waiting.gres, "mig") == {"3g.40gb": 1}
        assert all(not n.used.get("3g.40gb") for n in world.client.nodes())

    def test_pending_job_starts_when_its_profile_is_offered(self, world: World) -> None:
        job = world.submit("mig:3g.40gb:1")
        until(world, job, "PENDING")
        world.client.set_gres({world.nodes[0]: offer(world, world.nodes[0], **{"3g_40gb": 1, "1g_10gb": 2})})
        assert node(world, world.nodes[0]).gres["3g.40gb"] == 1
        assert until(world, job, "RUNNING").nodes == world.nodes[:1]

    def test_set_gres_names_unknown_nodes_and_updates_the_others(self, world: World) -> None:
        first, second = world.nodes
        wanted = {
            first: offer(world, first, **{"2g_20gb": 1}),
            "nosuchnode": "mig:none:1",
            second: offer(world, second, **{"2g_20gb": 1}),
            "another": offer(world, second, **{"2g_20gb": 1}),
        }
        refusals = refused(lambda: world.client.set_gres(wanted), "nosuchnode", "another")
        assert set(refusals.values()) == {"Invalid node name specified"}
        assert [node(world, name).gres["2g.20gb"] for name in world.nodes] == [1, 1]

    def test_offer_may_be_smaller_than_what_is_in_use(self, world: World) -> None:
        job = world.submit("mig:1g.10gb:2")
        name = until(world, job, "RUNNING").nodes[0]
        world.client.set_gres({name: offer(world, name, **{"1g_10gb": 1})})
        assert node(world, name).gres["1g.10gb"] == 1
        assert node(world, name).used["1g.10gb"] == 2
        assert until(world, job, "RUNNING").nodes == (name,)

    def test_jobs_on_returns_the_jobs_listed_on_those_nodes(self, world: World) -> None:
        jobs = [world.submit("mig:1g.10gb:1") for _ in range(4)]
        places = {job: until(world, job, "RUNNING").nodes for job in jobs}
        for name in world.nodes:
            found = world.client.jobs_on(frozenset({name}))
            assert {row.job_id for row in found} == {job for job in jobs if places[job] == (name,)}
            assert by_id(found) == by_id(row for row in world.client.jobs() if row.nodes == (name,))
        found = world.client.jobs_on(frozenset(world.nodes))
        assert by_id(found) == by_id(row for row in world.client.jobs() if row.active)

    def test_pending_jobs_are_listed_in_slurms_order(self, world: World) -> None:
        jobs = [world.submit("mig:3g.40gb:1") for _ in range(3)]
        listed = [r.job_id for r in world.client.jobs() if r.pending]
        assert listed == jobs


class Changing:
    """Many jobs updated, requeued and signalled in one call; refused ones are named and do not block the others."""

    def test_retyped_pending_job_keeps_its_place_in_the_queue(self, world: World) -> None:
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

    def test_dependent_job_shows_its_dependency_and_can_be_retyped(self, world: World) -> None:
        first = world.submit("mig:1g.10gb:1")
        second = world.dependent("mig:1g.10gb:1", first)
        until(world, first, "RUNNING")
        before = until(world, second, "PENDING")
        assert (before.after, before.eligible) == ((first,), None) and not could_run(before, before.submit)
        assert before.reason in ("Dependency", "None"), "until Slurm has considered it"
        world.client.update_jobs({str(second): {"Gres": "mig:2g.20gb:1", "Comment": "typed"}})
        after = until(world, second, "PENDING")
        assert (after.after, after.eligible) == ((first,), None)
        assert (after.submit, after.comment, gres.counts(after.gres, "mig")) == (before.submit, "typed", {"2g.20gb": 1})
        world.client.cancel(first)
        never = next(
            (found for _ in world.passes() if (found := row(world, second)) and found.reason.startswith("DependencyN")),
            None,
        )
        assert never is not None and (never.reason, never.after) == ("DependencyNeverSatisfied", (first,))

    def test_job_of_a_pipeline_shows_more_dependencies_than_fit_into_the_listing(self, world: World) -> None:
        before = [world.submit("mig:1g.10gb:1") for _ in range(6)]
        last = world.dependent("mig:1g.10gb:1", *before, comment="migbatch: pipeline=p")
        other = world.dependent("mig:1g.10gb:1", *before)
        assert until(world, last, "PENDING").after == tuple(before)
        shown = until(world, other, "PENDING")
        assert set(shown.after) & set(before) and not could_run(shown, shown.submit)
        assert [r.after for r in world.client.jobs() if r.job_id == last] == [tuple(before)]

    def test_update_jobs_names_running_and_unknown_jobs_and_updates_the_others(self, world: World) -> None:
        running, waiting = world.submit("mig:1g.10gb:1"), world.submit("mig:3g.40gb:1")
        until(world, running, "RUNNING")
        fields = {"Gres": "mig:2g.20gb:1", "Comment": ""}
        updates = {str(running): fields, str(NOBODY): fields, str(waiting): fields}
        refusals = refused(lambda: world.client.update_jobs(updates), str(running), str(NOBODY))
        assert refusals[str(running)] == "Job is no longer pending execution"
        assert refusals[str(NOBODY)] == "Invalid job id specified"
        found = {r.job_id: gres.counts(r.gres, "mig") for r in world.client.jobs()}
        assert found == {running: {"1g.10gb": 1}, waiting: {"2g.20gb": 1}}

    def test_requeued_job_keeps_its_id_and_comment_and_is_delayed(self, world: World) -> None:
        job = world.submit("mig:1g.10gb:1", comment="kept")
        first = until(world, job, "RUNNING")
        world.client.requeue_all([job])
        again = until(world, job, "PENDING")
        assert (again.job_id, again.restarts, again.comment, again.nodes) == (job, 1, "kept", ())
        assert again.eligible is not None and first.start is not None and again.eligible > first.start
        assert again.reason in ("BeginTime", "None")
        assert all(not n.used.get("1g.10gb") for n in world.client.nodes())

    def test_suspended_job_that_is_resumed_first_is_not_held_after_its_requeue(self, world: World) -> None:
        job, running = world.submit("mig:1g.10gb:1"), world.submit("mig:1g.10gb:1")
        until(world, job, "RUNNING")
        until(world, running, "RUNNING")
        world.suspend(job)
        until(world, job, "SUSPENDED")
        refusals = refused(lambda: world.client.resume_all([running, job]), str(running))
        assert set(refusals) == {str(running)}
        world.client.requeue_all([job])
        again = until(world, job, "PENDING")
        assert again.priority and again.eligible is not None and again.reason in ("BeginTime", "None")

    def test_requeued_job_can_be_retyped_at_once(self, world: World) -> None:
        job = world.submit("mig:1g.10gb:1")
        until(world, job, "RUNNING")
        world.client.requeue_all([job])
        found = until(world, job, "COMPLETING", "PENDING")
        assert found.restarts == int(found.pending), "the run that still ends is the one before"
        until(world, job, "PENDING")
        world.client.update_jobs({str(job): {"Gres": "mig:3g.40gb:1", "Comment": ""}})
        assert gres.counts(until(world, job, "PENDING").gres, "mig") == {"3g.40gb": 1}

    def test_a_job_is_not_started_on_nodes_that_it_excludes(self, world: World) -> None:
        first, second = world.nodes
        jobs = [world.submit("mig:3g.40gb:1") for _ in range(2)]
        world.client.update_jobs({str(jobs[0]): {"ExcNodeList": first}, str(jobs[1]): {"ExcNodeList": second}})
        assert world.client.excluded_nodes([*jobs, NOBODY]) == {str(jobs[0]): first, str(jobs[1]): second}
        world.client.update_jobs({str(jobs[1]): {"ExcNodeList": ""}})
        assert world.client.excluded_nodes(jobs) == {str(jobs[0]): first}
        world.client.set_gres({name: offer(world, name, **{"3g_40gb": 1}) for name in world.nodes})
        assert [until(world, job, "RUNNING").nodes for job in jobs] == [(second,), (first,)]

    def test_requeue_all_leaves_pending_jobs_and_names_unknown_ones(self, world: World) -> None:
        running, waiting = world.submit("mig:1g.10gb:1"), world.submit("mig:3g.40gb:1")
        until(world, running, "RUNNING")
        before = row(world, waiting)
        refusals = refused(lambda: world.client.requeue_all([waiting, NOBODY, running]), str(NOBODY))
        assert refusals == {str(NOBODY): "Invalid job id specified"}
        assert until(world, running, "PENDING").restarts == 1
        after = row(world, waiting)
        assert before is not None and after is not None
        assert (after.restarts, after.submit, after.priority) == (0, before.submit, before.priority)

    def test_signalling_a_job_that_is_not_running_is_no_error(self, world: World) -> None:
        running, waiting = world.submit("mig:1g.10gb:1"), world.submit("mig:3g.40gb:1")
        until(world, running, "RUNNING")
        world.client.signal_all([waiting, NOBODY, running], "USR1")
        found = row(world, waiting)
        assert found is not None
        assert (found.state, found.restarts) == ("PENDING", 0)

    def test_empty_requests_are_accepted(self, world: World) -> None:
        world.client.update_jobs({})
        world.client.requeue_all([])
        world.client.signal_all([], "USR1")
        world.client.set_gres({})


class Arrays:
    """Pending tasks share a row until one of them gets a record of its own."""

    def test_pending_tasks_share_a_row_and_running_tasks_have_their_own(self, world: World) -> None:
        array = world.array("mig:1g.10gb:8", "0-9%3")
        for _ in world.passes():
            found = tasks(world, array)
            if len(found) == 3:
                break
        assert set(found) == {"0", "1", "2-9%3"}
        assert [found[t].state for t in ("0", "1", "2-9%3")] == ["RUNNING", "RUNNING", "PENDING"]
        assert [found[t].tasks for t in ("0", "1", "2-9%3")] == [1, 1, 8]
        assert [found[t].throttle for t in ("0", "1", "2-9%3")] == [None, None, 3]
        assert found["2-9%3"].job_id == array

    def test_array_id_retypes_all_pending_tasks_and_task_id_only_that_task(self, world: World) -> None:
        array = world.array("mig:1g.10gb:8", "0-5")
        for _ in world.passes():
            if len(tasks(world, array)) == 3:
                break
        world.client.update_jobs({str(array): {"Gres": "mig:4g.40gb:1"}, f"{array}_4": {"Gres": "mig:3g.40gb:1"}})
        assert kinds(tasks(world, array)) == {
            "0": {"1g.10gb": 8},
            "1": {"1g.10gb": 8},
            "2-3,5": {"4g.40gb": 1},
            "4": {"3g.40gb": 1},
        }
        world.client.update_jobs({str(array): {"Gres": "mig:2g.20gb:1"}})
        found = kinds(tasks(world, array))
        assert (found["2-3,5"], found["4"], found["0"]) == ({"2g.20gb": 1}, {"3g.40gb": 1}, {"1g.10gb": 8})
        refusals = refused(lambda: world.client.update_jobs({f"{array}_0": {"Gres": "mig:2g.20gb:1"}}), f"{array}_0")
        assert set(refusals.values()) == {"Job is no longer pending execution"}

    def test_array_throttle_can_be_changed_and_removed(self, world: World) -> None:
        array = world.array("mig:3g.40gb:1", "1-8%2")
        for value, throttle, task in (("5", 5, "1-8%5"), ("0", None, "1-8"), ("1", 1, "1-8%1")):
            world.client.update_jobs({str(array): {"ArrayTaskThrottle": value}})
            assert {t: r.throttle for t, r in tasks(world, array).items()} == {task: throttle}

    def test_requeued_array_task_has_its_own_row(self, world: World) -> None:
        array = world.array("mig:1g.10gb:14", "0-5%4")
        for _ in world.passes():
            if len(tasks(world, array)) == 3:
                break
        world.client.requeue_all([f"{array}_0"])
        for _ in world.passes():
            found = tasks(world, array)
            if "0" in found and found["0"].pending:
                break
        assert (found["0"].restarts, found["0"].tasks) == (1, 1)
        world.client.update_jobs({f"{array}_0": {"Gres": "mig:2g.20gb:1", "StartTime": "now+2"}})
        found = tasks(world, array)
        assert kinds(found)["0"] == {"2g.20gb": 1}
        assert all(kind == {"1g.10gb": 14} for task, kind in kinds(found).items() if task != "0")
        assert all(r.restarts == 0 for task, r in found.items() if task != "0")
        assert [r.throttle for r in found.values() if r.job_id == array] == [4], world.client.jobs()

    def test_task_with_the_arrays_own_id_is_cancelled_alone_by_its_task_name(self, world: World) -> None:
        """The record of the task that starts last has the array's own id, which as a job id means all tasks."""
        array = world.array("mig:1g.10gb:1", "0-2")
        for _ in world.passes():
            if [r.state for r in tasks(world, array).values()] == ["RUNNING"] * 3:
                break
        assert tasks(world, array)["2"].job_id == array
        world.client.update_jobs({f"{array}_2": {"Comment": "why"}})
        assert {t: r.comment for t, r in tasks(world, array).items()} == {"0": "", "1": "", "2": "why"}
        world.client.cancel(f"{array}_2")
        for _ in world.passes():
            if "2" not in tasks(world, array):
                break
        assert {t: r.state for t, r in tasks(world, array).items()} == {"0": "RUNNING", "1": "RUNNING"}

    def test_no_more_tasks_run_than_the_throttle_allows(self, world: World) -> None:
        array = world.array("mig:1g.10gb:1", "0-5%2")
        for _ in world.passes():
            if len(tasks(world, array)) == 3:
                break
        assert {t: r.state for t, r in tasks(world, array).items()} == {
            "0": "RUNNING",
            "1": "RUNNING",
            "2-5%2": "PENDING",
        }
        other = world.submit("mig:1g.10gb:1")
        until(world, other, "RUNNING")  # there is room, and Slurm has scheduled since
        assert len(tasks(world, array)) == 3
        world.client.update_jobs({str(array): {"ArrayTaskThrottle": "4"}})
        for _ in world.passes():
            if len(tasks(world, array)) == 5:
                break
        assert {t for t, r in tasks(world, array).items() if r.state == "RUNNING"} == {"0", "1", "2", "3"}
        world.client.requeue_all([f"{array}_1"])
        states: dict[str, str] = {}
        for _ in world.passes():  # the row of the last task alone is written "5" or "5%4", depending on the release
            states = {task.partition("%")[0]: row.state for task, row in tasks(world, array).items()}
            if states.get("4") == "RUNNING":
                break
        assert {task: state for task, state in states.items() if task in ("4", "5")} == {
            "4": "RUNNING",
            "5": "PENDING",
        }


class Order:
    """Which jobs start first, what jobs wait for, and what Slurm refuses."""

    def test_jobs_in_a_higher_tier_partition_are_listed_first(self, world: World) -> None:
        low = world.submit("mig:3g.40gb:1", partition="train")
        high = world.submit("mig:3g.40gb:1")
        both = world.submit("mig:3g.40gb:1", partition="train,gpu")
        rows = [r for r in world.client.jobs() if r.pending]
        assert [r.job_id for r in rows] == [high, both, low]
        assert set(rows[1].partition.split(",")) == {"gpu", "train"}

    def test_job_can_be_held_released_and_cancelled(self, world: World) -> None:
        job = world.submit("mig:1g.10gb:1", hold=True)
        held = row(world, job)
        assert held is not None
        assert (held.reason, held.priority, held.eligible) == ("JobHeldUser", 0, None)
        world.release(job)
        until(world, job, "RUNNING")
        world.client.cancel(job)
        for _ in world.passes():
            if row(world, job) is None:
                break
        world.client.cancel(job)
        world.client.cancel(NOBODY)
        with pytest.raises(SlurmRefused, match="Invalid job id"):
            world.client.update_jobs({str(NOBODY): {"Comment": "x"}})

    def test_hasten_starts_a_requeued_job(self, world: World) -> None:
        job = world.submit("mig:1g.10gb:1")
        until(world, job, "RUNNING")
        world.client.requeue_all([job])
        until(world, job, "PENDING")
        world.client.shorten_requeue_delay(job)
        assert until(world, job, "RUNNING").restarts == 1

    def test_offers_shrink_and_grow_in_one_call(self, world: World) -> None:
        first, second = world.nodes
        world.client.set_gres({first: offer(world, first, **{"7g_80gb": 1}), second: offer(world, second)})
        found = {node.name: {k: v for k, v in node.gres.items() if v} for node in world.client.nodes()}
        total = sum(found[second].values())
        assert (found[first], found[second]) == ({"7g.80gb": 1, "none": total - 1}, {"none": total})

    def test_default_partition_is_read(self, world: World) -> None:
        assert world.client.default_partition() == "gpu"

    def test_requested_slices_must_fit_on_one_node(self, world: World) -> None:
        first, second = world.submit("mig:1g.10gb:9"), world.submit("mig:1g.10gb:9")
        names = {until(world, job, "RUNNING").nodes for job in (first, second)}
        assert names == {("n1",), ("n2",)}
        third = world.submit("mig:1g.10gb:6")
        small = world.submit("mig:1g.10gb:5")
        assert until(world, small, "RUNNING").nodes in names
        waiting = row(world, third)
        assert waiting is not None and (waiting.state, waiting.nodes) == ("PENDING", ())

    def test_job_whose_profile_no_node_offers_delays_no_other_job(self, world: World) -> None:
        waiting = world.timed("mig:3g.40gb:1", 60)
        until(world, waiting, "PENDING")
        for job in (world.timed("mig:1g.10gb:14", 60), world.timed("mig:1g.10gb:14", 60)):
            until(world, job, "RUNNING")
        for _ in world.passes():
            found = row(world, waiting)
            assert found is not None
            if found.reason.startswith("ReqNodeNotAvail"):
                break
        assert found is not None and found.pending

    def test_backfill_starts_only_jobs_short_enough_to_delay_no_earlier_job(self, world: World) -> None:
        """Backfill reserves whole nodes, including slices of types that the earlier job does not request."""
        first, second = world.nodes
        world.client.set_gres(
            {first: offer(world, first, **{"1g_10gb": 2, "2g_20gb": 1}), second: offer(world, second)}
        )
        running = world.timed("mig:1g.10gb:2", 60)
        until(world, running, "RUNNING")
        before = world.timed("mig:1g.10gb:1", 60)
        only_short_jobs_start(world, "mig:2g.20gb:1", running, before)

    def test_job_of_several_nodes_keeps_its_idle_node_free_for_its_start(self, world: World) -> None:
        running = world.timed("mig:1g.10gb:14", 60)
        until(world, running, "RUNNING")
        before = world.timed("mig:1g.10gb:14", 60, nodes=2)
        only_short_jobs_start(world, "mig:1g.10gb:1", running, before)

    def test_submission_is_refused_when_no_node_lists_its_gres(self, world: World) -> None:
        assert "Requested node configuration is not available" in world.refusal("mig:5g.60gb:1")
        assert "Requested node configuration is not available" in world.refusal("mig:1g.10gb:999")
        assert not [r for r in world.client.jobs() if "5g.60gb" in r.gres]

    def test_job_is_held_when_no_node_lists_its_profile(self, world: World) -> None:
        job = world.submit("mig:3g.40gb:1")
        until(world, job, "PENDING")
        world.client.update_jobs({str(job): {"Gres": "mig:5g.60gb:1"}})
        for _ in world.passes():
            found = row(world, job)
            if found is not None and found.reason == "BadConstraints":
                break
        # the backfill scheduler of 23.11 clears the reason before the main scheduler has held the job for it
        assert found is not None and (found.priority == 0 or found.reason == "None")

    def test_components_of_a_heterogeneous_job_share_its_id(self, world: World) -> None:
        job = world.het("mig:3g.40gb:1", "mig:2g.20gb:1")
        rows = world.client.jobs()
        assert {r.het_job for r in rows} == {job}
        assert [kinds({"": r})[""] for r in sorted(rows, key=lambda r: r.job_id)] == [{"3g.40gb": 1}, {"2g.20gb": 1}]
        assert replace(rows[0], job_id=0).user == "mbalice"

    def test_heterogeneous_components_start_together_on_different_nodes(self, world: World) -> None:
        job = world.het("mig:1g.10gb:1", "mig:1g.10gb:1")
        for _ in world.passes():
            found = world.client.jobs()
            if {r.state for r in found} == {"RUNNING"}:
                break
        assert {r.het_job for r in found} == {job}
        assert {r.nodes for r in found} == {("n1",), ("n2",)}
