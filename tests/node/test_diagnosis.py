"""The explanation of a misfit: what was planned, what is held, and by which jobs."""

import pytest

from slurm_migbatch.mig.grant import Grant, parse_comment
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.node import exits, plan
from slurm_migbatch.node.diagnosis import LONGEST, GpuLabel, explain_misfit
from slurm_migbatch.node.journal_rows import JournalRun, JournalSlice
from tests.support.nodes import ALICE, BOB
from tests.support.promises import TWO, publish, uuids

LABELS = [GpuLabel(0, "GPU-11111111-aaaa"), GpuLabel(1, "GPU-22222222-bbbb")]


def slot(text):
    profile, _, place = text.partition("@")
    start, _, size = place.partition(":")
    return Slot.of(profile, int(start), int(size))


def planned(*layouts, version=5):
    return plan.CachedPlan(
        version, {s.uuid: tuple(map(slot, layout)) for s, layout in zip(LABELS, layouts, strict=True)}
    )


def row(site, text, state="held", job=None, **more):
    return JournalSlice(LABELS[site].uuid, slot(text), state, job=job, restart=0 if job else None, **more)


def run(job, user):
    return JournalRun(job, 0, 1000, user, "physics", "gpu", "", "running")


def grant(marker) -> Grant:
    found = parse_comment(marker)
    assert found is not None
    return found


def test_misfit_text_names_the_planned_slot_and_the_jobs_that_block_it():
    cached_plan = planned(["1g.20gb@0:2"], ["7g.80gb@0:8"])
    rows = [row(1, "1g.20gb@6:2", job=197), row(0, "1g.20gb@0:2", job=12), row(1, "1g.10gb@0:1", "idle")]
    text = explain_misfit(grant("[mig:7g.80gb:1]"), cached_plan, LABELS, rows, [run(197, "alice"), run(12, "bob")])
    assert text == (
        "plan 5 has 7g.80gb at 0:8 of GPU 1 (blocked). Taken: GPU 0 (GPU-11111111): 1g.20gb@0:2 by job 12 of bob; "
        "GPU 1 (GPU-22222222): 1g.20gb@6:2 by job 197 of alice outside the plan"
    )


def test_misfit_text_distinguishes_the_states_of_blocking_slices():
    cached_plan = planned(["1g.10gb@0:1", "1g.10gb@1:1"], [])
    rows = [
        row(0, "1g.10gb@0:1", "intent", job=1),
        row(0, "1g.10gb@1:1", "zombie", reason="in use by process 77"),
        row(0, "2g.20gb@2:2", "evict", owner="1.2.3"),
        row(0, "3g.40gb@4:4", "foreign", reason="created by hand; in use by process 78"),
        row(1, "1g.10gb@0:1", "lost", job=3),
    ]
    text = explain_misfit(grant("[mig:1g.10gb:1]"), cached_plan, LABELS, rows, [])
    assert "1g.10gb at 0:1 of GPU 0 (taken), 1:1 of GPU 0 (taken)" in text
    for part in (
        "1g.10gb@0:1 being created for job 1",
        "1g.10gb@1:1 disabled (in use by process 77)",
        "2g.20gb@2:2 being destroyed",
        "3g.40gb@4:4 created by hand; in use by process 78",
    ):
        assert part in text
    assert "job 3" not in text


def test_misfit_text_for_an_unplanned_profile_points_to_slurms_counts():
    text = explain_misfit(grant("[mig:2g.20gb:1,1g.10gb:2]"), planned(["1g.10gb@0:1"], []), LABELS, [], [])
    assert "no 2g.20gb" in text and "1g.10gb at 0:1 of GPU 0 (free)" in text
    assert "Slurm had other counts" in text and "Nothing is taken" in text


def test_misfit_text_says_that_there_is_no_plan():
    assert "no plan" in explain_misfit(grant("[mig:1g.10gb:1]"), plan.CachedPlan(), LABELS, [], [])


def test_misfit_text_is_limited_in_length():
    rows = [row(0, f"1g.10gb@{i % 7}:1", job=i, reason="x" * 50) for i in range(1, 200)]
    runs = [run(i, "u" * 30) for i in range(1, 200)]
    assert len(explain_misfit(grant("[mig:1g.10gb:1]"), planned([], []), LABELS, rows, runs)) == LONGEST


def test_misfit_details_go_to_controller_and_slurmd_but_not_to_the_user(new_node):
    node = new_node(gpus=TWO)
    publish(node, [["4g.40gb", 0, 4], ["3g.40gb", 4, 4]], [["7g.80gb", 0, 8]], version=41)
    node.prolog(1, "[mig:4g.40gb:1]")
    publish(node, [["7g.80gb", 0, 8]], [], version=42)
    node.prolog(2, "[mig:7g.80gb:1]", uid=BOB)
    code, line = node.prolog(3, "[mig:7g.80gb:1]")
    assert code == exits.OK and "requeued" in line
    (misfit,) = node.events("misfit")
    for text in (line, misfit["reason"]):
        assert "plan 42 has 7g.80gb at 0:8 of GPU 0 (blocked)" in text
        assert f"GPU 0 ({uuids(node)[0][:12]}): 4g.40gb@0:4 by job 1 of user{ALICE} outside the plan" in text
        assert "7g.80gb@0:8 by job 2" in text
    left = (node.root / "run" / "job" / "3.0").read_text()
    assert "no free placement for mig:7g.80gb:1" in left and "job 2" not in left
    node.check()


@pytest.mark.parametrize(("layouts", "kept"), [([["1g.10gb", 0, 1]], True), ([["1g.20gb", 0, 2]], False)])
def test_start_event_says_whether_the_slot_was_planned(node, layouts, kept):
    publish(node, layouts)
    node.prolog(1, "[mig:1g.10gb:1]")
    assert node.events("start")[0]["planned"] is kept
