"""Slice and batch chosen together: the smallest slice on which a batch keeps all limits, and the best batch there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.candidate import Figures, Interval
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.selection import Chooser, SliceChoice
from slurm_migbatch.predict.serving import rates_at_limit
from slurm_migbatch.workload.buckets import Bucket, Grid
from slurm_migbatch.workload.catalog import GpuKind
from slurm_migbatch.workload.hints import NO_LLM, Hints
from slurm_migbatch.workload.refusal import Refusal
from tests.support.gpu_kinds import SITE
from tests.support.predictors import ByCells

GPU, MIXED = SITE.partitions["gpu"], SITE.partitions["mixed"]
BATCHES = (1, 2, 3, 4, 8, 16, 64)
SMS = {"1g.10gb": 16, "1g.20gb": 26, "2g.20gb": 32, "3g.40gb": 60, "4g.40gb": 64, "7g.80gb": 132}


class Curve(ByCells):
    """A model that is host-bound up to a batch that grows with the slice, and device-bound beyond it."""

    version = "curve"

    def __init__(self, host_s: float, item_s: float, idle: float, mib: tuple[float, float] = (1000.0, 100.0)) -> None:
        self._host, self._item, self._idle, self._mib = host_s, item_s, idle, mib

    def grids(self) -> Mapping[str, Grid]:
        return {"m": Grid("tok", (128,), BATCHES, 128)}

    def aliases(self) -> Mapping[str, str]:
        return {}

    def advice(self, bucket: Bucket, kind: GpuKind, profile: Profile) -> None:
        """None is given."""

    def figures(self, cell: Bucket, kind: GpuKind) -> Mapping[Profile, Figures]:
        found = {}
        for info in kind.geometry.profiles:
            if not info.profile.suffix:
                s = max(self._host, self._item * (cell.batch + self._idle) * 132 / info.sm_count)
                mib = self._mib[0] + self._mib[1] * cell.batch
                rate = cell.batch / s
                found[info.profile] = Figures(
                    Interval(s / 2, s / 1.5, s), Interval(rate, rate, rate), Interval(1, 1, mib)
                )
        return found


curves = st.builds(
    Curve,
    st.floats(1e-3, 3e-2),
    st.floats(1e-5, 1e-2),
    st.floats(0.0, 8.0),
    st.tuples(st.floats(500, 30000), st.floats(1, 2000)),
)
open_hints = st.builds(
    Hints,
    model=st.just("m"),
    slo_us=st.integers(1000, 10**6),
    mem_mib=st.sampled_from([None, None, 4000, 15000]),
    max=st.sampled_from([None, None, "3g.40gb"]),
    items=st.just(100_000),
    deadline_s=st.sampled_from([None, 200, 3600]),
)
services = open_hints.flatmap(
    lambda hints: st.sampled_from([NO_LLM, replace(NO_LLM, rate=20_000), replace(NO_LLM, rate=500_000)]).map(
        lambda llm: replace(hints, role="serve", llm=llm, items=None, deadline_s=None)
    )
)
asked = st.one_of(open_hints, services)


def both(chooser: Chooser, hints: Hints) -> tuple[SliceChoice, SliceChoice] | None:
    """The choice with a chosen batch and the choice for the usual batch; None if the job is refused."""
    try:
        return chooser.choose(hints, GPU, passes_batch=True), chooser.choose(hints, GPU)
    except Refusal as refusal:
        assert refusal.code == "mem_nowhere"
        return None


def keeping(chooser: Chooser, hints: Hints, names: Sequence[str]) -> dict[tuple[str, int], int]:
    """The throughput of every slice and batch that keeps the limits, by the predictor's own figures."""
    usual = chooser.bucket(hints)
    assert usual is not None and usual.slo_us is not None
    found = {}
    for batch in (1, 2, 4, 8, 16, 64):
        for name, known in chooser.figures(replace(usual, batch=batch), GPU).items():
            need = hints.mem_mib if hints.mem_mib and batch <= usual.batch else max(known.need_mib, hints.mem_mib or 0)
            in_time = known.latency_us <= usual.slo_us and known.rate >= (usual.rate or 0)
            if hints.role == "serve":
                pace = min(hints.llm.rate or known.rate, known.rate)
                in_time = in_time and (batch - 1) * 10**9 <= (usual.slo_us - known.latency_us) * pace
            if name in names and in_time and need <= GPU.offers[name].memory_mib:
                found[name, batch] = known.rate
    return found


@given(curves, asked)
def test_smallest_slice_that_keeps_the_limits_and_its_best_batch_are_chosen(curve: Curve, hints: Hints) -> None:
    """The pairs that keep the limits come from a separate chooser, which predicts one batch after the other."""
    chooser = Chooser(curve)
    pair = both(chooser, hints)
    if pair is None:
        return
    chosen, usual = pair
    most = usual.offer.order
    names = [o.profile.gres_type for o in GPU.plain if o.order <= most and (not hints.max or o.compute_slices <= 3)]
    open_to_it = keeping(Chooser(curve), hints, names)
    assert (chosen.batch is None) == (not open_to_it)
    if chosen.batch is None:
        assert chosen == usual
        return
    assert chosen.reason == "batch_chosen" and f"run batches of {chosen.batch} (MIGBATCH_BATCH)" in chosen.text
    slice_ = chosen.offer.profile.gres_type
    assert all(chosen.offer.order <= GPU.offers[name].order for name, _ in open_to_it)
    rates = {batch: rate for (name, batch), rate in open_to_it.items() if name == slice_}
    assert chosen.batch == min(batch for batch, rate in rates.items() if rate >= 0.85 * max(rates.values()))
    assert chosen.bucket is not None and chosen.bucket.batch == chosen.batch
    assert chosen.figures == Chooser(curve).figures(chosen.bucket, GPU)[slice_]
    assert next(candidate.ok for candidate in chosen.candidates if candidate.offer == chosen.offer) or hints.mem_mib


@given(curves, asked)
def test_slice_is_never_larger_than_the_one_for_the_usual_batch(curve: Curve, hints: Hints) -> None:
    pair = both(Chooser(curve), hints)
    if pair is not None:
        assert pair[0].offer.order <= pair[1].offer.order


@given(curves, open_hints, st.sampled_from(["batch", "slo", "train", "untold"]))
def test_batch_is_chosen_only_for_inference_with_slo_and_no_batch_hint(curve: Curve, hints: Hints, what: str) -> None:
    hints = replace(hints, mem_mib=None)
    chooser, passes_batch = Chooser(curve), what != "untold"
    if what == "batch":
        hints = replace(hints, batch=8)
    elif what == "slo":
        hints = replace(hints, slo_us=None)
    elif what == "train":
        hints = replace(hints, role="train")
    choice = chooser.choose(hints, GPU, passes_batch=passes_batch)
    assert choice.batch is None and choice.bucket is not None and choice.bucket.batch == 8
    assert choice == chooser.choose(hints, GPU)


def test_smaller_batch_allows_a_smaller_slice() -> None:
    """A batch takes 10 ms up to 1.6 items on 1g.10gb and 6 on 3g: batches of 8 keep 15 ms on 3g, of 2 on 1g.10gb."""
    chooser = Chooser(Curve(0.010, 0.00075, 0.0))
    hints = Hints(model="m", slo_us=15_000)
    assert chooser.choose(hints, GPU).offer.profile.name == "3g.40gb"
    choice = chooser.choose(hints, GPU, passes_batch=True)
    assert (choice.offer.profile.name, choice.batch) == ("1g.10gb", 2)
    assert (
        "; batches of 8 would need 3g.40gb. Predicted for m/infer/b2/128tok: at most 12.5 ms per batch" in choice.text
    )


def test_smaller_batch_meets_a_limit_that_the_usual_batch_cannot() -> None:
    slow = Curve(0.001, 0.004, 0.0)
    hints = Hints(model="m", slo_us=10_000)
    choice = Chooser(slow).choose(hints, GPU, passes_batch=True)
    assert choice.batch == 1 and "no slice is predicted to meet it with batches of 8" in choice.text
    assert Chooser(slow).choose(hints, GPU).reason == "time_short"


@pytest.mark.parametrize(("rate", "batch"), [(5, 1), (25, 2), (50, 4), (300, 16), (100_000, 64), (None, 64)])
def test_batch_of_a_service_fills_within_the_latency_limit(rate: int | None, batch: int) -> None:
    """Any batch takes 10 ms: at 50 items/s three more arrive within 60 ms, seven within 140. If items arrive faster
    than one instance works there are more instances; without a rate hint, items are assumed to arrive that fast."""
    chooser = Chooser(Curve(0.010, 1e-9, 0.0))
    llm_hints = NO_LLM if rate is None else replace(NO_LLM, rate=rate * 1000)
    choice = chooser.choose(Hints(model="m", slo_us=100_000, role="serve", llm=llm_hints), GPU, passes_batch=True)
    assert choice.batch == batch and choice.figures is not None
    assert rates_at_limit(chooser, Hints(model="m", slo_us=100_000, role="serve", llm=llm_hints), GPU)[
        choice.offer.profile
    ] == pytest.approx(choice.figures.rate / 1000)


@pytest.mark.slow
def test_shipped_predictor_chooses_a_batch_that_keeps_the_limits() -> None:
    chooser = Chooser(LearnedPredictor())
    for model in chooser.grids:
        for partition in (GPU, MIXED):
            for slo_us in (5_000, 40_000, 400_000):
                choice = chooser.choose(Hints(model=model, slo_us=slo_us), partition, passes_batch=True)
                if choice.batch is not None:
                    known = choice.figures
                    assert known is not None and known.latency_us <= slo_us
                    assert known.need_mib <= choice.offer.memory_mib
