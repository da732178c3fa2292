"""Decisions of the compiled table are not recorded; the marker then says whether the user named the profile."""

from __future__ import annotations

import pytest

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, JobRequest
from slurm_migbatch.submit.rewrite import rewrite
from tests.support.gpu_kinds import SITE

HINTS = "migbatch: model=bert-large batch=32"


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("gres/mig:auto", "#auto]"),
        ("gres/mig:2", "#auto]"),
        ("gres/mig:1g.10gb", ":1]"),
        ("gres/mig:auto,gres/mig:1g.10gb", "]"),
        ("gres/gpu:1", ":1]"),
    ],
)
def test_marker_says_whether_the_user_named_the_profile(asked: str, named: str, chooser: Chooser) -> None:
    request = JobRequest(uid=1001, partition="gpu", tres_per_node=asked, comment=HINTS)
    answer = rewrite(request, SITE, chooser, SubmitPolicy())
    assert isinstance(answer, Accept)
    comment = answer.changes["comment"]
    assert comment.endswith(named) and ("#" in comment) == (named == "#auto]")
    recorded = rewrite(request, SITE, chooser, SubmitPolicy(), decision_id="abc12345")
    assert isinstance(recorded, Accept) and recorded.changes["comment"].endswith("#abc12345]")
