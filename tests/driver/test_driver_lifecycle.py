"""Creating, finding and destroying instances; handles, ids and UUIDs."""

import uuid

import pynvml
import pytest

from tests.support.driver_helpers import code, computes, create, create_ci, gpu, instances, nvml, slice_of

IN_USE = pynvml.NVML_ERROR_IN_USE
INVALID = pynvml.NVML_ERROR_INVALID_ARGUMENT
NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
INSUFFICIENT = pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES


def test_gpu_instance_without_compute_instance_is_no_mig_device(machine):
    create(gpu(), 9, 0, 4)
    assert code(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu(), 0) == NOT_FOUND


def test_compute_instance_gives_its_mig_device_and_parent_gpu(machine):
    instance, compute, mig_uuid = slice_of(gpu(), 14, 2, 2)
    info = pynvml.nvmlComputeInstanceGetInfo_v2(compute)
    device = info.device
    assert pynvml.nvmlDeviceIsMigDeviceHandle(device).value == 1
    assert pynvml.nvmlDeviceIsMigDeviceHandle(gpu()).value == 0
    assert mig_uuid.startswith("MIG-")
    assert str(uuid.UUID(mig_uuid[4:])) == mig_uuid[4:]
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(mig_uuid)) == mig_uuid
    assert pynvml.nvmlDeviceGetGpuInstanceId(device) == pynvml.nvmlGpuInstanceGetInfo(instance).id == 4
    assert pynvml.nvmlDeviceGetComputeInstanceId(device) == info.id == 0
    assert pynvml.nvmlDeviceGetMinorNumber(device) == 2
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
    assert pynvml.nvmlDeviceGetUUID(parent) == pynvml.nvmlDeviceGetUUID(gpu())
    assert pynvml.nvmlGpuInstanceGetInfo(info.gpuInstance).id == 4


def test_gpu_instance_with_a_compute_instance_cannot_be_destroyed(machine):
    instance, compute, mig_uuid = slice_of(gpu(), 14, 0, 2)
    assert code(pynvml.nvmlGpuInstanceDestroy, instance) == IN_USE
    pynvml.nvmlComputeInstanceDestroy(compute)
    assert code(pynvml.nvmlDeviceGetHandleByUUID, mig_uuid) == NOT_FOUND
    pynvml.nvmlGpuInstanceDestroy(instance)
    assert machine.dump()["gpus"][0]["instances"] == []


def test_overlapping_placement_is_rejected_as_insufficient_resources(machine):
    create(gpu(), 14, 0, 2)
    assert code(create, gpu(), 14, 0, 2) == INSUFFICIENT
    assert code(create, gpu(), 19, 1, 1) == INSUFFICIENT
    assert code(create, gpu(), 19, 2, 1) == 0


def test_placements_outside_the_list_are_invalid(machine):
    for profile_id, start, size in [
        (14, 1, 2),
        (14, 0, 1),
        (14, 6, 2),
        (9, 2, 4),
        (19, 7, 1),
        (0, 0, 7),
        (14, 2**31, 2),
    ]:
        assert code(create, gpu(), profile_id, start, size) == INVALID, (profile_id, start, size)


def test_handles_of_destroyed_instances_are_invalid(machine):
    instance, compute, _ = slice_of(gpu(), 14, 0, 2)
    device = pynvml.nvmlComputeInstanceGetInfo_v2(compute).device
    pynvml.nvmlComputeInstanceDestroy(compute)
    assert code(pynvml.nvmlComputeInstanceDestroy, compute) == INVALID
    assert code(pynvml.nvmlComputeInstanceGetInfo_v2, compute) == INVALID
    assert code(pynvml.nvmlDeviceGetUUID, device) == INVALID
    pynvml.nvmlGpuInstanceDestroy(instance)
    again, compute_again, _ = slice_of(gpu(), 14, 0, 2)  # the same ids
    assert code(pynvml.nvmlGpuInstanceGetInfo, instance) == INVALID
    assert code(pynvml.nvmlComputeInstanceGetInfo_v2, compute) == INVALID
    assert code(pynvml.nvmlDeviceGetUUID, device) == INVALID
    assert pynvml.nvmlGpuInstanceGetInfo(again).id == 3
    assert pynvml.nvmlComputeInstanceGetInfo_v2(compute_again).id == 0


def test_mig_uuids_are_never_reused(machine):
    seen = set()
    for _ in range(20):
        instance, compute, mig_uuid = slice_of(gpu(), 14, 0, 2)
        seen.add(mig_uuid)
        pynvml.nvmlComputeInstanceDestroy(compute)
        pynvml.nvmlGpuInstanceDestroy(instance)
    assert len(seen) == 20


def test_handle_of_the_wrong_kind_is_rejected(machine):
    instance, compute, _ = slice_of(gpu(), 14, 0, 2)
    device = pynvml.nvmlComputeInstanceGetInfo_v2(compute).device
    assert code(pynvml.nvmlGpuInstanceGetInfo, compute) == INVALID
    assert code(pynvml.nvmlDeviceGetUUID, instance) == INVALID
    assert code(pynvml.nvmlComputeInstanceGetInfo_v2, instance) == INVALID
    assert code(pynvml.nvmlDeviceGetUUID, None) == INVALID
    assert code(create, device, 14, 2, 2) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert code(pynvml.nvmlDeviceGetGpuInstanceId, gpu()) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert code(pynvml.nvmlDeviceGetAttributes, gpu()) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_instances_are_listed_by_profile(machine):
    for start in (4, 5):
        create(gpu(), 19, start, 1)
    create(gpu(), 20, 6, 1)
    create(gpu(), 14, 0, 2)
    ids = {pid: [pynvml.nvmlGpuInstanceGetInfo(i).id for i in instances(gpu(), pid)] for pid in (19, 20, 14, 9)}
    assert ids == {19: [11, 12], 20: [13], 14: [3], 9: []}
    assert pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(gpu(), 13)).profileId == 20
    assert code(pynvml.nvmlDeviceGetGpuInstanceById, gpu(), 7) == NOT_FOUND
    assert code(pynvml.nvmlDeviceGetGpuInstanceById, gpu(), 99) == NOT_FOUND
    assert instances(gpu(1), 19) == []


def test_compute_instances_are_listed_by_profile(machine):
    instance = create(gpu(), 5, 0, 4)
    create_ci(instance, 0, 3, 1)
    create_ci(instance, 1, 0, 2)
    found = {pid: [pynvml.nvmlComputeInstanceGetInfo_v2(c).id for c in computes(instance, pid)] for pid in (0, 1, 3)}
    assert found == {0: [0], 1: [1], 3: []}
    assert code(create_ci, instance, 1, 2, 2) == INSUFFICIENT
    assert code(create_ci, instance, 1, 1, 2) == INVALID
    assert code(create_ci, instance, 0, 2, 1) == 0
    assert code(pynvml.nvmlGpuInstanceGetComputeInstanceById, instance, 5) == NOT_FOUND


def test_mig_devices_are_numbered_without_gaps(machine):
    """Slurm's gpu/nvml plugin asserts this."""
    made = [slice_of(gpu(), 19, start, 1) for start in (5, 1, 3)]
    devices = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu(), i) for i in range(3)]
    assert [pynvml.nvmlDeviceGetGpuInstanceId(d) for d in devices] == [8, 10, 12]
    assert [pynvml.nvmlDeviceGetIndex(d) for d in devices] == [0, 1, 2]
    assert code(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu(), 3) == NOT_FOUND
    pynvml.nvmlComputeInstanceDestroy(made[1][1])
    left = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu(), i) for i in range(2)]
    assert [pynvml.nvmlDeviceGetGpuInstanceId(d) for d in left] == [10, 12]
    assert code(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu(), 2) == NOT_FOUND
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu()) == 7


def test_instances_on_one_gpu_do_not_affect_another(machine):
    create(gpu(0), 0, 0, 8)
    create(gpu(1), 0, 0, 8)
    assert [len(g["instances"]) for g in machine.dump()["gpus"]] == [1, 1]


def test_device_is_found_by_uuid_pci_bus_id_and_serial(machine):
    for index in range(2):
        handle = gpu(index)
        pci = pynvml.nvmlDeviceGetPciInfo(handle)
        for same in (
            pynvml.nvmlDeviceGetHandleByUUID(pynvml.nvmlDeviceGetUUID(handle)),
            pynvml.nvmlDeviceGetHandleByPciBusId(pci.busId),
            pynvml.nvmlDeviceGetHandleByPciBusId(pci.busIdLegacy),
            pynvml.nvmlDeviceGetHandleBySerial(pynvml.nvmlDeviceGetSerial(handle)),
        ):
            assert pynvml.nvmlDeviceGetIndex(same) == index
    assert [pynvml.nvmlDeviceGetMinorNumber(gpu(i)) for i in range(2)] == [2, 0]
    assert code(pynvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid.uuid4()}") == NOT_FOUND
    assert code(pynvml.nvmlDeviceGetHandleByUUID, "GPU-nonsense") == NOT_FOUND
    assert code(pynvml.nvmlDeviceGetHandleByPciBusId, "0000:FF:00.0") == NOT_FOUND
    assert code(pynvml.nvmlDeviceGetHandleByIndex, 2) == INVALID


def test_whole_gpu_queries_return_the_model_facts(make):
    with nvml(make(["a100-80gb", "rtx-pro-6000"], mig=False)):
        assert pynvml.nvmlSystemGetDriverVersion() in pynvml.nvmlSystemGetNVMLVersion()
        assert pynvml.nvmlDeviceGetCudaComputeCapability(gpu()) == (8, 0)
        assert pynvml.nvmlDeviceGetArchitecture(gpu()) == pynvml.NVML_DEVICE_ARCH_AMPERE
        assert pynvml.nvmlDeviceGetArchitecture(gpu(1)) == pynvml.NVML_DEVICE_ARCH_BLACKWELL
        assert pynvml.nvmlDeviceGetMemoryInfo(gpu()).total == 80 * 2**30
        assert pynvml.nvmlDeviceGetMemoryBusWidth(gpu()) == 5120
        assert any(pynvml.nvmlDeviceGetCpuAffinity(gpu(), 4))
        assert pynvml.nvmlDeviceGetMaxClockInfo(gpu(), pynvml.NVML_CLOCK_SM) == 1410
        assert pynvml.nvmlDeviceGetTemperature(gpu(), pynvml.NVML_TEMPERATURE_GPU) > 0
        assert pynvml.nvmlDeviceGetPowerUsage(gpu()) < pynvml.nvmlDeviceGetPowerManagementLimit(gpu())
        assert pynvml.nvmlDeviceGetUtilizationRates(gpu()).gpu == 0
        memory_clock = pynvml.nvmlDeviceGetSupportedMemoryClocks(gpu())[0]
        clocks = pynvml.nvmlDeviceGetSupportedGraphicsClocks(gpu(), memory_clock)
        assert clocks == sorted(clocks, reverse=True)
        pynvml.nvmlDeviceSetApplicationsClocks(gpu(), memory_clock, clocks[3])
        assert pynvml.nvmlDeviceGetApplicationsClock(gpu(), pynvml.NVML_CLOCK_GRAPHICS) == clocks[3]
        pynvml.nvmlDeviceResetApplicationsClocks(gpu())
        assert pynvml.nvmlDeviceGetApplicationsClock(gpu(), pynvml.NVML_CLOCK_GRAPHICS) == clocks[0]
        assert pynvml.nvmlDeviceGetNvLinkState(gpu(), 0) == 1
        assert pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu(), 0).busId.startswith("00000001")
        assert code(pynvml.nvmlDeviceGetNvLinkState, gpu(1), 0) == pynvml.NVML_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize(
    "call",
    [
        pynvml.nvmlDeviceGetUtilizationRates,
        pynvml.nvmlDeviceGetEncoderUtilization,
        lambda device: pynvml.nvmlDeviceGetNvLinkState(device, 0),
        lambda device: pynvml.nvmlDeviceGetProcessUtilization(device, 0),
    ],
)
def test_mig_mode_hides_whole_gpu_metrics(machine, call):
    assert code(call, gpu()) == pynvml.NVML_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize(
    "call",
    [
        pynvml.nvmlDeviceGetPowerUsage,
        pynvml.nvmlDeviceGetUtilizationRates,
        lambda device: pynvml.nvmlDeviceGetTemperature(device, 0),
        lambda device: pynvml.nvmlDeviceGetClockInfo(device, 0),
    ],
)
def test_a_mig_device_has_no_sensors(machine, call):
    _, compute, _ = slice_of(gpu(), 9, 0, 4)
    device = pynvml.nvmlComputeInstanceGetInfo_v2(compute).device
    assert code(call, device) == pynvml.NVML_ERROR_NOT_SUPPORTED
