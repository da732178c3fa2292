"""The hardware that the driver plays, seen through nvidia-ml-py."""

import ctypes

import pynvml
import pytest
from driver_helpers import GPUS, code, create, full_ci, gpu, nvml, placements


@pytest.fixture(params=GPUS)
def model(request, make):
    with nvml(make([request.param])):
        yield GPUS[request.param]


def test_profiles_are_found_by_enum_and_carry_the_device_id(model):
    found = {}
    for enum in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu(), enum)
        except pynvml.NVMLError_NotSupported:
            continue
        by_id = pynvml.nvmlDeviceGetGpuInstanceProfileInfoByIdV(gpu(), info.id)
        old = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu(), enum, version=1)
        for field, _ in pynvml.c_nvmlGpuInstanceProfileInfo_t._fields_:
            assert getattr(info, field) == getattr(old, field) == getattr(by_id, field), field
        places = placements(gpu(), info.id)
        assert places == sorted(places)
        found[info.name.removeprefix("MIG ")] = (
            info.id,
            enum,
            info.sliceCount,
            info.memorySizeMB,
            info.multiprocessorCount,
            info.instanceCount,
            tuple(start for start, _ in places),
            places[0][1],
        )
        assert {size for _, size in places} == {places[0][1]}
    assert found == model


def test_the_walk_over_enums_ends_at_invalid_argument(model):
    assert code(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu(), 0x12) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu(), 5) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_names_follow_from_the_memory(model):
    """Old drivers gave no names; tools compute them like this, and the result is the same."""
    total = pynvml.nvmlDeviceGetMemoryInfo(gpu()).total
    for name, row in model.items():
        eighths = -(-8 * row[3] * 2**20 // total)
        gigabytes = int(eighths / 8 * -(-total // 2**30) + 0.5)
        assert name.startswith(f"{row[2]}g.{gigabytes}gb")


def test_an_enum_is_not_a_profile_id(model):
    ids = {row[0] for row in model.values()}
    for enum in {row[1] for row in model.values()} - ids:
        start, size = model[next(name for name, row in model.items() if row[1] == enum)][6:]
        assert code(create, gpu(), enum, start[0], size) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_an_instance_is_described_as_it_was_asked_for(model):
    total_slices = max(row[7] for row in model.values())
    for name, (profile_id, _, slices, memory, sms, _, starts, size) in model.items():
        for start in starts:
            instance = create(gpu(), profile_id, start, size)
            info = pynvml.nvmlGpuInstanceGetInfo(instance)
            assert (info.profileId, info.placement.start, info.placement.size) == (profile_id, start, size)
            assert info.id == total_slices // size - 1 + start // size
            compute = full_ci(instance)
            device = pynvml.nvmlComputeInstanceGetInfo_v2(compute).device
            attributes = pynvml.nvmlDeviceGetAttributes(device)
            assert attributes.memorySizeMB == memory
            assert attributes.multiprocessorCount == sms
            assert attributes.gpuInstanceSliceCount == attributes.computeInstanceSliceCount == slices
            assert pynvml.nvmlDeviceGetMemoryInfo(device).total == memory * 2**20
            assert pynvml.nvmlDeviceGetName(device).endswith(f" MIG {name}")
            pynvml.nvmlComputeInstanceDestroy(compute)
            pynvml.nvmlGpuInstanceDestroy(instance)


class ProfileV3(ctypes.Structure):
    """nvmlGpuInstanceProfileInfo_v3_t, which nvidia-ml-py does not have."""

    _fields_ = [
        *[field for field in pynvml.c_nvmlGpuInstanceProfileInfo_v2_t._fields_ if field[0] != "isP2pSupported"],
        ("capabilities", ctypes.c_uint),
    ]


def test_version_three_tells_graphics(make):
    with nvml(make(["rtx-pro-6000"])):
        call = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetGpuInstanceProfileInfoV")
        for name, row in GPUS["rtx-pro-6000"].items():
            info = ProfileV3(version=ctypes.sizeof(ProfileV3) | 3 << 24)
            assert call(gpu(), row[1], ctypes.byref(info)) == 0
            assert info.name.decode() == f"MIG {name}"
            assert (info.id, info.sliceCount, info.memorySizeMB) == (row[0], row[2], row[3])
            assert bool(info.capabilities & 2) == name.endswith("+gfx")


@pytest.mark.parametrize(
    ("model_name", "profile_id", "size", "expected"),
    [
        # compute slices: (max, SMs, starts); nvidia-smi mig -lcip on an A100
        ("a100-40gb", 9, 4, {1: (3, 14, [0, 1, 2]), 2: (1, 28, [0]), 3: (1, 42, [0])}),
        ("a100-40gb", 5, 4, {1: (4, 14, [0, 1, 2, 3]), 2: (2, 28, [0, 2]), 4: (1, 56, [0])}),
        (
            "a100-40gb",
            0,
            8,
            {
                1: (7, 14, [0, 1, 2, 3, 4, 5, 6]),
                2: (3, 28, [0, 2, 4]),
                3: (2, 42, [0, 4]),
                4: (1, 56, [0]),
                7: (1, 98, [0]),
            },
        ),
        ("h100-80gb", 15, 2, {1: (1, 26, [0])}),
        ("h100-80gb", 9, 4, {1: (3, 16, [0, 1, 2]), 2: (1, 32, [0]), 3: (1, 60, [0])}),
    ],
)
def test_compute_profiles(make, model_name, profile_id, size, expected):
    with nvml(make([model_name])):
        instance = create(gpu(), profile_id, 0, size)
        found = {}
        for enum in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, enum, 0)
            except pynvml.NVMLError_NotSupported:
                continue
            count = ctypes.c_uint(8)
            places = (pynvml.c_nvmlComputeInstancePlacement_t * 8)()
            pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance, info.id, places, ctypes.byref(count))
            starts = [place.start for place in places[: count.value]]
            found[info.sliceCount] = (info.instanceCount, info.multiprocessorCount, starts)
        assert found == expected


def test_a_double_memory_instance_has_another_compute_profile(make):
    """Seen on Hopper as "1g.24gb (ID 7)": the compute profile must be looked up, not assumed."""
    with nvml(make(["h100-80gb"])):
        instance = create(gpu(), 15, 0, 2)
        assert code(pynvml.nvmlGpuInstanceCreateComputeInstance, instance, 0) == pynvml.NVML_ERROR_INVALID_ARGUMENT
        assert code(pynvml.nvmlGpuInstanceCreateComputeInstance, instance, 7) == 0
