"""What Prolog and Epilog do on a machine that works."""

import pytest
from nodes import ALICE, BOB

from slurm_migbatch.node import exits


def test_a_job_gets_its_slice_and_gives_it_back(node):
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


def test_the_next_job_of_that_profile_reuses_the_slice_without_a_driver_change(node):
    node.prolog(1, "[mig:1g.10gb:2]")
    node.epilog(1)
    node.machine.calls(reset=True)
    code, line = node.prolog(2, "[mig:1g.10gb:2]", uid=BOB)
    assert code == exits.OK and "warm" in line
    changes = [name for name in node.machine.calls() if "Create" in name or "Destroy" in name]
    assert changes == []
    assert node.events("start")[-1]["warm"] is True
    node.check()


@pytest.mark.parametrize(("policy", "warm"), [("any", True), ("same-user", False), ("never", False)])
def test_warm_reuse_by_another_user_is_a_setting(new_node, policy, warm):
    node = new_node(WarmReuse=policy)
    node.prolog(1, "[mig:7g.80gb:1]")
    node.epilog(1)
    assert node.prolog(2, "[mig:7g.80gb:1]", uid=BOB)[0] == exits.OK
    assert node.events("start")[-1]["warm"] is warm
    node.check()


def test_same_user_keeps_a_warm_slice_where_only_others_are_refused(new_node):
    node = new_node(WarmReuse="same-user")
    node.prolog(1, "[mig:7g.80gb:1]")
    node.epilog(1)
    node.prolog(2, "[mig:7g.80gb:1]")
    assert node.events("start")[-1]["warm"] is True
