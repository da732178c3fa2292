"""Metrics, spans, levels and plots of small simulations."""

from __future__ import annotations

import json
import math
import re
from io import StringIO
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.lab.sim import log, plots
from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.engine import Simulation, SimulationResult
from slurm_migbatch.lab.sim.fragmentation import fragmentation
from slurm_migbatch.lab.sim.gpus import geometry, whole
from slurm_migbatch.lab.sim.job import JobCosts, SimulatedJob
from slurm_migbatch.lab.sim.metrics import jain, over_seeds, summarise
from slurm_migbatch.lab.sim.page import page
from slurm_migbatch.lab.sim.policies.queued import Fifo
from slurm_migbatch.lab.sim.policies.tiresias import Tiresias
from slurm_migbatch.lab.sim.spans import levels, spans
from slurm_migbatch.lab.sim.speeds import Linear, Whole
from slurm_migbatch.mig.layout import EMPTY, Layout
from slurm_migbatch.mig.planning import capacity
from slurm_migbatch.mig.profile import Profile
from tests.support.layouts import layouts


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    """Three jobs, one after the other, on one GPU, then one that never ends."""
    jobs = [
        SimulatedJob(0, "a", 0, 10, user="ann", slo_s=10),
        SimulatedJob(1, "b", 0, 20, user="bob", slo_s=25),
        SimulatedJob(2, "c", 40, 5, "infer", user="bob", start_slo_s=1, costs=JobCosts(cold_start_s=2)),
        SimulatedJob(3, "d", 50, 1, gpus=2, slo_s=1000),
    ]
    return Simulation(SimulatedCluster.of(whole("a30"), 1), jobs, Fifo(), Whole(), log=True).run()


def test_summary_matches_figures_worked_out_by_hand(result: SimulationResult) -> None:
    figures = summarise(result)
    assert figures["makespan_s"] == 50
    assert figures["held"] == pytest.approx(37 / 50)
    assert figures["busy_of_held"] == pytest.approx(35 / 37)
    assert figures["busy"] == pytest.approx(35 / 50)
    every = figures["all"]
    assert (every["jobs"], every["done"]) == (4, 3)
    assert every["jct_s"] == {"mean": (10 + 30 + 7) / 3, "p50": 10, "p95": 30, "p99": 30, "max": 30}
    assert every["queue_s"]["mean"] == pytest.approx(10 / 3)
    # b ends late and c starts late; d has time until 1050, so it is not counted
    assert every["slo"] == {"jobs": 3, "broken": 2, "share": pytest.approx(2 / 3)}
    assert figures["infer"]["delay_s"]["mean"] == 2
    assert figures["train"]["jobs"] == 3
    ann, bob = 1.0, (20 / 30 + 5 / 7) / 2
    assert every["jain"] == pytest.approx((ann + bob) ** 2 / (2 * (ann**2 + bob**2)))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_jain_index_is_one_if_equal_and_one_over_n_if_one_value_has_all(values: list[float]) -> None:
    found = jain(values)
    assert found is not None
    assert 1 / len(values) - 1e-9 <= found <= 1 + 1e-9
    assert jain([values[0]] * 5) == pytest.approx(1)
    assert jain([0, 0, 0, values[0]]) == pytest.approx(0.25)
    assert jain([]) is None


def test_fairness_is_reported_only_for_two_or_more_users() -> None:
    result, _ = _preempted()
    assert summarise(result)["all"]["jain"] is None
    alone = [SimulatedJob(0, "a", 0, 10, user="ann"), SimulatedJob(1, "b", 0, 20, user="ann")]
    done = Simulation(SimulatedCluster.of(whole("a30"), 1), alone, Fifo(), Whole()).run()
    assert summarise(done)["all"]["jain"] is None


def test_zeros_are_noted_and_not_drawn_on_a_logarithmic_axis() -> None:
    svg = plots.cdf({"wait": [0.0, 0.0, 0.0, 5.0]}, "waits")
    assert "wait (75% are 0)" in _texts(svg)
    (line,) = _groups(svg, "line-")
    assert len(_corners(line)) <= 1


def test_a_short_logarithmic_axis_has_numbers_at_its_ticks() -> None:
    texts = _texts(plots.cdf({"wait": [1500.0, 2500.0, 9000.0]}, "waits"))
    assert {"2000", "5000"} <= texts
    assert not [text for text in texts if "$" in text]


def test_timeline_has_a_legend_of_profiles() -> None:
    result, cluster = _preempted()
    stays = spans(result.events, result.end)
    texts = _texts(plots.timeline(stays, cluster, "layouts"))
    assert {str(span.place.slot.profile) for span in stays} | {"pale: no progress yet"} <= texts


def test_figures_of_seeds_become_means_with_intervals() -> None:
    merged = over_seeds([{"a": {"b": 1.0, "c": None}, "d": 5}, {"a": {"b": 3.0, "c": 1.0}, "d": 5}])
    assert merged["a"]["c"] is None
    assert merged["d"] == {"mean": 5, "low": 5, "high": 5}
    assert merged["a"]["b"]["mean"] == 2
    assert merged["a"]["b"]["high"] - 2 == pytest.approx(2 - merged["a"]["b"]["low"])
    assert merged["a"]["b"]["high"] > 3
    assert over_seeds([{"a": 1}])["a"] == {"mean": 1, "low": None, "high": None}


def test_spans_are_the_periods_of_jobs_on_their_places(result: SimulationResult) -> None:
    found = spans(result.events, result.end)
    assert [(span.name, span.begin, span.end, span.paused) for span in found] == [
        ("a", 0, 10, 0), ("b", 10, 30, 0), ("c", 40, 47, 2),
    ]  # fmt: skip


def _preempted() -> tuple[SimulationResult, SimulatedCluster]:
    cluster = SimulatedCluster.of(geometry("a100-80gb"), 2, per_node=1)
    jobs = [SimulatedJob(n, f"j<{n}>", 3.0 * n, 20.0 + n, gpus=1 + n % 2) for n in range(8)]
    result = Simulation(cluster, jobs, Tiresias(limits=(5, 40)), Linear(cluster), log=True).run()
    return result, cluster


def test_levels_add_up_to_the_totals_of_the_engine() -> None:
    result, _ = _preempted()
    found = levels(result.events, result.begin, result.end, result.slices, parts=37)
    assert sum(found.held) / 37 == pytest.approx(result.held / result.slices / (result.end - result.begin))
    assert sum(found.waiting) / 37 == pytest.approx(result.waiting)
    assert max(found.held) <= 1 + 1e-9
    assert sum(span.end - span.begin for span in spans(result.events, result.end)) * 7 == pytest.approx(result.held)


def test_the_log_is_json_lines(result: SimulationResult) -> None:
    file = StringIO()
    log.write(result.events, file)
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert rows[1] == {
        "time": 0.0, "what": "arrive", "job": 1, "places": [], "seconds": 0.0, "name": "b",
        "destroyed": 0, "created": 0,
    }  # fmt: skip
    assert rows[2]["places"] == [[0, "4g.24gb@0:4"]]


SVG = "{http://www.w3.org/2000/svg}"


def _groups(svg: str, prefix: str) -> list[ElementTree.Element]:
    """The groups of a drawing whose id begins with `prefix`."""
    return [group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if group.get("id", "").startswith(prefix)]


def _corners(group: ElementTree.Element) -> list[tuple[float, float]]:
    paths = [path.get("d", "") for path in group.iter(f"{SVG}path")]
    found = [pair for path in paths for pair in re.findall(r"[ML] ([^ ]+) ([^ ]+)", path)]
    return [(float(x), float(y)) for x, y in found]


def _width(group: ElementTree.Element) -> float:
    across = [x for x, _ in _corners(group)]
    return max(across) - min(across)


def _texts(svg: str) -> set[str]:
    return {"".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")}


def test_plots_are_valid_svg_with_finite_coordinates() -> None:
    result, _ = _preempted()
    times = [run.ended - run.job.arrival for run in result.runs if run.ended is not None]
    series = {"ours <&>": times, "none": [], "zero": [0.0]}
    svg = plots.cdf(series, "title & <more>")
    assert svg == plots.cdf(series, "title & <more>")
    assert all(math.isfinite(number) for line in _groups(svg, "line-") for pair in _corners(line) for number in pair)
    assert {"title & <more>", "ours <&>", "zero (100% are 0)", "s (logarithmic)"} <= _texts(svg)
    assert "none" not in _texts(svg)
    svg = plots.use(levels(result.events, result.begin, result.end, result.slices), "use")
    assert len(_groups(svg, "line-")) == 2
    assert {"use", "compute slices held", "hours"} <= _texts(svg)
    assert plots.cdf({}, "nothing") == ""
    assert plots.cdf({"completion": [], "wait": [0.0, 0.0]}, "nothing") == ""


def test_timeline_has_a_tooltip_for_each_span() -> None:
    result, cluster = _preempted()
    stays = [span for span in spans(result.events, result.end) if span.place.gpu == 0]
    svg = plots.timeline(spans(result.events, result.end), cluster, "layouts", gpus=1)
    (group,) = _groups(svg, "stays")
    titles = [title.text or "" for title in group.iter(f"{SVG}title")]
    assert len(titles) == len(stays) == len(list(group.iter(f"{SVG}path")))
    assert titles[0].startswith("j<0>: 7g.80gb@0:8, 0 to ")
    first, last = (_corners(path) for path in [*group][:: len([*group]) - 1])
    assert min(x for x, _ in first) < min(x for x, _ in last)
    assert {"layouts", "GPU 0", "hours"} <= _texts(svg)
    assert plots.timeline([], cluster, "nothing") == ""


def test_bar_lengths_are_proportional_to_values_and_intervals_are_drawn() -> None:
    groups = {
        "load <1>": [plots.PlottedBar("ours", 2.0, 1.0, 3.0), plots.PlottedBar("others & all", 4.0)],
        "load 2": [],
    }
    svg = plots.bars(groups, "title <&>", "jobs", mark=1.0)
    ours, others = _groups(svg, "bar-")
    assert _width(others) == pytest.approx(2 * _width(ours), rel=0.01)
    assert len(_groups(svg, "interval-")) == len(_groups(svg, "mark")) == 1
    assert {"title <&>", "jobs", "load <1>", "ours", "others & all", "2", "4"} <= _texts(svg)
    assert plots.bars({}, "nothing", "x") == plots.bars({"a": []}, "nothing", "x") == ""


def test_page_escapes_all_text_but_not_the_svg_plots() -> None:
    text = page("<t>", "a & b", ("x", "y"), [("<r>", "1")], ["<svg>ok</svg>", ""], "[p]\nname = '<'", ["<n>"])
    assert "<svg>ok</svg>" in text
    for raw in ("<t>", "<r>", "<n>", "a & b"):
        assert raw not in text
    assert text.count("<svg") == 1


def test_empty_simulations_have_no_figures() -> None:
    empty: Any = Simulation(SimulatedCluster.of(whole("a30"), 1), [], Fifo(), Whole()).run()
    figures = summarise(empty)
    assert figures["all"]["jct_s"]["mean"] is None
    assert figures["held"] is None


@pytest.mark.parametrize("kind", ["a30", "a100-40gb", "rtx-pro-6000"])
def test_fragmentation_is_the_share_of_further_slots_that_placements_cost(kind: str) -> None:
    gpu = geometry(kind)
    alike: dict[tuple[Profile, ...], list[Layout]] = {}
    for layout in layouts(gpu):
        alike.setdefault(layout.profiles, []).append(layout)
    for arranged in list(alike.values())[::7]:
        weights = {info.profile: info.memory_slices for info in gpu.profiles}
        possible = sum(size * max(capacity(gpu, each, p) for each in arranged) for p, size in weights.items())
        for used in arranged[:5]:
            actual = sum(size * capacity(gpu, used, p) for p, size in weights.items())
            assert fragmentation(gpu, used) == pytest.approx(1 - actual / possible if possible else 0)
    assert fragmentation(gpu, EMPTY) == fragmentation(gpu, Layout(gpu.full.slots)) == 0
