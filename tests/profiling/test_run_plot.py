"""Curves, their knees, and the drawing."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from slurm_migbatch.profiling.curves import KNEE_SHARE, curves
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.plot import draw, numbers

SVG = "{http://www.w3.org/2000/svg}"

speeds = st.none() | st.floats(1e-6, 1e9)
rows = st.lists(
    st.builds(
        Measurement,
        gpu=st.just("g"),
        model=st.just("m"),
        batch=st.integers(1, 2048),
        input_size=st.none() | st.sampled_from([128, 512]),
        procs=st.integers(1, 3),
        throughput_per_s=speeds,
        latency_s=speeds,
        latency_p99_s=speeds,
    ),
    max_size=12,
)


def row(batch, rate, input_size=None):
    return Measurement(gpu="g", model="m", batch=batch, input_size=input_size, throughput_per_s=rate)


def test_knee_is_the_smallest_batch_near_the_best_throughput():
    (curve,) = curves([row(16, 1000.0), row(1, 100.0), row(4, 400.0), row(8, 805.0), row(32, 980.0), row(64, None)])
    assert curve.knee.batch == 8
    assert [point.batch for point in curve.points] == [1, 4, 8, 16, 32] and curve.unfit == (64,)


def test_a_model_that_never_ran_has_no_knee():
    (curve,) = curves([row(1, None)])
    assert curve.knee is None and curve.points == ()


@given(rows)
def test_every_point_is_on_exactly_one_curve(found):
    drawn = curves(found)
    assert {(c.input_size, c.procs, p.batch) for c in drawn for p in c.points} | {
        (c.input_size, c.procs, batch) for c in drawn for batch in c.unfit
    } == {(r.input_size, r.procs, r.batch) for r in found}
    for curve in drawn:
        if curve.knee is not None:
            best = max(point.rate for point in curve.points)
            assert curve.knee.rate >= KNEE_SHARE * best
            assert all(point.rate < KNEE_SHARE * best for point in curve.points if point.batch < curve.knee.batch)


@pytest.mark.slow
@settings(deadline=None, max_examples=15, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(rows, st.text("ab<>&$\"'", max_size=8))
def test_every_plot_is_well_formed_and_inside_its_frame(found, title):
    text = draw(found, title)
    assert draw(found, title) == text
    drawing = ET.fromstring(text)
    groups = marked(drawing)
    _, _, width, height = (float(number) for number in drawing.get("viewBox").split())
    for group in groups.values():
        for x, y in coordinates(group):
            assert -0.1 <= x <= width + 0.1 and -0.1 <= y <= height + 0.1
    names = [name for name in groups if name.startswith("knee-")]
    assert len(names) == 2 * sum(curve.knee is not None for curve in curves(found))
    names = [name for name in groups if name.startswith("unfit-")]
    assert len(names) == 2 * sum(len(curve.unfit) for curve in curves(found))
    assert {title.strip(), "batch"} - {""} <= {words.strip() for words in texts(drawing)}


def marked(drawing):
    """The groups of a drawing by their ids, which are all different."""
    groups = [element for element in drawing.iter(f"{SVG}g") if element.get("id")]
    found = {group.get("id"): group for group in groups if not group.get("id")[-1].isalpha()}
    assert len({group.get("id") for group in groups}) == len(groups)
    return found


def texts(drawing):
    return ["".join(element.itertext()) for element in drawing.iter(f"{SVG}text")]


def coordinates(group):
    """Positions of a group's line corners and of its markers; a marker's own corners are relative to its centre."""
    defined = {path for defs in group.iter(f"{SVG}defs") for path in defs.iter()}
    for path in group.iter(f"{SVG}path"):
        if path not in defined:
            yield from ((float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path.get("d")))
    for use in group.iter(f"{SVG}use"):
        yield float(use.get("x")), float(use.get("y"))


def test_points_with_nearly_equal_values_are_drawn():
    near = Measurement(gpu="g", model="m", batch=1, throughput_per_s=1e6, latency_s=1.0000000000000002e-06)
    drawing = ET.fromstring(draw([replace(near, latency_p99_s=1e-06)], "t"))
    assert "latency-p99-0" in marked(drawing)


def test_larger_values_are_drawn_higher_and_farther_right():
    drawing = ET.fromstring(draw([row(1, 100.0), row(2, 180.0), row(4, 300.0)], "t"))
    groups = marked(drawing)
    for name in ("throughput-0", "latency-0"):
        points = list(coordinates(groups[name]))[:3]
        assert [x for x, _ in points] == sorted(x for x, _ in points)
        assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
        assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.2)  # doublings are even


def test_legend_explains_lines_rings_and_crosses():
    slow = Measurement(gpu="g", model="m", batch=4, input_size=512, latency_s=0.1, latency_p99_s=0.2)
    labels = texts(ET.fromstring(draw([row(1, 100.0, 128), slow, row(64, None, 512)], "m on g")))
    wanted = {"m on g", "input 128", "input 512", "99th percentile", "does not fit"}
    assert wanted | {"throughput, items/s", "latency of a batch, ms"} <= set(labels)
    assert any(words.startswith("smallest batch with") for words in labels)
    plain = texts(ET.fromstring(draw([row(1, 100.0)], "m on g")))
    assert not {"99th percentile", "does not fit", "no input size"} & set(plain)


def test_ticks_are_short_numbers():
    formatter = numbers()
    assert [formatter(value) for value in (0, 0.25, 8000, 12500, 3e6)] == ["0", "0.25", "8000", "12.5k", "3M"]
