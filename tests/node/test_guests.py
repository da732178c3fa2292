"""Two jobs of one user on one slice: joining it and leaving it in any order, and never with another user."""

import json
import os
import signal
import sqlite3
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.node import effects, exits, guest, owner, plan
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.guest import GuestAction, verdict
from slurm_migbatch.node.journal import NAME, Journal, Overlap
from slurm_migbatch.node.journal_rows import JournalRun, JournalSlice
from slurm_migbatch.node.plan import SharedSlot
from tests.support.examples import examples
from tests.support.nodes import ALICE, BOB

GUEST = "[mig:guest:1]"
HOST = "[mig:2g.20gb:1#h0st]"


def publish(node, guests, slots=None, version=7):
    """Store a plan with these slots (default: those held now) and guests (job -> job and restart of the host)."""
    held = {(row.job, row.restart): row for row in node.slices("held") if row.beside is None}
    if slots is None:
        slots = {}
        for row in held.values():
            slots.setdefault(row.gpu, []).append([row.slot.profile.name, *row.slot.placement])
    wire = {}
    for job, where in guests.items():
        if not isinstance(where[0], str):
            row = held[where]
            where = [row.gpu, row.slot.profile.name, *row.slot.placement, *where]
        wire[str(job)] = where
    raw = {"version": version, "gpus": slots, "guests": wire}
    return plan.store(str(node.config.state_dir), json.dumps(raw).encode())


def pair(node, host=1, guest=2):
    code, line = node.prolog(host, HOST)
    assert code == exits.OK, line
    publish(node, {guest: (host, 0)})
    code, line = node.prolog(guest, GUEST)
    assert code == exits.OK and "warm" in line, line
    node.check()
    return [row for row in node.slices("held") if row.job in (host, guest)]


def owners(node, row):
    return {node.cap(minor) for minor in (row.cap_gi, row.cap_ci)}


def refused(node, job, marker=GUEST, **values):
    code, line = node.prolog(job, marker, **values)
    assert code == exits.OK and "requeued" in line, line
    assert node.scontrol_calls()[-1] == f"requeue incomplete {job}"
    assert node.handoff(job, values.get("restart", 0)).slices == ()
    node.check()
    return node.events("misfit")[-1]["reason"]


# -- joining and leaving


def test_guest_gets_the_slice_of_its_host_and_no_instance_is_created(node):
    node.prolog(1, HOST)
    node.machine.calls(reset=True)
    publish(node, {2: (1, 0)})
    code, line = node.prolog(2, "[mig:guest:1#gu3st]")
    assert code == exits.OK, line
    assert not [name for name in node.machine.calls() if "Create" in name or "Destroy" in name]
    first, second = node.slices("held")
    assert (first.job, second.job, second.beside) == (1, 2, first.id)
    assert node.handoff(1).slices == node.handoff(2).slices
    start = node.events("start")[-1]
    assert (start["job"], start["beside"], start["decision"]) == (2, [1, 0], "gu3st")
    assert start["slices"] == node.events("start")[0]["slices"]
    assert "beside" not in node.events("start")[0]
    node.check()


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_slice_is_freed_when_both_jobs_have_ended_in_either_order(node, order):
    row = pair(node)[0]
    first, second = order
    assert node.epilog(first)[0] == exits.OK
    node.check()
    (left,) = node.slices("held")
    assert (left.job, left.beside, left.mig_uuid) == (second, None, row.mig_uuid)
    assert owners(node, row) == {(ALICE, 0o400)}
    assert node.handoff(first).slices == () and node.handoff(second).slices
    assert node.epilog(second)[0] == exits.OK
    node.check()
    assert [r.state for r in node.slices()] == ["idle"] and owners(node, row) == {(0, 0o400)}
    stops = {event["job"]: event for event in node.events("stop")}
    assert stops[1]["slices"] == stops[2]["slices"] and all(stop["shared"] for stop in stops.values())
    node.machine.calls(reset=True)
    assert "warm" in node.prolog(3, "[mig:2g.20gb:1]")[1]


def test_host_can_get_another_guest_after_the_first_has_ended(node):
    pair(node)
    node.epilog(2)
    publish(node, {3: (1, 0)}, version=8)
    assert node.prolog(3, GUEST)[0] == exits.OK
    assert {row.job for row in node.slices("held")} == {1, 3}
    node.check()


def test_guest_can_become_a_host_after_its_host_has_ended(node):
    pair(node)
    node.epilog(1)
    publish(node, {3: (2, 0)}, version=8)
    assert node.prolog(3, GUEST)[0] == exits.OK
    assert {row.job for row in node.slices("held")} == {2, 3}
    assert node.events("start")[-1]["beside"] == [2, 0]
    node.check()


def test_repeated_hook_changes_nothing(node):
    pair(node)
    before = node.slices(), node.events()
    assert "already" in node.prolog(2, GUEST)[1]
    assert (node.slices(), node.events()) == before
    node.epilog(2)
    before = node.slices(), node.events()
    assert node.epilog(2) == (exits.OK, "")
    assert (node.slices(), node.events()) == before


def test_requeued_guest_joins_its_host_again(node):
    pair(node)
    node.epilog(2, restart=1)
    assert node.prolog(2, GUEST, restart=1)[0] == exits.OK
    assert [(row.job, row.restart) for row in node.slices("held")] == [(1, 0), (2, 1)]
    node.check()


def test_new_run_of_the_host_releases_the_earlier_runs_share(node):
    """slurmd may start a requeued job before its Epilog has run: the guest keeps the slice, the host gets another."""
    pair(node)
    assert node.prolog(1, HOST, restart=1)[0] == exits.OK
    rows = {row.job: row for row in node.slices("held")}
    assert rows[1].slot != rows[2].slot and rows[2].beside is None
    node.check()


def test_hooks_of_a_shared_slice_leave_other_slices_alone(node):
    node.prolog(9, "[mig:1g.10gb:2]", uid=BOB)
    pair(node)
    before = [row for row in node.slices("held") if row.job == 9]
    node.epilog(1)
    node.epilog(2)
    assert [row for row in node.slices("held") if row.job == 9] == before
    node.check()


# -- guests that are refused


def test_guest_of_another_user_is_refused(node):
    node.prolog(1, HOST)
    publish(node, {2: (1, 0)})
    assert "another user" in refused(node, 2, uid=BOB)
    assert [row.job for row in node.slices("held")] == [1]


def test_third_job_on_a_slice_is_refused(node):
    pair(node)
    publish(node, {2: (1, 0), 3: (1, 0)}, version=8)
    assert "already" in refused(node, 3)
    node.epilog(1)  # the remaining job is not the host that the plan names
    assert "not held by job 1" in refused(node, 3, restart=1)


@pytest.mark.parametrize("guests", [{}, {7: (1, 0)}])
def test_guest_that_the_plan_does_not_name_is_refused(node, guests):
    node.prolog(1, HOST)
    publish(node, guests)
    assert "has no slice for it to share" in refused(node, 2)


def test_guest_is_refused_without_a_plan(node):
    node.prolog(1, HOST)
    assert "has no slice for it" in refused(node, 2)


def test_guest_joins_by_the_cached_plan_without_the_controller(node):
    """The plan is on disk; the agent that wrote it need not be running."""
    node.prolog(1, HOST)
    publish(node, {2: (1, 0)})
    node.forget_executor()
    assert node.prolog(2, GUEST)[0] == exits.OK
    node.check()


def test_guest_is_refused_when_another_run_of_the_host_holds_the_slice(node):
    node.prolog(1, HOST)
    publish(node, {2: (1, 0)})
    node.epilog(1, restart=1)
    node.prolog(1, HOST, restart=1)
    assert "not held by job 1 run 0" in refused(node, 2)


def test_guest_planned_on_a_missing_gpu_is_refused(node):
    node.prolog(1, HOST)
    publish(node, {2: ["GPU-gone", "2g.20gb", 0, 2, 1, 0]}, slots={})
    assert "has no slice for it" in refused(node, 2)


@pytest.mark.parametrize("place", [["GPU", "2g", 0, 2, 1, 0], ["GPU", "2g.20gb", 0, 2, 1], 5, ["GPU", "2g.20gb"]])
def test_plan_with_malformed_guests_is_rejected_as_a_whole(node, place):
    with pytest.raises(plan.PlanError):
        plan.parse({"version": 1, "gpus": {}, "guests": {"2": place}})
    with pytest.raises(plan.PlanError):
        plan.parse({"version": 1, "gpus": {}, "guests": []})


def test_job_with_its_own_profile_is_not_a_guest_even_if_the_plan_says_so(node):
    """The marker states what Slurm allocated; an outdated plan does not change it."""
    node.prolog(1, HOST)
    publish(node, {2: (1, 0)})
    assert node.prolog(2, "[mig:1g.10gb:1]")[0] == exits.OK
    rows = {row.job: row for row in node.slices("held")}
    assert rows[2].slot.profile.name == "1g.10gb" and rows[2].beside is None
    node.check()


def test_devices_stay_with_the_user_until_both_jobs_have_ended(node):
    row = pair(node)[0]
    node.machine.start_process(row.mig_uuid, 4_000_001)
    node.epilog(1)
    assert owners(node, row) == {(ALICE, 0o400)}
    node.reconcile()
    node.check()
    node.epilog(2)
    assert owners(node, row) == {(0, 0o400)}
    assert "made" in node.prolog(3, "[mig:2g.20gb:1]", uid=BOB)[1]  # not on that slice: a process still runs on it
    node.machine.end_process(4_000_001)


# -- the host ends before the guest starts


def test_guest_takes_the_planned_slot_alone_after_its_host_has_ended(node):
    node.prolog(1, HOST)
    stored_plan = publish(node, {2: (1, 0)})
    node.epilog(1)
    code, line = node.prolog(2, GUEST)
    assert code == exits.OK and "warm" in line, line
    (row,) = node.slices("held")
    assert (row.job, row.slot, row.beside) == (2, stored_plan.guests[2].slot, None)
    assert "beside" not in node.events("start")[-1]
    node.epilog(2)
    assert "shared" not in node.events("stop")[-1]
    node.check()


def test_guest_creates_the_instance_when_host_and_instance_are_gone(node):
    node.prolog(1, HOST)
    publish(node, {2: (1, 0)})
    node.epilog(1)
    node.destroy_by_hand()
    code, line = node.prolog(2, GUEST)
    assert code == exits.OK and "made" in line, line
    node.check()


def test_guest_is_requeued_when_its_slot_is_unplanned_or_in_use(node):
    node.prolog(1, HOST)
    publish(node, {2: (1, 0)})
    where = plan.load(str(node.config.state_dir)).guests[2]
    wire = [where.gpu, "2g.20gb", *where.slot.placement, 1, 0]
    node.epilog(1)
    publish(node, {2: wire}, slots={}, version=8)
    assert "has ended" in refused(node, 2)
    publish(node, {2: wire}, slots={where.gpu: [["2g.20gb", *where.slot.placement]]}, version=9)
    node.prolog(3, "[mig:7g.80gb:1]", uid=BOB)
    assert "not held by job 1" in refused(node, 2, restart=1)
    node.epilog(3)
    node.machine.stick_destroy(None)
    reason = refused(node, 2, restart=2)
    assert "still in use" in reason and "job 2 beside job 1" in reason
    node.machine.reset_faults()


def test_guest_waits_for_a_host_whose_epilog_is_running(node, monkeypatch):
    """Once the host's Epilog has begun no guest can join; when it has ended the slot is free."""
    node.prolog(1, HOST)
    publish(node, {2: (1, 0)})
    looked, seen = threading.Event(), []
    real = guest.verdict

    def noted(*values):
        found = real(*values)
        seen.append(found.action)
        looked.set()
        return found

    monkeypatch.setattr(guest, "verdict", noted)
    answer = []

    def other():
        executor = Executor(node.config)
        try:
            answer.append(executor.run(node.env("prolog", 2, GUEST)))
        finally:
            executor.close()
            executor.gpus.reset()

    thread = threading.Thread(target=other)

    def hook(name):
        if name == "handoff write" and thread.ident is None:  # of the host's release: its run is `ending` now
            thread.start()
            assert looked.wait(30)

    effects.hook = hook
    try:
        assert node.epilog(1)[0] == exits.OK
    finally:
        effects.hook = None
    thread.join(30)
    assert answer[0][0] == exits.OK and "warm" in answer[0][1], answer
    assert seen[0] is GuestAction.WAIT and seen[-1] is GuestAction.ALONE
    assert [row.job for row in node.slices("held")] == [2]
    node.check()


def test_guest_waits_only_a_limited_time_for_an_ending_host(node, monkeypatch):
    monkeypatch.setattr("slurm_migbatch.node.allocate.HOST_WAIT_S", 0.1)
    node.prolog(1, HOST)
    publish(node, {2: (1, 0)})
    with ending(node, 1):
        assert "starting or ending" in refused_while_ending(node, 2)


def refused_while_ending(node, job):
    code, line = node.prolog(job, GUEST)
    assert code == exits.OK and "requeued" in line
    return node.events("misfit")[-1]["reason"]


@contextmanager
def ending(node, job):
    """A release that a live process has begun."""
    with owner.working() as who:
        with node.journal.write():
            (run,) = node.journal.runs("job=?", (job,))
            node.journal.put_run(run._replace(state="ending", owner=who))
        yield


def test_interrupted_release_of_the_host_is_completed_before_the_guest_starts(node):
    node.prolog(1, HOST)
    publish(node, {2: (1, 0)})
    with ending(node, 1):
        pass
    assert node.prolog(2, GUEST)[0] == exits.OK
    assert [(row.job, row.beside) for row in node.slices("held")] == [(2, None)]
    node.check()


# -- concurrent hooks


def meanwhile(node, moment, work):
    """Return an effects hook that runs all of `work(executor)` at the first `moment`."""
    done = []

    def hook(name):
        if name == moment and not done:
            done.append(True)
            effects.hook = None
            executor = Executor(node.config)
            try:
                work(executor)
            finally:
                executor.close()
                executor.gpus.reset()

    return hook


@pytest.mark.parametrize("moment", ["commit", "handoff write", "handoff rename"])
def test_guest_keeps_the_slice_when_its_host_ends_during_its_prolog(node, moment):
    """The guest's claim becomes one on the whole slice; the user keeps the devices."""
    node.prolog(1, HOST)
    (row,) = node.slices("held")
    publish(node, {2: (1, 0)})
    count = 0

    def leave(executor):
        assert executor.run(node.env("epilog", 1))[0] == exits.OK

    def hook(name):
        nonlocal count
        if name == moment and (moment != "commit" or count):
            effects.hook = None
            # in a thread: this one may be inside a transaction, and then the other waits for its end
            other = threading.Thread(target=run_apart, args=(node, leave))
            other.start()
            if moment != "commit":
                other.join(30)
            threads.append(other)
        count += name == "commit"

    threads = []
    effects.hook = hook
    try:
        code, line = node.prolog(2, GUEST)
    finally:
        effects.hook = None
    for thread in threads:
        thread.join(30)
    assert threads and code == exits.OK, line
    (left,) = node.slices("held")
    assert (left.job, left.mig_uuid, left.beside) == (2, row.mig_uuid, None)
    node.check()
    node.epilog(2)
    node.check()
    assert owners(node, row) == {(0, 0o400)}


def run_apart(node, work):
    executor = Executor(node.config)
    try:
        work(executor)
    finally:
        executor.close()
        executor.gpus.reset()


@pytest.mark.parametrize("moment", ["handoff write", "handoff rename"])
@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_slice_is_freed_when_both_jobs_end_at_the_same_time(node, moment, order):
    """The second Epilog to finish closes the devices, although the slice was still shared when it began."""
    row = pair(node)[0]
    first, second = order
    effects.hook = meanwhile(node, moment, lambda executor: executor.run(node.env("epilog", second)))
    try:
        assert node.epilog(first)[0] == exits.OK
    finally:
        effects.hook = None
    node.check()
    assert [r.state for r in node.slices()] == ["idle"] and owners(node, row) == {(0, 0o400)}
    assert sorted(event["job"] for event in node.events("stop")) == [1, 2]


def test_guard_with_a_stale_row_does_not_close_the_guests_devices(node):
    """Housekeeping read the row while the host still held the slice."""
    row = pair(node)[0]
    gpu = node.executor.gpus.managed()[0]
    (instance,) = gpu.instances()
    stale = row
    node.epilog(1)
    node.executor.repairer._guard(gpu, stale, instance, "as it was seen before")
    assert owners(node, row) == {(ALICE, 0o400)}
    node.epilog(2)
    node.executor.repairer._guard(gpu, stale, instance, "as it was seen before")
    assert owners(node, row) == {(0, 0o400)}


def test_guests_join_while_their_hosts_end_in_parallel(new_node):
    from tests.support.node_processes import in_processes

    node = new_node(latency=0.002)
    for job in (1, 2, 3):
        assert node.prolog(job, "[mig:2g.20gb:1]")[0] == exits.OK
    publish(node, {job + 10: (job, 0) for job in (1, 2, 3)})
    hooks = [("prolog", job + 10, GUEST) for job in (1, 2, 3)] + [("epilog", job, "") for job in (1, 2, 3)]
    works = [lambda h=h: Executor(node.config).run(node.env(*h))[0] for h in hooks]
    assert in_processes(works) == [0] * len(works)
    node.forget_executor()
    node.check()
    assert sorted(row.job for row in node.slices("held")) == [11, 12, 13], node.events("misfit")
    assert (
        in_processes([lambda j=j: Executor(node.config).run(node.env("epilog", j))[0] for j in (11, 12, 13)]) == [0] * 3
    )
    node.forget_executor()
    node.check()
    assert {row.state for row in node.slices()} == {"idle"}


# -- repair


def test_vanished_instance_is_lost_to_host_and_guest(node):
    pair(node)
    node.destroy_by_hand()
    node.reconcile()
    assert [(row.job, row.state) for row in node.slices()] == [(1, "lost"), (2, "lost")]
    assert "job 2" in node.events("fault")[0]["what"]
    assert node.prolog(3, "[mig:7g.80gb:1]", uid=BOB)[0] == exits.OK
    for job in (1, 2):
        node.epilog(job)
        node.check()
    assert [row.job for row in node.slices()] == [3]
    assert [event["job"] for event in node.events("stop")] == [1, 2]


def test_reboot_ends_host_and_guest(node):
    pair(node)
    node.forget_executor()
    node.machine.reboot()
    assert node.slices() == []
    assert sorted(event["job"] for event in node.events("stop")) == [1, 2]


@pytest.mark.parametrize("how", ["garbage", "table gone"])
def test_rebuilt_journal_has_host_and_guest(node, how):
    from tests.support.journals import damage

    pair(node)
    damage(node, how)
    assert node.epilog(404)[0] == exits.OK
    assert {row.job for row in node.slices("held")} == {1, 2}
    node.check()
    for job in (2, 1):
        node.epilog(job)
        node.check()
    assert [row.state for row in node.slices()] == ["idle"]


def test_lost_gpu_marks_the_rows_of_host_and_guest_as_lost(node):
    pair(node)
    node.executor.repairer.repair_absent(())
    assert [row.state for row in node.slices()] == ["lost", "lost"]
    node.executor.repairer.repair_absent(())
    assert len(node.events("fault")) == 1
    node.reconcile()
    assert [row.state for row in node.slices()] == ["held", "held"]
    node.check()


def test_no_memory_figure_is_reported_for_a_shared_slice(node):
    from slurm_migbatch.node import peaks

    row = pair(node)[0]
    peaks.store(
        node.executor.paths.run,
        {(1, 0): peaks.RunPeak(1e6, {row.mig_uuid: 5}), (2, 0): peaks.RunPeak(1e6, {})},
        {(1, 0)},
    )
    node.epilog(2)
    node.epilog(1)
    assert [event["memory_mib"] for event in node.events("stop")] == [None, None]


# -- the verdict, over all possible inputs


SLOT = Slot.of("2g.20gb", 0, 2)
PLACE = SharedSlot("GPU-0", SLOT, (1, 0))
slots = st.sampled_from([SLOT, Slot.of("1g.10gb", 0, 1), Slot.of("2g.20gb", 2, 2), Slot.of("3g.40gb", 0, 4)])
rows = st.lists(
    st.builds(
        JournalSlice,
        gpu=st.sampled_from(["GPU-0", "GPU-1"]),
        slot=slots,
        state=st.sampled_from(["held", "intent", "idle", "evict", "zombie", "foreign", "lost"]),
        job=st.sampled_from([1, 3]),
        restart=st.integers(0, 1),
        uid=st.sampled_from([ALICE, BOB]),
        beside=st.sampled_from([None, None, 0, 1]),
        id=st.integers(0, 3),
    ),
    max_size=4,
)
run_states = st.dictionaries(
    st.tuples(st.sampled_from([1, 3]), st.integers(0, 1)), st.sampled_from(["starting", "running", "ending"])
)


@settings(max_examples=examples(500))
@given(rows, run_states, st.sampled_from([ALICE, BOB]), st.booleans())
def test_verdict_admits_only_permitted_guests(found, states, uid, planned):
    runs = {key: JournalRun(*key, ALICE, "", "", "", "", state) for key, state in states.items()}
    answer = verdict(PLACE, uid, found, runs, planned)
    if answer.action is GuestAction.JOIN:
        host = answer.host
        assert (host.gpu, host.slot, host.state, host.uid) == ("GPU-0", SLOT, "held", uid)
        assert runs[host.job, host.restart].state == "running" and (host.job, host.restart) == (1, 0)
        assert not [row for row in found if row.beside == host.id and row.gpu == "GPU-0" and row.state == "held"]
    if answer.action is GuestAction.ALONE:
        assert planned and not [
            row
            for row in found
            if row.gpu == "GPU-0"
            and row.state in ("held", "intent", "zombie", "foreign")
            and row.slot.placement.overlaps(SLOT.placement)
        ]
    if answer.action is GuestAction.NO:
        assert answer.why


# -- the journal itself


@pytest.fixture
def journal(tmp_path):
    opened = Journal(str(tmp_path / NAME))
    yield opened
    opened.close()


def journal_slice(job, *, uid=ALICE, state="held", slot=SLOT, gpu="GPU-0", **values):
    values = {"restart": 0, "ordinal": 0, "mig_uuid": "MIG-1", "gi": 3, "ci": 0, "cap_gi": 30, "cap_ci": 31} | values
    return JournalSlice(gpu, slot, state, job=job, uid=uid, **values)


def test_database_triggers_reject_invalid_host_and_guest_rows(journal):
    with journal.write():
        host = journal.put(journal_slice(1))
        other = journal.put(journal_slice(5, slot=Slot.of("1g.10gb", 4, 1)))
        journal.put(journal_slice(2, beside=host.id))
    wrong = [
        journal_slice(3, beside=host.id),  # a third one
        journal_slice(3, beside=other.id),  # another slot than its host's
        journal_slice(3, beside=other.id, slot=other.slot, uid=BOB),
        journal_slice(3, beside=other.id, slot=other.slot, gpu="GPU-1"),
        journal_slice(3, beside=99),
        host._replace(state="idle"),
        host._replace(state="zombie"),
        host._replace(uid=BOB),
        host._replace(slot=Slot.of("1g.10gb", 0, 1)),
    ]
    for row in wrong:
        with pytest.raises(sqlite3.IntegrityError), journal.write():
            journal.put(row)
    with pytest.raises(sqlite3.IntegrityError), journal.write():
        journal.drop(host)
    with pytest.raises(Overlap), journal.write():
        journal.put(journal_slice(3))
    guest_row = journal.guest_of(host)
    with pytest.raises(sqlite3.IntegrityError), journal.write():
        journal.put(journal_slice(3, beside=guest_row.id))  # a guest cannot be a host


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "lose"]), st.integers(1, 4)), max_size=25))
def test_slice_becomes_idle_when_its_last_holder_leaves(tmp_path_factory, steps):
    journal = Journal(str(tmp_path_factory.mktemp("model") / NAME))
    holders: list[int] = []
    lost = False
    try:
        for what, job in steps:
            rows = [row for row in journal.slices() if row.state in ("held", "lost")]
            mine = [row for row in rows if row.job == job]
            host = next((row for row in rows if row.beside is None), None)
            try:
                with journal.write():
                    if what == "join" and not mine:
                        if host is None:
                            (idle,) = journal.slices("state='idle'") or [None]
                            journal.put(journal_slice(job, id=None if idle is None else idle.id))
                            lost = False
                        else:
                            journal.put(journal_slice(job, beside=host.id, state=host.state))
                        holders.append(job)
                    elif what == "leave" and mine:
                        journal.leave(mine[0])
                        holders.remove(job)
                    elif what == "lose" and host is not None and journal.guest_of(host) is None:
                        journal.put(host._replace(state="lost"))
                        lost = True
            except sqlite3.IntegrityError:
                assert what == "join" and len(holders) == 2
            rows = journal.slices()
            held = [row for row in rows if row.state in ("held", "lost")]
            assert sorted(row.job for row in held) == sorted(holders) and len(held) <= 2
            assert len({row.mig_uuid for row in rows}) <= 1
            assert sum(row.beside is None for row in rows) <= 1
            if held:
                assert {row.state for row in held} == {"lost" if lost else "held"}
                assert not [row for row in rows if row.state == "idle"]
            elif rows:
                assert [row.state for row in rows] == ["idle"] and rows[0].job is None
    finally:
        journal.close()


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["guest", "host"])
def test_one_job_ends_while_the_others_hook_is_killed_at_any_side_effect(many_nodes, killed):
    """The guest's Prolog or the host's Epilog stops before its k-th effect and is killed during the other's Epilog."""
    from tests.support.node_processes import stopping_child

    k, stopped = 0, True
    while stopped:
        k += 1
        node = many_nodes(name=f"k{k}")
        assert node.prolog(9, "[mig:2g.20gb:1]")[0] == exits.OK
        publish(node, {1: (9, 0)})
        if killed == "host":
            assert node.prolog(1, GUEST)[0] == exits.OK
        node.forget_executor()
        env = node.env("prolog", 1, GUEST) if killed == "guest" else node.env("epilog", 9)
        other = node.env("epilog", 9) if killed == "guest" else node.env("epilog", 1)
        child, stopped = stopping_child(node, env, k)
        found = []

        def work(node=node, found=found, other=other):
            executor = Executor(node.config)
            found.append(executor.run(other))
            executor.close()
            executor.gpus.reset()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(0.3)  # unless the stopped process has the journal locked
        if stopped:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        thread.join(30)
        assert found[0][0] == exits.OK
        node.reconcile()
        node.check()
        assert node.reconcile() == []
        for job in (1, 9):
            node.epilog(job)
        node.check()
        assert not node.slices("held")
        assert node.prolog(50, "[mig:7g.80gb:1]", uid=BOB)[0] == exits.OK and len(node.slices("held")) == 1
        node.check()
        node.close()
    assert k > 5
