"""A hook without the agent works in whatever state slurmd, or a script around the hook, starts its process."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

import pytest

from slurm_migbatch.node import exits
from tests.support.node_processes import run_hook
from tests.support.nodes import Node

MARKER = "[mig:1g.10gb:1]"


def ignore_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def close_standard_descriptors() -> None:
    for descriptor in (0, 1, 2):
        os.close(descriptor)


@pytest.mark.parametrize("prepare", [ignore_children, close_standard_descriptors])
def test_prolog_and_epilog_work(node: Node, prepare: Callable[[], None]) -> None:
    code, line = run_hook(node, "prolog", 1, MARKER, prepare=prepare)
    assert (code, "made" in line) == (exits.OK, True), line
    assert node.handoff(1)
    code, line = run_hook(node, "epilog", 1, prepare=prepare)
    assert (code, "released" in line) == (exits.OK, True), line
    node.check()


def test_failed_scontrol_is_noticed_although_its_end_is_not_signalled(node: Node) -> None:
    (node.root / "scontrol.code").write_text("1")
    code, line = run_hook(node, "prolog", 1, "[mig:9g.90gb:1]", prepare=ignore_children)
    assert code == exits.OK and "cannot be requeued" in line


def refuse() -> int:
    raise BlockingIOError(errno.EAGAIN, "no process")


def test_epilog_that_can_start_no_process_leaves_its_work_to_the_next_hook(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_hook(node, "prolog", 1, MARKER)[0] == exits.OK
    code, line = run_hook(node, "epilog", 1, prepare=lambda: monkeypatch.setattr(os, "fork", refuse))
    assert code == exits.OK and "no process" in line
    assert run_hook(node, "prolog", 2, MARKER)[0] == exits.OK
    assert node.handoff(1) is None or not node.handoff(1).slices
    node.check()


def test_prolog_that_can_start_no_process_drains_the_node(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even scontrol could be started to requeue the job."""
    code, line = run_hook(node, "prolog", 1, MARKER, prepare=lambda: monkeypatch.setattr(os, "fork", refuse))
    assert code == exits.UNSAFE and "job 1 run 0" in line and "no process" in line
