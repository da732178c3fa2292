"""One GPU of a node whose calls fail is withdrawn after some failures; the others keep starting jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from slurm_migbatch.doctor.gpus import gather
from slurm_migbatch.mig.driver import DriverError, Instance
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.nvml.gpu import NvmlGpu
from slurm_migbatch.node import exits, gpu_faults
from slurm_migbatch.node.boot import prepare
from slurm_migbatch.node.deadline import Deadline, locked
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.inventory import inventory
from slurm_migbatch.node.repair import gpu_lock
from slurm_migbatch.node.status import status
from tests.support.nodes import Node
from tests.support.waiting import eventually

WHOLE, SMALL = "[mig:7g.80gb:1]", "[mig:1g.10gb:1]"
LIMIT = 3


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the GPUs on which no instance can be created."""
    gpus: set[str] = set()
    create = NvmlGpu.create

    def fail(gpu: NvmlGpu, slot: Slot) -> Instance:
        if gpu.uuid in gpus:
            raise DriverError(999, f"GPU {gpu.index} ({gpu.uuid}): creating {slot}: the driver failed (NVML code 999)")
        return create(gpu, slot)

    monkeypatch.setattr(NvmlGpu, "create", fail)
    return gpus


@pytest.fixture
def pair(new_node: Callable[..., Node]) -> Node:
    return new_node(gpus=["h100-80gb"] * 2, ErrorsBeforeDrain=LIMIT, WarmReuse="never")


@pytest.fixture
def failing(pair: Node, broken: set[str]) -> Iterator[str]:
    """Fail `LIMIT` starts on one GPU, each followed by a start on the other; yield the GPU's UUID."""
    first, second = pair.executor.gpus.listed()
    plan_for(pair, first.uuid, second.uuid)
    broken.add(first.uuid)
    for job in range(1, 2 * LIMIT + 1):
        fails = job % 2 == 1
        assert ("requeued" in start_on(pair, job, first.uuid if fails else second.uuid)) is fails
        pair.epilog(job)
    yield first.uuid


def plan_for(node: Node, *whole: str, cut: str = "") -> None:
    """Plan one slice for the whole of each of these GPUs, and a small one on the GPU `cut`."""
    slots = {gpu: [["7g.80gb", 0, 8]] for gpu in whole} | ({cut: [["1g.10gb", 0, 1]]} if cut else {})
    (node.root / "state" / "plan.json").write_text(json.dumps({"version": 1, "gpus": slots}))


def start_on(node: Node, job: int, gpu: str) -> str:
    """Start a job on this GPU, the only one that has its slice in the plan."""
    (other,) = (g.uuid for g in node.executor.gpus.listed() if g.uuid != gpu)
    plan_for(node, gpu, cut=other)
    code, line = node.prolog(job, WHOLE)
    plan_for(node, gpu, other)
    assert code == exits.OK
    return line


def test_gpu_that_fails_while_another_starts_jobs_is_withdrawn(pair: Node, failing: str) -> None:
    code, line = pair.prolog(100, WHOLE)
    assert code == exits.OK and "requeued" not in line, line
    assert {row.gpu for row in pair.slices("held")} != {failing}
    assert not [call for call in pair.scontrol_calls() if "DRAIN" in call]
    fault = pair.events("fault")[-1]
    assert fault["gpu"] == failing and "NVML code 999" in fault["what"] and not fault["drain"]


def test_job_without_room_beside_a_withdrawn_gpu_is_requeued_and_drains_no_node(pair: Node, failing: str) -> None:
    pair.prolog(100, WHOLE)
    faults = len(pair.events("fault"))
    for job in range(101, 101 + 2 * LIMIT):
        assert "requeued" in pair.prolog(job, WHOLE)[1]
    assert not [call for call in pair.scontrol_calls() if "DRAIN" in call]
    assert len(pair.events("fault")) == faults


def test_withdrawn_gpu_is_not_offered_and_is_shown(pair: Node, failing: str) -> None:
    entries = {entry["uuid"]: entry for entry in inventory(pair.executor.gpus)}
    assert "mig" not in entries[failing] and "NVML code 999" in str(entries[failing]["problem"])
    assert [entry["mig"] for uuid, entry in entries.items() if uuid != failing] == [True]
    shown = {gpu["uuid"]: gpu for gpu in status(pair.config, pair.executor)["gpus"]}
    assert "migbatch node init" in shown[failing]["problem"]
    checked = {gpu.uuid: gpu for gpu in gather(pair.executor.gpus.all(), pair.config)}
    assert [uuid for uuid, gpu in checked.items() if gpu.problem] == [failing]


def test_withdrawn_gpu_is_used_again_after_node_init(pair: Node, failing: str, broken: set[str]) -> None:
    broken.clear()
    prepare(pair.config, pair.executor)
    assert "requeued" not in start_on(pair, 100, failing)
    assert [row.gpu for row in pair.slices("held")] == [failing]


def test_withdrawn_gpu_is_tried_again_after_some_time(
    pair: Node, failing: str, broken: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time() + gpu_faults.FIRST_PAUSE_S
    monkeypatch.setattr(time, "time", lambda: now)
    assert "requeued" in start_on(pair, 100, failing)
    assert "requeued" not in pair.prolog(101, WHOLE)[1], "one more failure, and it is withdrawn again"
    pair.epilog(101)
    broken.clear()
    now += gpu_faults.FIRST_PAUSE_S
    assert failing in pair.executor.gpus.withdrawn(), "for longer than the first time"
    now += gpu_faults.FIRST_PAUSE_S
    assert "requeued" not in start_on(pair, 102, failing)
    assert [row.gpu for row in pair.slices("held")] == [failing]


def test_start_on_a_gpu_resets_its_own_failures(pair: Node, broken: set[str]) -> None:
    first, second = pair.executor.gpus.listed()
    plan_for(pair, first.uuid, second.uuid)
    for job in range(1, 2 * LIMIT):
        broken.update({first.uuid} if job % LIMIT else set())
        start_on(pair, job, first.uuid)
        broken.clear()
        pair.epilog(job)
    assert not pair.executor.gpus.withdrawn()


def test_node_whose_gpus_all_fail_is_drained(pair: Node, failing: str, broken: set[str]) -> None:
    broken.update(gpu.uuid for gpu in pair.executor.gpus.listed())
    for job in range(100, 100 + LIMIT):
        pair.prolog(job, WHOLE)
    assert len([call for call in pair.scontrol_calls() if "State=DRAIN" in call]) == 1
    assert not pair.executor.gpus.withdrawn(), "an administrator who resumes it finds all GPUs in use"


def test_gpu_whose_calls_hang_is_withdrawn(pair: Node) -> None:
    """The process that hangs keeps the lock of the GPU."""
    first, second = pair.executor.gpus.listed()
    pair.configure(HookDeadline=0.2)
    pair.forget_executor()
    with locked(pair.executor.paths.lock, [gpu_lock(first.uuid)], Deadline(1.0)):
        for job in range(1, 1 + LIMIT):
            assert "requeued" in start_on(pair, job, first.uuid)
        assert list(pair.executor.gpus.withdrawn()) == [first.uuid]
        pair.configure(HookDeadline=20)
        pair.forget_executor()
        assert "requeued" not in pair.prolog(100, WHOLE)[1]
    assert [row.gpu for row in pair.slices("held")] == [second.uuid]


def test_journal_and_driver_agree_after_failures(pair: Node, failing: str, broken: set[str]) -> None:
    broken.clear()
    prepare(pair.config, pair.executor)
    pair.prolog(100, SMALL)
    pair.check()


def test_failures_on_a_gpu_that_is_withdrawn_by_then_do_not_drain_the_node(pair: Node) -> None:
    """Several starts hang on it at once, and all of them give up."""
    first, second = pair.executor.gpus.listed()
    plan_for(pair, first.uuid, second.uuid)
    why = f"not done after 30 s, in or after this call of the driver: GPU 0 ({first.uuid}): creating 1g.10gb@0"
    for job in range(1, 1 + 3 * LIMIT):
        assert "requeued" in pair.executor.give_up(pair.env("prolog", job, SMALL), why)[1]
    assert list(pair.executor.gpus.withdrawn()) == [first.uuid]
    assert not [call for call in pair.scontrol_calls() if "DRAIN" in call]


def test_start_that_waited_for_a_gpu_that_is_withdrawn_meanwhile_gets_another(pair: Node) -> None:
    first, second = pair.executor.gpus.listed()
    plan_for(pair, first.uuid, cut=second.uuid)
    paths = pair.executor.paths
    pair.prolog(100, SMALL)  # the first start of a boot repairs all GPUs
    pair.epilog(100)
    with ThreadPoolExecutor(1) as pool:
        with locked(paths.lock, [gpu_lock(first.uuid)], Deadline(1.0)):
            start = pool.submit(lambda: Executor(pair.config).run(pair.env("prolog", 1, WHOLE)))
            eventually(lambda: pair.slices("intent"))
            plan_for(pair, first.uuid, second.uuid)
            for _ in range(LIMIT):
                gpu_faults.count(paths, first.uuid, "the driver failed", LIMIT, Deadline(1.0))
        assert "requeued" not in start.result()[1]
    assert [row.gpu for row in pair.slices()] == [second.uuid]


def test_running_jobs_keep_slices_of_a_withdrawn_gpu_if_the_journal_is_lost(pair: Node) -> None:
    first, second = pair.executor.gpus.listed()
    plan_for(pair, first.uuid, second.uuid)
    start_on(pair, 1, first.uuid)
    for _ in range(LIMIT):
        gpu_faults.count(pair.executor.paths, first.uuid, "the driver failed", LIMIT, Deadline(1.0))
    pair.forget_executor()
    for path in (pair.root / "state").glob("journal*"):
        path.unlink()
    pair.reconcile()
    assert [(row.gpu, row.job) for row in pair.slices("held")] == [(first.uuid, 1)]
    pair.check()


def test_journal_is_not_rebuilt_while_a_gpu_with_running_jobs_does_not_answer(
    pair: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (gpu.uuid for gpu in pair.executor.gpus.listed())
    plan_for(pair, first, second)
    start_on(pair, 1, first)
    pair.forget_executor()
    for path in (pair.root / "state").glob("journal*"):
        path.unlink()
    ask = NvmlGpu.mig_mode

    def fail(gpu: NvmlGpu) -> tuple[bool, bool]:
        if gpu.uuid == first:
            raise DriverError(999, f"GPU {gpu.index} ({gpu.uuid}): its MIG mode: the driver failed (NVML code 999)")
        return ask(gpu)

    gpus = Gpus(pair.config)
    with monkeypatch.context() as patch:
        patch.setattr(NvmlGpu, "mig_mode", fail)
        with pytest.raises(DriverError, match="999"):
            Executor(pair.config, gpus)
    gpus.reset()
    pair.reconcile()
    assert [(row.gpu, row.job) for row in pair.slices("held")] == [(first, 1)]
    pair.check()
