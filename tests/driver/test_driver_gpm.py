"""GPU performance monitoring (GPM): metrics follow the simulated load of each instance. Hopper and later."""

import math
import time

import pynvml
import pytest

from slurm_migbatch.mig.nvml.gpm import LEAST_S
from slurm_migbatch.testbed.simdriver import GPU_MODELS, SimDriverError
from tests.support.driver_helpers import GPUS, code, create, create_ci, gpu, nvml, run, slice_of

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
INVALID_ARGUMENT = pynvml.NVML_ERROR_INVALID_ARGUMENT

GRAPHICS, SM, OCCUPANCY, TENSOR, DRAM = 1, 2, 3, 5, 10
PCIE_TX, PCIE_RX, NVDEC_0, NVLINK_RX = 20, 21, 30, 60


def request(first, second, *wanted):
    asked = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(wanted))
    asked.sample1, asked.sample2 = first, second
    for number, metric in enumerate(wanted):
        asked.metrics[number].metricId = metric
    return asked


def measure(first, second, *wanted):
    """The metrics between two samples; a negative return code in place of a metric that is not available."""
    answer = pynvml.nvmlGpmMetricsGet(request(first, second, *wanted))
    return [-metric.nvmlReturn if metric.nvmlReturn else metric.value for metric in answer.metrics[: len(wanted)]]


class Watch:
    """Two samples of one device or instance, and the metrics between them."""

    def __init__(self, gi_id=None, index=0):
        self.gi_id, self.index = gi_id, index
        self.first, self.second = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        self.take(self.first)

    def take(self, sample):
        if self.gi_id is None:
            pynvml.nvmlGpmSampleGet(gpu(self.index), sample)
        else:
            pynvml.nvmlGpmMigSampleGet(gpu(self.index), self.gi_id, sample)

    def metrics(self, *wanted):
        self.take(self.second)
        return measure(self.first, self.second, *wanted)

    def free(self):
        pynvml.nvmlGpmSampleFree(self.first)
        pynvml.nvmlGpmSampleFree(self.second)


@pytest.fixture
def watch(machine):
    """Creates watches on the machine's GPUs; each takes its first sample at once."""
    made = []

    def start(*args):
        made.append(Watch(*args))
        return made[-1]

    yield start
    for started in made:
        started.free()


def wait():
    """Wait until there is a figure for the memory's traffic."""
    time.sleep(LEAST_S)


def near(*values):
    return pytest.approx(list(values), abs=0.2)


@pytest.mark.parametrize("model", GPU_MODELS)
def test_gpm_is_supported_from_hopper_on(make, model):
    expected = model not in ("a30", "a100-40gb", "a100-80gb")
    with nvml(make([model])):
        assert bool(pynvml.nvmlGpmQueryDeviceSupport(gpu()).isSupportedDevice) == expected
        sample = pynvml.nvmlGpmSampleAlloc()
        assert code(pynvml.nvmlGpmSampleGet, gpu(), sample) == (0 if expected else NOT_SUPPORTED)
        row = max(GPUS[model].values(), key=lambda row: row[3])  # the most memory
        instance, _, _ = slice_of(gpu(), row[0], row[6][0], row[7])
        gi_id = pynvml.nvmlGpuInstanceGetInfo(instance).id
        assert code(pynvml.nvmlGpmMigSampleGet, gpu(), gi_id, sample) == (0 if expected else NOT_SUPPORTED)
        pynvml.nvmlGpmSampleFree(sample)


def test_instance_metrics_show_its_load_and_gpu_metrics_the_total(machine, watch):
    """3g.40gb has 60 of 132 SMs and half of the memory, 1g.10gb 16 SMs and an eighth."""
    _, _, large = slice_of(gpu(), 9, 4, 4)
    _, _, small = slice_of(gpu(), 19, 0, 1)
    machine.set_load(large, graphics=100, sm=80, occupancy=30, tensor=40, dram=60)
    machine.set_load(small, graphics=10, sm=5, dram=8)
    of_large, of_small, of_all = watch(2), watch(7), watch()
    wait()
    assert of_large.metrics(GRAPHICS, SM, OCCUPANCY, TENSOR, DRAM) == near(100, 80, 30, 40, 60)
    assert of_small.metrics(GRAPHICS, SM, OCCUPANCY, TENSOR, DRAM) == near(10, 5, 0, 0, 8)
    whole = [(60 * a + 16 * b) / 132 for a, b in ((100, 10), (80, 5), (30, 0), (40, 0))]
    assert of_all.metrics(GRAPHICS, SM, OCCUPANCY, TENSOR, DRAM) == near(*whole, 60 / 2 + 8 / 8)


def test_loads_of_compute_instances_in_one_gpu_instance_add_up(machine, watch):
    instance = create(gpu(), 9, 4, 4)
    uuids = []
    for start in range(2):
        compute = create_ci(instance, 0, start, 1)
        uuids.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlComputeInstanceGetInfo_v2(compute).device))
    machine.set_load(uuids[0], sm=90, dram=70)
    machine.set_load(uuids[1], sm=30, dram=50)
    both = watch(2)
    wait()
    # each has 16 of the instance's 60 SMs; they share its memory
    assert both.metrics(SM, DRAM) == near((90 + 30) * 16 / 60, 100)


def test_every_instance_of_a_full_gpu_can_be_busy(machine, watch):
    """Three times in a row: destroyed instances leave no load and take no place in the load table."""
    for turn in range(3):
        made = [slice_of(gpu(), 19, start, 1) for start in range(7)]
        for number, (_, _, uuid) in enumerate(made):
            machine.set_load(uuid, sm=90)
            machine.set_load(uuid, sm=10 * number + turn)
        watches = [watch(7 + start) for start in range(7)]
        assert [watch.metrics(SM)[0] for watch in watches] == near(*[10 * number + turn for number in range(7)])
        for instance, compute, _ in made:
            pynvml.nvmlComputeInstanceDestroy(compute)
            pynvml.nvmlGpuInstanceDestroy(instance)
        assert watch().metrics(SM) == near(0)


def test_metrics_are_averages_over_the_time_between_the_samples(machine, watch):
    _, _, uuid = slice_of(gpu(), 9, 4, 4)
    sampler = watch(2)
    assert sampler.metrics(SM) == near(0)
    around = []  # the time before and after each step, which happens in between

    def step(what, *args, **options):
        before = time.monotonic()
        what(*args, **options)
        around.append((before, time.monotonic()))
        time.sleep(0.05)

    step(sampler.take, sampler.first)
    step(machine.set_load, uuid, sm=100)
    step(machine.set_load, uuid, sm=0)
    step(sampler.take, sampler.second)
    (share,) = measure(sampler.first, sampler.second, SM)
    begin, on, off, end = around
    least = (off[0] - on[1]) / (end[1] - begin[0])
    most = (off[1] - on[0]) / (end[0] - begin[1])
    assert 0 < 100 * least - 0.1 <= share <= 100 * most + 0.1


def test_memory_traffic_in_less_than_a_tenth_of_a_second_is_not_a_number(machine, watch):
    _, _, uuid = slice_of(gpu(), 9, 4, 4)
    machine.set_load(uuid, sm=50, dram=50)
    sampler = watch(2)
    for _ in range(50):  # a busy machine may take longer over one of them
        sampler.take(sampler.first)
        sm, dram = sampler.metrics(SM, DRAM)
        assert sm == pytest.approx(50, abs=0.2)
        if math.isnan(dram):
            break
    assert math.isnan(dram)
    wait()
    assert sampler.metrics(SM, DRAM) == near(50, 50)


def test_a_load_ends_with_its_instance(machine, watch):
    _, compute, uuid = slice_of(gpu(), 9, 4, 4)
    machine.set_load(uuid, sm=100)
    pynvml.nvmlComputeInstanceDestroy(compute)
    assert watch().metrics(SM) == near(0)
    assert watch(2).metrics(SM) == near(0)
    with pytest.raises(SimDriverError, match="no such device"):
        machine.set_load(uuid, sm=100)


def test_pcie_traffic_is_reported_for_the_gpu_and_not_for_instances(machine, watch):
    _, _, large = slice_of(gpu(), 9, 4, 4)
    _, _, small = slice_of(gpu(), 19, 0, 1)
    machine.set_load(large, pcie_tx=1000, pcie_rx=5)
    machine.set_load(small, pcie_tx=200)
    # NVLink is not available on a partitioned GPU
    assert watch().metrics(PCIE_TX, PCIE_RX, NVLINK_RX) == pytest.approx([1200, 5, -NOT_SUPPORTED], rel=0.01)
    assert watch(2).metrics(PCIE_TX, NVLINK_RX) == [-NOT_SUPPORTED, -NOT_SUPPORTED]


def test_nvlink_metrics_are_reported_without_mig(make):
    machine = make(["h200"], mig=False)
    with nvml(machine):
        machine.set_load(pynvml.nvmlDeviceGetUUID(gpu()), nvlink_rx=9000, sm=50)
        whole_gpu = Watch()
        assert whole_gpu.metrics(NVLINK_RX, SM) == pytest.approx([9000, 50], rel=0.01)
        assert code(pynvml.nvmlGpmMigSampleGet, gpu(), 0, whole_gpu.first) == INVALID_ARGUMENT
        whole_gpu.free()


def test_each_metric_has_its_own_return_code(machine, watch):
    slice_of(gpu(), 9, 4, 4)  # three decoders
    sampler = watch(2)
    assert sampler.metrics(SM, 0, 5000, NVDEC_0 + 2, NVDEC_0 + 3, 8, 399) == [
        0,
        -INVALID_ARGUMENT,
        -INVALID_ARGUMENT,
        0,
        -NOT_SUPPORTED,
        0,
        -NOT_SUPPORTED,
    ]
    answer = pynvml.nvmlGpmMetricsGet(request(sampler.first, sampler.second, SM, PCIE_TX))
    assert answer.metrics[0].metricInfo.unit == b"%"
    assert answer.metrics[0].metricInfo.shortName == b"smutil"


def test_samples_of_different_devices_or_in_wrong_order_are_rejected(machine, watch):
    instance, compute, _ = slice_of(gpu(), 9, 4, 4)
    slice_of(gpu(), 19, 0, 1)
    large, small, whole = watch(2), watch(7), watch()
    large.take(large.second)
    for first, second in (
        (large.first, small.first),
        (large.first, whole.first),
        (large.second, large.first),  # the wrong way round
        (large.first, large.first),
        (large.first, small.second),  # nothing in it
        (large.first, None),
    ):
        assert code(pynvml.nvmlGpmMetricsGet, request(first, second, SM)) == INVALID_ARGUMENT
    pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(instance)
    slice_of(gpu(), 9, 4, 4)
    large.take(large.second)  # another instance with the same id
    assert code(pynvml.nvmlGpmMetricsGet, request(large.first, large.second, SM)) == INVALID_ARGUMENT


def test_gpm_calls_with_wrong_arguments_are_rejected(machine, watch):
    _, _, uuid = slice_of(gpu(), 9, 4, 4)
    sampler = watch(2)
    sampler.take(sampler.second)
    device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    assert code(pynvml.nvmlGpmQueryDeviceSupport, device) == NOT_SUPPORTED
    assert code(pynvml.nvmlGpmSampleGet, device, sampler.first) == NOT_SUPPORTED
    assert code(pynvml.nvmlGpmMigSampleGet, gpu(), 1, sampler.first) == pynvml.NVML_ERROR_NOT_FOUND
    assert code(pynvml.nvmlGpmSampleFree, None) == INVALID_ARGUMENT
    wrong = request(sampler.first, sampler.second, SM)
    wrong.version = 9
    assert code(pynvml.nvmlGpmMetricsGet, wrong) == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    wrong.version, wrong.numMetrics = 1, 0
    assert code(pynvml.nvmlGpmMetricsGet, wrong) == INVALID_ARGUMENT
    spare = pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmSampleFree(spare)
    assert code(pynvml.nvmlGpmSampleFree, spare) == INVALID_ARGUMENT
    assert code(pynvml.nvmlGpmSampleGet, gpu(), spare) == INVALID_ARGUMENT


def test_simulated_load_is_visible_in_another_process(machine):
    _, _, uuid = slice_of(gpu(), 9, 4, 4)
    machine.set_load(uuid, sm=75)
    out = run(
        machine,
        """
pynvml.nvmlInit()
samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
for sample in samples:
    pynvml.nvmlGpmMigSampleGet(gpu(), 2, sample)
    time.sleep(0.02)
asked = pynvml.c_nvmlGpmMetricsGet_t(version=1, numMetrics=1, sample1=samples[0], sample2=samples[1])
asked.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
print(round(pynvml.nvmlGpmMetricsGet(asked).metrics[0].value))
""",
    )
    assert out.strip() == "75"


@pytest.mark.parametrize(
    ("figures", "message"),
    [({"sms": 5}, "unknown load 'sms'"), ({"sm": 100.5}, "not valid"), ({"sm": -1}, "not less than 0")],
)
def test_invalid_loads_are_rejected_by_name(machine, figures, message):
    _, _, uuid = slice_of(gpu(), 9, 4, 4)
    with pytest.raises(SimDriverError, match=message):
        machine.set_load(uuid, **figures)


def test_load_cannot_be_set_on_a_partitioned_gpu(machine):
    with pytest.raises(SimDriverError, match="in use"):
        machine.set_load(pynvml.nvmlDeviceGetUUID(gpu()), sm=5)
