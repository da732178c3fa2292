"""The explanation why a job waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_migbatch.decide.capacity.model import Demand, Gpu, Mode, Node
from slurm_migbatch.decide.explain import why_not_started
from slurm_migbatch.decide.supply.planner import Planner
from slurm_migbatch.decide.supply.stage import SupplyDecision
from tests.support.dispatch_site import NOW, job
from tests.support.supply_gpus import H100, P, layout


def why(reason: str) -> str:
    decided = SupplyDecision(Planner().plan([], [], NOW), [], {})
    return why_not_started(9, job(9, array_job=9, array_task="3-9%2", tasks=7, reason=reason), decided, NOW)


def test_why_names_the_task_limit_of_an_array() -> None:
    assert "its array is at its task limit" in why("JobArrayTaskLimit")
    assert "for another reason (Dependency)" in why("Dependency")
    assert "no MIG node" in why("Resources")


@pytest.mark.parametrize("reason", ["JobHoldMaxPreemptRequeue", "preemption requeue limit exceeded requeued held"])
def test_why_says_how_a_job_continues_that_was_requeued_too_often(reason: str) -> None:
    assert "MaxPreemptRequeue of slurm.conf allows; an operator lets it continue by `scontrol release 9`" in why(reason)


def test_why_names_the_drained_nodes() -> None:
    gpus = (Gpu("a", H100),)
    nodes = [Node("n1", gpus, mode=Mode.CLOSED), Node("n2", gpus)]
    demands = [Demand(9, ((P("3g.40gb"), 1),), frozenset({"n1"}))]
    decided = SupplyDecision(Planner().plan(nodes, demands, NOW), demands, {node.name: node for node in nodes})
    assert "Slurm starts no jobs on n1 now" in why_not_started(9, job(9), decided, NOW)


def test_why_does_not_deny_the_slices_of_a_node_for_a_job_that_needs_more_nodes() -> None:
    decided = SupplyDecision(Planner().plan([Node("n1", (Gpu("a", H100),))], [], NOW), [], {})
    text = why_not_started(9, job(9, num_nodes=2), decided, NOW)
    assert text == "it needs 2 nodes, and fewer of the MIG nodes that it can use have such slices"


def test_why_does_not_promise_a_start_on_a_node_that_may_lack_cpus() -> None:
    nodes = [Node("n1", (Gpu("a", H100, offered=layout("7g.80gb@0")),))]
    demands = [Demand(9, ((P("7g.80gb"), 1),), frozenset({"n1"}))]
    decided = SupplyDecision(Planner().plan(nodes, demands, NOW), demands, {node.name: node for node in nodes})
    assert "offered on n1; Slurm starts it there once CPUs and memory are free" in why_not_started(
        9, job(9), decided, NOW
    )
    alone = why_not_started(9, replace(job(9), exclusive=True), decided, NOW)
    assert alone == "its slices are offered on n1; Slurm starts it there once the whole node is free"


@pytest.mark.parametrize(
    ("lending", "reason"),
    [
        (None, "lending is disabled"),
        (("other",), "partition mig does not lend"),
        (("mig", "other"), "the next round of lending decides"),
    ],
)
def test_why_of_a_job_that_waits_for_a_loan_names_the_state_of_lending(
    lending: tuple[str, ...] | None, reason: str
) -> None:
    decided = SupplyDecision(Planner().plan([], [], NOW), [], {})
    explanation = why_not_started(9, job(9, gres="gres/mig:loan:1"), decided, NOW, lending)
    assert explanation.startswith("it waits for a loan of an idle slice") and reason in explanation
