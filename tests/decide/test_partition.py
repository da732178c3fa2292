"""Cuts of GPUs: legal, never worse than homogeneous ones, and close to the best cut where all can be tried."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from slurm_migbatch.decide.paris_elsa.assignment import StockCosts, WorkClass
from slurm_migbatch.decide.paris_elsa.partition import MARGIN, TRIAL_JOBS, flow, homogeneous, partition, total, ways
from slurm_migbatch.decide.paris_elsa.trial import ALLOWED, bounded_rate, central, stream
from slurm_migbatch.lab.papers.pariselsa import largest_remainder, packed, paris, split
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.mig.profile import Profile
from tests.support.examples import thinned

A100 = geometry("a100-80gb")
KINDS = tuple(Profile.parse(name) for name in ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"))
SIZES = (1, 2, 3, 4, 7)


def model(knee, limit, batches=8, floor=1.0):
    """Batches that take at least `floor` seconds, and beyond `knee` items per slice a time that grows with them."""
    return [
        WorkClass(1.0 / b, limit, tuple(max(floor, b / (knee * size)) for size in SIZES)) for b in range(1, batches + 1)
    ]


def test_ways_to_fill_one_gpu():
    assert len(ways(A100, KINDS)) == 12
    assert (0, 0, 1, 1, 0) in ways(A100, KINDS)
    assert (1, 0, 2, 0, 0) not in ways(A100, KINDS)  # two 3g slices take all the memory


def test_homogeneous_cuts_hold_as_many_as_fit():
    assert [cut.stock for cut in homogeneous(A100, KINDS, 2)] == [
        (14, 0, 0, 0, 0),
        (0, 6, 0, 0, 0),
        (0, 0, 4, 0, 0),
        (0, 0, 0, 2, 0),
        (0, 0, 0, 0, 2),
    ]


def test_paris_gives_the_numbers_calculated_by_hand():
    """Sizes 1 and 2, batches 1 to 4. The knee of size 1 is batch 2 (rates 1, 2, 2, 2), so batches 3 and 4 are size
    2's: R_1 = (4 * 1 + 3 * 1) / 10 = 0.7, R_2 = (2 * 1 + 1 * 1) / 10 = 0.3; N_1 = 0.7 * 13 / 1.3 = 7, N_2 = 3."""
    batches = [
        WorkClass(s, 9.0, (max(1.0, b / 2), 1.0)) for b, s in zip(range(1, 5), (0.4, 0.3, 0.2, 0.1), strict=True)
    ]
    assert paris(batches, (1, 2), 13.0) == pytest.approx([7.0, 3.0])


def test_largest_remainder():
    assert largest_remainder([2.6, 1.5], (1, 2), 5.6) == [3, 1]
    assert largest_remainder([2.5, 1.6], (1, 2), 6.1) == [2, 2]
    assert largest_remainder([2.5, 1.6], (1, 2), 5.7) == [3, 1]  # the larger remainder has no room
    assert largest_remainder([7.0, 3.0], (1, 2), 13.0) == [7, 3]


@given(st.lists(st.integers(0, 6), min_size=5, max_size=5), st.integers(1, 3))
def test_packed_cuts_have_all_gpus_and_use_only_ways_to_fill_one(counts, gpus):
    cut = packed(A100, KINDS, gpus, counts)
    assert len(cut.gpus) == gpus
    assert all(gpu in ways(A100, KINDS) for gpu in cut.gpus)


def test_flow_gives_the_rates_calculated_by_hand():
    """Half the work takes 1 s anywhere; the other half meets its limit of 2 s only on a 7g. Two 7g supply 2 seconds per
    second, and a job takes 1/2 + 1 seconds on average: 4/3. (If one GPU has 1g slices, the other is full at 1.) With
    fractions of GPUs, n of them 7g: r = n = 2 (2 - n) * 7, 28/15."""
    both = [WorkClass(1, 2.0, (1.0,) * 5), WorkClass(1, 2.0, (9.0, 9.0, 9.0, 9.0, 2.0))]
    assert flow(both, ways(A100, KINDS), 2, whole=True).rate == pytest.approx(4 / 3)
    assert flow(both, ways(A100, KINDS), 2, whole=False).rate == pytest.approx(28 / 15)
    assert flow(both[1:], ways(A100, KINDS), 2, whole=True).rate == pytest.approx(1.0)
    assert flow(both[:1], ways(A100, KINDS), 2, whole=True).rate == pytest.approx(14.0)
    assert flow([WorkClass(1, 2.0, (math.inf,) * 5)], ways(A100, KINDS), 2, whole=True).rate == 0


def test_flow_may_put_the_allowed_late_work_on_cheaper_slices():
    heavy = [WorkClass(1, 2.0, (10.0, 9.0, 9.0, 9.0, 2.0))]
    possible = ways(A100, KINDS)
    strict, loose = (flow(heavy, possible, 4, whole=False, late=late).rate for late in (0.0, 0.2))
    assert strict == pytest.approx(2.0)
    assert loose == pytest.approx(4 / (0.8 * 2 + 0.2 * 10 / 7))


@settings(max_examples=25)
@given(st.integers(1, 4), st.floats(2.0, 8.0), st.integers(1, 2))
def test_flow_over_whole_gpus_is_the_best_of_all_cuts(knee, limit, gpus):
    works = model(knee, limit)
    possible = ways(A100, KINDS)
    best = max(fixed(works, total(cut, len(KINDS))) for cut in itertools.combinations_with_replacement(possible, gpus))
    found = flow(works, possible, gpus, whole=True)
    assert found.rate == pytest.approx(best, rel=0.006)
    assert sum(found.ways) <= gpus
    assert flow(works, possible, gpus, whole=False).rate >= best * (1 - 1e-6)


def fixed(works, stock):
    """The flow of one stock, as a separate linear program."""
    cells = [(c, k) for c, w in enumerate(works) for k, n in enumerate(stock) if n and w.seconds[k] <= w.limit_s]
    if {c for c, _ in cells} != set(range(len(works))):
        return 0.0
    share = sum(w.share for w in works)
    above = np.zeros((len(stock), len(cells) + 1))
    equal = np.zeros((len(works), len(cells) + 1))
    for j, (c, k) in enumerate(cells):
        above[k, j] = works[c].seconds[k]
        equal[c, j] = 1.0
    equal[:, -1] = [-w.share / share for w in works]
    found = linprog([0.0] * len(cells) + [-1.0], A_ub=above, b_ub=stock, A_eq=equal, b_eq=[0.0] * len(works))
    return -found.fun


def test_split_gives_each_kind_the_class_that_it_serves_best():
    """One slice of each of two kinds; class a is twice as fast on the first, b equally fast on both."""
    a, b = WorkClass(1, 9.0, (1.0, 2.0)), WorkClass(1, 9.0, (1.0, 1.0))
    assert split([a, b], [1, 1]) == [pytest.approx([1, 0]), pytest.approx([0, 1])]
    assert split([a, b], [0, 1]) == [pytest.approx([0, 1]), pytest.approx([0, 1])]
    assert split([WorkClass(1, 0.5, (1.0, 2.0))], [1, 1]) == [[0, 0]]


WORKS = [model(1, 3.0), model(2, 1.5), model(1, 8.0, floor=3.0), model(0.5, 6.0)]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(WORKS)))
def test_partition_is_near_the_best_cut_and_not_worse_than_homogeneous_ones(number):
    works = WORKS[number]
    found = partition(A100, KINDS, works, 2, neighbours=100)
    chance = np.random.Generator(np.random.PCG64(0))
    judged_by = stream(works, TRIAL_JOBS, chance, allowed=MARGIN * ALLOWED, exact=True)

    def rate(stock):
        return bounded_rate(central, StockCosts(works, SIZES, stock), judged_by, found.rate, 0.002)

    assert all(gpu in ways(A100, KINDS) for gpu in found.gpus)
    for cut in homogeneous(A100, KINDS, 2):
        assert rate(cut.stock) <= found.rate * 1.006
    cuts = list(itertools.combinations_with_replacement(ways(A100, KINDS), 2))
    best = max(rate(total(cut, len(KINDS))) for cut in thinned(cuts, number))
    assert found.rate >= 0.97 * best


def test_work_that_no_cut_can_serve_still_gets_a_cut():
    found = partition(A100, KINDS, [WorkClass(1, 0.5, (1.0,) * 5)], 1)
    assert found.rate == 0
    assert found.gpus == ((7, 0, 0, 0, 0),)
    assert "no partition serves" in found.origin


def test_partition_serves_a_rare_model_as_well_as_a_common_one():
    """A model with less than a tenth of the work must not be the one that is always late."""
    common = [WorkClass(0.93, 2.0, (1.0,) * 5)]
    rare = [WorkClass(0.07, 2.0, (9.0, 9.0, 9.0, 9.0, 1.0), group=1)]
    found = partition(A100, KINDS, [*common, *rare], 2)
    assert found.stock[4] == 1


def test_the_same_work_gives_the_same_cut():
    works = model(2, 1.5)
    assert partition(A100, KINDS, works, 3) == partition(A100, KINDS, works, 3)
