"""Two training jobs on one slice in the lending loop: from pairing to the end of both, whichever ends first."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.decide.capacity.sharing import is_guest
from tests.support.loan_world import LoanWorld, MakeWorld

WHOLE = "signal=usr1 min=7g.80gb max=7g.80gb mem=20GB"


@pytest.fixture
def world(world: MakeWorld) -> MakeWorld:
    return functools.partial(world, share=True)


def short(w: LoanWorld, needs: float = 60.0, limit: int = 200, hints: str = WHOLE, **kw: Any) -> int:
    """A training job whose time limit says that it is short."""
    job = w.train(needs=needs, hints=hints, **kw)
    w.slurm.change(job, time_limit_s=limit)
    return job


def paired(w: LoanWorld, needs: float = 60.0, long: float = 1000.0) -> tuple[int, int]:
    """A long job on the whole GPU and a short one beside it."""
    host = w.train(needs=long, hints=WHOLE)
    w.until(lambda: host in w.loaned())
    guest = short(w, needs)
    w.until(lambda: guest in w.running())
    w.step()
    assert set(w.nodes.second.values()) == {(guest, w.row(guest).restarts)}
    assert is_guest(w.row(guest).gres) and w.row(guest).requested_nodes == "n1"
    return host, guest


def kinds(w: LoanWorld, job: int) -> list[str]:
    with w.store() as store:
        return [row["kind"] for row in store.actions([job]) if not row["outcome"]]


def loans(w: LoanWorld, job: int) -> list[tuple[str, str, str]]:
    with w.store() as store:
        return [(row["profile"], row["state"], row["cause"]) for row in store.loans([job])]


def test_short_job_without_room_shares_a_slice_until_it_ends(world: MakeWorld) -> None:
    w = world()
    host, guest = paired(w)
    w.until(lambda: guest not in w.slurm.queue)
    w.step()
    assert host in w.loaned() and not w.nodes.second and not w.nodes.misfits
    assert kinds(w, guest) == ["share"] and loans(w, guest) == [("7g.80gb", "ended", "left")]
    with w.store() as store:
        (reason,) = [row["why"] for row in store.actions([guest])]
    assert reason.startswith(f"beside job {host} on its 7g.80gb")
    for _ in range(5):
        w.step()
    assert w.slurm.machines["n1"].gres.get("guest", 0) == 0


def test_slice_sharing_is_off_unless_it_is_configured(world: MakeWorld) -> None:
    w = world(share=False)
    host = w.train(hints=WHOLE)
    w.until(lambda: host in w.loaned())
    guest = short(w)
    for _ in range(30):
        w.step()
    assert w.row(guest).pending and not w.shared and not w.slurm.machines["n1"].gres.get("guest")


@pytest.mark.parametrize(
    "other", [{"uid": 1003, "user": "carol"}, {"hints": "signal=usr1 min=7g.80gb"}, {"limit": 10**7}]
)
def test_job_that_does_not_qualify_does_not_share(world: MakeWorld, other: dict[str, Any]) -> None:
    """A job of another user, a job whose memory use is unknown, and a job that is as long as the other."""
    w = world()
    host = w.train(hints=WHOLE)
    w.until(lambda: host in w.loaned())
    guest = short(w, **other)
    for _ in range(30):
        w.step()
    assert w.row(guest).pending and not w.shared and "no GPU has room" in w.why(guest)


def test_measured_slowdowns_decide_if_a_table_is_configured(world: MakeWorld, tmp_path: Path) -> None:
    table = tmp_path / "pairs.csv"
    table.write_text("app1,app2,slowdown1,slowdown2\nbert-large,bert-large,40,40\n")
    model = f"{WHOLE} model=bert-large"
    w = world(pairs=str(table))
    host = w.train(hints=model)
    w.until(lambda: host in w.loaned())
    worse, better = short(w, hints=model), short(w)
    w.until(lambda: better in w.running())
    assert w.row(worse).pending
    w.restart(pairs=str(tmp_path / "gone.csv"))
    w.until(lambda: worse in w.running())


def test_no_job_shares_where_slurm_keeps_former_gres_types(world: MakeWorld) -> None:
    w = world()
    host = w.train(hints=WHOLE)
    w.until(lambda: host in w.loaned())
    guest = short(w)
    w.slurm.change(guest, gres="gres:mig:loan:2")
    for _ in range(20):
        w.step()
    assert w.row(guest).pending and not w.shared and w.row(guest).gres == "gres:mig:loan:2"


def test_no_job_shares_while_a_gpu_has_room(world: MakeWorld) -> None:
    w = world(gpus=2)
    host = w.train(hints=WHOLE)
    w.until(lambda: host in w.loaned())
    other = short(w)
    w.until(lambda: other in w.running())
    assert other in w.loaned() and not w.nodes.second


def test_shortest_pending_job_is_offered_the_host_first(world: MakeWorld) -> None:
    w = world()
    host = w.train(needs=1000, hints=WHOLE)
    w.until(lambda: host in w.loaned())
    longer, shorter = short(w, limit=400), short(w, limit=200)
    w.until(lambda: shorter in w.running() or longer in w.running())
    assert shorter in w.running() and w.row(longer).pending
    w.until(lambda: longer in w.running())
    assert not w.nodes.misfits


def test_job_waits_for_a_slice_that_is_free_soon(world: MakeWorld) -> None:
    """It would end sooner beside the long job than after it, but another job's slice is free in half a minute."""
    w = world(gpus=2)
    long = w.train(needs=1000, hints=WHOLE)
    ending = short(w, needs=40, limit=80)
    w.until(lambda: {long, ending} <= set(w.loaned()))
    waiting = short(w)
    w.until(lambda: waiting in w.running())
    assert ending not in w.slurm.queue and waiting in w.loaned() and not w.nodes.second
    assert kinds(w, waiting) == ["release"]


def test_inference_reclaims_both_loans_and_both_resume_later(world: MakeWorld) -> None:
    w = world()
    host, guest = paired(w, needs=200)
    for _ in range(10):
        w.step()
    done = {job: w.training[job].done for job in (host, guest)}
    inference = w.infer("3g.40gb", runs=20)
    steps = w.until(lambda: inference in w.running())
    assert steps <= 12 and {job for job, _ in w.slurm.signals} == {host, guest}
    assert sorted(w.slurm.requeues) == sorted([host, guest])
    assert all(w.training[job].saved >= done[job] for job in (host, guest)) and not w.nodes.misfits
    w.step()
    assert all(w.row(job).pending and "loan" in w.row(job).gres for job in (host, guest))
    assert w.row(guest).requested_nodes == ""
    assert [cause for _, _, cause in loans(w, guest)] == ["reclaim"]
    w.until(lambda: guest not in w.slurm.queue and host not in w.slurm.queue, 3000)
    assert not w.nodes.misfits


def test_guest_whose_host_has_ended_is_an_ordinary_loan(world: MakeWorld) -> None:
    w = world()
    host, guest = paired(w, needs=500, long=45)
    w.until(lambda: host not in w.slurm.queue)
    w.step()
    assert guest in w.running() and not w.nodes.second
    for _ in range(10):
        w.step()
    assert w.lending.ledger.open[guest].state.value == "running"
    inference = w.infer("7g.80gb", runs=10)
    assert w.until(lambda: inference in w.running()) <= 12
    assert w.slurm.requeues == [guest] and not w.nodes.misfits


def test_guest_starts_although_its_host_has_ended_before(world: MakeWorld) -> None:
    w = world()
    host = w.train(hints=WHOLE)
    w.until(lambda: host in w.loaned())
    guest = short(w)
    w.until(lambda: bool(w.shared))
    w.training[host].done = w.training[host].needs
    w.until(lambda: host not in w.slurm.queue)
    w.until(lambda: guest in w.running())
    w.until(lambda: guest not in w.slurm.queue)
    assert not w.nodes.misfits


def test_guest_that_does_not_start_is_withdrawn_and_waits_for_a_loan(world: MakeWorld) -> None:
    w = world()
    host = w.train(hints=WHOLE)
    w.until(lambda: host in w.loaned())
    guest = short(w)
    w.slurm.set_node("n1", completing=w.slurm.machines["n1"].completing + 1)  # Slurm starts nothing there
    w.until(lambda: is_guest(w.row(guest).gres))
    w.until(lambda: not is_guest(w.row(guest).gres))
    assert "loan" in w.row(guest).gres and w.row(guest).requested_nodes == ""
    assert kinds(w, guest) == ["share", "withdraw"]
    w.slurm.set_node("n1", completing=w.slurm.machines["n1"].completing - 1)
    for _ in range(40):
        w.step()
    assert kinds(w, guest) == ["share", "withdraw"] and not w.shared, "not with the same job again for a while"
    assert w.slurm.machines["n1"].gres.get("guest", 0) == 0


@pytest.mark.parametrize("when", ["offered", "typed", "running"])
def test_sharing_survives_a_restart_of_the_service(world: MakeWorld, when: str) -> None:
    w = world()
    host = w.train(hints=WHOLE)
    w.until(lambda: host in w.loaned())
    guest = short(w, needs=100)
    moments = {
        "offered": lambda: bool(w.shared),
        "typed": lambda: is_guest(w.row(guest).gres),
        "running": lambda: guest in w.running(),
    }
    w.until(moments[when])
    w.restart()
    w.until(lambda: guest in w.running())
    for _ in range(3):
        w.step()
    assert w.lending.ledger.open[guest].profile == "7g.80gb" and len(w.nodes.second) == 1
    w.until(lambda: guest not in w.slurm.queue)
    assert not w.nodes.misfits


def test_dry_run_offers_no_shared_slice(world: MakeWorld) -> None:
    w = world()
    host = w.train(hints=WHOLE)
    w.until(lambda: host in w.loaned())
    w.restart(dry_run=True)
    guest = short(w)
    for _ in range(20):
        w.step()
    assert w.row(guest).pending and not w.shared and "loan" in w.row(guest).gres


def test_reports_of_sharing_runs_do_not_count_as_speed_on_the_profile(world: MakeWorld) -> None:
    w = world()
    host, guest = paired(w)
    for job in (host, guest):
        w.tell(job, 0, items=1000.0, throughput_per_s=10.0)
    w.step()
    assert not w.lending.elastic_jobs._heard
    assert w.lending.slice_sharing.shared == {(host, 0), (guest, 0)}


def working(w: LoanWorld, rates: dict[int, float], seconds: int, **fields: Any) -> None:
    """That many steps of a second; every fifth, jobs report their work at these rates (items per second)."""
    for second in range(seconds):
        w.step()
        for job, rate in rates.items():
            if job not in w.running():
                continue
            w.items[job] = w.items.get(job, 0.0) + rate
            if second % 5 == 4:
                w.tell(job, w.row(job).restarts, items=w.items[job], throughput_per_s=rate, **fields)


def reporting_pair(w: LoanWorld, needs: float, limit: int) -> tuple[int, int]:
    """A host whose rate alone on the slice is known, and a guest that needs `needs` seconds of its `limit`."""
    model = f"{WHOLE} model=bert-large batch=8"
    host = w.train(needs=5000.0, hints=model)
    w.until(lambda: host in w.loaned())
    working(w, {host: 10.0}, 70)
    guest = short(w, needs=needs, limit=limit, hints=model)
    w.until(lambda: guest in w.running())
    return host, guest


def test_pair_slower_than_one_job_alone_is_ended_and_not_tried_again(world: MakeWorld) -> None:
    w = world()
    host, guest = reporting_pair(w, 800.0, 1600)
    working(w, {host: 2.0, guest: 2.0}, 90)
    w.until(lambda: guest not in w.running())
    assert w.slurm.requeues == [guest] and host in w.loaned()
    assert [cause for _, _, cause in loans(w, guest)] == ["parted"]
    (reason,) = [row for row in why(w, guest) if "less than one alone" in row]
    assert reason.startswith(f"beside job {host} it takes 5.")
    working(w, {host: 10.0}, 90)
    assert w.row(guest).pending and w.slurm.requeues == [guest] and not w.nodes.second


def test_pair_with_a_measured_gain_goes_on(world: MakeWorld) -> None:
    w = world()
    host, guest = reporting_pair(w, 300.0, 600)
    working(w, {host: 8.0, guest: 8.0}, 100)
    assert guest in w.running() and not w.slurm.requeues
    assert w.lending.slice_sharing.runs.rules.measured == {
        ("bert-large", "bert-large", "7g.80gb"): pytest.approx(1.25, rel=0.05)
    }


@pytest.mark.parametrize(("activity", "shares"), [(0.95, False), (0.3, True)])
def test_untried_pair_shares_only_if_both_leave_their_slice_idle_often(
    world: MakeWorld, activity: float, shares: bool
) -> None:
    """The SM activity of the host is reported by its node; that of the user's next job is assumed to be the same."""
    w = world()
    host = w.train(needs=5000.0, hints=WHOLE)
    w.until(lambda: host in w.loaned())
    working(w, {host: 10.0}, 70, sm=activity)
    guest = short(w, needs=800.0, limit=1600)
    working(w, {host: 10.0}, 30, sm=activity)
    assert (guest in w.running()) is shares
    assert w.lending.slice_sharing.runs.slowdowns.activity(w.row(host).uid, "") == {"7g.80gb": activity}


def test_job_reaching_its_limit_by_sharing_is_requeued_with_a_new_limit(world: MakeWorld) -> None:
    w = world()
    host, guest = reporting_pair(w, 10_000.0, 400)
    w.slurm.change(guest, end=(w.row(guest).start or 0.0) + 400)
    working(w, {host: 6.0, guest: 6.0}, 350)
    assert guest in w.running()
    w.until(lambda: guest in w.slurm.requeues, 40)
    assert [cause for _, _, cause in loans(w, guest)] == ["limit"]
    assert w.training[guest].saved > 0, "from its checkpoint"


def why(w: LoanWorld, job: int) -> list[str]:
    with w.store() as store:
        return [row["why"] for row in store.actions([job])]
