"""Lending from the release to the end of loans, with a strict fake Slurm and a real record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm_migbatch.daemon import record
from slurm_migbatch.daemon.nodesview import NodesView
from slurm_migbatch.decide.capacity.facts import NodeFacts
from slurm_migbatch.mig.layout import Slot
from tests.support.loan_world import LoanWorld, MakeWorld
from tests.support.stores import Away
from tests.support.waiting import eventually

CALLS = ["signal_all", "requeue_all", "update_jobs"]


class Killed(BaseException):
    """migbatchd is killed in the middle of its work."""


def history(w: LoanWorld, job: int) -> list[tuple[int, str, str]]:
    """Restart, state and cause of each loan of a job."""
    with w.store() as store:
        return [(row["restart"], row["state"], row["cause"]) for row in store.loans([job])]


def kinds(w: LoanWorld, job: int, *, dry_run: bool = False) -> list[str]:
    """The kinds of the actions on a job that were not refused."""
    with w.store() as store:
        rows = [row for row in store.actions([job]) if row["dry_run"] is dry_run and not row["outcome"]]
    return [row["kind"] for row in rows]


def filled(w: LoanWorld, **options: Any) -> list[int]:
    """Seven training jobs on one GPU, which have run for a while."""
    jobs = [w.train(**{"needs": 500, "hints": "signal=usr1 max=1g.10gb", **options}) for _ in range(7)]
    w.until(lambda: len(w.loaned()) == 7)
    for _ in range(20):
        w.step()
    return jobs


def crowded(make: MakeWorld, full: str, what: str) -> LoanWorld:
    """Two nodes: one with free slices and hardly any CPUs or memory, one with little else than 2g.20gb free."""
    w = make(nodes=2, start_s=60.0)
    for machine in w.slurm.machines.values():
        machine.memory = 500_000
    taken = {"cpus": 62} if what == "cpus" else {"cpus": 1, "memory_per_node": 490_000}
    w.infer("1g.10gb", runs=10**8, requested_nodes=full, **taken)
    for _ in range(5):
        w.infer("1g.10gb", runs=10**8, requested_nodes="n1" if full == "n2" else "n2", cpus=1, memory_per_node=1000)
    for _ in range(3):
        w.step()
    return w


def test_training_jobs_start_on_idle_slices_and_end_by_themselves(world: MakeWorld) -> None:
    w = world()
    first, second = w.train(needs=30), w.train(needs=30)
    w.until(lambda: len(w.loaned()) == 2)
    w.until(lambda: first not in w.slurm.queue and second not in w.slurm.queue)
    w.step()
    for job in (first, second):
        assert history(w, job) == [(0, "ended", "left")]
        assert kinds(w, job) == ["release"]
    with w.store() as store:
        assert all(row["released"] <= row["started"] < row["ended"] for row in store.loans())
    assert not w.nodes.misfits


class Liar:
    """The facts that the nodes report, except that one of them also claims a run."""

    def __init__(self, view: NodesView, node: str, run: tuple[int, int], profile: str = "1g.10gb") -> None:
        self._view, self._node, self._lease = view, node, (Slot.of(profile, 6, 1), run)

    def facts(self) -> dict[str, NodeFacts]:
        found = dict(self._view.facts())
        honest = found.pop(self._node)
        (gpu,) = honest.gpus
        return {**found, self._node: replace(honest, gpus=(replace(gpu, leases=(*gpu.leases, self._lease)),))}


def test_job_is_not_stopped_because_another_node_claims_its_run(world: MakeWorld) -> None:
    w = world(nodes=2)
    large = w.infer("7g.80gb", runs=10**8)
    w.step()
    w.infer("1g.10gb", runs=10**8)
    w.step()
    job = w.train(hints="signal=usr1 max=1g.10gb")
    w.until(lambda: job in w.loaned())
    for _ in range(5):
        w.step()
    (liar,) = w.row(large).nodes
    assert liar not in w.row(job).nodes
    w.vanish(large)
    w.control.observer.view = Liar(w.control.observer.view, liar, (job, 0))
    wants = w.infer("7g.80gb")
    for _ in range(20):
        w.step()
    assert w.row(wants).pending, "whose slice is where the claim is"
    assert w.row(job).restarts == 0 and "signal" not in kinds(w, job)


def test_profile_invented_by_a_node_does_not_count_as_demand(world: MakeWorld) -> None:
    """Otherwise each profile would be remembered and examined in every round."""
    w = world(nodes=2)
    honest, job = w.control.observer.view, w.infer("1g.10gb", runs=10**8)
    w.step()
    for number in range(20):
        w.control.observer.view = Liar(honest, "n2", (job if number % 2 else 999, 0), f"9g.{number}gb")
        w.round()
    assert [profile.name for profile in w.lending.expected._gaps] == ["1g.10gb"]


@pytest.mark.parametrize("late", [0, 6])
def test_small_loans_reclaimed_for_a_large_slice_continue_with_their_progress(world: MakeWorld, late: int) -> None:
    """Also when the nodes report late that slices were given back, as Slurm knows it already."""
    w = world()
    w.late = late
    jobs = filled(w)
    done = {job: w.training[job].done for job in jobs}
    inference = w.infer("3g.40gb", runs=40)
    took = w.until(lambda: inference in w.running())
    victims = {job for job, _ in w.slurm.signals}
    assert len(victims) == 3
    assert took <= 12 + late
    assert sorted(w.slurm.requeues) == sorted(victims)
    assert all(w.training[job].saved >= done[job] for job in victims)
    assert set(w.loaned()) == set(jobs) - victims
    w.until(lambda: inference not in w.slurm.queue)
    w.until(lambda: victims <= set(w.loaned()))
    w.until(lambda: not w.slurm.queue, 1500)
    assert not w.nodes.misfits
    with w.store() as store:
        loans = store.loans()
    called = [row for row in loans if row["cause"] == "reclaim"]
    assert {row["job_id"] for row in called} == victims
    assert all(row["signalled"] <= row["checkpoint"] <= row["requeued"] <= row["ended"] for row in called)
    assert all(f"inference job {inference} needs 3g.40gb" in row["why_ended"] for row in called)
    for job in victims:
        assert kinds(w, job) == ["release", "signal", "requeue", "retype", "release"]


def test_job_that_ignores_the_signal_is_requeued_after_the_grace_period(world: MakeWorld) -> None:
    w = world()
    filled(w, after=None)
    inference = w.infer("7g.80gb", runs=10)
    w.until(lambda: len(w.slurm.signals) == 7)
    signalled = w.clock.now
    w.until(lambda: len(w.slurm.requeues) == 7)
    assert w.clock.now - signalled == w.rules.grace_s
    w.until(lambda: inference in w.running())
    w.until(lambda: len(w.loaned()) == 7)


def test_reclaim_ends_although_the_clock_is_set_back(world: MakeWorld) -> None:
    w = world()
    filled(w, after=None)
    w.infer("7g.80gb", runs=10)
    w.until(lambda: len(w.slurm.signals) == 7)
    w.clock.now -= 3600
    for _ in range(int(w.rules.grace_s) + 2):
        w.step()
    assert len(w.slurm.requeues) == 7


@pytest.mark.parametrize("horizon_s", [1.0, 60.0])
def test_free_slices_are_lent_although_the_clock_is_set_back(world: MakeWorld, horizon_s: float) -> None:
    w = world(horizon_s=horizon_s)
    inference = w.infer("7g.80gb", runs=10)
    w.until(lambda: inference in w.running())
    w.until(lambda: inference not in w.slurm.queue)
    w.step()
    w.clock.now -= 3600
    w.train(needs=30)
    w.until(lambda: len(w.loaned()) == 1, 300)


@pytest.mark.parametrize("payback_s", [600.0, 5.0])
def test_job_that_has_made_no_step_yet_is_requeued_at_once(world: MakeWorld, payback_s: float) -> None:
    """It has nothing to save and would not handle the signal, whatever payback_s is."""
    w = world(payback_s=payback_s, grace_s=60.0)
    filled(w, after=None, starts=45.0)
    inference = w.infer("3g.40gb", runs=10)
    w.step()
    assert len(w.slurm.requeues) == 3 and not w.slurm.signals
    w.until(lambda: inference in w.running())
    for _ in range(60):
        w.step()
    w.infer("7g.80gb", runs=10)
    w.step()
    assert len(w.slurm.signals) >= 4


def test_job_without_a_signal_is_requeued_at_once(world: MakeWorld) -> None:
    w = world()
    filled(w, hints="max=1g.10gb")
    inference = w.infer("7g.80gb", runs=10)
    w.step()
    assert not w.slurm.signals
    assert len(w.slurm.requeues) == 7
    w.until(lambda: inference in w.running())


def test_only_as_many_loans_end_as_inference_needs(world: MakeWorld) -> None:
    w = world(nodes=2)
    for _ in range(2):
        filled(w)
    first, second = w.infer("1g.10gb", runs=60), w.infer("1g.10gb", runs=60)
    w.until(lambda: {first, second} <= w.running())
    for _ in range(20):
        w.step()
    assert len(w.slurm.requeues) == 2


@pytest.mark.parametrize("reason", ["Resources", "None"])
def test_loans_are_reclaimed_for_the_cpus_that_inference_lacks(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """The backfill scheduler of Slurm 23.11 clears the reason that the main scheduler has set."""
    w = world()
    listed = w.slurm.jobs
    shown = {"Resources": reason}
    monkeypatch.setattr(
        w.slurm, "jobs", lambda: [replace(row, reason=shown.get(row.reason, row.reason)) for row in listed()]
    )
    training = [w.train(hints="signal=usr1 max=1g.10gb", cpus=cpus) for cpus in (8, 16, 16, 24)]  # all of 64
    w.until(lambda: len(w.loaned()) == 4)
    for _ in range(20):
        w.step()
    inference = w.infer("1g.10gb", runs=60, cpus=20)
    w.step()
    assert not w.slurm.signals, "the shortage must last"
    w.until(lambda: inference in w.running())
    ended = [job for job in training if w.row(job).restarts]
    assert sum(w.row(job).cpus for job in ended) in (24, 32) and len(ended) <= 2
    assert [history(w, job)[0] for job in ended] == [(0, "ended", "reclaim")] * len(ended)
    w.until(lambda: len(w.loaned()) == 4)
    assert sum(w.row(job).restarts for job in training) == len(ended), "they wait until the CPUs are free"


def test_loans_are_reclaimed_for_the_memory_that_inference_lacks(world: MakeWorld) -> None:
    w = world()
    w.slurm.machines["n1"].memory = 500_000
    sizes = (50_000, 100_000, 250_000, 100_000)  # all of it
    training = [w.train(hints="signal=usr1 max=1g.10gb", cpus=1, memory_per_node=size) for size in sizes]
    w.until(lambda: len(w.loaned()) == 4)
    for _ in range(20):
        w.step()
    inference = w.infer("1g.10gb", runs=60, cpus=1, memory_per_node=240_000)
    w.until(lambda: inference in w.running())
    ended = [job for job in training if w.row(job).restarts]
    freed = [w.row(job).memory_per_node for job in ended]
    assert sum(freed) >= 240_000 > sum(freed) - min(freed), "each was needed"
    assert [history(w, job)[0] for job in ended] == [(0, "ended", "reclaim")] * len(ended)
    w.until(lambda: len(w.loaned()) == 4)
    assert sum(w.row(job).restarts for job in training) == len(ended), "they wait until the memory is free"


@pytest.mark.parametrize(("memory", "restarts"), [(440_000, 1), (460_000, 0)])
def test_no_loan_is_reclaimed_for_a_slice_where_the_memory_could_not_suffice(
    world: MakeWorld, memory: int, restarts: int
) -> None:
    w = world()
    w.slurm.machines["n1"].memory = 500_000
    other = w.infer("1g.10gb", runs=10_000, cpus=1, memory_per_node=50_000)
    training = w.train(hints="signal=usr1 min=4g.40gb max=4g.40gb", cpus=4, memory_per_node=100_000)
    w.until(lambda: {other, training} <= w.running())
    inference = w.infer("4g.40gb", runs=60, cpus=1, memory_per_node=memory)
    for _ in range(30):
        w.step()
    assert w.row(training).restarts == restarts
    assert (inference in w.running()) == bool(restarts)


@pytest.mark.parametrize("what", ["cpus", "memory"])
@pytest.mark.parametrize("full", ["n1", "n2"])
def test_loans_are_on_nodes_with_cpus_and_memory_for_them(world: MakeWorld, full: str, what: str) -> None:
    w = crowded(world, full, what)
    training = [w.train(cpus=4, memory_per_node=50_000) for _ in range(2)]
    w.until(lambda: len(w.loaned()) == 2, 60)
    assert all(w.row(job).nodes != (full,) for job in training)
    assert {kind for job in training for kind in kinds(w, job)} == {"release"}


def test_no_job_is_stopped_for_a_slice_of_a_node_that_lacks_memory_for_it(world: MakeWorld) -> None:
    w = crowded(world, "n1", "memory")
    job = w.train(needs=10**6, cpus=4, memory_per_node=50_000)
    w.until(w.loaned)
    for _ in range(400):
        w.step()
    assert (w.row(job).nodes, w.row(job).restarts) == (("n2",), 0)


def test_reason_names_cpus_and_memory_where_no_node_with_a_free_slice_has_them(world: MakeWorld) -> None:
    w = crowded(world, "n1", "cpus")
    job = w.train(cpus=32, hints="signal=usr1 min=4g.40gb")
    for _ in range(30):
        w.step()
    assert "lack the CPUs or the memory that it requests" in w.why(job) and not kinds(w, job)
    w.vanish(next(iter(w.slurm.queue)))
    w.until(lambda: w.row(job).nodes == ("n1",))


def test_no_more_jobs_are_released_than_a_node_has_cpus_for(world: MakeWorld) -> None:
    w = world(gpus=2)
    training = [w.train(cpus=24, hints="signal=usr1 max=1g.10gb") for _ in range(4)]  # of 64
    for _ in range(100):
        w.step()
    assert len(w.loaned()) == 2
    assert sorted(kind for job in training for kind in kinds(w, job)) == ["release"] * 2


def test_suspended_loan_is_not_held_after_its_reclaim(world: MakeWorld) -> None:
    w = world()
    training = w.train(hints="signal=usr1 min=7g.80gb")
    w.until(lambda: training in w.loaned())
    w.slurm.suspend(training)
    inference = w.infer("7g.80gb", runs=60)
    w.until(lambda: inference in w.running())
    assert (w.row(training).pending, w.row(training).reason, w.row(training).restarts) == (True, "BeginTime", 1)
    w.until(lambda: training in w.loaned() and training in w.running(), most=800)


def test_suspended_loan_writes_a_checkpoint_before_its_reclaim(world: MakeWorld) -> None:
    """Slurm signals running jobs only."""
    w = world()
    training = w.train(hints="signal=usr1 min=7g.80gb")
    w.until(lambda: training in w.running())
    for _ in range(80):  # a run of less than a minute has nothing to save
        w.step()
    w.slurm.suspend(training)
    inference = w.infer("7g.80gb", runs=60)
    w.until(lambda: inference in w.running())
    assert [job for job, _ in w.slurm.signals] == [training]


def test_no_loan_is_reclaimed_if_all_loans_hold_too_few_cpus(world: MakeWorld) -> None:
    w = world()
    other = w.infer("1g.10gb", runs=10_000, cpus=60)
    training = w.train(hints="signal=usr1 max=1g.10gb", cpus=4)
    w.until(lambda: {other, training} <= w.running())
    w.infer("1g.10gb", runs=60, cpus=20)
    for _ in range(20):
        w.step()
    assert not w.row(training).restarts and not w.slurm.signals


@pytest.mark.parametrize(("cpus", "restarts"), [(14, 1), (15, 0)])
def test_no_loan_is_reclaimed_for_a_slice_where_the_cpus_could_not_suffice(
    world: MakeWorld, cpus: int, restarts: int
) -> None:
    w = world()
    other = w.infer("1g.10gb", runs=10_000, cpus=50)
    training = w.train(hints="signal=usr1 min=4g.40gb max=4g.40gb", cpus=4)
    w.until(lambda: {other, training} <= w.running())
    inference = w.infer("4g.40gb", runs=60, cpus=cpus)
    for _ in range(60):
        w.step()
    assert w.row(training).restarts == restarts
    assert (inference in w.running()) == bool(restarts)


@pytest.mark.parametrize("moment", ["released", "running", "signalled", "requeued"])
@pytest.mark.parametrize("what", ["cancelled", "requeued by Slurm"])
def test_ledger_follows_a_cancellation_or_requeue_at_any_moment(world: MakeWorld, moment: str, what: str) -> None:
    w = world()
    job = w.train(hints="signal=usr1 max=7g.80gb", after=None)
    w.until(lambda: job in w.lending.ledger.open)
    if moment != "released":
        w.until(lambda: job in w.running() and w.lending.ledger.open[job].state.value == "running")
        for _ in range(10):
            w.step()
    if moment in ("signalled", "requeued"):
        w.infer("7g.80gb", runs=10)
        w.until(lambda: w.lending.ledger.open[job].state.value == moment)
    if what == "cancelled":
        w.vanish(job)
        w.step()
        w.step()
        assert job not in w.lending.ledger.open
        assert history(w, job) == [(0, "ended", "left")]
    elif job in w.running():
        w.slurm.requeue_all([job])
        w.until(lambda: job not in w.lending.ledger.open)
        ((restart, state, cause),) = history(w, job)
        assert (restart, state, cause) == (0, "ended", "reclaim" if moment == "requeued" else "slurm")
        w.until(lambda: job in w.loaned())
        assert w.lending.ledger.open[job].restart == w.row(job).restarts


def test_job_grows_where_it_pays_and_no_other_job_waits(world: MakeWorld) -> None:
    """It is stopped for that once, after its checkpoint, and not before it has run for the minimum time."""
    w = world(horizon_s=600.0, min_idle_s=5.0)
    others = [w.train(needs=60, hints="max=1g.10gb") for _ in range(6)]
    job = w.train(needs=10**6)
    w.until(lambda: len(w.loaned()) == 7)
    assert w.loaned()[job] == "1g.10gb"
    begun = w.clock.now
    w.until(lambda: not set(others) & set(w.slurm.queue))
    w.until(lambda: w.loaned().get(job, "1g.10gb") != "1g.10gb", 1000)
    assert w.clock.now - begun >= w.rules.hysteresis.first_s
    assert history(w, job)[0] == (0, "ended", "grow")
    assert kinds(w, job) == ["release", "signal", "requeue", "retype", "release"]
    assert w.training[job].saved > 0
    for _ in range(600):
        w.step()
    assert w.row(job).restarts <= 2
    assert not w.lending.ledger.past[job].hits, "it was not reclaimed"


def test_inference_takes_precedence_over_a_released_job_that_has_not_started(world: MakeWorld) -> None:
    """Inference that arrives between the release of a job and its start gets the room."""
    w = world()
    job = w.train(hints="min=7g.80gb")
    w.until(lambda: job in w.lending.ledger.open)
    inference = w.infer("3g.40gb", runs=30)
    w.until(lambda: inference in w.running())
    w.until(lambda: inference not in w.slurm.queue)
    w.until(lambda: job in w.loaned())
    assert not w.nodes.misfits


def test_while_the_database_is_away_loans_are_reclaimed_but_none_begins(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world()
    filled(w)
    waiting = w.train(hints="max=1g.10gb")
    real = w.writer._store
    assert real is not None
    with monkeypatch.context() as patch:
        patch.setattr(record, "_SAVE_S", 0.2)  # it waits in vain
        w.writer._store = Away()  # type: ignore[assignment]
        inference = w.infer("2g.20gb", runs=20)
        w.until(lambda: inference in w.running())
        w.until(lambda: inference not in w.slurm.queue)
        for _ in range(60):
            w.step()
        assert waiting not in w.loaned()
    assert not w.slurm.calls["update_jobs"] > 3
    w.writer._store = real
    eventually(lambda: not w.writer.fault.open)  # its thread tries again in real time, the world steps much faster
    w.until(lambda: waiting in w.loaned(), 1000)
    with w.store() as store:
        causes = [row["cause"] for row in store.loans()]
    assert causes.count("reclaim") == 2
    assert causes.count("refused") <= 1, "not one record for each second"


def test_array_tasks_are_lent_slices_one_by_one(world: MakeWorld) -> None:
    w = world()
    array = w.train(needs=60, hints="signal=usr1 max=1g.10gb", tasks=9)
    w.until(lambda: len(w.running()) == 7)
    assert {row.array_task for row in w.slurm.queue.values() if row.state == "RUNNING"} == set("0123456")
    assert w.row(array).tasks == 2
    inference = w.infer("2g.20gb", runs=10)
    w.until(lambda: inference in w.running())
    victims = set(w.slurm.requeues)
    assert len(victims) == 2
    w.until(lambda: not w.slurm.queue, 1000)
    with w.store() as store:
        loans = store.loans()
    assert len({row["job_id"] for row in loans}) == 9
    assert {row["job_id"] for row in loans if row["cause"] == "reclaim"} == victims
    assert not w.nodes.misfits


def test_migbatchd_killed_while_releasing_an_array_task_finds_it_again(world: MakeWorld) -> None:
    w = world()
    w.train(needs=60, hints="max=1g.10gb", tasks=3)

    def die(called: str) -> None:
        if called == "update_jobs":
            w.slurm.after_call = lambda called: None
            raise Killed

    w.slurm.after_call = die
    with pytest.raises(Killed):
        w.until(lambda: False)
    w.restart()
    w.until(lambda: not w.slurm.queue, 1000)
    with w.store() as store:
        ended = [row for row in store.loans() if row["cause"] == "left"]
    assert len({row["job_id"] for row in ended}) == 3


def test_released_job_that_does_not_start_is_withdrawn(world: MakeWorld) -> None:
    w = world()
    job = w.train()
    w.nodes.deaf.add("n1")  # it receives no new plan, so nothing can be offered there
    w.slurm.set_node("n1", gres={"none": 14})
    w.until(lambda: job in w.lending.ledger.open)
    w.slurm.set_node("n1", states={"DOWN"})
    w.until(lambda: "withdraw" in kinds(w, job))
    w.step()
    assert history(w, job) == [(0, "ended", "late")]
    assert "loan" in w.row(job).gres
    assert w.row(job).comment.endswith("[mig:loan:1#loan0001]")
    w.slurm.set_node("n1", states={"IDLE"})
    w.nodes.deaf.clear()
    w.until(lambda: job in w.loaned())


@pytest.mark.parametrize("options", [{}, {"tasks": 50}])
def test_job_that_slurm_never_starts_does_not_keep_a_slice_from_others(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Such as one for which its node has too little memory, or a user who is at a limit for slices."""
    w = world()
    for _ in range(6):
        w.infer("1g.10gb", runs=10**8)
    w.step()
    never = w.train(hints="max=1g.10gb", priority=200, **options)
    start = w.slurm._start_next

    def start_next(key: Any, *rest: Any) -> Any:
        row = w.slurm.queue[key.job]
        return [] if never in (key.job, row.array_job) else start(key, *rest)

    monkeypatch.setattr(w.slurm, "_start_next", start_next)
    w.until(lambda: w.lending.ledger.open)
    other = w.train(hints="max=1g.10gb", needs=100)
    w.until(lambda: other in w.loaned(), 100)
    assert "Slurm did not start it after 2 releases" in w.why(never)
    w.restart()
    w.until(lambda: other not in w.slurm.queue)
    monkeypatch.undo()
    w.until(w.loaned, 700)


def test_quota_counts_compute_slices_of_an_account(world: MakeWorld) -> None:
    w = world(quota={"ml": 3})
    jobs = [w.train(hints="max=2g.20gb", account="ml") for _ in range(4)]
    other = w.train(hints="max=1g.10gb", account="web")
    w.until(lambda: other in w.loaned() and len(w.loaned()) >= 3)
    for _ in range(30):
        w.step()
    mine = [profile for job, profile in w.loaned().items() if job in jobs]
    assert 2 <= len(mine) <= 3
    assert sum(int(profile[0]) for profile in mine) <= 3
    waiting = next(job for job in jobs if job not in w.loaned())
    assert "quota" in w.why(waiting)


def test_nothing_is_lent_in_blackout_hours_and_the_reason_says_so(world: MakeWorld) -> None:
    w = world(blackout=("00:00-24:00",))
    job = w.train()
    for _ in range(30):
        w.step()
    assert not w.loaned()
    assert "blackout" in w.why(job)


def test_slice_is_lent_only_after_it_has_been_idle_for_min_idle_s(world: MakeWorld) -> None:
    w = world(min_idle_s=120.0)
    inference = w.infer("7g.80gb", runs=20)
    w.until(lambda: inference in w.running())
    job = w.train()
    w.until(lambda: inference not in w.slurm.queue)
    over = w.clock.now
    w.until(lambda: "idle long enough" in w.why(job))
    for _ in range(10):
        w.step()
    assert "idle long enough" in w.why(job) or "expected" in w.why(job)
    w.until(lambda: job in w.loaned())
    assert w.clock.now - over >= 120


def test_round_releases_no_more_jobs_than_allowed(world: MakeWorld) -> None:
    w = world(most_releases=2)
    jobs = [w.train(hints="max=1g.10gb") for _ in range(7)]
    before = 0
    while len(w.loaned()) < 7:
        w.step()
        open_now = len(w.lending.ledger.open)
        assert open_now - before <= 2
        before = open_now
    assert set(w.loaned()) == set(jobs)


def test_dry_run_records_the_same_actions_once_and_changes_nothing(world: MakeWorld) -> None:
    w, live = world(dry_run=True), world()
    for cluster in (w, live):
        for _ in range(3):
            cluster.train(hints="max=2g.20gb")
    queue = dict(w.slurm.queue)
    for _ in range(40):
        w.step()
    assert not {"update_jobs", "signal_all", "requeue_all"} & set(w.slurm.calls)
    assert {job: row.gres for job, row in w.slurm.queue.items()} == {job: row.gres for job, row in queue.items()}
    assert not w.lending.ledger.open
    live.until(lambda: len(live.loaned()) == 3)
    with w.store() as store, live.store() as real:
        would, did = store.actions(), real.actions()
        assert store.loans() == []
    assert all(row["dry_run"] for row in would)
    assert not any(row["dry_run"] for row in did)
    planned = [(row["job_id"], row["kind"], row["before"], row["after"], row["why"]) for row in would]
    assert planned == [(row["job_id"], row["kind"], row["before"], row["after"], row["why"]) for row in did]
    w.restart()
    for _ in range(10):
        w.step()
    with w.store() as store:
        assert len(store.actions()) == len(would)


def test_release_that_slurm_refuses_is_not_retried_every_second(world: MakeWorld) -> None:
    w = world()
    job = w.train()
    w.slurm.refuse = {"update_jobs"}
    for _ in range(60):
        w.step()
    assert 2 <= w.slurm.calls["update_jobs"] <= 8
    w.slurm.refuse = set()
    w.until(lambda: job in w.loaned())
    with w.store() as store:
        assert "refuses" in store.actions([job])[0]["outcome"]


@pytest.mark.slow
@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("when", ["before_call", "after_call"])
@pytest.mark.parametrize("nth", [1, 2])
def test_migbatchd_killed_at_any_slurm_call_continues_where_it_was(
    world: MakeWorld, what: str, when: str, nth: int
) -> None:
    w = world()
    jobs = [w.train(hints="signal=usr1 max=1g.10gb", needs=10**6) for _ in range(7)]
    left = nth

    def die(called: str) -> None:
        nonlocal left
        if called == what:
            left -= 1
            if not left:
                setattr(w.slurm, when, lambda called: None)
                raise Killed

    def step() -> None:
        try:
            w.step()
        except Killed:
            w.restart()

    setattr(w.slurm, when, die)
    inference = 0
    for _ in range(300):
        step()
        if not inference and len(w.loaned()) == 7:
            for _ in range(10):
                step()
            inference = w.infer("3g.40gb", runs=30)
        if inference and inference not in w.slurm.queue and len(w.loaned()) == 7:
            break
    assert left <= 0 or nth == 2, "it was not killed"
    assert set(w.loaned()) == set(jobs)
    assert not w.nodes.misfits
    victims = set(w.slurm.requeues)
    assert len(w.slurm.requeues) == len(victims)
    assert len(w.slurm.signals) <= len(victims) * (2 if (what, when) == ("signal_all", "after_call") else 1)
    assert all(w.row(job).restarts == (job in victims) for job in jobs)
    with w.store() as store:
        open_loans = store.loans(active=True)
        ended = [row for row in store.loans() if row["ended"] is not None and row["cause"] != "refused"]
    assert {row["job_id"] for row in open_loans} == set(jobs)
    assert len(open_loans) == 7
    assert sorted(row["job_id"] for row in ended) == sorted(victims)


def test_room_of_one_loan_is_held_until_all_loans_for_the_same_job_have_ended(world: MakeWorld) -> None:
    """Otherwise a job of lower priority would keep the larger one waiting until its own end."""
    w = world(gpus=2, min_idle_s=1.0, grace_s=30.0)
    w.infer("7g.80gb", runs=900, limit=1000)  # without the loans, the reservation would be on its GPU
    w.step()
    quick = w.train(needs=10**6, hints="max=3g.40gb min=3g.40gb")
    slow = w.train(needs=10**6, hints="signal=usr1 max=3g.40gb min=3g.40gb", after=20.0)
    w.until(lambda: len(w.loaned()) == 2)
    for _ in range(60):
        w.step()
    large = w.infer("7g.80gb", runs=10**6, priority=900)
    w.until(lambda: w.row(quick).pending)
    assert w.row(slow).state == "RUNNING" and w.row(large).pending
    small = w.infer("1g.10gb", runs=10**6, priority=500)
    w.until(lambda: large in w.running() or small in w.running())
    assert large in w.running() and small not in w.running()
