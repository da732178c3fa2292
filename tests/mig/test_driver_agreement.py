"""What `Geometry` calls legal is what the driver accepts: at every legal layout, for every further slot."""

import ctypes

import pynvml
import pytest

from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.nvml import NvmlDriver
from slurm_migbatch.testbed.simdriver import GPU_MODELS
from tests.support.layouts import layouts


class RawGpu:
    """Creates and destroys bare GPU instances, without asking any geometry first."""

    def __init__(self, index, geometry):
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.ids = {info.profile: info.profile_id for info in geometry.profiles}

    def create(self, slot):
        """The instance's handle, or None where the driver refuses."""
        place = pynvml.c_nvmlGpuInstancePlacement_t(*slot.placement)
        try:
            return pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(
                self.handle, self.ids[slot.profile], ctypes.byref(place)
            )
        except pynvml.NVMLError as error:
            assert error.value in (pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return None


@pytest.fixture(scope="module")
def opened(all_models):
    with NvmlDriver(str(all_models.library)) as driver:
        yield driver


def neighbours(raw, geometry, layout, slots):
    """The driver accepts a slot beside the layout that it holds if and only if the slot fits."""
    for slot in slots:
        made = raw.create(slot)
        assert (made is not None) == geometry.fits(layout, slot), f"{slot} beside {layout}"
        if made is not None:
            pynvml.nvmlGpuInstanceDestroy(made)


# One model of each shape (4 + 4, 7 + 8, 4 + 12 slices) is walked through completely.
@pytest.mark.slow
@pytest.mark.parametrize("model", ["a30", "a100-40gb", "rtx-pro-6000"])
def test_legal_layouts_are_exactly_those_the_driver_accepts(opened, geometries, model):
    """From the empty GPU on, slots in order of their start, so each layout is built once; all refusals are checked."""
    geometry = geometries[model]
    raw = RawGpu(GPU_MODELS.index(model), geometry)
    slots = sorted(geometry.slots, key=lambda s: (s.placement, s.profile))
    seen = set()

    def walk(layout, index):
        seen.add(layout)
        for i, slot in enumerate(slots):
            fits = geometry.fits(layout, slot)
            if fits and i < index:
                continue  # leads to a layout that is built in its own order
            made = raw.create(slot)
            assert (made is not None) == fits, f"{slot} beside {layout}"
            if made is not None:
                walk(layout.add(slot), i + 1)
                pynvml.nvmlGpuInstanceDestroy(made)

    walk(EMPTY, 0)
    assert seen == set(layouts(geometry))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["a100-80gb", "h100-80gb", "h200", "b200"])
def test_single_additions_agree_with_the_driver(opened, geometries, model):
    geometry = geometries[model]
    raw = RawGpu(GPU_MODELS.index(model), geometry)
    slots = sorted(geometry.slots)
    for layout in list(layouts(geometry))[::25]:
        held = [raw.create(slot) for slot in layout]
        assert None not in held
        neighbours(raw, geometry, layout, slots)
        for made in held:
            pynvml.nvmlGpuInstanceDestroy(made)


def test_slices_created_through_the_adapter_are_as_requested(opened, geometries):
    """GPU instance, compute instance and UUID, for every slot of every model."""
    for gpu, model in zip(opened.gpus(), GPU_MODELS, strict=True):
        for slot in sorted(geometries[model].slots):
            made = gpu.create(slot)
            assert made.slot == slot
            assert made.mig_uuid.startswith("MIG-")
            assert gpu.instances() == (made,)
            gpu.destroy(made)
            assert gpu.instances() == ()
