"""Why a job waits, in words."""

from __future__ import annotations

from slurm_migbatch.decide.explain import why_not_started
from slurm_migbatch.decide.supply.planner import Planner
from slurm_migbatch.decide.supply.stage import SupplyDecision
from tests.support.dispatch_site import NOW, job


def why(reason: str) -> str:
    decided = SupplyDecision(Planner().plan([], [], NOW), [], {})
    return why_not_started(9, job(9, array_job=9, array_task="3-9%2", tasks=7, reason=reason), decided, NOW)


def test_a_task_that_its_array_keeps_waiting_is_told_so() -> None:
    assert "its array is at its task limit" in why("JobArrayTaskLimit")
    assert "for another reason (Dependency)" in why("Dependency")
    assert "no MIG node" in why("Resources")
