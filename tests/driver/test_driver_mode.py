"""MIG mode, resets and reboots."""

import pynvml
import pytest

from tests.support.driver_helpers import code, create, gpu, instances, nvml, placements, slice_of

AMPERE = ["a30", "a100-40gb", "a100-80gb"]
LATER = ["h100-80gb", "h200", "b200", "rtx-pro-6000"]


def mode(index=0):
    return pynvml.nvmlDeviceGetMigMode(gpu(index))


@pytest.mark.parametrize("model", LATER)
def test_mig_mode_on_hopper_and_later_changes_at_once_and_ends_at_reboot(make, model):
    machine = make([model], mig=False)
    with nvml(machine):
        assert pynvml.nvmlDeviceSetMigMode(gpu(), 1) == 0
        assert mode() == [1, 1]
    machine.reboot()
    with nvml(machine):
        assert mode() == [0, 0]


@pytest.mark.parametrize("model", AMPERE)
def test_mig_mode_on_ampere_needs_a_reset_and_survives_a_reboot(make, model):
    machine = make([model, model], mig=False)
    with nvml(machine):
        for index in range(2):
            assert pynvml.nvmlDeviceSetMigMode(gpu(index), 1) == pynvml.NVML_ERROR_RESET_REQUIRED
        machine.reset_gpu(0)
        assert (mode(0), mode(1)) == ([1, 1], [0, 1])
        assert code(create, gpu(1), 0, 0, 8) == pynvml.NVML_ERROR_NOT_SUPPORTED
    machine.reboot()
    with nvml(machine):
        assert (mode(0), mode(1)) == ([1, 1], [1, 1])


def test_pending_mig_mode_change_can_be_reverted(make):
    with nvml(make(["a100-40gb"], mig=False)):
        pynvml.nvmlDeviceSetMigMode(gpu(), 1)
        assert pynvml.nvmlDeviceSetMigMode(gpu(), 0) == 0
        assert mode() == [0, 0]


def test_idle_ampere_gpu_is_reset_by_the_driver_when_configured(make):
    machine = make(["a100-40gb", "a100-40gb"], mig=False, ampere_auto_reset=True)
    with nvml(machine):
        machine.start_process(pynvml.nvmlDeviceGetUUID(gpu(1)))
        assert pynvml.nvmlDeviceSetMigMode(gpu(0), 1) == 0
        assert pynvml.nvmlDeviceSetMigMode(gpu(1), 1) == pynvml.NVML_ERROR_IN_USE
        assert (mode(0), mode(1)) == ([1, 1], [0, 1])


@pytest.mark.parametrize("model", ["a100-40gb", "h100-80gb"])
def test_mig_mode_cannot_be_disabled_while_instances_exist(make, model):
    with nvml(make([model], ampere_auto_reset=True)):
        instance = create(gpu(), 0, 0, 8)
        assert code(pynvml.nvmlDeviceSetMigMode, gpu(), 0) == pynvml.NVML_ERROR_IN_USE
        assert mode() == [1, 1]
        assert pynvml.nvmlDeviceSetMigMode(gpu(), 1) == 0  # nothing to change
        pynvml.nvmlGpuInstanceDestroy(instance)
        assert pynvml.nvmlDeviceSetMigMode(gpu(), 0) == 0
        assert mode() == [0, 0]


def test_mig_mode_cannot_change_while_a_process_runs(make):
    machine = make(["h100-80gb"], mig=False)
    with nvml(machine):
        machine.start_process(pynvml.nvmlDeviceGetUUID(gpu()))
        assert code(pynvml.nvmlDeviceSetMigMode, gpu(), 1) == pynvml.NVML_ERROR_IN_USE
        machine.end_process()
        assert pynvml.nvmlDeviceSetMigMode(gpu(), 1) == 0


def test_without_mig_profiles_are_described_and_nothing_can_be_created(make):
    """Ampere is taken to answer like Hopper, whose answers test_driver_recorded.py compares one by one."""
    with nvml(make(["h100-80gb", "a100-80gb"], mig=False)):
        for index in range(2):
            device = gpu(index)
            for version in (1, 2):
                assert pynvml.nvmlDeviceGetGpuInstanceProfileInfo(device, 0, version=version).id == 19
            assert pynvml.nvmlDeviceGetGpuInstanceProfileInfoByIdV(device, 19).name == "MIG 1g.10gb"
            assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, 19) == 7
            assert instances(device, 19) == []
            assert code(pynvml.nvmlDeviceGetGpuInstanceById, device, 0) == pynvml.NVML_ERROR_NOT_FOUND
            assert code(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device, 0) == pynvml.NVML_ERROR_NOT_FOUND
            assert pynvml.nvmlDeviceGetMaxMigDeviceCount(device) == 0
            assert code(pynvml.nvmlDeviceCreateGpuInstance, device, 19) == pynvml.NVML_ERROR_NOT_SUPPORTED
            assert code(create, device, 19, 0, 1) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_profile_ids_of_other_gpus_are_known_without_mig(make):
    with nvml(make(["h100-80gb"], mig=False)):
        unknown = pynvml.NVML_ERROR_INVALID_ARGUMENT
        for profile_id, info, rest in (
            (21, pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NOT_SUPPORTED),
            (2, unknown, unknown),
        ):
            assert code(pynvml.nvmlDeviceGetGpuInstanceProfileInfoByIdV, gpu(), profile_id) == info
            assert code(pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity, gpu(), profile_id) == rest
            assert code(placements, gpu(), profile_id) == rest
        assert instances(gpu(), 21) == []
        assert code(instances, gpu(), 2) == unknown


def test_reboot_removes_instances_processes_and_sessions(machine):
    _, compute, mig_uuid = slice_of(gpu(1), 9, 0, 4)
    machine.start_process(mig_uuid, 999_999, sticky=True)
    before = machine.dump()
    (machine.dev_root / "nvidia-caps").mkdir()
    (machine.dev_root / "nvidia-caps" / "nvidia-cap3").write_text("")
    old = gpu(1)
    machine.reboot()
    assert code(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    pynvml.nvmlInit()  # attaches anew
    try:
        after = machine.dump()
        assert after["boot_id"] != before["boot_id"]
        assert machine.boot_id_file.read_text() == after["boot_id"] + "\n"
        assert after["processes"] == []
        assert [g["instances"] for g in after["gpus"]] == [[], []]
        assert [g["uuid"] for g in after["gpus"]] == [g["uuid"] for g in before["gpus"]]
        assert not (machine.dev_root / "nvidia-caps").exists()
        assert not list(machine.proc_root.rglob("gi*"))
        assert code(pynvml.nvmlDeviceGetUUID, old) == pynvml.NVML_ERROR_INVALID_ARGUMENT
        assert code(pynvml.nvmlComputeInstanceGetInfo_v2, compute) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    finally:
        pynvml.nvmlShutdown()


def test_reset_removes_instances_and_is_refused_while_a_process_runs(machine):
    _, _, mig_uuid = slice_of(gpu(0), 9, 0, 4)
    _, _, other = slice_of(gpu(1), 9, 0, 4)
    machine.start_process(mig_uuid)
    with pytest.raises(RuntimeError, match="in use"):
        machine.reset_gpu(0)
    machine.end_process()
    machine.reset_gpu(0)
    assert code(pynvml.nvmlDeviceGetHandleByUUID, mig_uuid) == pynvml.NVML_ERROR_NOT_FOUND
    assert code(pynvml.nvmlDeviceGetHandleByUUID, other) == 0
    assert mode(0) == [1, 1]


def test_lost_gpu_fails_every_call_until_its_reset(machine):
    handle = gpu(0)
    instance, _, mig_uuid = slice_of(handle, 9, 0, 4)
    machine.set_lost(0)
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    assert code(pynvml.nvmlDeviceGetName, handle) == lost
    assert code(pynvml.nvmlGpuInstanceDestroy, instance) == lost
    assert code(pynvml.nvmlDeviceGetHandleByUUID, mig_uuid) == lost
    assert code(gpu, 0) == lost
    assert code(gpu, 1) == 0
    machine.reset_gpu(0)
    assert code(pynvml.nvmlDeviceGetName, handle) == 0
