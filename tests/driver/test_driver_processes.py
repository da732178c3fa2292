"""Processes on instances, and permissions."""

import ctypes
import os
import subprocess
import sys

import pynvml
import pytest

from slurm_migbatch.testbed.simdriver import SimDriverError
from tests.support.driver_helpers import code, create, gpu, nvml, run, slice_of

IN_USE = pynvml.NVML_ERROR_IN_USE


def test_instance_with_a_process_cannot_be_destroyed(machine):
    instance, compute, mig_uuid = slice_of(gpu(), 9, 4, 4)
    machine.start_process(mig_uuid, memory_mib=300)
    assert code(pynvml.nvmlComputeInstanceDestroy, compute) == IN_USE
    assert code(pynvml.nvmlGpuInstanceDestroy, instance) == IN_USE
    assert machine.end_process() == 1
    assert code(pynvml.nvmlComputeInstanceDestroy, compute) == 0


def test_processes_are_listed_with_their_instance(machine):
    _, first, first_uuid = slice_of(gpu(), 9, 4, 4)
    _, second, second_uuid = slice_of(gpu(), 14, 0, 2)
    machine.start_process(first_uuid, 70_001, memory_mib=300)
    machine.start_process(second_uuid, 70_002, memory_mib=100)
    machine.start_process(second_uuid, 70_003, memory_mib=50)
    for call in (
        pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
        pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
    ):
        rows = {(p.pid, p.gpuInstanceId, p.computeInstanceId, p.usedGpuMemory >> 20) for p in call(gpu())}
        assert rows == {(70_001, 2, 0, 300), (70_002, 3, 0, 100), (70_003, 3, 0, 50)}
    device = pynvml.nvmlComputeInstanceGetInfo_v2(second).device
    assert {p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)} == {70_002, 70_003}
    memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    assert (memory.used >> 20, memory.total >> 20) == (150, 20096)
    assert memory.free == memory.total - memory.used
    whole = pynvml.nvmlDeviceGetMemoryInfo(gpu(), version=pynvml.nvmlMemory_v2)
    assert whole.used >> 20 == 450
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(gpu(1)) == []
    assert pynvml.nvmlDeviceGetGraphicsRunningProcesses(gpu()) == []
    pynvml.nvmlComputeInstanceGetInfo_v2(first)


def test_ended_or_zombie_process_does_not_block_destroy(machine):
    _, compute, mig_uuid = slice_of(gpu(), 9, 4, 4)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        machine.start_process(mig_uuid, process.pid)
        assert code(pynvml.nvmlComputeInstanceDestroy, compute) == IN_USE
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie does not hold the instance either
        assert machine.dump()["processes"] == []
        assert code(pynvml.nvmlComputeInstanceDestroy, compute) == 0


def test_leaked_context_blocks_destroy_until_it_is_ended(machine):
    _, compute, mig_uuid = slice_of(gpu(), 9, 4, 4)
    machine.start_process(mig_uuid, 2**22 + 5)  # above any pid: made up, hence sticky
    assert [p["sticky"] for p in machine.dump()["processes"]] == [True]
    assert code(pynvml.nvmlComputeInstanceDestroy, compute) == IN_USE
    assert machine.end_process(2**22 + 5) == 1
    assert code(pynvml.nvmlComputeInstanceDestroy, compute) == 0


def test_nonexistent_process_that_is_not_sticky_is_not_listed(machine):
    _, _, mig_uuid = slice_of(gpu(), 9, 4, 4)
    machine.start_process(mig_uuid, 2**22 + 5, sticky=False)
    assert machine.dump()["processes"] == []


def test_slots_of_ended_processes_are_reused(machine):
    _, _, mig_uuid = slice_of(gpu(), 9, 4, 4)
    for pid in range(2**22 + 1, 2**22 + 1200):
        machine.start_process(mig_uuid, pid, sticky=False)
    machine.start_process(mig_uuid)
    assert [p["pid"] for p in machine.dump()["processes"]] == [os.getpid()]


def test_process_requires_an_existing_unpartitioned_device(machine):
    with pytest.raises(SimDriverError, match="no such device"):
        machine.start_process("MIG-00000000-0000-5000-8000-000000000000")
    with pytest.raises(SimDriverError, match="not valid"):
        machine.start_process("nonsense")
    with pytest.raises(SimDriverError, match="in use"):  # CUDA does not see the whole of a partitioned GPU
        machine.start_process(pynvml.nvmlDeviceGetUUID(gpu()))


def test_process_on_a_whole_gpu_is_listed(make):
    machine = make(["h100-80gb"], mig=False)
    with nvml(machine):
        machine.start_process(pynvml.nvmlDeviceGetUUID(gpu()), memory_mib=10)
        (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu())
        assert (process.pid, process.gpuInstanceId) == (os.getpid(), 0xFFFFFFFF)
        assert [s.pid for s in pynvml.nvmlDeviceGetProcessUtilization(gpu(), 0)] == [os.getpid()]
        assert "python" in pynvml.nvmlSystemGetProcessName(os.getpid())


def test_stuck_destroy_fails_as_in_use_without_any_process(machine):
    instance, compute, _ = slice_of(gpu(), 9, 4, 4)
    machine.stick_destroy(None)
    assert code(pynvml.nvmlComputeInstanceDestroy, compute) == 0  # seen in practice: only this one is destroyed
    assert code(pynvml.nvmlGpuInstanceDestroy, instance) == IN_USE
    machine.reset_faults()
    assert code(pynvml.nvmlGpuInstanceDestroy, instance) == 0
    instance, compute, _ = slice_of(gpu(), 9, 4, 4)
    machine.stick_destroy(3600, which="ci")
    assert code(pynvml.nvmlComputeInstanceDestroy, compute) == IN_USE
    machine.stick_destroy(0, which="both")
    assert code(pynvml.nvmlComputeInstanceDestroy, compute) == 0


def test_unprivileged_user_can_query_but_not_list_or_change_instances(machine, open_tmp_path):
    instance, _, mig_uuid = slice_of(gpu(), 9, 4, 4)
    out = run(
        machine,
        """
os.setuid(65534)
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
print(pynvml.nvmlDeviceGetUUID(device) == sys.argv[1], pynvml.nvmlDeviceGetGpuInstanceId(device))
refused = [
    code(pynvml.nvmlDeviceSetMigMode, gpu(), 0),
    code(pynvml.nvmlDeviceCreateGpuInstance, gpu(), 19),
    code(create, gpu(), 19, 0, 1),
    code(placements, gpu(), 19),
    code(instances, gpu(), 19),
    code(pynvml.nvmlDeviceGetGpuInstanceById, gpu(), 2),
    code(pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity, gpu(), 19),
    code(pynvml.nvmlDeviceSetApplicationsClocks, gpu(), 2619, 900),
    code(pynvml.nvmlDeviceSetGpuLockedClocks, gpu(), 900, 900),
    code(pynvml.nvmlDeviceResetGpuLockedClocks, gpu()),
    code(pynvml.nvmlDeviceSetMemoryLockedClocks, gpu(), 2619, 2619),
    code(pynvml.nvmlDeviceResetMemoryLockedClocks, gpu()),
]
instance = ctypes.cast(int(sys.argv[2]), pynvml.c_nvmlGpuInstance_t)
refused += [
    code(pynvml.nvmlGpuInstanceDestroy, instance),
    code(pynvml.nvmlGpuInstanceCreateComputeInstance, instance, 0),
    code(computes, instance, 2),
]
print(set(refused))
""",
        mig_uuid,
        str(ctypes.cast(instance, ctypes.c_void_p).value),
    )
    assert out.splitlines() == ["True 2", str({pynvml.NVML_ERROR_NO_PERMISSION})]
    assert len(machine.dump()["gpus"][0]["instances"]) == 1
    create(gpu(), 19, 0, 1)
