"""The session plan of a GPU: it sustains its stated load, and no other plan that was tried sustains more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.paris_elsa.partition import flow, ways
from slurm_migbatch.lab.papers.sessionplan import PRECISION, SessionPlan, at_load, best, carried, largest, plans, play
from slurm_migbatch.lab.papers.sessions import Hosted, demand_of
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.mig.profile import Profile

A30 = geometry("a30")
KINDS = tuple(Profile.parse(name) for name in ("1g.6gb", "2g.12gb", "4g.24gb"))


def hosted(items, rates, window=600.0, runs=4, name="m"):
    return Hosted(name, rates, window, items, runs)


@pytest.mark.parametrize(("limit", "bound"), [(0.37, 1.0), (0.95, 1.0), (2.5, 4.0), (0.01, 1.0)])
def test_largest_sustainable_load_is_found(limit, bound):
    found = largest(lambda load: load > limit, bound)
    assert found <= limit < found + 2 * PRECISION


def test_largest_load_is_zero_if_deadlines_are_always_missed():
    assert largest(lambda load: True) == 0.0


def test_model_without_gain_from_larger_slices_gets_the_smallest():
    """Four 1g slices do four times the work of the whole GPU."""
    chosen = best(carried(A30, KINDS, [hosted(600.0, (1.0, 1.0, 1.0), runs=20)]))
    assert chosen.plan.held == (((4, 0, 0), 1.0),)
    assert chosen.load == pytest.approx(4.0, rel=0.06)


def test_model_that_runs_only_on_a_whole_gpu_gets_it():
    chosen = best(carried(A30, KINDS, [hosted(300.0, (0.0, 0.0, 1.0), runs=10)]))
    assert chosen.plan.held == (((0, 0, 1), 1.0),)
    assert chosen.load == pytest.approx(2.0, rel=0.06)


def test_models_that_need_different_layouts_do_not_share_one_layout():
    """One model runs on the whole GPU only, the other gains nothing from it: the whole GPU needs 500 s of 600 for both;
    alternating with four slices, 200 s are enough."""
    both = [hosted(100.0, (0.0, 0.0, 1.0)), hosted(400.0, (1.0, 1.0, 1.0), runs=8)]
    found = carried(A30, KINDS, both)
    assert best([candidate for candidate in found if len(candidate.plan.held) == 1]).load == pytest.approx(1.2, abs=0.1)
    assert len(best(found).plan.held) != 1
    assert 2.0 < best(found).load <= 3.0


def test_load_factor_scales_items_and_runs():
    model = hosted(100.0, (1.0, 2.0, 4.0), runs=4)
    assert at_load(model, 1.0) == model
    assert (at_load(model, 0.5).items, at_load(model, 0.5).runs) == (50.0, 2)
    assert at_load(model, 0.01).runs == 1


models = st.lists(
    st.builds(
        hosted,
        st.floats(10.0, 2000.0),
        st.lists(st.floats(0.5, 4.0), min_size=3, max_size=3).map(lambda rates: tuple(sorted(rates))),
        st.sampled_from((600.0, 1200.0)),
        st.integers(1, 8),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=10, deadline=None)
@given(models)
def test_plan_sustains_its_stated_load_and_does_not_exceed_the_bound(found):
    tried = carried(A30, KINDS, found)
    chosen = best(tried)
    assert [candidate.plan for candidate in tried] == plans(A30, KINDS, found)
    assert all(candidate.load <= chosen.load for candidate in tried)
    works = demand_of(found)
    bound = flow(works, ways(A30, KINDS), 1, whole=False).rate / sum(work.share for work in works)
    assert chosen.load <= bound + 1e-9
    if chosen.load:
        assert play(A30, KINDS, found, chosen.plan, chosen.load).missed == 0


def test_plans_include_every_layout_and_the_leanest_sizes():
    found = plans(A30, KINDS, [hosted(100.0, (1.0, 1.5, 5.0)), hosted(100.0, (1.0, 2.0, 3.0))])
    assert [plan.held[0][0] for plan in found if len(plan.held) == 1] == list(ways(A30, KINDS))
    assert found[-1] == SessionPlan(sizes=(2, 0))
