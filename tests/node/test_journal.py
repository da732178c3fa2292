"""The journal: no partial writes, no placement held twice, nothing lost to a damaged file."""

import json
import os
import time
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.mig.driver import Instance
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.node import exits
from slurm_migbatch.node.deadline import Deadline, locked
from slurm_migbatch.node.differences import diagnose
from slurm_migbatch.node.journal import NAME, Corrupt, Journal, JournalError, Overlap, move_aside
from slurm_migbatch.node.journal_rows import IN_FLIGHT, JournalRun, JournalSlice
from tests.support.examples import examples
from tests.support.journals import damage
from tests.support.node_processes import run_hook
from tests.support.nodes import ALICE, BOB


@pytest.fixture
def journal(tmp_path):
    opened = Journal(str(tmp_path / NAME))
    yield opened
    opened.close()


def journal_slice(start, size=1, state="idle", **values):
    profile = {1: "1g.10gb", 2: "2g.20gb", 4: "3g.40gb", 8: "7g.80gb"}[size]
    return JournalSlice("GPU-0", Slot.of(profile, start, size), state, **values)


def test_overlapping_slices_are_rejected(journal):
    with journal.write():
        journal.put(journal_slice(0, 4, "held", job=1))
    for start, size in ((0, 4), (3, 1), (2, 2), (0, 8)):
        with pytest.raises(Overlap), journal.write():
            journal.put(journal_slice(start, size, "intent", owner="x"))
    with journal.write():
        journal.put(journal_slice(4, 4, "held", job=2))
    assert len(journal.slices()) == 2


def test_a_transaction_is_all_or_nothing(journal):
    with pytest.raises(RuntimeError), journal.write():
        journal.put(journal_slice(0))
        journal.event("create", {"gpu": "GPU-0"})
        raise RuntimeError
    assert journal.slices() == [] and journal.spooled() == []


def test_transaction_that_has_waited_long_tries_as_often_as_one_that_has_just_begun_to_wait(tmp_path, monkeypatch):
    """SQLite's own wait tries less and less often: of many hooks, the one that came first was refused at last."""
    first, second = Journal(str(tmp_path / NAME)), Journal(str(tmp_path / NAME))
    pauses = []
    with ExitStack() as transaction:
        transaction.enter_context(first.write())

        def pause(seconds):
            pauses.append(seconds)
            if len(pauses) == 100:
                transaction.close()

        monkeypatch.setattr("slurm_migbatch.node.journal.time.sleep", pause)
        with second.write():
            second.set_meta("key", "value")
    assert first.meta("key") == "value" and len(pauses) == 100 and len(set(pauses)) == 1
    first.close()
    second.close()


def test_claims_may_overlap_slices_being_destroyed_but_not_each_other(journal):
    with journal.write():
        journal.put(journal_slice(0, 4, "evict", owner="me"))
        journal.put(journal_slice(0, 2, "intent", owner="me"))
        journal.put(journal_slice(2, 2, "intent", owner="other"))
    for owner in ("me", "other", "third"):
        with pytest.raises(Overlap), journal.write():
            journal.put(journal_slice(3, 1, "intent", owner=owner))
    for state in ("idle", "held", "zombie"):
        with pytest.raises(Overlap), journal.write():
            journal.put(journal_slice(0, 4, state, owner="other"))


def test_rows_are_read_back_as_written(journal):
    whole = journal_slice(2, 2, "held", gi=3, ci=0, mig_uuid="MIG-x", cap_gi=30, cap_ci=31, job=7, restart=1, ordinal=2)
    whole = whole._replace(uid=5, warm=True, owner="1.2.3", since=4.5, reason="why")
    with journal.write():
        written = journal.put(whole)
    assert journal.slices() == [written] and written._replace(id=None) == whole


def test_event_numbers_are_never_reused(journal):
    with journal.write():
        for _ in range(3):
            journal.event("create", {})
    journal.acknowledge(3, "d1")
    with journal.write():
        journal.event("create", {"x": "ü"})
    (event,) = journal.spooled()
    assert event["seq"] == 4 and event["x"] == "ü"
    assert journal.spool_length() == 1


def test_a_newer_schema_is_refused(tmp_path, journal):
    journal._connection.execute("PRAGMA user_version=99")
    with pytest.raises(JournalError, match="newer release"):
        Journal(str(tmp_path / NAME))


def test_journal_is_root_only_and_uses_wal_with_full_sync(tmp_path, journal):
    assert os.stat(journal.path).st_mode & 0o777 == 0o600
    assert journal._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert journal._connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_each_journal_has_its_own_identity(tmp_path, journal):
    other = Journal(str(tmp_path / "other.db"))
    assert len(journal.identity) == 16 and journal.identity != other.identity
    again = Journal(journal.path)
    assert again.identity == journal.identity
    other.close()
    again.close()


@pytest.mark.parametrize("raw", [b"garbage" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_file_that_is_not_a_database_is_reported_as_corrupt(tmp_path, raw):
    path = tmp_path / "bad.db"
    path.write_bytes(raw)
    with pytest.raises(Corrupt):
        Journal(str(path)).check()
    aside = move_aside(str(path))
    assert not path.exists() and os.path.exists(aside)


@pytest.mark.parametrize("how", ["garbage", "table gone", "older schema"])
def test_a_damaged_journal_is_rebuilt_from_driver_and_handoffs(node, how):
    node.prolog(1, "[mig:2g.20gb:1,1g.10gb:1]")
    node.prolog(2, "[mig:1g.10gb:1]", uid=BOB)
    node.prolog(3, "[mig:1g.10gb:1]")
    node.epilog(3)
    before = {(row.slot, row.state, row.job, row.ordinal) for row in node.slices()}
    old = node.journal.identity
    damage(node, how)
    assert node.epilog(404)[0] == exits.OK
    assert {(row.slot, row.state, row.job, row.ordinal) for row in node.slices()} == before
    node.check()
    assert node.journal.identity != old
    assert "damaged" in node.events("fault")[0]["what"]
    assert list((node.root / "state").glob("*.damaged-*"))
    for job, uid in ((1, ALICE), (2, BOB)):
        assert node.epilog(job, uid=uid)[0] == exits.OK
    node.check()
    assert not node.slices("held")


@pytest.mark.parametrize("hook,calls", [("prolog", ["requeue incomplete 7"]), ("epilog", [])])
def test_hook_does_not_drain_the_node_while_another_rebuilds_the_journal(new_node, hook, calls):
    node = new_node()
    node.prolog(1, "[mig:1g.10gb:1]")
    node.configure(HookDeadline=0.3)
    node.forget_executor()
    lock = os.dup(node.executor.paths.lock)
    damage(node, "garbage")
    with locked(lock, ["rebuild"], Deadline(1)):
        code, line = run_hook(node, hook, 7, "[mig:1g.10gb:1]")
    os.close(lock)
    assert code == exits.OK and "rebuild" in line, line
    assert node.scontrol_calls() == calls
    assert node.epilog(1)[0] == exits.OK
    node.check()


def test_instances_with_an_unknown_owner_become_zombies(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.prolog(2, "[mig:1g.10gb:1]")
    (row, other) = node.slices("held")
    node.machine.start_process(other.mig_uuid, 4_000_002)
    for path in (node.root / "run" / "job").iterdir():
        path.unlink()
    damage(node, "garbage")
    assert node.epilog(404)[0] == exits.OK
    assert {r.mig_uuid for r in node.slices("zombie")} == {row.mig_uuid, other.mig_uuid}
    assert "owner is unknown" in node.events("zombie")[0]["reason"]
    assert node.prolog(3, "[mig:3g.40gb:1]", uid=BOB)[0] == exits.OK


def test_instances_are_adopted_after_the_journal_was_deleted(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.epilog(1)
    damage(node, "deleted")
    node.reconcile()
    assert [row.state for row in node.slices()] == ["idle"]
    node.check()


# -- diagnose: from any state, its repairs lead to a state for which it returns none


starts = st.sampled_from([(0, 4), (4, 4), (0, 2), (2, 2), (4, 2), (0, 1), (1, 1), (2, 1), (5, 1), (6, 1), (0, 8)])
states = st.sampled_from(["intent", "held", "idle", "evict", "zombie", "foreign", "lost"])


@st.composite
def worlds(draw):
    instances = []
    mask = 0
    for gi, (start, size) in enumerate(draw(st.lists(starts, max_size=5))):
        slot = journal_slice(start, size).slot
        if not mask & slot.placement.mask:
            mask |= slot.placement.mask
            whole = draw(st.booleans())
            instances.append(Instance(gi, *slot, 0 if whole else None, f"MIG-{gi}" if whole else None))
    rows = []
    taken = 0
    for number, (start, size) in enumerate(draw(st.lists(starts, max_size=6)), 1):
        state = draw(states)
        row = journal_slice(start, size, state, id=number, owner=draw(st.sampled_from(["alive", "dead"])), gi=number)
        row = row._replace(mig_uuid=draw(st.sampled_from(["MIG-0", "MIG-1", None])))
        if state not in ("lost", "evict"):
            if taken & row.slot.placement.mask:
                continue
            taken |= row.slot.placement.mask
        rows.append(row)
    busy = {i.gi_id: [99] if draw(st.booleans()) else [] for i in instances}
    return rows, instances, busy


def applied(repairs, rows, instances):
    """Model of what the repairs do: return the rows and instances that result."""
    rows = {row.id: row for row in rows}
    existing = {i.gi_id: i for i in instances}
    fresh = max(1000, *rows, 0)
    for repair in repairs:
        row, instance = repair.row, repair.instance
        if (
            instance is not None
            and instance.ci_id is None
            and repair.action in ("undo", "complete", "adopt", "release")
        ):
            instance = existing[instance.gi_id] = instance._replace(ci_id=0, mig_uuid=f"MIG-new{instance.gi_id}")
        if repair.action in ("undo", "complete", "release", "adopt"):
            key = row.id if row else (fresh := fresh + 1)
            base = row or JournalSlice("GPU-0", instance.slot, "idle")
            rows[key] = base.on(instance).freed("idle")._replace(id=key)
            for other in list(rows.values()):
                overlap = other.slot.placement.overlaps(instance.placement)
                if other.id != key and other.state == "evict" and overlap:
                    del rows[other.id]
        elif repair.action == "respect":
            fresh += 1
            rows[fresh] = JournalSlice("GPU-0", instance.slot, "foreign", id=fresh).on(instance)
        elif repair.action == "forget":
            rows.pop(row.id, None)
        elif repair.action in ("lose", "park", "regain"):
            new = {"lose": "lost", "park": "zombie", "regain": "held"}[repair.action]
            rows[row.id] = row._replace(state=new)
        elif repair.action == "clear":
            existing.pop(instance.gi_id)
            rows.pop(row.id)
        else:
            raise AssertionError(repair.action)
    return list(rows.values()), list(existing.values())


@settings(max_examples=examples(400), deadline=None)
@given(worlds())
def test_repairs_lead_to_a_state_that_needs_no_repair(world):
    rows, instances, busy = world
    alive = "alive".__eq__
    for _ in range(3):
        repairs = diagnose(rows, instances, busy, alive)
        rows, instances = applied(repairs, rows, instances)
        if not repairs:
            break
    else:
        repairs = diagnose(rows, instances, busy, alive)
    assert repairs == []
    accounted = [row.slot for row in rows if row.state not in ("lost", *IN_FLIGHT)]
    assert len(accounted) == len(set(accounted)), "no slot has two rows"
    live = [row.slot.placement for row in rows if row.state in IN_FLIGHT]
    orphans = [i for i in instances if i.slot not in accounted and not any(p.overlaps(i.placement) for p in live)]
    assert orphans == []
    assert all(row.slot in {i.slot for i in instances} for row in rows if row.state in ("idle", "held", "zombie"))
    claims = [row.slot.placement for row in rows if row.state == "intent" and row.owner == "alive"]
    for row in rows:
        if row.state in IN_FLIGHT and row.owner == "dead":  # left to the live owner whose claim overlaps it
            assert row.state == "evict" and any(place.overlaps(row.slot.placement) for place in claims)


@pytest.mark.slow
@given(worlds())
def test_rows_of_living_owners_are_not_repaired(world):
    rows, instances, busy = world
    untouched = {row.id for row in rows if row.state in IN_FLIGHT and row.owner == "alive"}
    assert not untouched & {r.row.id for r in diagnose(rows, instances, busy, "alive".__eq__) if r.row is not None}


def test_spooled_events_are_json_with_number_time_and_kind(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.epilog(1)
    for event in node.events():
        assert {"seq", "ts", "kind"} <= set(event)
        json.dumps(event)


def test_hooks_do_not_look_at_runs_that_ended_before(node):
    """A user may run many short jobs, and every start on the node would wait for them."""

    def steps(job):
        counted = []
        node.journal._connection.set_progress_handler(lambda: counted.append(job), 100)
        node.prolog(job, "[mig:1g.10gb:1]")
        node.epilog(job)
        node.journal._connection.set_progress_handler(None, 0)
        return len(counted)

    few = [steps(job) for job in range(1, 4)][-1]
    with node.journal.write():
        for job in range(1000, 21_000):
            run = JournalRun(job, 0, ALICE, "alice", "physics", "gpu", "[mig:1g.10gb:1]", "ended")
            node.journal.put_run(run._replace(since=time.time() - 3600))
    assert steps(4) <= few + 20


@pytest.mark.parametrize("how", ["removed", "killed while it was made anew"])
def test_missing_journal_is_rebuilt_from_handoffs_and_driver(node, how):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.forget_executor()
    for path in list((node.root / "state").glob("journal.db*")):
        path.unlink()
    if how != "removed":
        Journal(str(node.root / "state" / "journal.db")).close()  # killed right after creating it
    assert [row.job for row in node.slices("held")] == [1]
    assert [event["what"] for event in node.events("fault")] == ["the journal was missing"]
    node.check()
    assert node.epilog(1)[0] == 0
    node.check()
