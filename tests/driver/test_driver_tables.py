"""The hardware that the driver simulates, seen through nvidia-ml-py."""

import ctypes

import pynvml
import pytest

from tests.support.driver_helpers import GPUS, ProfileV3, code, computes, create, full_ci, gpu, nvml, placements


@pytest.fixture(params=GPUS)
def model(request, make):
    with nvml(make([request.param])):
        yield GPUS[request.param]


def test_profile_info_by_enum_and_by_id_agrees_with_the_table(model):
    found = {}
    for enum in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu(), enum)
        except pynvml.NVMLError_NotSupported:
            continue
        except pynvml.NVMLError_InvalidArgument:  # nvidia-ml-py may know profiles of newer drivers
            break
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


def test_profile_enum_out_of_range_returns_invalid_argument(model):
    assert code(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu(), 0x11) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert code(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu(), 5) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_profile_names_agree_with_names_computed_from_memory(model):
    """Old drivers returned no names; tools compute them like this, with the same result."""
    total = pynvml.nvmlDeviceGetMemoryInfo(gpu()).total
    for name, row in model.items():
        eighths = -(-8 * row[3] * 2**20 // total)
        gigabytes = int(eighths / 8 * -(-total // 2**30) + 0.5)
        assert name.startswith(f"{row[2]}g.{gigabytes}gb")


def test_profile_enum_is_not_accepted_as_profile_id(model):
    ids = {row[0] for row in model.values()}
    for enum in {row[1] for row in model.values()} - ids:
        start, size = model[next(name for name, row in model.items() if row[1] == enum)][6:]
        assert code(create, gpu(), enum, start[0], size) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_created_instance_has_the_requested_profile_and_placement(model):
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


def test_profile_info_version_3_reports_graphics_capability(make):
    with nvml(make(["rtx-pro-6000"])):
        call = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetGpuInstanceProfileInfoV")
        for name, row in GPUS["rtx-pro-6000"].items():
            info = ProfileV3(version=ctypes.sizeof(ProfileV3) | 3 << 24)
            assert call(gpu(), row[1], ctypes.byref(info)) == 0
            assert info.name.decode() == f"MIG {name}"
            assert (info.id, info.sliceCount, info.memorySizeMB) == (row[0], row[2], row[3])
            assert bool(info.capabilities & 2) == name.endswith("+gfx")


def compute_profiles(instance, version=2):
    """The compute profiles found by iterating over the enums: {enum: description}."""
    found = {}
    for enum in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            found[enum] = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, enum, 0, version=version)
        except pynvml.NVMLError_NotSupported:
            continue
    return found


def compute_starts(instance, profile_id):
    count = ctypes.c_uint(8)
    places = (pynvml.c_nvmlComputeInstancePlacement_t * 8)()
    pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance, profile_id, places, ctypes.byref(count))
    return [place.start for place in places[: count.value]]


SEVENTH = [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("model_name", "profile_id", "size", "expected"),
    [
        # compute profile id: (name, slices, max, SMs, starts); nvidia-smi mig -lcip on an A100
        (
            "a100-40gb",
            9,
            4,
            {
                0: ("1c.3g.20gb", 1, 3, 14, [0, 1, 2]),
                1: ("2c.3g.20gb", 2, 1, 28, [0]),
                2: ("3g.20gb", 3, 1, 42, [0]),
            },
        ),
        (
            "a100-40gb",
            5,
            4,
            {
                0: ("1c.4g.20gb", 1, 4, 14, [0, 1, 2, 3]),
                1: ("2c.4g.20gb", 2, 2, 28, [0, 2]),
                3: ("4g.20gb", 4, 1, 56, [0]),
            },
        ),
        (
            "a100-40gb",
            0,
            8,
            {
                0: ("1c.7g.40gb", 1, 7, 14, SEVENTH),
                1: ("2c.7g.40gb", 2, 3, 28, [0, 2, 4]),
                2: ("3c.7g.40gb", 3, 2, 42, [0, 4]),
                3: ("4c.7g.40gb", 4, 1, 56, [0]),
                4: ("7g.40gb", 7, 1, 98, [0]),
            },
        ),
        # Ampere has no SMs to spare: a double-memory 1g has those of a plain one, and one compute profile
        ("a100-40gb", 15, 2, {0: ("1g.10gb", 1, 1, 14, [0])}),
        # B300 of kubernetes-sigs/dra-driver-nvidia-gpu issue 1454, the same on all of Hopper and later:
        # the part is profile 0, the whole profile 7
        ("h100-80gb", 15, 2, {0: ("1c.1g.20gb", 1, 1, 16, [0]), 7: ("1g.20gb", 1, 1, 26, [0])}),
        ("h200", 15, 2, {0: ("1c.1g.35gb", 1, 1, 16, [0]), 7: ("1g.35gb", 1, 1, 26, [0])}),
        ("b200", 15, 2, {0: ("1c.1g.45gb", 1, 1, 18, [0]), 7: ("1g.45gb", 1, 1, 30, [0])}),
        ("h100-80gb", 19, 1, {0: ("1g.10gb", 1, 1, 16, [0])}),
        # nvidia-smi mig -lcip on an H100, NVIDIA/go-nvml issue 146: profile 7 is present too, but is not the whole
        (
            "h100-80gb",
            14,
            2,
            {
                0: ("1c.2g.20gb", 1, 2, 16, [0, 1]),
                1: ("2g.20gb", 2, 1, 32, [0]),
                7: ("1c.2g.20gb", 1, 1, 26, [0]),
            },
        ),
        ("a100-80gb", 14, 2, {0: ("1c.2g.20gb", 1, 2, 14, [0, 1]), 1: ("2g.20gb", 2, 1, 28, [0])}),
        (
            "h100-80gb",
            9,
            4,
            {
                0: ("1c.3g.40gb", 1, 3, 16, [0, 1, 2]),
                1: ("2c.3g.40gb", 2, 1, 32, [0]),
                2: ("3g.40gb", 3, 1, 60, [0]),
            },
        ),
    ],
)
def test_compute_profiles_of_an_instance_match_nvidia_smi(make, model_name, profile_id, size, expected):
    with nvml(make([model_name])):
        instance = create(gpu(), profile_id, 0, size)
        found = {
            info.id: (
                info.name.removeprefix("MIG "),
                info.sliceCount,
                info.instanceCount,
                info.multiprocessorCount,
                compute_starts(instance, info.id),
            )
            for info in compute_profiles(instance).values()
        }
        assert found == expected


@pytest.mark.parametrize(("profile", "sms", "name"), [(0, 16, "1c.1g.20gb"), (7, 26, "1g.20gb")])
def test_double_memory_instance_accepts_a_partial_or_full_compute_instance(make, profile, sms, name):
    """Both one-slice profiles take its one compute slice; the partial one leaves 10 SMs unused."""
    machine = make(["h100-80gb"])
    with nvml(machine):
        instance = create(gpu(), 15, 0, 2)
        compute = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, profile)
        device = pynvml.nvmlComputeInstanceGetInfo_v2(compute).device
        assert pynvml.nvmlDeviceGetAttributes(device).multiprocessorCount == sms
        assert pynvml.nvmlDeviceGetName(device).endswith(f" MIG {name}")
        assert machine.dump()["gpus"][0]["instances"][0]["compute_instances"][0]["profile"] == name
        for other in (0, 7):
            capacity = pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, other)
            assert capacity == 0
            refused = code(pynvml.nvmlGpuInstanceCreateComputeInstance, instance, other)
            assert refused == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
        assert [len(computes(instance, p)) for p in (0, 7)] == [profile == 0, profile == 7]


def test_compute_instances_never_exceed_the_sms_of_their_gpu_instance(make):
    """Of 32 SMs, a compute instance with 26 leaves no room for one with 16, though one slice is left."""
    with nvml(make(["h100-80gb"])):
        instance = create(gpu(), 14, 0, 2)
        capacity = pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity
        assert [capacity(instance, profile) for profile in (0, 1, 7)] == [2, 1, 1]
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 7)
        assert [capacity(instance, profile) for profile in (0, 1, 7)] == [0, 0, 0]
        refused = code(pynvml.nvmlGpuInstanceCreateComputeInstance, instance, 0)
        assert refused == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
