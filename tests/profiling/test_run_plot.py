"""Curves, their knees, and the drawing."""

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.profiling.curves import KNEE_SHARE, curves
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.plot import draw

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


def test_the_knee_is_the_smallest_batch_near_the_best_throughput():
    (curve,) = curves([row(16, 1000.0), row(1, 100.0), row(4, 400.0), row(8, 805.0), row(32, 980.0), row(64, None)])
    assert curve.knee.batch == 8
    assert [point.batch for point in curve.points] == [1, 4, 8, 16, 32] and curve.unfit == (64,)


def test_a_model_that_never_ran_has_no_knee():
    (curve,) = curves([row(1, None)])
    assert curve.knee is None and curve.points == ()


@given(rows)
def test_every_point_is_on_one_curve(found):
    drawn = curves(found)
    assert {(c.input_size, c.procs, p.batch) for c in drawn for p in c.points} | {
        (c.input_size, c.procs, batch) for c in drawn for batch in c.unfit
    } == {(r.input_size, r.procs, r.batch) for r in found}
    for curve in drawn:
        if curve.knee is not None:
            best = max(point.rate for point in curve.points)
            assert curve.knee.rate >= KNEE_SHARE * best
            assert all(point.rate < KNEE_SHARE * best for point in curve.points if point.batch < curve.knee.batch)


@settings(deadline=None)
@given(rows, st.text("ab<>&\"'", max_size=8))
def test_every_drawing_is_well_formed_and_stays_in_its_frame(found, title):
    drawing = ET.fromstring(draw(found, title))
    _, _, width, height = (float(number) for number in drawing.get("viewBox").split())
    for element in drawing.iter():
        for x, y in coordinates(element):
            assert -0.1 <= x <= width + 0.1 and -0.1 <= y <= height + 0.1
    circles = [element for element in drawing.iter(f"{SVG}circle") if element.get("class") == "knee"]
    assert len(circles) == 2 * sum(curve.knee is not None for curve in curves(found))
    crosses = [element for element in drawing.iter(f"{SVG}path") if element.get("class") == "unfit"]
    assert len(crosses) == 2 * sum(len(curve.unfit) for curve in curves(found))


def coordinates(element):
    for pair in (element.get("points") or "").split():
        yield tuple(float(number) for number in pair.split(","))
    for x, y in (("cx", "cy"), ("x", "y")):
        if element.get(x) is not None:
            yield float(element.get(x)), float(element.get(y))
    start = re.match(r"M([\d.-]+) ([\d.-]+)", element.get("d") or "")
    if start:
        yield float(start[1]), float(start[2])


def test_larger_is_higher_and_farther_right():
    drawing = ET.fromstring(draw([row(1, 100.0), row(2, 180.0), row(4, 300.0)], "t"))
    lines = [element.get("points") for element in drawing.iter(f"{SVG}polyline")]
    for line, rising in zip(lines, (True, True), strict=True):
        points = [tuple(map(float, pair.split(","))) for pair in line.split()]
        assert [x for x, _ in points] == sorted(x for x, _ in points)
        assert ([y for _, y in points] == sorted((y for _, y in points), reverse=True)) == rising
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.2)  # doublings are even
