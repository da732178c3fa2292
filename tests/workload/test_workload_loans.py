"""Which jobs are elastic training jobs, what is known of them, and how their GRES type is changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.mig.grant import GrantError, parse_comment
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.loans import (
    GUEST,
    LOAN,
    LONGEST_MARK,
    LoanHints,
    away,
    decided,
    decision_name,
    drops_old_gres_type,
    emptied,
    is_marked,
    loan_hints,
    retyped,
    waiting_count,
)

HINTS = "migbatch: role=train model=Org/Net-1 batch=64 input=128tok min=1g.10gb max=3g.40gb signal=usr1 mem=9GiB"
WAITING = f"{HINTS} [mig:loan:1#loan7fq3k000]"
LENDS = {"train", "night"}


def training_hints(**more: object) -> LoanHints:
    known = {
        "min": Profile(1, 10), "max": Profile(3, 40), "signal": "usr1", "mem_mib": 9216, "model": "org/net-1",
        "batch": 64, "input": 128, "input_unit": "tok",
    }  # fmt: skip
    return LoanHints(**{**known, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("gres", ["gres:mig:loan:2", "gres/mig:loan:1", "mig:loan:1", "gres:fpga:2,gres:mig:loan:2"])
def test_waiting_loan_job_is_recognized(gres: str) -> None:
    found = loan_hints(WAITING, "train", gres, LENDS)
    assert found == training_hints() and found.waiting


def test_released_loan_job_is_recognized_with_its_slice() -> None:
    fields = retyped("gres/mig:loan:1", WAITING, "2g.20gb")
    assert fields == {"Gres": "mig:2g.20gb:1", "Comment": f"{HINTS} [mig:2g.20gb:1#loan7fq3k000]"}
    found = loan_hints(fields["Comment"], "train", "gres/mig:2g.20gb:1", LENDS)
    assert found == training_hints(slice=Profile(2, 20)) and not found.waiting


def test_released_job_can_return_to_waiting() -> None:
    released = retyped("gres/mig:loan:1", WAITING, "1g.10gb.me")
    assert retyped(released["Gres"], released["Comment"], LOAN) == {"Gres": "mig:loan:1", "Comment": WAITING}


def test_guest_job_has_the_guest_marker() -> None:
    fields = retyped("gres/mig:loan:1", WAITING, GUEST)
    assert fields["Gres"] == "mig:guest:1" and fields["Comment"].endswith("[mig:guest:1#loan7fq3k000]")
    assert loan_hints(fields["Comment"], "train", "gres/mig:guest:1", LENDS) == training_hints(guest=True)


def test_one_update_is_enough_where_slurm_forgets_the_old_gres() -> None:
    assert (
        emptied("gres/mig:loan:1") == {}
        and drops_old_gres_type("gres/mig:loan:1")
        and waiting_count("gres/mig:auto") == 1
    )


def test_job_keeps_its_first_profile_where_slurm_does_not_forget_gres() -> None:
    assert emptied("gres:mig:loan:2") == {"TresPerNode": "", "TresPerJob": "gres:mig:loan:2", "NumNodes": "1-1"}
    released = retyped("gres:mig:loan:2", WAITING, "2g.20gb")
    assert released["TresPerJob"] == "" and released["Gres"] == "mig:2g.20gb:1"
    running = "gres:mig:2g.20gb:1"
    only = {"min": Profile(2, 20), "max": Profile(2, 20)}
    assert loan_hints(released["Comment"], "train", running, LENDS) == training_hints(slice=Profile(2, 20), **only)
    back = retyped(running, released["Comment"], LOAN)
    assert back == {"TresPerJob": "", "Gres": "mig:loan:2,mig:2g.20gb:0", "Comment": WAITING}
    shown = "gres:mig:loan:2,gres:mig:2g.20gb:0"
    assert loan_hints(WAITING, "train", shown, LENDS) == training_hints(**only)
    assert retyped(shown, WAITING, "2g.20gb")["Gres"] == "mig:2g.20gb:1"
    assert retyped(shown, WAITING, LOAN)["Gres"] == "mig:loan:2,mig:2g.20gb:0"


def test_excluded_nodes_are_kept_in_gres_until_the_job_waits_again() -> None:
    assert away("gres:mig:loan:2") == frozenset()
    released = retyped("gres:mig:loan:2,gres:mig:2g.20gb:0", WAITING, "2g.20gb", ("n3", "n1"))
    assert released["Gres"] == "mig:2g.20gb:1,mig:not-n1:0,mig:not-n3:0" and released["ExcNodeList"] == "n1,n3"
    shown = "gres:mig:2g.20gb:1,gres:mig:not-n1:0,gres:mig:not-n3:0"
    assert away(shown) == {"n1", "n3"}
    only = {"min": Profile(2, 20), "max": Profile(2, 20)}
    assert loan_hints(released["Comment"], "train", shown, LENDS) == training_hints(slice=Profile(2, 20), **only)
    assert emptied(shown)["ExcNodeList"] == ""
    back = retyped(shown, released["Comment"], LOAN)
    assert (back["Gres"], back["ExcNodeList"]) == ("mig:loan:2,mig:2g.20gb:0", "")


def test_job_left_with_empty_gres_is_recognized() -> None:
    assert loan_hints(WAITING, "train", "", LENDS) == training_hints()
    assert loan_hints(HINTS, "train", "", LENDS) is None
    assert retyped("", WAITING, "1g.10gb")["TresPerJob"] == ""


@pytest.mark.parametrize(
    ("comment", "partition", "gres"),
    [
        (f"{HINTS} [mig:2g.20gb:1#7fq3k000]", "train", "gres:mig:2g.20gb:1"),  # the profile was named by the user
        (HINTS, "train", "gres:mig:2g.20gb:1"),
        (WAITING, "gpu", "gres:mig:loan:1"),
        (WAITING, "train,gpu", "gres:mig:loan:1"),
        (WAITING, "", "gres:mig:loan:1"),
        (WAITING, "train", "gres:mig:1"),
        (f"{HINTS} [mig:2g.20gb:1#loan1]", "train", "gres:mig:2g.20gb:2"),
        (WAITING, "train", "gres:mig:loan:0"),
        (WAITING, "train", "gres:mig:none:1"),
        (WAITING, "train", "gres:mig:loan:1,gres:mig:1g.10gb:1"),
        (WAITING, "train", "gres:mig:loan:x y"),
        # what a user may write where the submit filter is not installed
        (f"{HINTS} #loan7fq3k000]", "train", "gres:mig:2g.20gb:1"),
        (f"{HINTS} [mig:2g.20gb:1#loan1] [mig:2g.20gb:1#abc]", "train", "gres:mig:2g.20gb:1"),
        (f"{HINTS} [mig:2g.20gb:1#loan1] tail", "train", "gres:mig:2g.20gb:1"),
    ],
)
def test_other_jobs_are_not_recognized_as_loans(comment: str, partition: str, gres: str) -> None:
    assert loan_hints(comment, partition, gres, LENDS) is None


def test_job_in_several_lending_partitions_is_recognized() -> None:
    assert loan_hints(WAITING, "train,night", "mig:loan:1", LENDS) == training_hints()


def test_invalid_hints_of_a_loan_job_are_ignored() -> None:
    assert loan_hints("migbatch: min=77g.1gb max=1g colour=red", "train", "mig:loan:1", LENDS) == LoanHints()
    assert loan_hints("migbatch: min=00g.1gb signal=usr2", "train", "mig:loan:1", LENDS) == LoanHints(signal="usr2")


def test_other_gres_and_unusual_comments_are_kept() -> None:
    fields = retyped("gres/fpga:2,gres/mig:loan:1,gres/nic:a:1", "", "1g.10gb")
    assert fields == {"Gres": "fpga:2,nic:a:1,mig:1g.10gb:1", "Comment": "[mig:1g.10gb:1#loan]"}
    assert retyped("gres:fpga:2,gres:mig:loan:2", "", "1g.10gb")["Gres"] == "fpga:2,mig:1g.10gb:1"
    assert retyped("mig:loan", " ", "1g.10gb")["Comment"] == "[mig:1g.10gb:1#loan]"


def test_decision_name_gets_the_loan_prefix_once() -> None:
    assert decision_name("7fq3k000") == "loan7fq3k000"
    assert decision_name("") == "loan"
    assert decision_name("loan7fq3k000") == "loan7fq3k000"


@given(
    text=st.text(max_size=60).filter(lambda text: "[mig:" not in text),
    kinds=st.lists(st.sampled_from([LOAN, "1g.10gb", "10g.1000gb.me.all", "2g.20gb"]), min_size=1, max_size=5),
    id=st.text(alphabet="0123456789abcdefghijklmnopqrstuvwxyz", max_size=8),
)
def test_marker_always_agrees_with_gres(text: str, kinds: list[str], id: str) -> None:
    first = f"[mig:loan:1#{decision_name(id)}]"
    gres, comment = "gres/mig:loan:1", f"{text} {first}" if text else first
    for kind in kinds:
        fields = retyped(gres, comment, kind)
        gres, comment = fields["Gres"], fields["Comment"]
        assert gres == f"mig:{kind}:1" and is_marked(comment)
        assert comment.count("[mig:") == 1 and comment.startswith(text.strip(" ") and text)
        assert len(comment) - len(text) - 1 <= LONGEST_MARK
        if kind == LOAN:  # no hook creates a slice for it
            with pytest.raises(GrantError):
                parse_comment(comment)
        else:
            grant = parse_comment(comment)
            assert grant is not None and grant.gres == gres and grant.decision == decision_name(id)


def test_decision_name_is_read_from_the_marker():
    assert decided(WAITING) == "loan7fq3k000"
    assert decided(retyped("gres/mig:loan:1", WAITING, "2g.20gb")["Comment"]) == "loan7fq3k000"
    assert decided(f"{WAITING} said somebody") == decided("migbatch: x [mig:2g.20gb:1#7fq3k]") == decided("") == ""
