"""A hook without the agent ends in time, and says which call hangs, if the driver does not return from a call."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from slurm_migbatch.node import exits
from slurm_migbatch.node.fallback import SPARE_S
from tests.support.node_processes import agent_process, run_hook
from tests.support.nodes import Node

MARKER = "[mig:1g.10gb:1]"
HANGS = {"gi_create": 3600.0}


@pytest.fixture
def hung(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node whose driver does not return from the creation of a GPU instance."""
    monkeypatch.setitem(SPARE_S, "prolog", 0.5)
    monkeypatch.setitem(SPARE_S, "epilog", 0.5)
    node.configure(HookDeadline=0.5, EpilogDeadline=0.5)
    node.machine.set_latency(HANGS)
    return node


def test_prolog_requeues_its_job_and_names_the_call_that_hangs(hung: Node) -> None:
    (gpu, *_) = hung.executor.gpus.listed()
    code, line = run_hook(hung, "prolog", 1, MARKER)
    assert code == exits.OK
    assert f"GPU {gpu.index} ({gpu.uuid}): creating 1g.10gb" in line
    assert hung.scontrol_calls() == ["requeue incomplete 1"]
    refused = hung.handoff(1)
    assert refused is not None and not refused.slices
    (fault,) = hung.events("fault")
    assert "creating 1g.10gb" in fault["what"] and not fault["drain"]


@pytest.mark.slow
def test_next_prolog_undoes_what_a_hung_one_has_begun(hung: Node) -> None:
    run_hook(hung, "prolog", 1, MARKER)
    assert run_hook(hung, "epilog", 1)[0] == exits.OK
    hung.machine.set_latency(0.0)
    hung.machine.reset_gpu(0)
    hung.configure(HookDeadline=20)
    code, line = run_hook(hung, "prolog", 1, MARKER, restart=1)
    assert code == exits.OK and "requeued" not in line
    hung.forget_executor()
    hung.check()


@pytest.mark.slow
def test_node_whose_driver_hangs_is_drained_with_that_reason(hung: Node) -> None:
    hung.configure(ErrorsBeforeDrain=2)
    for job in (1, 2):
        assert run_hook(hung, "prolog", job, MARKER)[0] == exits.OK
    (drained,) = [call for call in hung.scontrol_calls() if "State=DRAIN" in call]
    assert "2 failures in a row" in drained and "creating 1g.10gb" in drained


@pytest.mark.slow
def test_epilog_of_an_interrupted_start_does_not_wait_for_the_driver(hung: Node) -> None:
    run_hook(hung, "prolog", 1, MARKER)
    code, line = run_hook(hung, "epilog", 1)
    assert code == exits.OK, line


@pytest.mark.slow
def test_node_whose_driver_hangs_in_the_agent_is_drained(hung: Node) -> None:
    """The agent's thread keeps the locks of its job and GPU, so the hooks do not get them."""
    hung.configure(ErrorsBeforeDrain=2, AgentWait=0.2)
    hung.slurm_says("1 0 RUNNING n1", "2 0 RUNNING n1")
    with hung_agent(hung):
        for job in (1, 2):
            code, line = run_hook(hung, "prolog", job, MARKER)
            assert code == exits.OK and "requeued" in line
    assert [call for call in hung.scontrol_calls() if "State=DRAIN" in call and "2 failures in a row" in call]


@contextlib.contextmanager
def hung_agent(node: Node) -> Iterator[None]:
    """Run an agent, and kill it at the end: its threads do not return from the driver."""
    with agent_process(node) as child:
        yield
        os.kill(child.pid, signal.SIGKILL)
        child.wait(seconds=60)
