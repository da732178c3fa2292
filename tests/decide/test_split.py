"""A pipeline's time is split over its stages at the lowest price."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.dispatch.split import SENSIBLE, Split, SplitStage, StageChoice, path_s, split
from tests.support.examples import examples

choices = st.lists(
    st.builds(StageChoice, st.integers(1, 60).map(float), st.integers(1, 60).map(float)), min_size=1, max_size=4
).map(tuple)
chains = st.lists(choices, max_size=5).map(
    lambda found: [SplitStage(options, (number - 1,) if number else ()) for number, options in enumerate(found)]
)


@st.composite
def graphs(draw: st.DrawFn, most: int = 5) -> list[SplitStage]:
    found = draw(st.lists(choices, max_size=most))
    return [
        SplitStage(options, tuple(sorted(draw(st.sets(st.integers(0, number - 1)))))) if number else SplitStage(options)
        for number, options in enumerate(found)
    ]


left = st.integers(0, 250).map(float)


def cheapest(stages: list[SplitStage], left_s: float) -> float:
    """The lowest price of all combinations that keep the time, by trying each; infinite if none does."""
    combinations = itertools.product(*(range(len(stage.choices)) for stage in stages))
    kept = (chosen for chosen in combinations if path_s(stages, chosen) <= left_s)
    return min((priced(stages, chosen) for chosen in kept), default=math.inf)


def priced(stages: list[SplitStage], chosen: tuple[int, ...]) -> float:
    return sum(stage.choices[number].price for stage, number in zip(stages, chosen, strict=True))


def fastest_s(stages: list[SplitStage]) -> float:
    best = [min(range(len(s.choices)), key=lambda n, s=s: s.choices[n].seconds) for s in stages]  # type: ignore[misc]
    return path_s(stages, best)


@settings(max_examples=examples(400), deadline=None)
@given(stages=chains, left_s=left)
def test_split_of_a_chain_has_the_lowest_price(stages: list[SplitStage], left_s: float) -> None:
    found = split(stages, left_s)
    least = cheapest(stages, left_s)
    assert found.kept == (least < math.inf)
    if found.kept:
        assert found.price == least and found.seconds <= left_s


@settings(max_examples=examples(400), deadline=None)
@given(stages=graphs(), left_s=left)
def test_split_keeps_the_time_whenever_any_split_can(stages: list[SplitStage], left_s: float) -> None:
    found = split(stages, left_s)
    assert found.seconds == path_s(stages, found.chosen) and found.price == priced(stages, found.chosen)
    assert found.kept == (found.seconds <= left_s) == (fastest_s(stages) <= left_s)
    if found.kept:
        assert found.price >= cheapest(stages, left_s)


@settings(max_examples=examples(300), deadline=None)
@given(stages=chains, left_s=left, more_s=st.integers(0, 100))
def test_more_time_never_costs_more(stages: list[SplitStage], left_s: float, more_s: int) -> None:
    found, later = split(stages, left_s), split(stages, left_s + more_s)
    assert not found.kept or (later.kept and later.price <= found.price)


@settings(max_examples=examples(200), deadline=None)
@given(stages=graphs(), left_s=left)
def test_split_stays_close_to_the_fastest_if_the_time_cannot_be_kept(stages: list[SplitStage], left_s: float) -> None:
    found = split(stages, left_s)
    if not found.kept:
        assert found.seconds <= SENSIBLE * fastest_s(stages) * (1 + 1e-9)


def test_large_slice_goes_to_the_stage_that_gains_most() -> None:
    """Of two equally long stages, the one that scales gets the large slice; an equal split costs more."""
    scales = SplitStage((StageChoice(100, 100), StageChoice(50, 105), StageChoice(20, 110)))
    hardly = SplitStage((StageChoice(100, 100), StageChoice(80, 240), StageChoice(60, 420)), (0,))
    assert split([scales, hardly], 130.0) == Split((2, 0), 120.0, 210.0, kept=True)


def test_parallel_stage_is_only_as_fast_as_the_remaining_time_requires() -> None:
    ways = (StageChoice(100, 1), StageChoice(10, 5))
    stages = [
        SplitStage((StageChoice(5, 1),)),
        SplitStage(ways, (0,)),
        SplitStage(((StageChoice(90, 7)),), (0,)),
        SplitStage(ways, (1, 2)),
    ]
    assert split(stages, 106.0).chosen == (0, 1, 0, 1) and split(stages, 115.0).chosen == (0, 0, 0, 1)


def test_time_that_fits_exactly_is_kept_despite_rounding() -> None:
    stages = [SplitStage((StageChoice(0.1, 2.0),), (number - 1,) if number else ()) for number in range(10)]
    assert split(stages, path_s(stages, [0] * 10)).kept


def test_many_stages_with_many_choices_are_split_with_bounded_work() -> None:
    ways = [StageChoice(100.0 / (1 + 0.37 * n), 10.0 + n**1.7) for n in range(8)]
    stages = [
        SplitStage(
            tuple(StageChoice(c.seconds * (1 + 0.013 * number), c.price) for c in ways), (number - 1,) if number else ()
        )
        for number in range(60)
    ]
    most, least = path_s(stages, [0] * 60), path_s(stages, [7] * 60)
    prices = [split(stages, least + share * (most - least)).price for share in (0.1, 0.4, 0.7, 1.0)]
    assert prices == sorted(prices, reverse=True) and prices[-1] == 600.0


def test_empty_pipeline_has_an_empty_split() -> None:
    assert split([], 5.0) == Split((), 0.0, 0.0, kept=True)
