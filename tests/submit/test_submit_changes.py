"""Markers that a change of a waiting job writes: slurmctld may refuse the change and keep them."""

from __future__ import annotations

import pytest

from slurm_migbatch.submit.request import Accept, JobRequest, Present
from slurm_migbatch.submit.service import new_id
from tests.support.lua_shim import Shim

ONE, TWO = "gres/mig:1g.10gb:1", "gres/mig:2g.20gb:1"


@pytest.mark.parametrize(
    ("now", "comment", "changed"),
    [
        (ONE, "mine [mig:1g.10gb:1#7fq3k2ab]", True),
        (ONE, "mine [mig:1g.10gb:1]", True),
        (None, "mine", True),
        (TWO, "mine [mig:2g.20gb:1#7fq3k2ab]", False),
        (TWO, "mine [mig:2g.20gb:1#chg7fq3k2ab]", True),
        (TWO, "mine [mig:2g.20gb:1#chg]", True),
        (ONE, "mine [mig:2g.20gb:1#chg]", True),
    ],
)
def test_a_marker_of_another_grant_says_that_a_change_wrote_it(
    shim: Shim, now: str | None, comment: str, changed: bool
) -> None:
    """From then on it says so, whatever is changed next: what slurmctld has is known to slurmctld alone."""
    present = Present(True, "gpu", now, comment=comment)
    answer = shim(JobRequest(1001, None, tres_per_node=TWO, comment="other", now=present))
    assert isinstance(answer, Accept) and answer.changes["comment"].startswith("other [mig:2g.20gb:1")
    assert shim.changed is changed


def test_a_running_job_keeps_what_its_marker_says(shim: Shim) -> None:
    for name, changed in (("7fq3k2ab", False), ("chg7fq3k2ab", True)):
        present = Present(False, "gpu", ONE, comment=f"[mig:1g.10gb:1#{name}]")
        answer = shim(JobRequest(1001, None, comment="other", now=present))
        assert isinstance(answer, Accept) and answer.changes["comment"] == "other [mig:1g.10gb:1#7fq3k2ab]"
        assert shim.changed is changed


def test_no_decision_has_such_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([int("chg00000", 36), int("loan0000", 36), int("7fq3k2ab", 36)])
    monkeypatch.setattr("secrets.randbits", lambda _: next(numbers))
    assert new_id() == "7fq3k2ab"
