"""Gpus= leaves out a GPU on which jobs have slices: they keep them, and nothing remains there once they have ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.nvml import NvmlGpu
from tests.support.nodes import BOB, Node

WHOLE = "[mig:7g.80gb:1]"


@pytest.fixture
def pair(new_node: Callable[..., Node]) -> Node:
    """Return a node with a job on each of its two GPUs; its configuration leaves out the GPU of job 1."""
    node = new_node(gpus=["h100-80gb"] * 2)
    node.prolog(1, "[mig:3g.40gb:2]")
    node.prolog(2, WHOLE, uid=BOB)
    (kept,) = {row.gpu for row in node.slices("held") if row.job == 2}
    node.configure(Gpus=kept)
    node.forget_executor()
    return node


def excluded(node: Node) -> NvmlGpu:
    (gpu,) = [gpu for gpu in node.executor.gpus.all() if not node.executor.gpus.manages(gpu)]
    return gpu


def test_running_job_keeps_its_slices_and_devices(pair: Node) -> None:
    assert pair.reconcile() == []
    assert {row.job: row.state for row in pair.slices()} == {1: "held", 2: "held"}
    gpu = excluded(pair)
    for row in pair.slices():
        assert row.gpu != gpu.uuid or not pair.executor.caps.wrong(gpu.minor, row.gi or 0, row.ci or 0, row.uid or 0)
    assert pair.events("fault") == []


def test_lost_hand_off_of_a_running_job_is_written_again(pair: Node) -> None:
    before = pair.handoff(1)
    Path(f"{pair.config.run_dir}/job/1.0").unlink()
    pair.reconcile()
    assert pair.handoff(1) == before is not None


def test_nothing_remains_after_the_job_and_no_other_gets_its_place(pair: Node) -> None:
    pair.epilog(1)
    assert "requeued" in pair.prolog(3, WHOLE)[1]
    pair.reconcile()
    assert [row.job for row in pair.slices()] == [2] and not excluded(pair).instances()
    assert pair.reconcile() == []


def test_instances_made_by_hand_on_an_excluded_gpu_are_left_alone(pair: Node) -> None:
    pair.epilog(1)
    pair.reconcile()
    gpu = excluded(pair)
    gpu.complete(gpu.create(Slot.of("1g.10gb", 0, 1)))
    assert pair.reconcile() == [] and len(gpu.instances()) == 1


def test_slices_are_used_again_if_the_gpu_returns_before_the_job_ends(pair: Node) -> None:
    pair.reconcile()
    pair.configure(Gpus="all")
    pair.forget_executor()
    assert pair.reconcile() == []
    pair.epilog(1)
    assert "warm" in pair.prolog(3, "[mig:3g.40gb:1]")[1]
    pair.check()


def test_slices_of_a_broken_gpu_that_is_left_out_are_kept(pair: Node) -> None:
    """They may still exist, and the error does not stop the repair of others."""
    pair.machine.set_lost(excluded(pair).index)
    assert pair.reconcile() == []
    assert sorted(row.job for row in pair.slices("held")) == [1, 1, 2]
