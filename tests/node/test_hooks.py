"""What Prolog and Epilog do on a working machine."""

import json
import stat
import time
from pathlib import Path

import pytest

from slurm_migbatch.node import effects, exits, handoff, plan, run_repair
from slurm_migbatch.node.caps import CapsError
from slurm_migbatch.node.deadline import Deadline, locked
from slurm_migbatch.node.inventory import inventory
from tests.support.environments import exported
from tests.support.node_processes import run_hook
from tests.support.nodes import ALICE, BOB


def test_job_gets_its_slice_and_releases_it(node):
    code, line = node.prolog(17, "[mig:2g.20gb:1#7fq3k]")
    assert (code, "made" in line) == (exits.OK, True), line
    node.check()
    (row,) = node.slices("held")
    assert (row.job, row.uid, row.slot.profile.name) == (17, ALICE, "2g.20gb")
    (start,) = node.events("start")
    assert start["decision"] == "7fq3k" and start["warm"] is False and start["slices"][0]["mig_uuid"] == row.mig_uuid
    assert (start["job"], start["restart"], start["user"], start["account"]) == (17, 0, f"user{ALICE}", "physics")
    assert node.epilog(17)[0] == exits.OK
    node.check()
    assert [r.state for r in node.slices()] == ["idle"]
    (stop,) = node.events("stop")
    assert stop["slices"] == start["slices"] and stop["exit_code"] == 0
    assert node.scontrol_calls() == []


def test_next_job_of_the_user_reuses_the_slice_without_driver_changes(node):
    node.prolog(1, "[mig:1g.10gb:2]")
    node.epilog(1)
    node.machine.calls(reset=True)
    code, line = node.prolog(2, "[mig:1g.10gb:2]")
    assert code == exits.OK and "warm" in line
    changes = [name for name in node.machine.calls() if "Create" in name or "Destroy" in name]
    assert changes == []
    assert node.events("start")[-1]["warm"] is True
    node.check()


@pytest.mark.parametrize(("policy", "warm"), [("any", True), ("same-user", False), ("never", False)])
def test_warm_reuse_setting_controls_reuse_by_another_user(new_node, policy, warm):
    node = new_node(WarmReuse=policy)
    node.prolog(1, "[mig:7g.80gb:1]")
    node.epilog(1)
    assert node.prolog(2, "[mig:7g.80gb:1]", uid=BOB)[0] == exits.OK
    assert node.events("start")[-1]["warm"] is warm
    node.check()


def test_user_reuses_their_own_warm_slice_by_default(node):
    node.prolog(1, "[mig:7g.80gb:1]")
    node.epilog(1)
    node.prolog(2, "[mig:7g.80gb:1]")
    assert node.events("start")[-1]["warm"] is True


def test_slices_of_one_job_may_be_on_several_gpus(new_node):
    node = new_node(gpus=["h100-80gb", "h100-80gb"])
    assert node.prolog(1, "[mig:4g.40gb:2,3g.40gb:2]")[0] == exits.OK
    node.check()
    held = node.slices("held")
    assert len({row.gpu for row in held}) == 2 and len(held) == 4
    assert [row.slot.profile.name for row in sorted(held, key=lambda r: r.ordinal)] == ["4g.40gb"] * 2 + ["3g.40gb"] * 2
    given = node.handoff(1)
    assert [g.profile for g in given.slices] == ["4g.40gb", "4g.40gb", "3g.40gb", "3g.40gb"]


def test_repeated_hook_changes_nothing(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    before = node.slices(), node.events()
    code, line = node.prolog(1, "[mig:1g.10gb:1]")
    assert code == exits.OK and "already" in line
    assert (node.slices(), node.events()) == before
    node.epilog(1)
    before = node.slices(), node.events()
    assert node.epilog(1) == (exits.OK, "")
    assert (node.slices(), node.events()) == before


def test_epilog_without_a_prolog_succeeds_and_does_nothing(node):
    assert node.epilog(404) == (exits.OK, "")
    node.check()
    assert node.events("stop") == []


def test_epilog_with_the_next_restart_count_releases_the_earlier_run(node):
    node.prolog(1, "[mig:1g.10gb:1]", restart=0)
    assert node.epilog(1, restart=1)[0] == exits.OK
    node.check()
    assert not node.slices("held") and node.events("stop")[0]["restart"] == 0


def test_late_epilog_of_an_earlier_run_leaves_the_current_run_alone(node):
    node.prolog(1, "[mig:1g.10gb:1]", restart=3)
    assert node.epilog(1, restart=2)[0] == exits.OK
    assert [row.restart for row in node.slices("held")] == [3]
    node.check()


def test_new_run_releases_the_slices_of_the_earlier_run(node):
    node.prolog(1, "[mig:7g.80gb:1]", restart=0)
    assert node.prolog(1, "[mig:7g.80gb:1]", restart=1)[0] == exits.OK
    assert [row.restart for row in node.slices("held")] == [1]
    assert node.events("stop")[0]["restart"] == 0
    node.check()


@pytest.mark.parametrize("before", [0, 3])
def test_job_with_the_id_of_another_users_earlier_job_gets_its_own_slice(node, before):
    """slurmctld has lost its state and starts its job ids again, and the earlier job's Epilog never ran."""
    node.prolog(1, "[mig:3g.40gb:1]", restart=before)
    (row,) = node.slices("held")
    assert node.prolog(1, "[mig:1g.10gb:1]", uid=BOB)[0] == exits.OK
    assert [(r.uid, r.restart, r.slot.profile.name) for r in node.slices("held")] == [(BOB, 0, "1g.10gb")]
    assert node.cap(row.cap_gi)[0] != ALICE
    assert list(handoff.listed(node.executor.paths.job)) == [(1, 0)] and node.handoff(1).uid == BOB
    assert [(event["job"], event["restart"]) for event in node.events("stop")] == [(1, before)]
    node.epilog(1, uid=BOB)
    node.check()


def test_handoff_of_an_earlier_job_with_the_same_id_hides_no_refusal(node):
    node.prolog(1, "[mig:1g.10gb:1]", restart=3)
    node.epilog(1, restart=3)
    node.prolog(2, "[mig:7g.80gb:1]")
    assert "requeued" in node.prolog(1, "[mig:7g.80gb:1]", uid=BOB)[1]
    assert sorted(handoff.listed(node.executor.paths.job)) == [(1, 0), (2, 0)] and node.handoff(1).slices == ()


def test_epilog_without_a_restart_count_releases_the_job(node):
    node.prolog(1, "[mig:1g.10gb:1]", restart=2)
    node.epilog(1, restart=None)
    node.check()
    assert not node.slices("held")


def test_full_node_requeues_the_job_and_hands_off_no_slices(node):
    node.prolog(1, "[mig:7g.80gb:1]")
    code, line = node.prolog(2, "[mig:1g.10gb:1]", uid=BOB)
    assert code == exits.OK and "requeued" in line
    assert node.scontrol_calls() == ["requeue incomplete 2"]
    (misfit,) = node.events("misfit")
    assert (misfit["job"], misfit["grant"]) == (2, "mig:1g.10gb:1") and "no free placement" in misfit["reason"]
    assert node.handoff(2).slices == ()
    node.check()
    assert [event["job"] for event in node.events("stop")] == []


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (["7 2 1 0", "2 2 3 0", "8 2 2 0"], "2_3"),  # the array's last task, which has the array's id
        (["2 9 4 0"], "2"),
        (["2 2 N/A 0"], "2"),
        (["1 1 N/A 1", "2 2 N/A 1", "3 3 N/A 1"], "1"),  # a part of a heterogeneous job
        (["2 2 N/A N/A"], "2"),
    ],
)
def test_requeue_addresses_only_the_one_job_or_array_task(node, rows, name):
    node.prolog(1, "[mig:7g.80gb:1]")
    node.slurm_names(2, *rows)
    assert "requeued" in node.prolog(2, "[mig:1g.10gb:1]")[1]
    assert node.scontrol_calls() == [f"requeue incomplete {name}"]


@pytest.mark.parametrize("rows", [["3 3 N/A 0"], ["2 2 N/A 0", "2 2 N/A 0"], ["2"], [""]])
def test_job_is_not_requeued_when_squeue_does_not_identify_it(node, rows):
    node.prolog(1, "[mig:7g.80gb:1]")
    node.slurm_names(2, *rows)
    code, line = node.prolog(2, "[mig:1g.10gb:1]")
    assert code == exits.OK and "tasks will fail" in line
    assert node.scontrol_calls() == [] and node.handoff(2).slices == ()


def test_refusal_handoff_stays_until_the_next_run_has_its_slice(node):
    """slurmd may skip the Prolog of a job that is restarted at once: its tasks must not run without a slice."""
    node.prolog(1, "[mig:7g.80gb:1]")
    node.prolog(2, "[mig:1g.10gb:1]")
    assert node.epilog(2, restart=1)[0] == exits.OK
    assert node.handoff(2, 0).slices == ()
    node.check()
    node.reconcile()
    assert node.handoff(2, 0).slices == ()
    node.epilog(1)
    assert node.prolog(2, "[mig:1g.10gb:1]", restart=1)[0] == exits.OK
    assert node.handoff(2, 0) is None and node.handoff(2, 1).slices
    node.check()
    node.epilog(2, restart=1)
    node.check()


def test_ended_run_leaves_a_handoff_that_forbids_tasks_until_a_new_prolog(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.epilog(1, restart=1)
    assert node.handoff(1, 0).slices == ()
    node.check()
    node.prolog(1, "[mig:1g.10gb:1]", restart=1)
    assert node.handoff(1, 0) is None and node.handoff(1, 1).slices
    node.epilog(1, restart=1)
    node.check()


def test_old_refusal_handoff_is_removed(node, monkeypatch):
    node.prolog(1, "[mig:9g.99gb:1]")
    node.epilog(1)
    later = time.time() + run_repair.TOMBSTONE_S + 1
    monkeypatch.setattr(time, "time", lambda: later)
    node.reconcile()
    assert node.handoff(1) is None
    node.check()


def test_prolog_succeeds_and_refuses_tasks_when_the_requeue_fails(node):
    (node.root / "scontrol.code").write_text("1\n")
    node.prolog(1, "[mig:7g.80gb:1]")
    code, line = node.prolog(2, "[mig:1g.10gb:1]")
    assert code == exits.OK and "tasks will fail" in line
    assert node.handoff(2).slices == ()


@pytest.mark.parametrize(
    "marker",
    [
        "[mig:9g.99gb:1]",  # no such profile here
        "[mig:1g.10gb:1] and more",
        "[mig:1g.10gb:1][mig:7g.80gb:1]",
        "[mig:1g.10gb:99]",
        "[mig:1g.10gb:1;reboot]",
        "[mig:$(reboot):1]",
        "[mig:",
    ],
)
def test_job_with_an_invalid_marker_is_requeued(node, marker):
    code, line = node.prolog(1, marker)
    assert code == exits.OK and "requeued" in line, line
    assert not node.slices("held")
    node.check()


def test_job_without_a_marker_is_ignored(node):
    assert node.prolog(1, "") == (exits.OK, "")
    assert node.machine.calls()["nvmlDeviceCreateGpuInstanceWithPlacement"] == 0
    assert node.scontrol_calls() == []


def test_slurmctld_is_asked_for_the_gres_of_roots_jobs(node):
    node.slurm_says("1 0 gres/mig:1g.10gb:1,gres/mig:2g.20gb:1,gres/gpu:1")
    assert node.prolog(1, "", uid=0)[0] == exits.OK
    assert sorted(row.slot.profile.name for row in node.slices("held")) == ["1g.10gb", "2g.20gb"]
    assert node.asked_slurm() == [1]
    node.check()


def test_slurmctld_is_asked_for_the_gres_of_an_updated_job(node):
    """slurmctld keeps the comment of an update that it refuses, so the marker may exceed the job's allocation."""
    node.slurm_says("1 0 gres/mig:1g.10gb:1", "2 0 N/A", "3", "4 0 gres/mig:none:1")
    assert node.prolog(1, "[mig:7g.80gb:1#chg7fq3k2ab]")[0] == exits.OK
    assert [row.slot.profile.name for row in node.slices("held")] == ["1g.10gb"]
    for job in (2, 4):  # it has no slices, and is not requeued again and again because of that
        assert node.prolog(job, "[mig:1g.10gb:1#chg]") == (exits.OK, "")
    for job in (3, 5):
        assert "the job was updated" in node.prolog(job, "[mig:1g.10gb:1#chg]")[1]
    assert [call.split()[0] for call in node.scontrol_calls()] == ["requeue"] * 2
    assert node.asked_slurm() == [1, 2, 4, 3, 5]
    assert node.prolog(6, "[mig:1g.10gb:1#7fq3k2ab]")[0] == exits.OK and node.asked_slurm()[-1] == 5
    assert len(node.slices("held")) == 2
    node.check()


@pytest.mark.parametrize(
    ("release", "read", "skipped"),
    [
        ("22.05.8", "gres:", "gres/"),
        ("23.02.7", "gres:", "gres/"),
        ("23.11.4", "gres/", ""),
        ("26.05.0", "gres/", "gres:"),
        ("26.11-rc1", "gres/", "gres:"),
        ("27.05.0-0rc2", "gres/", "gres:"),
        ("23.11", "gres/", ""),
        ("23.02-Ubuntu", "gres:", "gres/"),
    ],
)
def test_gres_entry_without_the_releases_prefix_is_not_a_grant(node, release, read, skipped):
    """slurmctld keeps the text of an update unchanged, and looks for the prefix of its own release in it."""
    node.slurm_is(release)
    node.slurm_says(f"1 0 {read}mig:1g.10gb:1,gres/gpu:0", f"2 0 gres/gpu:0,{skipped}mig:7g.80gb:1")
    assert node.prolog(1, "[mig:1g.10gb:1#chg]")[0] == exits.OK
    code, line = node.prolog(2, "[mig:7g.80gb:1#chg]")
    assert code == exits.OK and "requeued" in line and "does not read" in line
    assert [row.slot.profile.name for row in node.slices("held")] == ["1g.10gb"]
    node.check()


def test_count_after_an_equals_sign_is_granted(node):
    """Slurm accepts --gres=mig:1g.10gb=2, and so does an update by an administrator, which no filter rewrites."""
    node.slurm_says("1 0 gres/mig:1g.10gb=2,gres/mig:2g.20gb=1,gres/gpu=0")
    assert node.prolog(1, "[mig:1g.10gb:1#chg]")[0] == exits.OK
    assert sorted(row.slot.profile.name for row in node.slices("held")) == ["1g.10gb", "1g.10gb", "2g.20gb"]
    node.check()


@pytest.mark.parametrize("first", ["[mig:1g.10gb:1]", "[mig:9g.99gb:1]"])
@pytest.mark.parametrize("second", ["", "[mig:1g.10gb:1#chg]"])
@pytest.mark.parametrize("epilog", [True, False])
def test_requeued_job_whose_slices_were_removed_runs_without_any(node, first, second, epilog):
    """The hand-off of its earlier run, which held slices or was refused, stops only tasks that need slices."""
    node.slurm_says("1 1 N/A")
    node.prolog(1, first)
    if epilog:
        node.epilog(1, restart=1)
    assert run_hook(node, "prolog", 1, second, restart=1) == (exits.OK, "-")
    assert exported(node, 1) == {}
    assert not node.slices("held")
    node.check()
    node.reconcile()
    assert exported(node, 1) == {}


def test_requeued_job_without_slices_starts_whatever_the_state_of_the_node(node):
    (node.etc / "node.conf").write_text("Gpus\n")
    assert run_hook(node, "prolog", 1, restart=1) == (exits.OK, "-")


def test_gres_of_the_next_run_is_not_granted_to_the_current_run(node):
    """A user can requeue a job while its Prolog runs on a slow node, and then change the GRES of the pending job."""
    node.slurm_says("1 1 gres/mig:7g.80gb:1", "2 1 gres/mig:1g.10gb:1")
    code, line = node.prolog(1, "[mig:1g.10gb:1#chg]", restart=0)
    assert code == exits.OK and "has been requeued" in line
    assert not node.slices("held")
    assert node.prolog(2, "[mig:1g.10gb:1#chg]", restart=1)[0] == exits.OK
    assert [row.slot.profile.name for row in node.slices("held")] == ["1g.10gb"]
    node.check()


def test_job_with_a_reused_id_does_not_take_over_the_earlier_jobs_slices(node):
    node.prolog(1, "[mig:7g.80gb:1]")
    code, line = node.prolog(1, "[mig:1g.10gb:2]")
    assert code == exits.OK and "already has" not in line
    assert [(row.job, row.slot.profile.name) for row in node.slices("held")] == [(1, "1g.10gb")] * 2
    node.check()
    for decision in ("", "#7fq3k2ab"):  # a new comment may name another decision
        assert "already has its slices" in node.prolog(1, f"[mig:1g.10gb:2{decision}]")[1]
    node.check()


def test_job_is_refused_when_the_slurm_release_is_unknown(node):
    node.slurm_is("unknown")
    node.slurm_says("1 0 gres/mig:1g.10gb:1")
    assert "not a Slurm release" in node.prolog(1, "[mig:1g.10gb:1#chg]")[1]
    assert not node.slices("held")


@pytest.mark.parametrize("end", ["\n", "\v", "\f", "\x1e", "\u2028"])
def test_line_break_in_a_gres_is_not_read_as_another_row(node, end):
    """From 23.11 on Slurm accepts any bytes in an entry with a count of 0, and squeue prints them."""
    node.slurm_says(f"1 0 gres/mig:1g.10gb:1,gres/gpu:a b{end}1 0 mig:7g.80gb:1{end}x:0")
    code, line = node.prolog(1, "[mig:1g.10gb:1#chg7fq3k2ab]")
    assert code == exits.OK and "requeued" in line and "not one row" in line
    assert not node.slices("held")
    node.check()


@pytest.mark.parametrize("answer", ["1 0 gres/gpu:1", "1 0 N/A", "1"])
def test_roots_jobs_without_mig_start_without_a_slice(node, answer):
    node.slurm_says(answer)
    assert node.prolog(1, "", uid=0) == (exits.OK, "")


def plan_for(node, slots, gpu=None):
    gpu = gpu or node.executor.gpus.listed()[0].uuid
    raw = {"version": 3, "gpus": {gpu: slots}}
    plan.store(str(node.config.state_dir), json.dumps(raw).encode())


def test_planned_slots_are_used_first(node):
    plan_for(node, [["1g.10gb", 2, 1], ["3g.40gb", 4, 4]])
    node.prolog(1, "[mig:1g.10gb:1]")
    assert [str(row.slot) for row in node.slices("held")] == ["1g.10gb@2:1"]
    node.prolog(2, "[mig:1g.10gb:1]")
    places = [row.slot.placement.start for row in node.slices("held")]
    assert all(start < 4 for start in places), "an unplanned slot overlaps a planned one"
    assert node.prolog(3, "[mig:3g.40gb:1]")[0] == exits.OK
    node.check()


def test_warm_planned_slot_is_preferred_to_a_cold_one(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.epilog(1)
    (idle,) = node.slices("idle")
    others = [["1g.10gb", start, 1] for start in range(3)]
    plan_for(node, [*others, ["1g.10gb", idle.slot.placement.start, 1]])
    node.prolog(2, "[mig:1g.10gb:1]")
    assert node.events("start")[-1]["warm"] is True


def test_plan_cannot_change_the_profile_that_a_job_was_granted(node):
    raw = {"version": 3, "gpus": {}, "jobs": {"1": "[mig:7g.80gb:1]"}}
    (Path(node.executor.config.state_dir) / "plan.json").write_text(json.dumps(raw))
    node.prolog(1, "[mig:1g.10gb:1]")
    assert [row.slot.profile.name for row in node.slices("held")] == ["1g.10gb"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"version":1,"gpus":{"x":[["9g",0,1]]}}', b"\xff" * 100])
def test_malformed_plan_file_is_ignored(node, raw):
    (Path(node.executor.config.state_dir) / "plan.json").write_bytes(raw)
    assert node.prolog(1, "[mig:1g.10gb:1]")[0] == exits.OK
    node.check()


def test_idle_instances_are_destroyed_to_make_room(node):
    node.prolog(1, "[mig:1g.10gb:7]")
    node.epilog(1)
    assert node.prolog(2, "[mig:7g.80gb:1]")[0] == exits.OK
    node.check()
    assert len(node.events("destroy")) == 7


def test_only_as_many_idle_instances_as_needed_are_destroyed(node):
    node.prolog(1, "[mig:1g.10gb:7]")
    node.epilog(1)
    node.prolog(2, "[mig:2g.20gb:1]")
    assert len(node.slices("idle")) == 5
    node.check()


def test_slices_of_different_sizes_take_the_place_of_one_idle_instance(node):
    """The larger one is placed first, and has it destroyed, wherever it stands in the request."""
    node.prolog(1, "[mig:7g.80gb:1]")
    node.epilog(1)
    code, line = node.prolog(2, "[mig:1g.10gb:2,2g.20gb:1]")
    assert (code, "made" in line) == (exits.OK, True), line
    assert [given.profile for given in node.handoff(2).slices] == ["1g.10gb", "1g.10gb", "2g.20gb"]
    assert node.scontrol_calls() == []
    node.check()


def test_idle_me_instance_is_destroyed_when_the_profile_limit_is_reached(node):
    """Only one +me instance fits on a GPU: an idle one blocks the next even if their placements do not overlap."""
    node.prolog(1, "[mig:1g.10gb.me:1]")
    node.epilog(1)
    (idle,) = node.slices("idle")
    place = next(start for start in range(6) if start != idle.slot.placement.start)
    plan_for(node, [["1g.10gb+me", place, 1]])
    assert node.prolog(2, "[mig:1g.10gb.me:1]")[0] == exits.OK
    node.check()
    assert len(node.instances()) == 1


def test_instance_with_a_running_process_is_never_allocated(new_node):
    node = new_node(gpus=["h100-80gb", "h100-80gb"])
    node.prolog(1, "[mig:7g.80gb:1]")
    node.epilog(1)
    (idle,) = node.slices("idle")
    node.machine.start_process(idle.mig_uuid, 4_000_000)
    code, line = node.prolog(2, "[mig:7g.80gb:1]")
    assert code == exits.OK, line
    (held,) = node.slices("held")
    assert held.gpu != idle.gpu
    (zombie,) = node.slices("zombie")
    assert zombie.mig_uuid == idle.mig_uuid and "4000000" in node.events("zombie")[0]["reason"]
    node.check()
    node.machine.end_process(4_000_000)
    assert node.reconcile()
    assert not node.slices("zombie") and node.events("cleared")
    node.check()


def test_instance_that_stays_busy_becomes_a_zombie_and_another_gpu_is_used(new_node):
    node = new_node(gpus=["h100-80gb", "h100-80gb"])
    node.prolog(1, "[mig:3g.40gb:2]")
    node.epilog(1)
    first = node.slices()[0].gpu
    plan_for(node, [["7g.80gb", 0, 8]], gpu=first)
    node.machine.stick_destroy(None)
    code, line = node.prolog(2, "[mig:7g.80gb:1]")
    assert code == exits.OK, line
    assert node.slices("held")[0].gpu != first
    assert node.slices("zombie")
    node.check()
    node.machine.reset_faults()
    node.reconcile()
    node.check()
    assert not node.slices("zombie")


def test_job_is_requeued_without_a_drain_when_only_zombies_are_left(node):
    node.prolog(1, "[mig:3g.40gb:2]")
    node.epilog(1)
    node.machine.stick_destroy(None)
    code, line = node.prolog(2, "[mig:7g.80gb:1]")
    assert code == exits.OK and "requeued" in line
    assert node.scontrol_calls() == ["requeue incomplete 2"]


def test_instances_created_by_hand_are_kept_while_in_use_and_then_adopted(new_node):
    node = new_node(WarmReuse="any")  # the earlier user of the instances is not known
    by_hand = node.make_by_hand("3g.40gb", 0, 4)
    idle = node.make_by_hand("1g.10gb", 4, 1)
    node.machine.start_process(by_hand.mig_uuid, 4_000_001)
    assert node.prolog(1, "[mig:3g.40gb:1]")[0] == exits.OK
    node.check()
    assert [row.mig_uuid for row in node.slices("foreign")] == [by_hand.mig_uuid]
    assert idle.mig_uuid not in {i.mig_uuid for i in node.instances().values()}, "its place was needed"
    assert "requeued" in node.prolog(2, "[mig:3g.40gb:1]")[1]
    reported = [event for event in node.events() if event["kind"] in ("zombie", "cleared")]
    assert [(event["kind"], event["profile"], event["start"]) for event in reported] == [("zombie", "3g.40gb", 0)]
    assert "created by hand" in reported[0]["reason"]
    node.machine.end_process(4_000_001)
    assert node.prolog(3, "[mig:3g.40gb:1]", uid=BOB)[0] == exits.OK
    assert node.slices("held")[0].mig_uuid == by_hand.mig_uuid
    reported = [event for event in node.events() if event["kind"] in ("zombie", "cleared")]
    assert [event["kind"] for event in reported] == ["zombie", "cleared"]
    node.check()


def test_instances_are_listed_again_after_a_repair_that_destroys_one(node, monkeypatch):
    def refuse(*_):
        raise CapsError("no such device")

    node.make_by_hand("1g.10gb", 4, 1)
    monkeypatch.setattr(node.executor.caps, "grant", refuse)
    (gpu,) = node.executor.gpus.managed()
    assert node.executor.maker.existing(gpu) == {}
    assert node.instances() == {}


def test_busy_instance_created_by_hand_between_two_jobs_is_kept(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    (held,) = node.slices("held")
    by_hand = node.make_by_hand("3g.40gb", 0, 4)
    node.machine.start_process(by_hand.mig_uuid, 4_000_001)
    assert node.prolog(2, "[mig:3g.40gb:1]")[0] == exits.OK or held
    node.check()
    assert by_hand.mig_uuid in {i.mig_uuid for i in node.instances().values()}


def test_idle_instance_destroyed_by_hand_is_created_again(node):
    node.prolog(1, "[mig:2g.20gb:1]")
    node.epilog(1)
    node.destroy_by_hand()
    code, line = node.prolog(2, "[mig:2g.20gb:1]")
    assert code == exits.OK and "made" in line
    node.check()


def test_vanished_held_instance_is_marked_lost_until_the_epilog(node):
    node.prolog(1, "[mig:2g.20gb:1]")
    node.destroy_by_hand()
    node.reconcile()
    assert [row.state for row in node.slices()] == ["lost"]
    assert node.events("fault")[0]["drain"] is False
    assert node.prolog(2, "[mig:7g.80gb:1]", uid=BOB)[0] == exits.OK
    node.epilog(1)
    assert [event["job"] for event in node.events("stop")] == [1]
    node.check()


@pytest.mark.parametrize(("profile", "fits"), [("1g.10gb", True), ("2g.20gb", True), ("7g.80gb", False)])
def test_slice_that_was_lost_and_exists_again_is_not_given_to_another_job(node, profile, fits):
    node.prolog(1, "[mig:1g.10gb:1]")
    (held,) = node.slices("held")
    with node.journal.write():
        node.journal.put(held._replace(state="lost"))
    code, line = node.prolog(2, f"[mig:{profile}:1]", uid=BOB)
    assert code == exits.OK and node.events("fault") == [], line
    assert {row.job: row.uid for row in node.slices()} == {1: ALICE, **({2: BOB} if fits else {})}
    assert node.handoff(1).slices[0].mig_uuid == held.mig_uuid
    assert ("no free placement" in line) is not fits
    node.check()


def test_lost_gpu_drains_the_node_with_a_reason_and_requeues_the_job(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.epilog(1)
    node.machine.set_lost(0)
    code, line = node.prolog(2, "[mig:1g.10gb:1]")
    assert code == exits.OK and "fell off the bus" in line, line
    assert node.scontrol_calls()[0].startswith("update NodeName=n1 State=DRAIN Reason=migbatch: GPU-")
    assert node.scontrol_calls()[1:] == ["requeue incomplete 2"]
    assert node.events("fault")[-1]["drain"] is True


@pytest.mark.parametrize("code", [19, 27, 999])
def test_gpu_that_fails_otherwise_requeues_the_job_and_drains_no_node(node, code):
    """It is in use, the driver is not ready yet, or an unknown error: counted like all other errors."""
    node.reconcile()
    node.machine.fail("nvmlDeviceGetMigMode", code=code)
    line = node.prolog(1, "[mig:1g.10gb:1]")[1]
    assert "requeued" in line and f"NVML code {code}" in line, line
    assert node.scontrol_calls() == ["requeue incomplete 1"] and node.journal.meta("errors") == "1"
    assert "requeued" not in node.prolog(2, "[mig:1g.10gb:1]")[1]


def test_other_gpu_is_used_while_one_is_lost(new_node):
    node = new_node(gpus=["h100-80gb", "h100-80gb"])
    node.prolog(1, "[mig:7g.80gb:1]")
    node.epilog(1)
    gpu = node.slices("idle")[0].gpu
    node.machine.set_lost(0)
    code, line = node.prolog(2, "[mig:7g.80gb:1]")
    assert code == exits.OK, line
    assert node.slices("held")[0].gpu != gpu


@pytest.mark.parametrize("on_error", ["requeue", "drain"])
def test_node_with_a_lost_gpu_is_drained_while_others_work_only_if_wanted(new_node, on_error):
    node = new_node(gpus=["h100-80gb", "h100-80gb"], OnError=on_error)
    node.prolog(1, "[mig:7g.80gb:1]")
    (held,) = node.slices("held")
    node.machine.set_lost(next(gpu.index for gpu in node.executor.gpus.listed() if gpu.uuid != held.gpu))
    for job in range(2, 9):
        code, line = node.prolog(job, "[mig:7g.80gb:1]")
        assert code == exits.OK and "requeued" in line and "fell off the bus" in line, line
    drains = [call for call in node.scontrol_calls() if "State=DRAIN" in call]
    assert bool(drains) is (on_error == "drain")
    offered = [entry["uuid"] for entry in inventory(node.executor.gpus) if entry.get("mig")]
    assert offered == [held.gpu] and len(node.events("fault")) == 7


def test_gpu_that_does_not_report_its_minor_does_not_affect_the_others(new_node):
    node = new_node(gpus=["h100-80gb", "h100-80gb"])
    for job in (1, 2):
        node.prolog(job, "[mig:7g.80gb:1]")
    first, second = node.executor.gpus.listed()
    rows = {row.gpu: row for row in node.slices("held")}
    node.forget_executor()
    node.machine.fail("nvmlDeviceGetMinorNumber", 999)  # of the first
    survey = node.executor.gpus.survey()
    assert [gpu.uuid for gpu in survey.managed] == [second.uuid]
    assert "its device minor" in survey.unidentified[first.index]
    assert [gpu.uuid for gpu in node.executor.gpus.listed()] == [first.uuid, second.uuid], "it is queried again"
    node.forget_executor()
    node.machine.fail("nvmlDeviceGetMinorNumber", 999)
    assert node.epilog(rows[second.uuid].job)[0] == exits.OK
    code, line = node.prolog(3, "[mig:7g.80gb:1]")
    assert code == exits.OK and "requeued" not in line, line
    assert {row.gpu: row.job for row in node.slices("held")} == {
        first.uuid: rows[first.uuid].job,
        second.uuid: 3,
    }
    node.check()


def test_hook_that_opens_the_driver_uses_the_other_gpu_while_one_is_lost(new_node):
    """The UUID of a lost GPU cannot be read; the slices that the journal has on it may still exist."""
    node = new_node(gpus=["h100-80gb", "h100-80gb"])
    for job in (1, 2):
        node.prolog(job, "[mig:7g.80gb:1]")
    lost, other = sorted(node.slices("held"), key=lambda row: row.job)
    index = next(gpu.index for gpu in node.executor.gpus.listed() if gpu.uuid == lost.gpu)
    node.machine.set_lost(index)
    node.forget_executor()
    assert node.epilog(2)[0] == exits.OK
    code, line = node.prolog(3, "[mig:7g.80gb:1]")
    assert code == exits.OK and "requeued" not in line, line
    assert {row.job: row.gpu for row in node.slices("held")} == {1: lost.gpu, 3: other.gpu}
    assert node.scontrol_calls() == []
    code, line = node.prolog(4, "[mig:7g.80gb:1]")
    assert code == exits.OK and "fell off the bus" in line, line
    assert node.scontrol_calls() == ["requeue incomplete 4"], "the other GPU works, so the node is not drained"
    assert node.events("fault")[-1]["drain"] is False
    assert node.epilog(1)[0] == exits.OK
    node.machine.reset_gpu(index)
    assert len(node.executor.gpus.listed()) == 2, "it is queried again"
    node.reconcile()
    assert node.prolog(5, "[mig:7g.80gb:1]")[0] == exits.OK
    assert {row.job: row.gpu for row in node.slices("held")} == {5: lost.gpu, 3: other.gpu}
    node.check()


def test_hook_that_opens_the_driver_drains_a_node_with_a_lost_gpu(node):
    node.machine.set_lost(0)
    code, line = node.prolog(1, "[mig:1g.10gb:1]")
    assert code == exits.OK and "fell off the bus" in line, line
    assert node.scontrol_calls()[0].startswith("update NodeName=n1 State=DRAIN Reason=migbatch: GPU 0 ")
    assert node.scontrol_calls()[1:] == ["requeue incomplete 1"]


def test_lost_gpu_that_is_not_managed_is_ignored(new_node):
    node = new_node(gpus=["h100-80gb", "h100-80gb"], Gpus="1")
    node.machine.set_lost(0)
    assert "requeued" not in node.prolog(1, "[mig:7g.80gb:1]")[1]
    assert "requeued" in node.prolog(2, "[mig:7g.80gb:1]")[1]
    assert node.scontrol_calls() == ["requeue incomplete 2"], "it is not drained"


@pytest.mark.parametrize("slices", [1, 2])
def test_gpu_that_is_lost_while_a_job_starts_is_the_only_one_not_used(new_node, monkeypatch, slices):
    node = new_node(gpus=["h100-80gb"] * 3)
    indices = {gpu.uuid: gpu.index for gpu in node.executor.gpus.managed()}
    lost = []

    def lose(name):
        if name == "driver create" and not lost:
            lost.append(min(node.slices("intent"), key=lambda row: row.ordinal).gpu)
            node.machine.set_lost(indices[lost[0]])

    monkeypatch.setattr(effects, "hook", lose)
    code, line = node.prolog(1, f"[mig:7g.80gb:{slices}]")
    assert code == exits.OK and "requeued" not in line, line
    assert len(node.slices("held")) == slices and node.scontrol_calls() == []
    assert lost[0] not in {row.gpu for row in node.slices("held")}
    node.machine.reset_gpu(indices[lost[0]])
    node.reconcile()
    node.check()


def test_job_with_cuda_index_gets_its_slice_while_another_gpu_is_lost(new_node):
    """The Prolog of such a job reads all GPUs, including those that the job does not use."""
    node = new_node(gpus=("h100-80gb",) * 2)
    node.prolog(1, "[mig:7g.80gb:1]")
    (held,) = node.slices("held")
    (other,) = {gpu.uuid for gpu in node.executor.gpus.listed()} - {held.gpu}
    node.epilog(1)
    node.machine.set_lost(next(gpu.index for gpu in node.executor.gpus.listed() if gpu.uuid == other))
    code, line = node.prolog(2, "", SLURM_JOB_COMMENT="migbatch: cuda=index [mig:7g.80gb:1]")
    assert code == exits.OK and "requeued" not in line, line
    assert node.scontrol_calls() == [] and [row.gpu for row in node.slices("held")] == [held.gpu]


def test_consecutive_failures_drain_the_node_and_a_success_resets_the_count(new_node):
    node = new_node(ErrorsBeforeDrain=3)
    for job in (1, 2):
        node.machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", code=999, times=None)
        assert "requeued" in node.prolog(job, "[mig:1g.10gb:1]")[1]
        node.epilog(job)
    node.machine.reset_faults()
    assert node.prolog(3, "[mig:1g.10gb:1]")[0] == exits.OK
    node.machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", code=999, times=None)
    for job in (4, 5, 6):
        assert node.prolog(job, "[mig:1g.10gb:1]")[0] == exits.OK
    drains = [call for call in node.scontrol_calls() if call.startswith("update")]
    assert len(drains) == 1 and "NodeName=n1 State=DRAIN Reason=migbatch: 3 failures in a row" in drains[0]


def test_failures_are_counted_anew_after_a_drain(new_node):
    """An administrator who resumes the node does not see it drained again by the first failure."""
    node = new_node(ErrorsBeforeDrain=3)
    node.machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", code=999, times=None)
    drains = []
    for job in range(1, 7):
        assert node.prolog(job, "[mig:1g.10gb:1]")[0] == exits.OK
        drains.append(sum(call.startswith("update") for call in node.scontrol_calls()))
    assert drains == [0, 0, 1, 1, 1, 2]


def test_on_error_drain_setting_drains_the_node_at_once(new_node):
    node = new_node(OnError="drain")
    node.machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", code=999, times=None)
    node.prolog(1, "[mig:1g.10gb:1]")
    assert node.scontrol_calls()[0].startswith("update NodeName=n1 State=DRAIN")
    (node.root / "scontrol.code").write_text("1\n")
    assert node.prolog(2, "[mig:1g.10gb:1]")[0] == exits.UNSAFE


def test_job_is_requeued_when_the_driver_library_is_missing(node):
    node.forget_executor()
    node.configure(NvmlLibrary="/nonexistent/libnvidia-ml.so.1")
    code, line = node.prolog(1, "[mig:1g.10gb:1]")
    assert code == exits.OK and "requeued" in line
    assert node.epilog(1)[0] == exits.OK


def test_gpus_with_mig_mode_off_are_left_alone(new_node):
    node = new_node(mig=False)
    assert "requeued" in node.prolog(1, "[mig:1g.10gb:1]")[1]
    assert node.machine.calls()["nvmlDeviceSetMigMode"] == 0


def test_only_listed_gpus_are_used(new_node):
    node = new_node(gpus=["h100-80gb", "h100-80gb"], Gpus="1")
    assert node.prolog(1, "[mig:7g.80gb:1]")[0] == exits.OK
    assert "requeued" in node.prolog(2, "[mig:7g.80gb:1]")[1]
    assert node.machine.dump()["gpus"][0]["instances"] == []


def test_reboot_ends_all_runs_and_forgets_all_slices(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.forget_executor()
    node.machine.reboot()
    assert node.reconcile() == []
    assert node.slices() == []
    assert node.handoff(1).slices == (), "its tasks must not run if slurmd brings it back without a Prolog"
    assert [event["boot_id"] for event in node.events("boot")][-1] == node.machine.dump()["boot_id"]
    assert node.events("stop")[0]["exit_code"] is None
    node.check()
    assert node.epilog(1) == (exits.OK, "")


def test_epilog_makes_no_driver_calls(node):
    node.prolog(1, "[mig:1g.10gb:2]")
    node.machine.calls(reset=True)
    node.epilog(1)
    assert not node.machine.calls()


def test_exit_by_a_signal_is_reported_as_128_plus_the_signal(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.epilog(1, SLURM_JOB_EXIT_CODE2="0:9")
    assert node.events("stop")[0]["exit_code"] == 137


@pytest.mark.slow
def test_prolog_that_cannot_get_a_lock_in_time_requeues_the_job(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    gpu = node.slices()[0].gpu
    node.configure(HookDeadline=0.3)
    node.forget_executor()
    with locked(node.executor.paths.lock, [f"gpu-{gpu}"], Deadline(1)):
        code, line = node.prolog(2, "[mig:1g.10gb:1]")
    assert code == exits.OK and "no time left" in line and "requeued" in line
    assert node.slices("intent")  # without the lock the claim could not be undone
    node.reconcile()
    node.check()


def test_next_hook_restores_directory_modes_left_by_a_killed_hook(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.forget_executor()
    for name in ("", "job"):
        (node.root / "run" / name).chmod(0o700)  # as `mkdir` makes it under a hook's umask
    assert node.prolog(2, "[mig:1g.10gb:1]")[0] == exits.OK
    assert [stat.S_IMODE((node.root / "run" / name).stat().st_mode) for name in ("", "job")] == [0o755, 0o755]
