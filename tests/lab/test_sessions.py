"""Sessions on one GPU: always legal, on time where the load allows, and fair with the remaining time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.paris_elsa.partition import ways
from slurm_migbatch.lab.papers.sessions import Hosted, InstanceCosts, at_size, framed, frames, session_s
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.metrics import jain
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.profile import Profile

A100 = geometry("a100-80gb")
KINDS = tuple(Profile.parse(name) for name in ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"))
FREE = InstanceCosts(0.0, 0.0)


def hosted(run_count, seconds=60.0, window=600.0, rates=(1.0, 2.0, 3.0, 4.0, 7.0), name="m"):
    """A model whose runs take `seconds` on the smallest slice."""
    return Hosted(name, rates, window, run_count * seconds * rates[0], run_count)


def check(schedule, models):
    """No slice has two runs at once, concurrent runs form a legal layout, and no run begins before its window."""
    events = sorted({run.start for run in schedule.runs})
    for at in events:
        running = [run for run in schedule.runs if run.start <= at < run.end - 1e-6]
        layout = Layout(run.slot for run in running)
        assert len(layout) == len(running)
        A100.check(layout)
    late = 0
    for run in schedule.runs:
        if run.due != float("inf"):
            assert run.start >= run.due - models[run.model].window_s - 1e-6
            late += run.end > run.due + 1e-5
    assert schedule.missed >= late


def test_schedule_at_fixed_sizes_matches_one_worked_out_by_hand():
    """Two models on 3g: both start at 0, the next two runs follow them; creating each slice takes 0.2 s once."""
    models = [hosted(2, 90.0), hosted(2, 90.0)]
    found = at_size(A100, KINDS, models, [2, 2], 1)
    assert [(run.model, run.start, run.end) for run in found.runs] == [
        (0, 0.2, 30.2),
        (1, 0.2, 30.2),
        (0, 30.2, 60.2),
        (1, 30.2, 60.2),
    ]
    assert (found.created, found.missed) == (2, 0)


def test_runs_are_ordered_by_earliest_deadline():
    models = [hosted(1, 70.0, window=1200.0), hosted(1, 70.0, window=600.0)]
    found = at_size(A100, KINDS, models, [4, 4], 1)
    assert [(run.model, run.due) for run in found.runs] == [(1, 600.0), (0, 1200.0), (1, 1200.0)]


def test_removal_of_an_idle_slice_delays_the_run_that_needs_its_placement():
    """The 4g is in the placement of the 7g: 0.2 s to destroy it and 0.2 s to create the new one."""
    models = [hosted(1, 40.0, window=600.0), hosted(1, 70.0, window=1200.0)]
    found = at_size(A100, KINDS, models, [3, 4], 1)
    assert [(run.model, pytest.approx(run.start)) for run in found.runs][:2] == [(0, 0.2), (1, 10.6)]


def test_missed_deadlines_are_counted():
    assert at_size(A100, KINDS, [hosted(3, 69.0 * 30)], [4], 1).missed == 1
    assert framed(A100, KINDS, [hosted(3, 69.0 * 30)], (((0, 0, 0, 0, 1), 1.0),), 1, costs=FREE).missed == 1


def test_frames_match_layouts_worked_out_by_hand():
    """A model that runs on 3g only: 4g + 3g and 3g + 3g can run it, of which two 3g sustain most. A model as fast on
    1g as on any other profile gets seven of them."""
    only = hosted(4, rates=(0.0, 0.0, 3.0, 0.0, 0.0))
    only = Hosted("m", only.rates, 600.0, 100.0, 4)
    assert frames(A100, KINDS, [only])[0][0][2] == 2
    assert frames(A100, KINDS, [hosted(4, rates=(1.0,) * 5)]) == (((7, 0, 0, 0, 0), 1.0),)


models = st.lists(
    st.builds(
        hosted,
        st.integers(1, 6),
        st.floats(5.0, 60.0),
        st.sampled_from((600.0, 1200.0, 1800.0)),
        st.lists(st.floats(1.0, 7.0), min_size=5, max_size=5).map(lambda r: tuple(sorted(r))),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30)
@given(models, st.data(), st.booleans())
def test_schedule_at_fixed_sizes_is_always_legal(found, data, fill):
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=len(found), max_size=len(found)))
    check(at_size(A100, KINDS, found, sizes, 2, fill=fill), found)


@settings(max_examples=30)
@given(models, st.booleans())
def test_schedule_in_frames_is_always_legal(found, fill):
    held = frames(A100, KINDS, found)
    assert sum(share for _, share in held) == pytest.approx(1.0)
    assert {way for way, _ in held} <= set(ways(A100, KINDS))
    check(framed(A100, KINDS, found, held, 2, fill=fill), found)


@pytest.mark.slow
@settings(max_examples=30)
@given(models, st.booleans())
def test_every_deadline_is_met_if_half_the_gpu_is_enough(found, fill):
    """At most six runs of a minute in ten, of at most five models, on a layout that fits each of them: seven 1g slices
    have 70 minutes for at most 30, whatever the sizes, and extra runs (`fill`) must not change that."""
    seven = (((7, 0, 0, 0, 0), 1.0),)
    assert framed(A100, KINDS, found, seven, 2, fill=fill).missed == 0
    assert at_size(A100, KINDS, found, [0] * len(found), 2, fill=fill).missed == 0


def gpu_time(schedule, model):
    """The compute-slice seconds of a model."""
    return sum((run.end - run.start) * run.slot.profile.compute for run in schedule.runs if run.model == model)


def test_idle_time_goes_to_the_model_with_the_least_gpu_time():
    """One model requests nine times the work of the other; the idle time makes their GPU time equal again."""
    both = [hosted(9, 30.0, name="much"), hosted(1, 30.0, name="little")]
    seven = (((7, 0, 0, 0, 0), 1.0),)
    plain = framed(A100, KINDS, both, seven, 3)
    filled = framed(A100, KINDS, both, seven, 3, fill=True)
    assert jain([gpu_time(plain, model) for model in (0, 1)]) == pytest.approx(100 / 164, rel=0.01)
    times = [gpu_time(filled, model) for model in (0, 1)]
    assert jain(times) > 0.999
    assert filled.missed == 0
    assert sum(times) > 0.95 * 7 * 3 * session_s(both)


def test_extra_runs_end_before_the_next_window_begins():
    both = [hosted(1, 45.0), hosted(1, 70.0)]
    found = framed(A100, KINDS, both, (((7, 0, 0, 0, 0), 1.0),), 3, fill=True)
    for run in found.runs:
        if run.due == float("inf"):
            assert run.end <= (run.start // 600 + 1) * 600 + 1e-5
