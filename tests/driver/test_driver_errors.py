"""Every documented error of the MIG calls can be reached."""

import ctypes

import pynvml
import pytest

from slurm_migbatch.testbed.simdriver import GPU_MODELS
from tests.support.driver_helpers import code, create, full_ci, gpu, nvml, run, slice_of

INVALID = pynvml.NVML_ERROR_INVALID_ARGUMENT
MISMATCH = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
UNINITIALIZED = pynvml.NVML_ERROR_UNINITIALIZED


def function(name):
    return pynvml._nvmlGetFunctionPointer(name)


def test_calls_fail_before_init_and_after_shutdown(machine):
    handle = gpu()
    pynvml.nvmlShutdown()
    assert code(pynvml.nvmlDeviceGetCount) == UNINITIALIZED
    assert code(pynvml.nvmlDeviceGetName, handle) == UNINITIALIZED
    assert code(pynvml.nvmlShutdown) == UNINITIALIZED
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 2


def test_init_and_shutdown_are_reference_counted(machine):
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetCount() == 2


def test_library_without_a_machine_reports_no_driver(machine, tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_bytes(machine.library.read_bytes())
    library = ctypes.CDLL(str(tmp_path / "libnvidia-ml.so.1"))
    assert library.nvmlInit_v2() == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    (tmp_path / "state").write_bytes(b"of another kind")
    assert library.nvmlInit_v2() == pynvml.NVML_ERROR_DRIVER_NOT_LOADED


def test_wrong_struct_versions_are_rejected(machine):
    instance = create(gpu(), 9, 0, 4)
    profile = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
    compute = pynvml.c_nvmlComputeInstanceProfileInfo_v2_t()
    memory = pynvml.c_nvmlMemory_v2_t()
    for word in (0, 1, 0x01000098, 0x02000097, 0x04000098, 0x02000088 + 1):
        profile.version = compute.version = memory.version = word
        assert function("nvmlDeviceGetGpuInstanceProfileInfoV")(gpu(), 0, ctypes.byref(profile)) == MISMATCH
        assert function("nvmlDeviceGetGpuInstanceProfileInfoByIdV")(gpu(), 19, ctypes.byref(profile)) == MISMATCH
        call = function("nvmlGpuInstanceGetComputeInstanceProfileInfoV")
        assert call(instance, 0, 0, ctypes.byref(compute)) == MISMATCH
        assert function("nvmlDeviceGetMemoryInfo_v2")(gpu(), ctypes.byref(memory)) == MISMATCH
    assert code(pynvml.nvmlDeviceGetTemperatureV, gpu(), 0) == 0


def test_compute_profile_info_is_served_in_both_versions(machine):
    instance = create(gpu(1), 9, 0, 4)
    old = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 0, 0, version=1)
    new = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 0, 0)
    for field, _ in pynvml.c_nvmlComputeInstanceProfileInfo_t._fields_:
        assert getattr(old, field) == getattr(new, field), field
    assert new.name == "MIG 1c.3g.20gb"
    info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
    assert info(instance, 2, 0).name == "MIG 3g.20gb"
    assert code(info, instance, 4, 0) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert code(info, instance, 9, 0) == INVALID
    assert code(info, instance, 0, 1) == INVALID


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("nvmlDeviceGetMigMode", ("gpu", None, None)),
        ("nvmlDeviceSetMigMode", ("gpu", 1, None)),
        ("nvmlDeviceSetMigMode", ("gpu", 2, "word")),
        ("nvmlDeviceGetGpuInstanceProfileInfo", ("gpu", 0, None)),
        ("nvmlDeviceGetGpuInstanceProfileInfoV", ("gpu", 0, None)),
        ("nvmlDeviceGetGpuInstanceProfileInfoByIdV", ("gpu", 1, "word")),
        ("nvmlDeviceGetGpuInstancePossiblePlacements_v2", ("gpu", 19, None, None)),
        ("nvmlDeviceGetGpuInstancePossiblePlacements_v2", ("gpu", 1, None, "word")),
        ("nvmlDeviceGetGpuInstanceRemainingCapacity", ("gpu", 19, None)),
        ("nvmlDeviceGetGpuInstanceRemainingCapacity", ("gpu", 1, "word")),
        ("nvmlDeviceCreateGpuInstance", ("gpu", 19, None)),
        ("nvmlDeviceCreateGpuInstance", ("gpu", 1, "word")),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", ("gpu", 19, None, "word")),
        ("nvmlDeviceGetGpuInstances", ("gpu", 19, None, "word")),
        ("nvmlDeviceGetGpuInstances", ("gpu", 1, "word", "word")),
        ("nvmlDeviceGetGpuInstanceById", ("gpu", 0, None)),
        ("nvmlDeviceGetMigDeviceHandleByIndex", ("gpu", 7, "word")),
        ("nvmlGpuInstanceGetInfo", ("instance", None)),
        ("nvmlGpuInstanceCreateComputeInstance", ("instance", 4, "word")),
        ("nvmlGpuInstanceCreateComputeInstance", ("instance", 99, "word")),
        ("nvmlGpuInstanceCreateComputeInstanceWithPlacement", ("instance", 0, None, "word")),
        ("nvmlGpuInstanceGetComputeInstancePossiblePlacements", ("instance", 99, None, "word")),
        ("nvmlGpuInstanceGetComputeInstanceRemainingCapacity", ("instance", 99, "word")),
        ("nvmlGpuInstanceGetComputeInstances", ("instance", 0, None, "word")),
        ("nvmlGpuInstanceGetComputeInstanceById", ("instance", 0, None)),
        ("nvmlGpuInstanceDestroy", (None,)),
        ("nvmlComputeInstanceDestroy", (None,)),
        ("nvmlComputeInstanceGetInfo_v2", (None, "word")),
        ("nvmlDeviceGetHandleByUUID", (None, "word")),
        ("nvmlDeviceGetName", ("gpu", None, 96)),
    ],
)
def test_invalid_arguments_are_rejected_without_effect(machine, name, arguments):
    instance = create(gpu(), 9, 0, 4)
    before = machine.dump()
    buffer = (ctypes.c_ulonglong * 32)()
    values = {"gpu": gpu(), "instance": instance, "word": ctypes.byref(buffer)}
    passed = [values[argument] if isinstance(argument, str) else argument for argument in arguments]
    assert function(name)(*passed) == INVALID
    assert machine.dump() == before


def test_too_small_name_buffer_is_rejected(machine):
    short = ctypes.create_string_buffer(5)
    for name in ("nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetSerial"):
        assert function(name)(gpu(), short, 5) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    assert function("nvmlSystemGetDriverVersion")(short, 5) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE


def test_too_small_process_array_returns_the_needed_size(machine):
    _, _, mig_uuid = slice_of(gpu(), 9, 0, 4)
    machine.start_process(mig_uuid, 70_001, sticky=True)
    machine.start_process(mig_uuid, 70_002, sticky=True)
    count = ctypes.c_uint(1)
    array = (pynvml.c_nvmlProcessInfo_v2_t * 1)()
    call = function("nvmlDeviceGetComputeRunningProcesses_v3")
    assert call(gpu(), ctypes.byref(count), array) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    assert count.value == 2


def test_function_that_is_not_served_is_not_found(machine):
    assert code(pynvml.nvmlDeviceGetFanControlPolicy_v2, gpu(), 0) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND


def test_nvml_error_string_is_served(machine):
    text = function("nvmlErrorString")
    text.restype = ctypes.c_char_p
    assert text(19) == b"In use by another client"
    assert text(23) == b"Insufficient Resources"
    assert text(4) == b"Insufficient Permissions"
    assert text(12345) == b"Unknown Error"


def test_injected_fault_fails_the_given_calls_with_the_given_code(machine):
    machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", pynvml.NVML_ERROR_MEMORY, nth=2, times=2)
    results = [code(create, gpu(), 19, start, 1) for start in range(4)]
    assert results == [0, pynvml.NVML_ERROR_MEMORY, pynvml.NVML_ERROR_MEMORY, 0]
    assert [i["start"] for i in machine.dump()["gpus"][0]["instances"]] == [0, 3]
    machine.fail("nvmlDeviceGetCount_v2", pynvml.NVML_ERROR_UNKNOWN, times=None)
    assert [code(pynvml.nvmlDeviceGetCount) for _ in range(3)] == [pynvml.NVML_ERROR_UNKNOWN] * 3
    machine.reset_faults()
    assert pynvml.nvmlDeviceGetCount() == 2


def test_injected_fault_can_fail_a_call_after_its_effect(machine):
    instance, compute, _ = slice_of(gpu(), 9, 0, 4)
    machine.fail("nvmlComputeInstanceDestroy", pynvml.NVML_ERROR_UNKNOWN, moment="after")
    assert code(pynvml.nvmlComputeInstanceDestroy, compute) == pynvml.NVML_ERROR_UNKNOWN
    assert code(pynvml.nvmlComputeInstanceDestroy, compute) == INVALID
    assert code(pynvml.nvmlGpuInstanceDestroy, instance) == 0


def test_injected_fault_can_fail_init_and_shutdown(machine):
    machine.fail("nvmlInitWithFlags", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert code(pynvml.nvmlInit) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert pynvml.nvmlDeviceGetCount() == 2
    machine.fail("nvmlShutdown", pynvml.NVML_ERROR_UNKNOWN)
    assert code(pynvml.nvmlShutdown) == pynvml.NVML_ERROR_UNKNOWN
    assert pynvml.nvmlDeviceGetCount() == 2


def test_injected_fault_can_kill_the_process_before_or_after_a_call(machine):
    """Kills a process at each of its calls in turn, before and after the effect."""
    script = """
pynvml.nvmlInit()
device = gpu()
instance = create(device, 9, 4, 4)
pynvml.nvmlDeviceSetMigMode(device, 1)
print("done", flush=True)
"""
    for call in ("nvmlInitWithFlags", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceSetMigMode"):
        for moment in ("before", "after"):
            machine.fail(call, kill=True, moment=moment)
            assert "done" not in run(machine, script, expect=-9)
            machine.reset_faults()
            machine.reset_gpu(0)


@pytest.mark.parametrize("model", GPU_MODELS)
def test_functions_used_by_the_slurm_nvml_plugin_are_served(make, model):
    """The functions that gpu/nvml of Slurm 24.11 links against."""
    names = """nvmlInit_v2 nvmlShutdown nvmlErrorString nvmlSystemGetDriverVersion nvmlSystemGetNVMLVersion
        nvmlDeviceGetCount_v2 nvmlDeviceGetHandleByIndex_v2 nvmlDeviceGetName nvmlDeviceGetUUID nvmlDeviceGetMinorNumber
        nvmlDeviceGetPciInfo_v3 nvmlDeviceGetCpuAffinity nvmlDeviceGetNvLinkState nvmlDeviceGetNvLinkRemotePciInfo_v2
        nvmlDeviceGetMigMode nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetMigDeviceHandleByIndex
        nvmlDeviceGetGpuInstanceId nvmlDeviceGetComputeInstanceId nvmlDeviceGetAttributes_v2
        nvmlDeviceGetSupportedMemoryClocks nvmlDeviceGetSupportedGraphicsClocks nvmlDeviceGetApplicationsClock
        nvmlDeviceSetApplicationsClocks nvmlDeviceResetApplicationsClocks nvmlDeviceGetProcessUtilization
        nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetPowerUsage"""
    machine = make([model])
    library = ctypes.CDLL(str(machine.library))
    assert [name for name in names.split() if not hasattr(library, name)] == []
    with nvml(machine):
        instance = pynvml.nvmlDeviceCreateGpuInstance(gpu(), 0)
        full_ci(instance)
        assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu()) >= 4
        assert pynvml.nvmlDeviceGetName(gpu()).split("-")[0].strip()
