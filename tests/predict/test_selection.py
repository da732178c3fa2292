"""The choice: fewest compute slices that keep every limit, and a clear message where none does."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict import requests
from slurm_migbatch.predict.candidate import Figures, Interval
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.limits import limits_of
from slurm_migbatch.predict.selection import Chooser, SliceChoice
from slurm_migbatch.workload.buckets import Bucket, Grid
from slurm_migbatch.workload.catalog import GpuKind, Partition
from slurm_migbatch.workload.hints import Hints, parse
from slurm_migbatch.workload.llmhints import LlmHints
from slurm_migbatch.workload.refusal import Refusal
from tests.support.gpu_kinds import A100_40, H100, SITE, P
from tests.support.predictors import ByCells

GPU = SITE.partitions["gpu"]


class Told(ByCells):
    """A predictor that returns given figures: `(latency_ms, memory_gib)` by profile."""

    version = "told"

    def __init__(self, figures: Mapping[str, tuple[float, float]]) -> None:
        self._told = {P(name): pair for name, pair in figures.items()}

    def grids(self) -> Mapping[str, Grid]:
        return {"m": Grid("tok", (128,), (1, 2, 4, 8), 128)}

    def aliases(self) -> Mapping[str, str]:
        return {"em": "m"}

    def advice(self, bucket: Bucket, kind: GpuKind, profile: Profile) -> None:
        """None is given."""

    def figures(self, cell: Bucket, kind: GpuKind) -> Mapping[Profile, Figures]:
        return {
            profile: Figures(
                Interval(latency / 2e3, latency / 1.5e3, latency / 1e3),
                Interval(cell.batch / latency * 1e3, cell.batch / latency * 1.5e3, cell.batch / latency * 2e3),
                Interval(memory * 512, memory * 700, memory * 1024),
            )
            for profile, (latency, memory) in self._told.items()
            if profile in kind.geometry
        }


FIGURES = {
    "1g.10gb": (400.0, 8.0),
    "1g.20gb": (300.0, 8.0),
    "2g.20gb": (200.0, 8.0),
    "3g.40gb": (100.0, 8.0),
    "4g.40gb": (90.0, 8.0),
    "7g.80gb": (50.0, 8.0),
}


def chosen(hints: Hints, figures: Mapping[str, tuple[float, float]] = FIGURES) -> tuple[str, str]:
    choice = Chooser(Told(figures)).choose(hints, GPU)
    return choice.offer.profile.name, choice.reason


def test_fewest_compute_slices_that_keep_the_limits_are_chosen() -> None:
    assert chosen(Hints(model="m")) == ("1g.10gb", "fits")
    assert chosen(Hints(model="m", slo_us=300_000)) == ("2g.20gb", "fits")  # 300 ms is counted as 280
    assert chosen(Hints(model="m", slo_us=100_000)) == ("3g.40gb", "fits")
    assert chosen(Hints(model="m", batch=8, items=1000, deadline_s=25)) == ("2g.20gb", "fits")
    assert chosen(Hints(model="org/EM".lower(), slo_us=100_000)) == ("3g.40gb", "fits")


def test_mem_hint_replaces_the_predicted_memory() -> None:
    assert chosen(Hints(model="m", mem_mib=15_000)) == ("1g.20gb", "fits")
    heavy = {name: (latency, 30.0) for name, (latency, _) in FIGURES.items()}
    assert chosen(Hints(model="m"), heavy) == ("3g.40gb", "fits")
    assert chosen(Hints(model="m", mem_mib=5_000), heavy) == ("1g.10gb", "fits")


def test_largest_slice_is_chosen_and_reported_when_nothing_fits() -> None:
    assert chosen(Hints(model="m", slo_us=10_000)) == ("7g.80gb", "time_short")
    huge = {name: (latency, 90.0) for name, (latency, _) in FIGURES.items()}
    assert chosen(Hints(model="m"), huge) == ("7g.80gb", "memory_short")


def test_need_of_many_times_the_largest_slice_is_refused() -> None:
    near, far = ({name: (latency, gib) for name, (latency, _) in FIGURES.items()} for gib in (310.0, 320.0))
    assert chosen(Hints(model="m"), near) == ("7g.80gb", "memory_short"), "predictions may be wrong"
    with pytest.raises(Refusal, match="smaller batch=") as refused:
        chosen(Hints(model="m"), far)
    assert refused.value.code == "need_far"
    assert chosen(Hints(model="m", mem_mib=30_000), far) == ("3g.40gb", "fits"), "the user knows better"
    with pytest.raises(Refusal, match="remove max="):
        chosen(Hints(model="m", max="1g.10gb"), dict.fromkeys(FIGURES, (1.0, 60.0)))


def test_model_without_figures_gets_the_default_or_the_slice_for_its_memory() -> None:
    assert chosen(Hints()) == ("1g.10gb", "no_hints")
    assert chosen(Hints(model="other")) == ("1g.10gb", "unknown_model")
    assert chosen(Hints(model="other", mem_mib=30_000)) == ("3g.40gb", "by_memory")
    assert chosen(Hints(model="other", min="2g.20gb")) == ("2g.20gb", "unknown_model")
    assert chosen(Hints(model="m"), {}) == ("1g.10gb", "unknown_model")


def test_misspelt_model_gets_the_default_slice_and_a_suggestion() -> None:
    class Named(Told):
        def grids(self) -> Mapping[str, Grid]:
            return {"resnet50": Grid("px", (224,), (1, 8), 224)}

    def text(model: str, figures: Mapping[str, tuple[float, float]] = FIGURES) -> str:
        return Chooser(Named(figures)).choose(Hints(model=model), GPU).text

    assert "nothing is known about resnt50 (did you mean model=resnet50?); add mem=" in text("resnt50")
    assert "did you mean" not in text("swin-tiny") + text("resnet50", {}) + text("r" * 400)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("resnet50-fp16", "resnet50"),
        ("my_resnet50_imagenet_run3", "resnet50"),
        ("yolov8m-custom", "yolov8m"),
        ("vit-base-finetuned-cifar10", "vit-base"),
        ("ours_convnext_base_v7", "convnext-base"),
        ("tf_efficientnet_b5_mine", "tf-efficientnet-b5"),
        ("my-own-net-50", ""),
    ],
)
def test_name_with_other_words_gets_the_model_in_it_as_a_suggestion(name: str, meant: str) -> None:
    """The longest one: it said nothing, or for a YOLOv8m the classifier of that name."""
    text = Chooser(LearnedPredictor()).choose(Hints(model=name), GPU).text
    assert f"nothing is known about {name}" in text
    assert text.partition(" (did you mean model=")[2].partition("?")[0] == meant


def test_profiles_without_figures_are_left_out() -> None:
    assert chosen(Hints(model="m"), {"2g.20gb": (1.0, 1.0)}) == ("2g.20gb", "fits")


def test_partition_with_two_gpu_kinds_gets_the_worse_figures() -> None:
    class Uneven(Told):
        def figures(self, cell: Bucket, kind: GpuKind) -> Mapping[Profile, Figures]:
            slow = 10.0 if kind is A100_40 else 1.0
            return Told({"1g.10gb": (100 * slow, 1.0)}).figures(cell, kind)

    both = Partition("both", (H100, A100_40))
    figures = Chooser(Uneven({})).figures(Bucket("m", "infer", 8, 128, "tok"), both)
    assert figures["1g.10gb"].latency_us == 1_000_000
    assert figures["1g.10gb"].rate == 8_000


def test_candidates_state_why_they_were_rejected() -> None:
    choice = Chooser(Told(FIGURES)).choose(Hints(model="m", slo_us=100_000, max="4g.40gb"), GPU)
    why = {candidate.profile.name: candidate.why for candidate in choice.candidates}
    assert why["3g.40gb"] == "" and "over 100 ms" in why["1g.10gb"] and why["7g.80gb"] == "outside min and max"
    assert choice.candidates[0].ok and choice.candidates[0].to_dict()["latency_s"][2] == pytest.approx(0.1)


hints = st.builds(
    Hints,
    model=st.sampled_from(["m", None, "other"]),
    batch=st.sampled_from([None, 1, 8]),
    slo_us=st.one_of(st.none(), st.integers(100, 10**6)),
    mem_mib=st.one_of(st.none(), st.integers(1, 80_000)),
    min=st.sampled_from([None, "1g.20gb", "2g.20gb"]),
    max=st.sampled_from([None, "4g.40gb", "7g.80gb"]),
)
latencies = st.lists(st.floats(1, 1000), min_size=6, max_size=6)


@given(hints, latencies)
def test_choice_that_fits_is_the_smallest_that_fits(asked: Hints, times: list[float]) -> None:
    figures = dict(zip(FIGURES, ((time, 8.0) for time in times), strict=True))
    limits = limits_of(asked, GPU)
    try:
        choice = Chooser(Told(figures)).choose(asked, GPU)
    except Refusal as refusal:
        assert refusal.code == "mem_nowhere"
        assert not [offer for offer in GPU.plain if limits.within(offer) and offer.memory_mib >= asked.mem_mib]
        return
    assert limits.within(choice.offer)
    if choice.reason == "fits":
        good = [candidate.offer for candidate in choice.candidates if candidate.ok]
        assert choice.offer == min(good, key=lambda offer: offer.order)
    if choice.reason == "time_short":
        assert not any(candidate.ok for candidate in choice.candidates)


def outcome(chooser: Chooser, hints: Hints, partition: Partition, passes_batch: bool) -> SliceChoice | str:
    try:
        return chooser.choose(hints, partition, passes_batch=passes_batch)
    except Refusal as refusal:
        return str(refusal)


def test_earlier_choices_do_not_change_later_ones() -> None:
    """A choice is cached per bucket; other limits, or another partition of the same name, do not share it."""
    lives_on = Chooser(LearnedPredictor())
    partitions = [GPU, SITE.partitions["mixed"], Partition("gpu", (A100_40,))]
    batches, roles, rates = [None, 32], [None, "serve"], [None, 5_000, 900_000]
    highest, needs, passes_batch = [None, "4g.40gb", "2g.20gb"], [None, 15_000], [False, True]
    for _ in range(2):
        for partition, batch, role, rate, high, need, tells in itertools.product(
            partitions, batches, roles, rates, highest, needs, passes_batch
        ):
            llm = LlmHints(rate=rate) if role == "serve" else LlmHints()
            hints = Hints("bert-large", batch, slo_us=40_000, mem_mib=need, role=role, max=high, llm=llm)
            fresh = outcome(Chooser(lives_on.predictor), hints, partition, tells)
            assert outcome(lives_on, hints, partition, tells) == fresh, hints


def test_number_of_remembered_workloads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user can query any number of workloads."""
    monkeypatch.setattr(requests, "_MOST_WORKLOADS", 4)
    chooser = Chooser(LearnedPredictor())
    for tokens in range(4000, 4009):
        chooser.choose(Hints("llama-3.1-8b", llm=LlmHints(max_model_len=tokens)), GPU)
    assert len(chooser._tokens) == 1


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ("model=resnet50 batch=1024 input=32", "model=resnet50 batch=16384 input=32"),
        ("model=resnet50 batch=8 input=1024", "model=resnet50 batch=8 input=2048"),
        ("model=bert-large batch=32 input=512", "model=bert-large batch=32 input=4096"),
        ("model=vgg19 role=train batch=1024 input=32", "model=vgg19 role=train batch=8192 input=32"),
    ],
)
def test_requests_beyond_the_grid_need_more_memory(small: str, large: str) -> None:
    chooser = Chooser(LearnedPredictor())
    needs = []
    for words in (small, large):
        choice = chooser.choose(parse(f"migbatch: {words}"), GPU)
        assert choice.figures is not None
        needs.append(choice.figures.need_mib)
    assert needs[1] > 2 * needs[0]
