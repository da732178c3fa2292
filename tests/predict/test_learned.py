"""The predictor without a measurement follows the hardware, not the g in a profile's name, and states uncertainty."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.lab.sim import gpus
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.predict.candidate import Figures
from slurm_migbatch.predict.cells import GpuSpec, shares_of
from slurm_migbatch.predict.facts import BUILT_IN, ModelFacts
from slurm_migbatch.predict.known import ModelKnowledge, from_facts
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.llm.speed import TokenFigures
from slurm_migbatch.predict.requests import canonical
from slurm_migbatch.predict.samples import samples_of
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.predict.sheet import Block
from slurm_migbatch.predict.state import Learned
from slurm_migbatch.predict.training import learn
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.table import read_folder
from slurm_migbatch.workload.buckets import Bucket
from slurm_migbatch.workload.catalog import GpuKind, Partition
from slurm_migbatch.workload.gpufacts import facts_of, guess
from slurm_migbatch.workload.hints import parse
from slurm_migbatch.workload.refusal import Refusal
from tests.support.gpu_kinds import A100_40, H100, P
from tests.support.gpu_kinds import info as profile_info
from tests.support.shown_calls import ROOT

PRIOR = LearnedPredictor()
cells = st.builds(
    lambda facts, role, batch, size: Bucket(facts.name, role, batch, size, facts.unit),
    st.sampled_from(BUILT_IN),
    st.sampled_from(["infer", "train"]),
    st.sampled_from([1, 4, 32, 256]),
    st.sampled_from([64, 128, 224, 512]),
)
kinds = st.sampled_from([H100, A100_40])


@given(cells, kinds)
def test_more_hardware_is_never_slower(cell: Bucket, kind: GpuKind) -> None:
    figures = PRIOR.figures(cell, kind)
    offers = [(i.sm_count, i.memory_slices, figures[i.profile]) for i in kind.geometry.profiles if i.profile in figures]
    for small_sm, small_memory, small in offers:
        for large_sm, large_memory, large in offers:
            if small_sm <= large_sm and small_memory <= large_memory:
                assert small.latency_s.mid >= large.latency_s.mid * 0.999999


@pytest.mark.parametrize("model", ["our-net", "resnet50"])
@pytest.mark.parametrize("seconds", [0.005, 0.014, 0.05])
def test_slices_with_more_hardware_may_be_slow_if_a_smaller_one_may_be(model: str, seconds: float) -> None:
    """After one point of a small batch the host may be all that takes time, or the device: then larger slices are
    slow, too, and their intervals must include it."""
    point = Measurement("h100-80gb", model, "cnn", profile="1g.10gb", batch=1, latency_s=seconds)
    predictor = LearnedPredictor(learn([point], ModelKnowledge()))
    for batch in (1, 4, 16, 64):
        figures = predictor.figures(Bucket(model, "infer", batch, 224, "px"), H100)
        infos = [info for info in H100.geometry.profiles if info.profile in figures]
        for small, large in itertools.permutations(infos, 2):
            if small.sm_count <= large.sm_count and small.memory_slices <= large.memory_slices:
                more = max(large.sm_count / small.sm_count, large.memory_slices / small.memory_slices)
                longest = figures[large.profile].latency_s.high * 1.000001
                assert longest * more >= figures[small.profile].latency_s.high


@given(cells, kinds)
def test_intervals_are_ordered_and_wide(cell: Bucket, kind: GpuKind) -> None:
    for figures in PRIOR.figures(cell, kind).values():
        for interval in (figures.latency_s, figures.throughput_per_s, figures.memory_mib):
            assert 0 < interval.low < interval.mid < interval.high
        assert figures.latency_us >= figures.latency_s.high * 1e6
        assert figures.rate <= figures.throughput_per_s.low * 1e3


@given(cells)
def test_training_takes_more_time_and_memory_than_inference(cell: Bucket) -> None:
    def of(role: str) -> Figures:
        return PRIOR.figures(Bucket(cell.model, role, cell.batch, cell.input, cell.unit), H100)[P("7g.80gb")]

    assert of("train").latency_s.mid > of("infer").latency_s.mid
    assert of("train").memory_mib.mid > of("infer").memory_mib.mid


def test_prior_scales_with_sms_and_memory_slices() -> None:
    """On an H100 3g has 60 SMs and 4g 64; 1g.20gb has 26, 1.6 times those of 1g.10gb."""
    figures = PRIOR.figures(Bucket("vgg19", "infer", 64, 224, "px"), H100)

    def ratio(one: str, two: str) -> float:
        return figures[P(one)].latency_s.mid / figures[P(two)].latency_s.mid

    assert 1.0 < ratio("3g.40gb", "4g.40gb") < 64 / 60  # never 4/3: time follows the SMs
    assert 1.4 < ratio("1g.10gb", "1g.20gb") < 2.0
    assert 5.0 < ratio("1g.10gb", "7g.80gb") <= 132 / 16


def test_small_batch_is_host_bound() -> None:
    figures = PRIOR.figures(Bucket("densenet201", "infer", 1, 224, "px"), H100)
    assert figures[P("3g.40gb")].latency_s.mid == pytest.approx(figures[P("7g.80gb")].latency_s.mid, rel=0.02)


def test_memory_of_known_models_is_in_the_published_range() -> None:
    llama = PRIOR.figures(Bucket("llama-3.1-8b", "infer", 1, 512, "tok"), H100)[P("7g.80gb")].memory_mib
    assert 15_000 < llama.mid < 20_000
    bert = PRIOR.figures(Bucket("bert-large", "infer", 8, 128, "tok"), H100)[P("7g.80gb")].memory_mib
    assert 1_500 < bert.mid < 4_000


def test_unknown_models_have_no_figures() -> None:
    assert PRIOR.figures(Bucket("mine", "infer", 1, 1, "tok"), H100) == {}


def test_a_larger_batch_or_input_never_needs_less_time_or_memory() -> None:
    """Intervals narrow close to measured points and far from those of another laboratory: their ends could decrease."""
    rows = [
        Measurement(
            "a100-40gb", model, "encoder", "train", "7g.40gb", 7, 8, 98, batch, size, latency_s=0.02 * batch,
            memory_mib=2000.0 + extra * batch * size / 128,
        )
        for model, extra in (("bert-base", 150.0), ("mine", 260.0), ("theirs", 90.0))
        for batch, size in ((2, 128), (16, 128), (32, 256))
    ]  # fmt: skip
    predictor = LearnedPredictor(learn(rows, ModelKnowledge()))
    for model, role, kind in itertools.product(("bert-base", "mine", "vit-b-16"), ("infer", "train"), (H100, A100_40)):
        grid = predictor.grids()[model]
        batches, inputs = (*grid.batches, 2 * grid.batches[-1]), grid.inputs
        block = Block(model, role, batches, inputs)
        seconds, mib = predictor.sheet(block, kind)[[0, 2]].reshape(2, 3, len(batches), len(inputs), -1)
        for ends in (seconds, mib):
            assert (np.diff(ends, axis=1) >= 0).all() and (np.diff(ends, axis=2) >= 0).all(), (model, role, kind.name)
        for batch, size in itertools.product(batches[::7], inputs[::5]):
            slice_figures = predictor.figures(Bucket(model, role, batch, size, grid.unit), kind)
            for name, all_ends in (("latency_s", seconds), ("memory_mib", mib)):
                ends = all_ends[:, batches.index(batch), inputs.index(size)].T.tolist()
                assert [getattr(figures, name).to_list() for figures in slice_figures.values()] == ends


@pytest.mark.parametrize("model", gpus.models())
def test_slice_whose_row_names_only_the_profile_has_the_shares_that_its_gpu_reports(model: str) -> None:
    geometry = gpus.geometry(model)
    rows = [
        Measurement(geometry.name, "resnet50", profile=info.profile.name, latency_s=1.0) for info in geometry.profiles
    ]
    gpu = GpuSpec.of_rows(rows)
    for row, info in zip(rows, geometry.profiles, strict=True):
        shares = info.sm_count / gpu.facts.sm_count, info.memory_slices / geometry.memory_slices
        assert shares_of(row, gpu) == pytest.approx(shares), row.profile
        counted = replace(row, compute_slices=info.compute_slices, memory_slices=info.memory_slices)
        assert shares_of(counted, gpu) == pytest.approx(shares), row.profile


@pytest.mark.parametrize("profiles", [["1g.20gb"], ["1g.20gb", "3g.40gb", "7g.80gb"]])
def test_points_of_a_table_without_sm_counts_lie_within_their_own_intervals(profiles: list[str]) -> None:
    infos = [H100.geometry.info(P(profile)) for profile in profiles]
    rows = [
        Measurement(
            "NVIDIA H100 80GB HBM3", "resnet50", profile=info.profile.name, batch=batch, input_size=224,
            latency_s=0.002 + 0.0003 * batch * 132 / info.sm_count,
        )
        for info in infos for batch in (8, 32, 128)
    ]  # fmt: skip
    predictor = LearnedPredictor(learn(rows, ModelKnowledge()))
    for row in rows:
        seconds = predictor.figures(Bucket("resnet50", "infer", row.batch, 224, "px"), H100)[P(row.profile)].latency_s
        assert seconds.low <= (row.latency_s or 0.0) <= seconds.high, row


def _measured_on(gpu: str, profiles: list[str], share: float = 1.0) -> list[Measurement]:
    """ResNet-50 on slices of an H200, as `migbatch profile run` writes it, under some name of the GPU."""
    geometry, rows = gpus.geometry("h200"), []
    for profile in profiles:
        info = geometry.info(P(profile)) if profile else geometry.full
        shown = (profile, info.compute_slices, info.memory_slices, info.sm_count) if profile else ("", None, None, 132)
        for batch, seconds in ((1, 0.01), (8, 0.02), (64, 0.12)):
            rows.append(
                Measurement(
                    gpu, "resnet50", "cnn", "infer", *shown, batch, 224, memory_mib=2000.0 + 20 * batch,
                    latency_s=share * seconds * 16 / info.sm_count, source="migbatch profile run",
                )
            )  # fmt: skip
    return rows


@pytest.mark.parametrize("profiles", [["1g.18gb"], ["1g.18gb", "3g.71gb"], ["1g.18gb", "7g.141gb"], [""]])
def test_unlisted_gpu_uses_its_own_measurements(profiles: list[str]) -> None:
    """Slices show neither the memory nor the SMs of the whole GPU, and the driver's name shows neither."""
    kind = GpuKind("x999-141gb", gpus.geometry("h200"), 400.0, 3500.0, 132)
    predictor = LearnedPredictor(learn(_measured_on("NVIDIA X999", profiles), ModelKnowledge()))
    figures = predictor.figures(Bucket("resnet50", "infer", 64, 224, "px"), kind)
    seconds = figures[P(profiles[0] or "7g.141gb")].latency_s
    assert seconds.mid == pytest.approx(0.12 if profiles[0] else 0.12 * 16 / 132, rel=0.1)
    assert seconds.high < 1.25 * seconds.mid


@pytest.mark.parametrize(
    ("slices", "measured"),
    [(4, (1,)), (4, (1, 2)), (4, (1, 2, 4)), (8, (1, 2, 4, 8)), (10, (1, 2, 5, 10))],
)
def test_unlisted_gpu_may_have_any_number_of_slices(slices: int, measured: tuple[int, ...]) -> None:
    """The compute slices of the whole GPU follow from its own measurements, or if it has four from any slice."""
    sizes = [size for size in range(1, slices + 1) if slices % size == 0]
    infos = [
        profile_info(f"{size}g.{24 * size}gb", size, size, 24000 * size, 20 * size, slices // size) for size in sizes
    ]
    kind = GpuKind(f"x999-{24 * slices}gb", Geometry("NVIDIA X999", infos), *guess(20 * slices, 24 * slices)[:2])
    rows = [
        Measurement(
            kind.name, "resnet50", "cnn", "infer", part.profile.name, part.compute_slices, part.memory_slices,
            part.sm_count, batch, 224, latency_s=0.004 * batch / part.compute_slices, source="runs",
        )
        for part in infos if part.compute_slices in measured for batch in (16, 32, 128)
    ]  # fmt: skip
    predictor = LearnedPredictor(learn(rows, ModelKnowledge()))
    for part in infos:
        seconds = predictor.figures(Bucket("resnet50", "infer", 128, 224, "px"), kind)[part.profile].latency_s
        assert seconds.low <= 0.512 / part.compute_slices <= seconds.high, part.profile


@pytest.mark.parametrize(
    ("gpu", "profiles", "name", "bandwidth"),
    [
        ("A100", ["3g.20gb", "1g.10gb"], "a100-40gb", 1555),
        ("NVIDIA A100", ["1g.5gb"], "a100-40gb", 1555),
        ("A100", ["7g.40gb"], "a100-40gb", 1555),
        ("A100", ["1g.10gb", "1g.20gb", "3g.40gb"], "a100-80gb", 2039),
        ("A100", [""], "a100-80gb", 2039),
        ("H200", ["2g.35gb", "1g.18gb"], "h200-141gb", 4800),
        ("NVIDIA A30", ["1g.6gb", "2g.12gb"], "a30-24gb", 933),
        ("NVIDIA GH200 144G HBM3e", ["1g.18gb"], "gh200-144gb", 4900),
    ],
)
def test_memory_that_the_name_of_a_gpu_leaves_out_follows_from_its_slices(
    gpu: str, profiles: list[str], name: str, bandwidth: float
) -> None:
    spec = GpuSpec.of_rows([Measurement(gpu, "resnet50", profile=profile, latency_s=0.1) for profile in profiles])
    assert (spec.name, spec.facts.bandwidth_gbs) == (name, bandwidth)


def test_measurements_and_runs_of_an_unlisted_gpu_are_merged() -> None:
    rows = [*_measured_on("NVIDIA X999", ["1g.18gb"]), *_measured_on("x999-141gb", ["3g.71gb"], 1.02)]
    found = samples_of(rows, ModelKnowledge())
    assert {(sample.gpu.name, len(sample.rows)) for sample in found} == {("x999-141gb", 6)}
    slow = [*_measured_on("x999-141gb", ["1g.18gb"]), *_measured_on("x999-80gb", ["1g.18gb", "3g.71gb"], 3.0)]
    learned = learn(slow, ModelKnowledge())
    for name in ("x999-141gb", "x999-80gb", "h200-141gb", "y1-141gb"):
        gpu = GpuSpec(name, guess(132, 141), 141)
        assert learned.as_measured(gpu) == gpu, "each has its own measurements, or none"
    listed = [*_measured_on("NVIDIA H200", ["1g.18gb"]), *_measured_on("NVIDIA H200 NVL", ["3g.71gb"])]
    assert len(samples_of(listed, ModelKnowledge())) == 2


@pytest.mark.parametrize(
    ("gpu", "profiles", "site"),
    [("NVIDIA GB300", ["1g.35gb"], "gb300-278gb"), ("NVIDIA GB300", [""], "gb300-278gb"),
     ("NVIDIA GB300", ["7g.278gb"], "gb300-251gb"), ("NVIDIA GB200", ["1g.23gb"], "gb200-189gb")],
)  # fmt: skip
def test_measurements_hold_under_another_drivers_names_of_profiles(gpu: str, profiles: list[str], site: str) -> None:
    """Drivers name the full profile of a GB300 7g.278gb or 7g.251gb, boards that of a GB200 7g.186gb or 7g.189gb."""
    rows = [
        Measurement(gpu, "resnet50", profile=profile, batch=batch, latency_s=0.01 * batch)
        for profile in profiles
        for batch in (8, 32)
    ]
    learned = learn(rows, ModelKnowledge())
    facts = facts_of(gpu)
    assert facts is not None
    spec = learned.as_measured(GpuSpec(site, facts, int(site.rpartition("-")[2].removesuffix("gb"))))
    assert ("resnet50", "infer", spec.name) in learned.fitted
    other = GpuSpec("gb300-144gb", facts, 144)
    assert learned.as_measured(other) == other


def test_built_in_model_names_and_aliases_are_unique() -> None:
    names = [name for facts in BUILT_IN for name in (facts.name, *facts.aliases)]
    assert len(names) == len(set(names))


def test_operations_grow_faster_than_linearly_with_the_input_length() -> None:
    facts = next(facts for facts in BUILT_IN if facts.name == "bert-base")
    assert facts.operations(4096) > 32 * facts.operations(128)
    assert isinstance(facts, ModelFacts)


@pytest.mark.parametrize(
    ("model", "role", "batch", "least", "most"),
    [
        ("resnet50", "infer", 256, 3, 12),
        ("resnet50", "train", 64, 5, 12),
        ("vgg16", "train", 32, 4, 10),
        ("densenet121", "train", 64, 7, 15),
        ("vit-b-16", "infer", 256, 3, 10),
        ("vit-b-16", "train", 64, 8, 16),
    ],
)
def test_prior_memory_is_in_the_range_of_eager_pytorch(
    model: str, role: str, batch: int, least: float, most: float
) -> None:
    """GiB that users commonly report for eager PyTorch in fp32."""
    figures = PRIOR.figures(Bucket(model, role, batch, 224, "px"), H100)[P("7g.80gb")]
    assert least < figures.memory_mib.mid / 1024 < most
    assert figures.memory_mib.high / 1024 < 3.5 * most


@pytest.mark.parametrize(
    ("name", "smaller"),
    [
        ("microsoft/swin-base-patch4-window7-224", "swin-t"),
        ("facebook/convnext-large-224", "convnext-tiny"),
        ("google/efficientnet-b7", "efficientnet-b4"),
        ("efficientnet_b5", "efficientnet-b4"),
        ("resnext101_32x8d", "resnet101"),
        ("wide_resnet50_2", "resnet50"),
        ("facebook/deit-small-patch16-224", ""),
        ("google/vit-huge-patch14-224-in21k", "vit-l-16"),
        ("facebook/detr-resnet-50", "resnet50"),
        ("regnet_y_32gf", ""),
        ("yolov8x", "yolov8n"),
        ("yolov8n-seg.pt", "yolov8n"),
        ("yolov8m-pose", "yolov8m"),
        ("ultralytics/yolo11l-obb", "yolo11l"),
        ("yolov11x_cls.pt", "yolo11n-cls"),
        ("yolov9s", "yolov9t"),
        ("yolo12x.pt", "yolo12l"),
        ("yolo26m-seg", "yolo26m"),
        ("rt-detr-x", "rtdetr-l"),
        ("torchvision/deeplabv3_resnet101", "deeplabv3-resnet50"),
        ("nvidia/segformer-b5", "segformer-b0"),
        ("nvidia/segformer-b5-finetuned-ade-640-640", "segformer-b5"),
        ("google/vit-base-patch16-224-in21k", "deit-s"),
        ("microsoft/swin-large-patch4-window7-224-in22k", "swin-b"),
        ("facebook/convnext-base-224-22k-1k", "convnext-small"),
        ("microsoft/swinv2-base-patch4-window8-256", "swin-v2-t"),
        ("timm/mobilenetv3_large_100.ra_in1k", "mobilenet-v3-small"),
        ("timm/eva02_large_patch14_448.mim_m38m_ft_in22k_in1k", "eva02-base"),
        ("eva02_base_patch14_224.mim_in22k", "eva02-small"),
        ("torchvision/densenet161", "densenet121"),
        ("vgg13_bn", "vgg11_bn"),
        ("timm/regnetx_320.tv2_in1k", "regnet_x_16gf"),
        ("resnext101_64x4d", "resnext50_32x4d"),
        ("mnasnet1_3", "mnasnet0_75"),
        ("shufflenet_v2_x2_0", "shufflenet_v2_x0_5"),
        ("timm/inception_v4.tf_in1k", "inception_v3"),
        ("legacy_senet154", "seresnext50_32x4d"),
        ("microsoft/beit-base-patch16-224", "vit-tiny"),
        ("facebook/deit-tiny-patch16-224", ""),
        ("timm/vit_small_patch16_224.augreg_in21k", "vit_tiny_patch16_224"),
        ("google/mobilenet_v1_1.0_224", ""),
        ("nasnetalarge", "mixer_b16_224"),
    ],
)
def test_public_vision_models_are_known_under_their_usual_names(name: str, smaller: str) -> None:
    predictor = LearnedPredictor()
    canonical = predictor.knowledge.canonical(name)
    assert canonical in predictor.grids()
    if smaller:
        one, other = (predictor.knowledge.of(model) for model in (smaller, canonical))
        assert other.traffic_mib > one.traffic_mib and other.flops > one.flops


@pytest.mark.parametrize(("model", "rough_gb"), [("yolov8n", 2.5), ("yolov8s", 3.8), ("yolov8m", 7.0)])
def test_training_memory_of_yolo_is_of_the_order_of_its_own_trainers(model: str, rough_gb: float) -> None:
    """Rough, not measured: what Ultralytics logs at 640 pixels in batches of 16, without the CUDA context."""
    need = PRIOR.figures(Bucket(model, "train", 16, 640, "px"), H100)[P("7g.80gb")].need_mib
    used = rough_gb * 1e9 / 2**20 + 500
    assert used <= need <= 2.4 * used


def test_names_that_differ_only_by_hyphens_are_the_same_model_unless_two_have_them() -> None:
    knowledge = ModelKnowledge()
    assert knowledge.canonical("ResNet_50") == knowledge.canonical("resnet50") == "resnet50"
    assert knowledge.canonical("regnet_y_1_6gf") == "regnet-y-1.6gf" != knowledge.canonical("regnet_y_16gf")
    assert knowledge.canonical("regnet_y_3_2gf") == "regnet-y-3.2gf" != knowledge.canonical("regnet_y_32gf")


@pytest.mark.parametrize(
    "name", ["yolov8n.pt", "ultralytics/yolov8n.onnx", "YOLOv8n.engine", "yolov8n", "yolov8n.v2_coco", "yolov8n.v2.pt"]
)
def test_name_of_a_models_file_is_the_models_name(name: str) -> None:
    assert ModelKnowledge().canonical(name) == "yolov8n"
    grids, aliases = LearnedPredictor().grids(), LearnedPredictor().aliases()
    assert canonical(name.lower(), grids, aliases) == "yolov8n"


def test_ending_is_part_of_a_name_that_has_figures_with_it() -> None:
    own = replace(next(facts for facts in BUILT_IN if facts.name == "resnet50"), name="faces.onnx", aliases=("f.pt",))
    knowledge = ModelKnowledge([*BUILT_IN, own])
    assert knowledge.canonical("faces.onnx") == knowledge.canonical("f.pt") == "faces.onnx"
    assert knowledge.canonical("faces.pt") == "faces"
    assert canonical("faces.onnx", {"faces.onnx": LearnedPredictor().grids()["resnet50"]}, {}) == "faces.onnx"


def test_live_memory_of_images_is_as_measured() -> None:
    """Growth of PyTorch's peak with the batch; the specifications are of another run on another machine of the kind."""
    knowledge = ModelKnowledge()
    peaks: dict[tuple[str, int], dict[int, float]] = {}
    for row in read_folder(ROOT / "measurements"):
        if row.kind == "infer" and row.family in ("cnn", "vit") and row.memory_mib and row.input_size:
            peaks.setdefault((row.model, row.input_size), {})[row.batch] = row.memory_mib
    assert len(peaks) >= 11
    for (model, size), by_batch in peaks.items():
        few, many = min(by_batch), max(by_batch)
        known = knowledge.of(model)
        measured = (by_batch[many] - by_batch[few]) / (many - few)
        assert known.alive_mib * known.volume(size) == pytest.approx(measured, rel=0.1), model


def test_training_with_autocast_takes_half_of_what_is_kept_in_32_bits() -> None:
    """As measured: 16-bit activations, of which some are kept in both widths."""
    peaks: dict[str, dict[int, float]] = {}
    for row in read_folder(ROOT / "measurements"):
        if row.kind == "train" and row.family in ("cnn", "vit") and row.memory_mib:
            peaks.setdefault(row.model, {})[row.batch] = row.memory_mib
    assert len(peaks) >= 2
    for model, by_batch in peaks.items():
        few, many = min(by_batch), max(by_batch)
        measured = (by_batch[many] - by_batch[few]) / (many - few)
        assert 0.5 < measured / ModelKnowledge().of(model).kept_mib < 0.6, model


def test_specifications_of_a_site_can_state_what_training_keeps() -> None:
    net = ModelFacts("net", "cnn", 20, 4, "px", 224, 200, activation_mib=10)
    assert from_facts(net).kept_mib == 80
    assert from_facts(replace(net, kept_mib=150)).kept_mib == 150


def test_a_backward_pass_keeps_more_than_a_forward_pass_holds() -> None:
    for name in LearnedPredictor().grids():
        known = ModelKnowledge().of(name)
        assert known.kept_mib > known.alive_mib, name


def test_a_language_model_that_only_a_table_names_is_described_by_its_architecture() -> None:
    """Most tables have no parameters and operations; the mean of the built-in models would be 0.3 GiB of weights."""
    knowledge = ModelKnowledge()
    row = Measurement("a100-80gb", "meta-llama/Llama-2-7b-hf", "", "infer", "", None, None, None, 1, 512, latency_s=0.1)
    known = knowledge.of(row.model, [row])
    assert (known.family, known.unit, known.doubt) == ("decoder", "tok", 1)
    assert known.params == pytest.approx(6.74e9, rel=0.01) and known.weight_mib == pytest.approx(12853, rel=0.01)
    assert known.flops == pytest.approx(2 * 6.6e9 * 512, rel=0.05)
    encoder = knowledge.of("BAAI/bge-large-en-v1.5")
    assert (encoder.family, encoder.doubt) == ("encoder", 0) and encoder.params == pytest.approx(335e6, rel=0.02)
    counted = knowledge.of(row.model, [Measurement(**{**vars(row), "flops_per_item": 7e12})])
    assert counted.flops == 7e12 and counted.params == pytest.approx(6.74e9, rel=0.01)
    assert ModelKnowledge(()).of(row.model, [row]).doubt == 2, "`eval predictor --blind` uses no specifications"
    unlisted = knowledge.of("our-own-net", [row])
    assert unlisted.doubt == 2


@pytest.mark.parametrize(
    ("model", "weights", "item", "kept"),
    [("stable-diffusion-xl", 6614, 5120, 7936), ("sam2-hiera-large", 856, 1720, 12496), ("sdxl", 6614, 5120, 7936)],
)
def test_larger_batches_and_training_of_a_generator_measured_at_one_image_need_more(
    model: str, weights: float, item: float, kept: float
) -> None:
    """A table of one batch without parameters; the mean of the built-in models would add 25 MiB for an image."""
    rows = [
        Measurement("h100-80gb", model, "cnn", "infer", profile, None, None, None, 1, 1024, latency_s=seconds,
                    memory_mib=1000 + weights + item / 1.5)
        for profile, seconds in (("3g.40gb", 6.0), ("7g.80gb", 3.0))
    ]  # fmt: skip
    predictor = LearnedPredictor(learn(rows, ModelKnowledge()))

    def need(role: str, batch: int) -> float:
        bucket = Bucket(predictor.knowledge.canonical(model), role, batch, 1024, "px")
        return predictor.figures(bucket, H100)[P("7g.80gb")].need_mib

    assert need("infer", 4) > weights + 4 * item / 1.5
    assert need("train", 8) > 4 * weights + 8 * kept
    assert ModelKnowledge(()).of(model, rows).doubt == 2, "`eval predictor --blind` uses no specifications"


def of_inference(model: str, memory_mib: float, input_size: int | None = None) -> list[Measurement]:
    """A laboratory's table of one model, which it did not train; most such tables state no input size."""
    return [
        Measurement("h100-80gb", model, "", "infer", profile, None, None, None, batch, input_size,
                    latency_s=batch * seconds, memory_mib=memory_mib * (1 + batch / 16))
        for batch in (1, 4) for profile, seconds in (("2g.20gb", 0.06), ("3g.40gb", 0.03), ("7g.80gb", 0.015))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "memory_mib", "hints"),
    [
        ("clip-vit-large-patch14", 2300.0, "batch=4"),
        ("facebook/dinov2-base", 1000.0, "batch=16"),
        ("siglip-base-patch16-512", 1700.0, "batch=4"),
        ("wav2vec2-base", 1200.0, "batch=4"),
        ("stable-diffusion-v1-5", 3500.0, "batch=2 input=512px"),
        ("sam2-hiera-large", 4000.0, "batch=4"),
        ("BAAI/bge-m3", 3000.0, "batch=4"),
        ("esm2_t33_650M_UR50D", 3400.0, "batch=4"),
    ],
)
def test_training_of_a_model_measured_in_inference_alone_is_sized_as_before_the_table(
    model: str, memory_mib: float, hints: str
) -> None:
    """A table says nothing about gradients, optimizer and what a backward pass keeps: the model's description does."""
    wanted = parse(f"migbatch: model={model} role=train {hints}")
    needs = []
    for learned in (Learned(), learn(of_inference(model, memory_mib), ModelKnowledge())):
        figures = Chooser(LearnedPredictor(learned)).choose(wanted, Partition("gpu", (H100,))).figures
        assert figures is not None
        needs.append(figures.slice_mib if isinstance(figures, TokenFigures) else figures.need_mib)
    before, after = needs
    assert 0.9 * before < after < 1.2 * before


@pytest.mark.parametrize(
    ("model", "cell"),
    [
        ("esm2-t33-650m", "esm2-t33-650m/infer/b8/1024tok"),
        ("modernbert-base", "modernbert-base/infer/b8/2048tok"),
        ("sam2-hiera-large", "sam2-hiera-large/infer/b8/1024px"),
        ("dinov2-base", "dinov2-base/infer/b8/224px"),
    ],
)
@pytest.mark.parametrize("measured", [None, 128])
def test_a_job_without_input_has_the_size_that_the_model_takes_after_a_table_too(
    model: str, cell: str, measured: int | None
) -> None:
    rows = of_inference(model, 2000.0, measured if cell.endswith("tok") else None)
    bucket = Chooser(LearnedPredictor(learn(rows, ModelKnowledge()))).bucket(parse(f"migbatch: model={model} batch=8"))
    assert bucket is not None
    assert bucket.cell == cell


@pytest.mark.parametrize(
    ("model", "memory_mib"),
    [("clip-vit-large-patch14", 9000.0), ("dinov2-base", 3000.0), ("wav2vec2-base", 4000.0), ("sam2-hiera-large", 9e3)],
)
def test_inference_of_a_model_measured_in_training_alone_is_sized_as_before_the_table(
    model: str, memory_mib: float
) -> None:
    rows = [replace(row, kind="train") for row in of_inference(model, memory_mib)]
    needs = []
    for learned in (Learned(), learn(rows, ModelKnowledge())):
        choice = Chooser(LearnedPredictor(learned)).choose(
            parse(f"migbatch: model={model} batch=8"), Partition("gpu", (H100,))
        )
        figures = choice.figures
        assert figures is not None
        needs.append(figures.slice_mib if isinstance(figures, TokenFigures) else figures.need_mib)
    before, after = needs
    assert 0.9 * before < after < 1.2 * before


@pytest.mark.parametrize("kind", ["infer", "train"])
@pytest.mark.parametrize("params", [None, 650e6])
def test_a_job_without_input_needs_what_a_table_without_input_measured(kind: str, params: float | None) -> None:
    """Both are of the size that the model takes: from texts of 128 tokens it would be eight times as much."""
    rows = [
        replace(row, kind=kind, params=params, memory_mib=4000.0 + 300.0 * row.batch)
        for row in of_inference("esm2-t33-650m", 1.0)
    ]
    chooser = Chooser(LearnedPredictor(learn(rows, ModelKnowledge())))
    hints = parse(f"migbatch: model=esm2-t33-650m batch=4{' role=train' * (kind == 'train')}")
    figures = chooser.choose(hints, Partition("gpu", (H100,))).figures
    assert isinstance(figures, Figures)
    assert 5200 <= figures.need_mib < 1.3 * 5200


@pytest.mark.parametrize(
    ("model", "size", "unit"), [("sam2-hiera-large", 512, "px"), ("dinov2-base", 512, "px"), ("bge-m3", 512, "tok")]
)
def test_a_size_in_a_table_is_of_the_model_s_kind_of_input(model: str, size: int, unit: str) -> None:
    chooser = Chooser(LearnedPredictor(learn(of_inference(model, 2000.0, size), ModelKnowledge())))
    bucket = chooser.bucket(parse(f"migbatch: model={model} batch=8 input={size}{unit}"))
    assert bucket is not None
    assert bucket.cell == f"{model}/infer/b8/{size}{unit}"


@pytest.mark.parametrize(
    ("name", "family", "params", "doubt"),
    [("tiny_vit_21m_224", "vit", 21e6, 1), ("my-cnn-25m", "cnn", None, 2), ("our-7b", "", None, 2)],
)
def test_a_size_in_a_name_does_not_make_a_language_model(
    name: str, family: str, params: float | None, doubt: int
) -> None:
    row = Measurement(
        "a100-80gb", name, family, "infer", "", None, None, None, 1, 224, latency_s=0.1, params=params
    )  # fmt: skip
    known = ModelKnowledge().of(name, [row])
    assert (known.family, known.unit, known.reference, known.doubt) == (family or "cnn", "px", 224, doubt)


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen2.5-14b"])
def test_predicted_memory_of_such_a_model_holds_its_weights(name: str) -> None:
    rows = [
        Measurement(
            "a100-80gb", model, "", "infer", "7g.80gb", 7, 8, 98, batch, 512, latency_s=0.02 * batch, memory_mib=mib
        )
        for model, mib in (("bert-base", 900.0), ("bert-large", 1900.0), ("gpt2", 1100.0), (name, None))
        for batch in (1, 2, 4, 8, 16, 32)
    ]  # fmt: skip
    predictor = LearnedPredictor(learn(rows, ModelKnowledge()))
    figures = predictor.figures(Bucket(name, "infer", 1, 512, "tok"), H100)[P("7g.80gb")]
    assert figures.memory_mib.high > ModelKnowledge().of(name).weight_mib


@pytest.mark.parametrize("kind", ["infer", "train"])
def test_rows_without_a_length_do_not_make_long_texts_small(kind: str) -> None:
    """A table of bge-m3 with texts of 128 tokens that does not say so."""
    rows = [
        Measurement("h100-80gb", "bge-m3", "encoder", kind, "7g.80gb", 7, 8, 132, batch, None,
                    throughput_per_s=batch / (0.01 + 0.002 * batch), memory_mib=2900.0 + 5.0 * batch)
        for batch in (1, 4, 8, 16, 32, 64)
    ]  # fmt: skip
    predictor = LearnedPredictor(learn(rows, ModelKnowledge()))
    needs = [
        predictor.figures(Bucket("bge-m3", kind, 32, size, "tok"), H100)[P("7g.80gb")].need_mib
        for size in (128, 512, 2048, 8192)
    ]
    assert needs == sorted(needs)
    assert needs[3] > 16_000  # 32 texts of 8192 tokens pass through layers of 1024 x 4096 in 32 bits
    stated = learn([replace(row, input_size=128) for row in rows], ModelKnowledge())
    short = LearnedPredictor(stated).figures(Bucket("bge-m3", kind, 32, 128, "tok"), H100)[P("7g.80gb")].need_mib
    assert short < 1.3 * (2900 + 5 * 32)


def _sized(params: float | None, family: str, size: int) -> LearnedPredictor:
    """Return a predictor that has seen a row of an unknown model in inference, which states its parameters."""
    row = Measurement("h100-80gb", "mynet", family, "infer", "", None, None, 132, 1, size, latency_s=0.1, params=params)
    return LearnedPredictor(learn([row], ModelKnowledge()))


TRAINED_TEXTS = [
    row
    for row in read_folder(ROOT / "measurements")
    if row.kind == "train" and row.family in ("encoder", "decoder") and row.trained.method in (None, "full")
]


@pytest.mark.parametrize("what", ["flops", "alive_mib", "kept_mib"])
def test_network_without_specifications_is_as_usual_for_the_size_of_its_images(what: str) -> None:
    """Of those that are listed, most detect or segment, and are guessed as if they were not."""
    listed = [facts for facts in BUILT_IN if facts.unit == "px" and facts.reference >= 512]
    away = []
    for facts in listed:
        row = Measurement("a100-80gb", "our-own-net", "cnn", batch=4, input_size=facts.reference, latency_s=1.0)
        away.append(getattr(from_facts(facts), what) / getattr(ModelKnowledge().of("our-own-net", [row]), what))
    assert len(listed) > 50 and 1 / 3 < float(np.median(away)) < 2


@pytest.mark.parametrize(
    ("family", "size", "each", "batch"), [("cnn", 1024, 300, 32), ("encoder", 2048, 100, 64), ("encoder", 512, 25, 64)]
)
@pytest.mark.parametrize("kind", ["infer", "train"])
def test_network_without_specifications_that_was_measured_gets_memory_for_more_items_of_its_size(
    family: str, size: int, each: int, batch: int, kind: str
) -> None:
    """It takes 1500 MiB, and as much as is usual for each large image or long text."""
    row = Measurement("a100-40gb", "our-own-net", family, kind, "7g.40gb", batch=4, input_size=size)
    predictor = LearnedPredictor(learn([replace(row, memory_mib=1500 + 4 * each)], ModelKnowledge()))
    unit = "px" if family == "cnn" else "tok"
    figures = predictor.figures(Bucket("our-own-net", kind, batch, size, unit), A100_40)
    assert figures[P("7g.40gb")].need_mib > 1500 + batch * each


@pytest.mark.parametrize("row", TRAINED_TEXTS, ids=lambda row: f"{row.model}-{row.batch}-{row.input_size}")
def test_training_of_an_unknown_text_model_with_stated_parameters_needs_what_it_was_measured_to_take(
    row: Measurement,
) -> None:
    predictor = _sized(row.params, row.family, row.input_size)
    figures = predictor.figures(Bucket("mynet", "train", row.batch, row.input_size, "tok"), H100)
    assert row.memory_mib <= figures[P("7g.80gb")].memory_mib.high <= 3.5 * row.memory_mib


@pytest.mark.parametrize("millions", [5, 25, 86, 300])
def test_training_of_an_unknown_network_of_images_with_batch_1_needs_little_beside_its_parameters(
    millions: int,
) -> None:
    """Weights, gradients and two moments in 32 bits, at most twice as much, not several times."""
    figures = _sized(millions * 1e6, "cnn", 224).figures(Bucket("mynet", "train", 1, 224, "px"), A100_40)
    need = 900 + 16 * millions * 1e6 / 2**20
    assert need <= figures[P("1g.5gb")].memory_mib.high <= 2.5 * need


def test_job_is_refused_for_its_likely_need_not_because_little_is_known() -> None:
    rows = [
        Measurement(H100.geometry.name, "our-net", kind=kind, batch=1, input_size=256, latency_s=s, memory_mib=mib)
        for kind, s, mib in (("infer", 0.01, 3000.0), ("train", 0.03, 3000.0))
    ]
    predictor = LearnedPredictor(learn(rows, ModelKnowledge(BUILT_IN)))
    partition = Partition("gpu", (H100,))

    def choice(batch: int) -> str:
        hints = parse(f"migbatch: model=our-net role=train batch={batch}")
        return Chooser(predictor).choose(hints, partition).offer.profile.name

    memory = predictor.figures(Bucket("our-net", "train", 512, 256, "px"), H100)[P("7g.80gb")].memory_mib
    assert memory.mid < 79.2 * 1024 < memory.high
    assert choice(512) == "7g.80gb"
    with pytest.raises(Refusal, match="is predicted to need"):
        choice(4096)
