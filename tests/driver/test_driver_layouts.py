"""Which instances fit on a GPU together: the driver compared with rules written independently here."""

import ctypes
from itertools import combinations

import pynvml
import pytest

from tests.support.driver_helpers import GPUS, code, create, gpu, nvml, placements

# Media engines (decoders, JPEG, OFA) by profile where instances compete for them, and what the GPU has.
ENGINES = {
    "a30": ({"1g.6gb+me": (1, 1, 1), "2g.12gb": (2, 0, 0), "2g.12gb+me": (2, 1, 1), "4g.24gb": (4, 1, 1)}, (4, 1, 1)),
    "rtx-pro-6000": (
        {
            "1g.24gb": (1, 1, 0),
            "1g.24gb+me": (1, 1, 1),
            "1g.24gb+gfx": (1, 1, 0),
            "1g.24gb+me.all": (4, 4, 1),
            "2g.48gb": (2, 2, 0),
            "2g.48gb+gfx": (2, 2, 0),
            "2g.48gb+me.all": (4, 4, 1),
            "4g.96gb": (4, 4, 1),
            "4g.96gb+gfx": (4, 4, 1),
        },
        (4, 4, 1),
    ),
}


def fits(model, taken, name, start):
    rows = GPUS[model]
    slices = max(row[2] for row in rows.values())
    size = rows[name][7]
    needs, has = ENGINES.get(model, ({}, (0, 0, 0)))
    together = [*(other for other, _ in taken), name]
    return (
        sum(rows[other][2] for other in together) <= slices
        and sum(other == name for other in together) <= rows[name][5]
        and all(start >= at + rows[other][7] or at >= start + size for other, at in taken)
        and all(sum(needs.get(other, (0, 0, 0))[i] for other in together) <= has[i] for i in range(3))
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["a30", "a100-40gb", "h100-80gb", "rtx-pro-6000"])
def test_exactly_the_legal_layouts_can_be_created(make, model):
    rows = GPUS[model]
    places = [(name, start) for name, row in rows.items() for start in row[6]]
    seen = 0

    def visit(device, first, taken):
        nonlocal seen
        seen += 1
        for index, (name, start) in enumerate(places):
            legal = fits(model, taken, name, start)
            if legal and index < first:
                continue  # this set is visited in another order
            try:
                instance = create(device, rows[name][0], start, rows[name][7])
            except pynvml.NVMLError as error:
                assert not legal, (taken, name, start)
                assert error.value == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
                continue
            assert legal, (taken, name, start)
            visit(device, index + 1, [*taken, (name, start)])
            pynvml.nvmlGpuInstanceDestroy(instance)

    with nvml(make([model])):
        visit(gpu(), 0, [])
    if model in ("a100-40gb", "h100-80gb"):
        assert seen == 2319  # counted by hand-written enumeration; 723 without +me


@pytest.mark.parametrize("model", GPUS)
def test_remaining_capacity_equals_the_number_that_can_be_created(make, model):
    rows = GPUS[model]
    with nvml(make([model])):
        device = gpu()
        for first, second in combinations(rows, 2):
            base = create(device, rows[first][0], rows[first][6][-1], rows[first][7])
            promised = pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, rows[second][0])
            made = []
            for start in rows[second][6]:
                if code(create, device, rows[second][0], start, rows[second][7]) == 0:
                    made.append(pynvml.nvmlDeviceGetGpuInstanceById(device, max_id(model, start, rows[second][7])))
            assert len(made) == promised, (first, second)
            for instance in [base, *made]:
                pynvml.nvmlGpuInstanceDestroy(instance)


def max_id(model, start, size):
    return max(row[7] for row in GPUS[model].values()) // size - 1 + start // size


def test_me_all_profile_leaves_capacity_only_for_profiles_without_engines(make):
    rows = GPUS["rtx-pro-6000"]
    with nvml(make(["rtx-pro-6000"])):
        create(gpu(), rows["1g.24gb+me.all"][0], 0, 3)
        for name, row in rows.items():
            free = pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu(), row[0])
            assert (free > 0) == (name in ("1g.24gb-me", "2g.48gb-me")), name


def test_seven_1g_instances_leave_no_capacity_for_any_profile(machine):
    made = [pynvml.nvmlDeviceCreateGpuInstance(gpu(), 19) for _ in range(7)]
    ids = sorted(pynvml.nvmlGpuInstanceGetInfo(instance).id for instance in made)
    assert ids == [7, 8, 9, 10, 11, 12, 13]
    for profile_id in (19, 20, 15, 14, 9, 5, 0):
        assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu(), profile_id) == 0
    assert code(pynvml.nvmlDeviceCreateGpuInstance, gpu(), 19) == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES


def test_creation_order_matters_without_explicit_placements(machine):
    """The MIG user guide's example on an A100: 19,19,14,9 fails at the last, 9,19,14,19 does not."""
    device = gpu(1)
    for profile_id in (19, 19, 14):
        pynvml.nvmlDeviceCreateGpuInstance(device, profile_id)
    assert code(pynvml.nvmlDeviceCreateGpuInstance, device, 9) == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
    machine.reset_gpu(1)
    for profile_id in (9, 19, 14, 19):
        pynvml.nvmlDeviceCreateGpuInstance(device, profile_id)


def test_all_possible_placements_are_listed_whatever_count_says_before(machine):
    """The caller's array must be large enough; nvml.h has no error for one that is not."""
    create(gpu(), 9, 4, 4)
    assert placements(gpu(), 9) == [(0, 4), (4, 4)]
    count = ctypes.c_uint(1)
    array = (pynvml.c_nvmlGpuInstancePlacement_t * 2)()
    result = code(pynvml.nvmlDeviceGetGpuInstancePossiblePlacements, gpu(), 9, array, ctypes.byref(count))
    assert (result, count.value) == (0, 2)
    assert [(place.start, place.size) for place in array] == [(0, 4), (4, 4)]


def test_placements_before_version_2_need_an_array_and_know_no_media_extensions(machine):
    call = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetGpuInstancePossiblePlacements")
    count = ctypes.c_uint(0)
    array = (pynvml.c_nvmlGpuInstancePlacement_t * 8)()
    assert call(gpu(), 9, None, ctypes.byref(count)) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert call(gpu(), 20, array, ctypes.byref(count)) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert (call(gpu(), 9, array, ctypes.byref(count)), count.value) == (0, 2)
    assert [(place.start, place.size) for place in array[:2]] == [(0, 4), (4, 4)]


def test_compute_instances_share_one_gpu_instance(machine):
    instance = create(gpu(1), 9, 4, 4)
    two_slices = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 1)
    assert pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, 0) == 1
    assert pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, 2) == 0
    assert code(pynvml.nvmlGpuInstanceCreateComputeInstance, instance, 2) == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
    one_slice = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    infos = [pynvml.nvmlComputeInstanceGetInfo_v2(ci) for ci in (two_slices, one_slice)]
    assert [(i.id, i.placement.start, i.placement.size) for i in infos] == [(0, 0, 2), (1, 2, 1)]
    names = [pynvml.nvmlDeviceGetName(i.device) for i in infos]
    assert names == ["NVIDIA A100-SXM4-40GB MIG 2c.3g.20gb", "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb"]
    attributes = pynvml.nvmlDeviceGetAttributes(infos[1].device)
    assert (attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount) == (3, 1)
    assert (attributes.multiprocessorCount, attributes.memorySizeMB) == (14, 19968)
