"""Queries of monitoring programs on a GPU and on a MIG device, through nvidia-ml-py."""

import ctypes
import os
import threading

import pynvml
import pytest

from tests.support.driver_helpers import code, gpu, nvml, slice_of

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
INVALID_ARGUMENT = pynvml.NVML_ERROR_INVALID_ARGUMENT
NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
TIMEOUT = pynvml.NVML_ERROR_TIMEOUT

CORRECTED, UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
VOLATILE, AGGREGATE = pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC
DRAM, SRAM = pynvml.NVML_MEMORY_LOCATION_DRAM, pynvml.NVML_MEMORY_LOCATION_SRAM


@pytest.fixture
def whole(make):
    """An H100 and an A100 without MIG."""
    machine = make(["h100-80gb", "a100-40gb"], mig=False)
    with nvml(machine):
        yield machine


@pytest.fixture
def mig_device(machine):
    """A MIG device of the H100 that the `machine` fixture has open."""
    return pynvml.nvmlDeviceGetHandleByUUID(slice_of(gpu(), 9, 4, 4)[2])


def field(device, wanted):
    """One field value: (return code, type, value)."""
    (found,) = pynvml.nvmlDeviceGetFieldValues(device, [wanted])
    value = found.value.uiVal if found.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT else found.value.ullVal
    return (found.nvmlReturn, value)


# -- functions for other systems -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "nvmlDeviceGetDriverModel_v1",
        "nvmlDeviceGetDriverModel_v2",
        "nvmlDeviceGetGpuOperationMode",
        "nvmlDeviceGetAutoBoostedClocksEnabled",
        "nvmlDeviceGetGridLicensableFeatures",
        "nvmlDeviceGetBridgeChipInfo",
        "nvmlDeviceGetRetiredPagesPendingStatus",
    ],
)
def test_features_absent_from_data_centre_gpus_are_not_supported(whole, name):
    assert code(getattr(pynvml, name), gpu()) == NOT_SUPPORTED


def test_null_output_pointer_is_rejected(whole):
    for name in ("nvmlDeviceGetDriverModel", "nvmlDeviceGetConfComputeMemSizeInfo", "nvmlDeviceGetSupportedEventTypes"):
        assert pynvml._nvmlGetFunctionPointer(name)(gpu(), None, None) == INVALID_ARGUMENT


# -- memory errors -------------------------------------------------------------------------------------------------


def test_ecc_error_counters_of_a_whole_gpu_are_served(whole):
    for kind in (CORRECTED, UNCORRECTED):
        for counter in (VOLATILE, AGGREGATE):
            assert pynvml.nvmlDeviceGetTotalEccErrors(gpu(), kind, counter) == 0
            for location in (DRAM, SRAM):
                assert pynvml.nvmlDeviceGetMemoryErrorCounter(gpu(), kind, counter, location) == 0
    l1 = pynvml.NVML_MEMORY_LOCATION_L1_CACHE
    assert code(pynvml.nvmlDeviceGetMemoryErrorCounter, gpu(), UNCORRECTED, VOLATILE, l1) == NOT_SUPPORTED
    for wrong in ((2, VOLATILE, DRAM), (CORRECTED, 2, DRAM), (CORRECTED, VOLATILE, 8)):
        assert code(pynvml.nvmlDeviceGetMemoryErrorCounter, gpu(), *wrong) == INVALID_ARGUMENT
    assert pynvml.nvmlDeviceGetRemappedRows(gpu()) == (0, 0, 0, 0)


def test_volatile_ecc_errors_of_a_partitioned_gpu_are_per_instance(machine, mig_device):
    """NVML, nvmlDeviceGetMemoryErrorCounter: per instance only uncorrected, volatile ones outside DRAM."""
    assert pynvml.nvmlDeviceGetTotalEccErrors(gpu(), UNCORRECTED, AGGREGATE) == 0
    assert code(pynvml.nvmlDeviceGetTotalEccErrors, gpu(), UNCORRECTED, VOLATILE) == NOT_SUPPORTED
    assert code(pynvml.nvmlDeviceGetMemoryErrorCounter, gpu(), UNCORRECTED, VOLATILE, SRAM) == NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetMemoryErrorCounter(mig_device, UNCORRECTED, VOLATILE, SRAM) == 0
    for wanted in (
        (UNCORRECTED, VOLATILE, DRAM),
        (CORRECTED, VOLATILE, SRAM),
        (UNCORRECTED, AGGREGATE, SRAM),
    ):
        assert code(pynvml.nvmlDeviceGetMemoryErrorCounter, mig_device, *wanted) == NOT_SUPPORTED


# -- fields --------------------------------------------------------------------------------------------------------


def test_field_values_equal_the_results_of_the_calls(whole):
    assert field(gpu(), pynvml.NVML_FI_DEV_ECC_CURRENT) == (0, 1)
    assert field(gpu(), pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL) == (0, 0)
    assert field(gpu(), pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT) == (0, 18)
    assert field(gpu(1), pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT) == (0, 12)
    assert field(gpu(), pynvml.NVML_FI_DEV_POWER_INSTANT) == (0, pynvml.nvmlDeviceGetPowerUsage(gpu()))
    assert field(gpu(), pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT) == (0, 700_000)
    assert field(gpu(), pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION)[1] > 0
    assert field(gpu(), (pynvml.NVML_FI_DEV_NVLINK_GET_VERSION, 17)) == (0, pynvml.NVML_NVLINK_VERSION_4_0)
    assert field(gpu(), (pynvml.NVML_FI_DEV_NVLINK_GET_STATE, 18))[0] == INVALID_ARGUMENT
    assert field(gpu(), pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED) == (0, 1)
    assert field(gpu(1), pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED) == (0, 0)


def test_each_field_has_its_own_return_code(whole):
    wanted = [pynvml.NVML_FI_DEV_ECC_CURRENT, 0, pynvml.NVML_FI_PWR_SMOOTHING_ENABLED, pynvml.NVML_FI_DEV_MEMORY_TEMP]
    found = pynvml.nvmlDeviceGetFieldValues(gpu(), wanted)
    assert [value.fieldId for value in found] == wanted
    assert [value.nvmlReturn for value in found] == [0, INVALID_ARGUMENT, NOT_SUPPORTED, 0]
    assert all(value.timestamp > 10**15 for value in found)  # microseconds since 1970
    fn = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")
    assert fn(gpu(), ctypes.c_int32(0), ctypes.byref(found)) == INVALID_ARGUMENT
    assert fn(gpu(), ctypes.c_int32(1), None) == INVALID_ARGUMENT


def test_fields_not_supported_under_mig_are_not_supported(machine, mig_device):
    assert field(gpu(), pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL)[0] == NOT_SUPPORTED
    assert field(gpu(), pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)[0] == NOT_SUPPORTED
    assert field(gpu(), pynvml.NVML_FI_DEV_MEMORY_TEMP)[0] == 0
    assert field(mig_device, pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL) == (0, 0)
    assert field(mig_device, pynvml.NVML_FI_DEV_MEMORY_TEMP)[0] == NOT_SUPPORTED


# -- traffic and links ---------------------------------------------------------------------------------------------


def test_pcie_throughput_follows_the_simulated_load(whole):
    tx, rx = pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES
    assert pynvml.nvmlDeviceGetPcieThroughput(gpu(), tx) == 0
    whole.set_load(pynvml.nvmlDeviceGetUUID(gpu()), pcie_tx=300, pcie_rx=20)
    assert pynvml.nvmlDeviceGetPcieThroughput(gpu(), tx) == 300 * 1024
    assert pynvml.nvmlDeviceGetPcieThroughput(gpu(), rx) == 20 * 1024
    assert pynvml.nvmlDeviceGetPcieThroughput(gpu(1), tx) == 0
    assert code(pynvml.nvmlDeviceGetPcieThroughput, gpu(), 2) == INVALID_ARGUMENT


def test_mig_device_has_no_pcie_throughput(machine, mig_device):
    machine.set_load(pynvml.nvmlDeviceGetUUID(mig_device), pcie_tx=300)
    assert code(pynvml.nvmlDeviceGetPcieThroughput, mig_device, 0) == NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetPcieThroughput(gpu(), 0) == 300 * 1024


def test_utilization_follows_the_simulated_load(whole):
    whole.set_load(pynvml.nvmlDeviceGetUUID(gpu()), graphics=90.5, sm=40, dram=25)
    rates = pynvml.nvmlDeviceGetUtilizationRates(gpu())
    assert (rates.gpu, rates.memory) == (90, 25)
    whole.start_process(pynvml.nvmlDeviceGetUUID(gpu()))
    (sample,) = pynvml.nvmlDeviceGetProcessUtilization(gpu(), 0)
    assert (sample.pid, sample.smUtil, sample.memUtil) == (os.getpid(), 40, 25)
    whole.set_load(pynvml.nvmlDeviceGetUUID(gpu()))
    assert pynvml.nvmlDeviceGetUtilizationRates(gpu()).gpu == 0


def test_utilization_is_not_supported_under_mig(machine, mig_device):
    machine.set_load(pynvml.nvmlDeviceGetUUID(mig_device), graphics=90)
    assert code(pynvml.nvmlDeviceGetUtilizationRates, gpu()) == NOT_SUPPORTED
    assert code(pynvml.nvmlDeviceGetUtilizationRates, mig_device) == NOT_SUPPORTED


@pytest.mark.parametrize(
    ("model", "links", "version"),
    [
        ("a30", 4, pynvml.NVML_NVLINK_VERSION_3_0),
        ("a100-80gb", 12, pynvml.NVML_NVLINK_VERSION_3_0),
        ("h200", 18, pynvml.NVML_NVLINK_VERSION_4_0),
        ("b200", 18, pynvml.NVML_NVLINK_VERSION_5_0),
    ],
)
def test_nvlink_count_and_version_follow_the_architecture(make, model, links, version):
    with nvml(make([model], mig=False)):
        for link in range(links):
            assert pynvml.nvmlDeviceGetNvLinkState(gpu(), link) == 1
            assert pynvml.nvmlDeviceGetNvLinkVersion(gpu(), link) == version
            assert pynvml.nvmlDeviceGetNvLinkCapability(gpu(), link, pynvml.NVML_NVLINK_CAP_P2P_SUPPORTED) == 1
            assert pynvml.nvmlDeviceGetNvLinkErrorCounter(gpu(), link, 0) == 0
        assert code(pynvml.nvmlDeviceGetNvLinkVersion, gpu(), links) == INVALID_ARGUMENT
    with nvml(make([model], mig=True)):
        assert code(pynvml.nvmlDeviceGetNvLinkState, gpu(), 0) == NOT_SUPPORTED
        assert code(pynvml.nvmlDeviceGetNvLinkVersion, gpu(), 0) == NOT_SUPPORTED


def test_gpu_without_nvlink_returns_not_supported(make):
    with nvml(make(["rtx-pro-6000"], mig=False)):
        assert code(pynvml.nvmlDeviceGetNvLinkVersion, gpu(), 0) == NOT_SUPPORTED
        assert field(gpu(), pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)[0] == NOT_SUPPORTED


def test_topology_between_gpus_is_served(make):
    with nvml(make(["h100-80gb", "h100-80gb", "a30"], mig=False)):
        assert pynvml.nvmlDeviceGetTopologyCommonAncestor(gpu(0), gpu(0)) == pynvml.NVML_TOPOLOGY_INTERNAL
        assert pynvml.nvmlDeviceGetTopologyCommonAncestor(gpu(0), gpu(2)) == pynvml.NVML_TOPOLOGY_NODE
        near = pynvml.nvmlDeviceGetTopologyNearestGpus(gpu(0), pynvml.NVML_TOPOLOGY_NODE)
        assert [pynvml.nvmlDeviceGetIndex(handle) for handle in near] == [1, 2]
        assert pynvml.nvmlDeviceGetTopologyNearestGpus(gpu(0), pynvml.NVML_TOPOLOGY_SINGLE) == []
        link = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        assert pynvml.nvmlDeviceGetP2PStatus(gpu(0), gpu(1), link) == pynvml.NVML_P2P_STATUS_OK
        assert pynvml.nvmlDeviceGetP2PStatus(gpu(0), gpu(2), link) == pynvml.NVML_P2P_STATUS_NOT_SUPPORTED


def test_mig_device_has_no_topology_and_partitioned_gpu_no_p2p(machine, mig_device):
    assert code(pynvml.nvmlDeviceGetTopologyCommonAncestor, mig_device, gpu(1)) == NOT_SUPPORTED
    status = pynvml.nvmlDeviceGetP2PStatus(gpu(0), gpu(1), pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    assert status == pynvml.NVML_P2P_STATUS_NOT_SUPPORTED


# -- locked clocks -------------------------------------------------------------------------------------------------


def clocks():
    return (
        pynvml.nvmlDeviceGetClockInfo(gpu(), pynvml.NVML_CLOCK_SM),
        pynvml.nvmlDeviceGetClockInfo(gpu(), pynvml.NVML_CLOCK_MEM),
    )


def test_locked_clocks_apply_until_they_are_reset(whole):
    top = clocks()
    pynvml.nvmlDeviceSetGpuLockedClocks(gpu(), 600, 900)
    assert clocks() == (900, top[1])
    assert pynvml.nvmlDeviceGetClock(gpu(), pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_ID_CURRENT) == 900
    assert pynvml.nvmlDeviceGetMaxClockInfo(gpu(), pynvml.NVML_CLOCK_SM) == top[0]
    pynvml.nvmlDeviceSetApplicationsClocks(gpu(), top[1], 210)
    assert clocks() == (600, top[1])
    pynvml.nvmlDeviceResetGpuLockedClocks(gpu())
    assert clocks() == (210, top[1])
    pynvml.nvmlDeviceResetApplicationsClocks(gpu())
    pynvml.nvmlDeviceSetMemoryLockedClocks(gpu(), top[1], top[1])
    assert clocks() == top
    pynvml.nvmlDeviceResetMemoryLockedClocks(gpu())
    assert pynvml.nvmlDeviceGetClockInfo(gpu(1), pynvml.NVML_CLOCK_SM) == 1410


def test_clocks_out_of_range_are_rejected(whole):
    top = clocks()
    for low, high in ((900, 600), (0, 100), (top[0] + 1, top[0] + 100)):
        assert code(pynvml.nvmlDeviceSetGpuLockedClocks, gpu(), low, high) == INVALID_ARGUMENT
    assert code(pynvml.nvmlDeviceSetMemoryLockedClocks, gpu(), 100, 200) == INVALID_ARGUMENT
    assert clocks() == top


def test_locked_clocks_end_with_a_reset_of_the_gpu_or_the_machine(whole):
    top = clocks()
    pynvml.nvmlDeviceSetGpuLockedClocks(gpu(), 600, 900)
    whole.reset_gpu(0)
    assert clocks() == top
    pynvml.nvmlDeviceSetGpuLockedClocks(gpu(), 600, 900)
    whole.reboot()
    pynvml.nvmlInit()
    assert clocks() == top
    pynvml.nvmlShutdown()


def test_mig_devices_have_no_clocks_to_lock(machine, mig_device):
    assert code(pynvml.nvmlDeviceSetGpuLockedClocks, mig_device, 600, 900) == NOT_SUPPORTED
    assert code(pynvml.nvmlDeviceResetMemoryLockedClocks, mig_device) == NOT_SUPPORTED


# -- processes and protected memory ----------------------------------------------------------------------------------


def test_process_detail_list_agrees_with_the_process_list(machine, mig_device):
    version = pynvml.nvmlProcessDetailList_v1
    assert pynvml.nvmlDeviceGetRunningProcessDetailList(gpu(), version, 0) == []
    machine.start_process(pynvml.nvmlDeviceGetUUID(mig_device), memory_mib=700)
    for device in (gpu(), mig_device):
        (process,) = pynvml.nvmlDeviceGetRunningProcessDetailList(device, version, 0)
        assert (process.pid, process.usedGpuMemory) == (os.getpid(), 700 * 2**20)
        assert (process.gpuInstanceId, process.computeInstanceId) == (2, 0)
        assert process.usedGpuCcProtectedMemory == 0
        assert pynvml.nvmlDeviceGetRunningProcessDetailList(device, version, 1) == []
    mismatch = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    assert code(pynvml.nvmlDeviceGetRunningProcessDetailList, gpu(), version + 1, 0) == mismatch
    assert code(pynvml.nvmlDeviceGetRunningProcessDetailList, gpu(), version, 3) == INVALID_ARGUMENT
    assert code(pynvml.nvmlDeviceGetRunningProcessDetailList, gpu(1), version, 0) == NOT_SUPPORTED  # Ampere


def test_confidential_compute_memory_is_reported_as_unprotected(machine, mig_device):
    info = pynvml.nvmlDeviceGetConfComputeMemSizeInfo(gpu())
    assert (info.protectedMemSizeKib, info.unprotectedMemSizeKib) == (0, 81559 * 1024)
    assert code(pynvml.nvmlDeviceGetConfComputeMemSizeInfo, gpu(1)) == NOT_SUPPORTED  # Ampere
    assert code(pynvml.nvmlDeviceGetConfComputeMemSizeInfo, mig_device) == NOT_SUPPORTED


# -- events --------------------------------------------------------------------------------------------------------


@pytest.fixture
def events(machine):
    created = pynvml.nvmlEventSetCreate()
    yield created
    pynvml.nvmlEventSetFree(created)


def test_events_are_delivered_to_registered_event_sets(machine, events):
    types = pynvml.nvmlDeviceGetSupportedEventTypes(gpu())
    assert types & pynvml.nvmlEventTypeXidCriticalError
    pynvml.nvmlDeviceRegisterEvents(gpu(0), pynvml.nvmlEventTypeXidCriticalError, events)
    assert code(pynvml.nvmlEventSetWait_v2, events, 0) == TIMEOUT
    machine.post_event(1, "xid", 31)  # another GPU
    machine.post_event(0, "clock")  # another kind
    machine.post_event(0, "xid", 48)
    machine.post_event(0, "xid", 63)
    data = pynvml.nvmlEventSetWait_v2(events, 0)
    assert (data.eventType, data.eventData) == (pynvml.nvmlEventTypeXidCriticalError, 48)
    assert pynvml.nvmlDeviceGetUUID(data.device) == pynvml.nvmlDeviceGetUUID(gpu(0))
    assert (data.gpuInstanceId, data.computeInstanceId) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert pynvml.nvmlEventSetWait_v2(events, 0).eventData == 63
    assert code(pynvml.nvmlEventSetWait_v2, events, 20) == TIMEOUT


def test_event_set_does_not_hold_earlier_events(machine):
    machine.post_event(0, "xid", 48)
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(gpu(0), pynvml.nvmlEventTypeXidCriticalError, events)
    assert code(pynvml.nvmlEventSetWait_v2, events, 0) == TIMEOUT
    pynvml.nvmlEventSetFree(events)


def test_event_wait_returns_on_the_event_and_does_not_block_threads(machine, events):
    pynvml.nvmlDeviceRegisterEvents(gpu(0), pynvml.nvmlEventTypeXidCriticalError, events)
    seen = []
    waiting = threading.Thread(target=lambda: seen.append(pynvml.nvmlEventSetWait_v2(events, 600_000)))
    waiting.start()
    assert pynvml.nvmlDeviceGetName(gpu()) == "NVIDIA H100 80GB HBM3"
    machine.set_lost(0)
    waiting.join(120)
    assert not waiting.is_alive()
    assert [data.eventData for data in seen] == [79]  # the GPU has fallen off the bus


def test_event_wait_version_1_writes_the_version_1_struct(machine, events):
    pynvml.nvmlDeviceRegisterEvents(gpu(0), pynvml.nvmlEventTypeXidCriticalError, events)
    machine.post_event(0, "xid", 48)
    data = pynvml.c_nvmlEventData_t(gpuInstanceId=7, computeInstanceId=7)
    fn = pynvml._nvmlGetFunctionPointer("nvmlEventSetWait")
    assert fn(events, ctypes.byref(data), ctypes.c_uint(0)) == 0
    assert (data.eventData, data.gpuInstanceId, data.computeInstanceId) == (48, 7, 7)


def test_invalid_event_sets_and_types_are_rejected(machine, mig_device, events):
    freed = pynvml.nvmlEventSetCreate()
    pynvml.nvmlEventSetFree(freed)
    assert code(pynvml.nvmlEventSetFree, freed) == INVALID_ARGUMENT
    assert code(pynvml.nvmlEventSetWait_v2, freed, 0) == INVALID_ARGUMENT
    assert code(pynvml.nvmlDeviceRegisterEvents, gpu(), 8, freed) == INVALID_ARGUMENT
    assert code(pynvml.nvmlDeviceRegisterEvents, gpu(), 1 << 40, events) == NOT_SUPPORTED
    assert code(pynvml.nvmlDeviceRegisterEvents, mig_device, 8, events) == NOT_SUPPORTED


def test_oldest_events_are_dropped_when_the_queue_is_full(machine, events):
    pynvml.nvmlDeviceRegisterEvents(gpu(0), pynvml.nvmlEventTypeXidCriticalError, events)
    for number in range(200):
        machine.post_event(0, "xid", number)
    got = []
    while code(lambda: got.append(pynvml.nvmlEventSetWait_v2(events, 0).eventData)) == 0:
        pass
    assert got == list(range(200))[-64:]


# -- older names -----------------------------------------------------------------------------------------------------


def written(name, size, *arguments):
    """The return code, and whether a call writes at most `size` bytes; the buffer is larger than that."""
    buffer = (ctypes.c_ubyte * 256)(*[0xA5] * 256)
    result = pynvml._nvmlGetFunctionPointer(name)(*arguments, ctypes.byref(buffer))
    content = bytes(buffer)
    return (result, len(content.rstrip(b"\xa5")) <= size and content[size:] == b"\xa5" * (256 - size))


def test_older_function_versions_write_their_older_structs(whole):
    """py3smi, which was built for them, ended in a segmentation fault when more was written than its structs hold."""
    assert written("nvmlDeviceGetPciInfo", 52, gpu()) == (0, True)
    assert written("nvmlDeviceGetPciInfo_v2", 52, gpu()) == (0, True)
    assert written("nvmlDeviceGetPciInfo_v3", 68, gpu()) == (0, True)
    assert written("nvmlDeviceGetNvLinkRemotePciInfo", 52, gpu(), 0) == (0, True)
    assert written("nvmlDeviceGetNvLinkRemotePciInfo_v2", 68, gpu(), 0) == (0, True)
    legacy = pynvml.nvmlPciInfo_v2_t()
    assert pynvml._nvmlGetFunctionPointer("nvmlDeviceGetPciInfo_v2")(gpu(1), ctypes.byref(legacy)) == 0
    assert (legacy.busId, legacy.bus, legacy.pciDeviceId) == ("0000:0F:00.0", 0x0F, 0x20B010DE)


def test_compute_instance_info_version_1_has_no_placement(machine):
    _, compute, _ = slice_of(gpu(), 9, 4, 4)
    assert written("nvmlComputeInstanceGetInfo", 24, compute) == (0, True)
    assert written("nvmlComputeInstanceGetInfo_v2", 32, compute) == (0, True)
