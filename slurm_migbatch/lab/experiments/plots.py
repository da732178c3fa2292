"""Plot the experiments' results, by name, for `--plot`. They are drawn from the printed figures alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.plots import PlottedBar, bars, cdf, curves, layouts
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile

Result = Mapping[str, Any]
Plots = dict[str, str]


def instances(result: Result) -> Plots:
    """Plot the GPUs for all scenarios, by planner and knowledge."""
    measured = [PlottedBar(row["name"], row["total"]) for row in result["rows"]]
    known = {entry["known"]: entry["rounds"] for entry in (*result["predicted"], *result["measured_share"])}
    rounds = {
        f"known: {name}": [PlottedBar(f"round {number}", at["total"]) for number, at in enumerate(rounds_of)]
        for name, rounds_of in known.items()
    }
    margins = [
        PlottedBar(f"{margin['points']} points, confidence {margin['confidence']:g}", margin["total"])
        for margin in result["margins"]
    ]
    target = next((row["total"] for row in result["rows"] if row["name"] == "ParvaGPU"), None)
    return {
        "gpus": bars({"measured figures": measured}, "GPUs for all scenarios", "GPUs", target),
        "predicted": bars(rounds, "GPUs for all scenarios, with predicted figures", "GPUs", target),
        "margins": bars({"first placement": margins}, "GPUs by confidence", "GPUs", target),
    }


def fragmentation(result: Result) -> Plots:
    """Plot mean waits, and accepted slices without a queue, by load."""
    plots: Plots = {}
    for name, population in result["populations"].items():
        waits: dict[str, list[PlottedBar]] = {}
        accepted: dict[str, list[PlottedBar]] = {}
        for load in population["loads"]:
            for way, row in load["ways"].items():
                into, key = (waits, "wait_s") if load["queued"] else (accepted, "slices")
                into.setdefault(f"load {load['load']:g}", []).append(PlottedBar(way, row[key]))
        key = name.replace(" ", "-")
        plots[f"wait-{key}"] = bars(waits, f"Mean wait: {name}", "s")
        plots[f"accepted-{key}"] = bars(accepted, f"Share of slices accepted: {name}", "of those requested")
    return plots


def dispatch(result: Result) -> Plots:
    """Plot mean completion times relative to both static layouts."""
    plots = {}
    for key, what in (("over_equal", "the best equal slices"), ("over_static", "the best static cut")):
        groups = {
            f"load {entry['load']:g}": [PlottedBar(name, *row[key]) for name, row in entry["ways"].items()]
            for entry in result["results"]
        }
        plots[key.replace("_", "-")] = bars(groups, f"Mean completion time over {what}", "times as long", 1.0)
    return plots


def sharing(result: Result) -> Plots:
    """Plot completion times of migbatchd's pairs relative to not sharing and sharing always."""
    groups: dict[str, dict[str, list[PlottedBar]]] = {}
    for cell in result["cells"]:
        for name, ratio in cell["over"].items():
            mean, low, high = ratio
            kind = f"load {cell['load']:g}, slowdown {cell['slowdown']}"
            groups.setdefault(name, {}).setdefault(kind, []).append(
                PlottedBar(f"sigma {cell['error']:g}", mean, low, high)
            )
    return {
        name.lower().replace(", ", "-").replace(" ", "-"): bars(by_kind, f"Mean completion time: {name}", "times", 1.0)
        for name, by_kind in groups.items()
    }


def placement(result: Result) -> Plots:
    """Plot accepted jobs by load, and gains over first fit with their intervals."""
    plots: Plots = {}
    for name, population in result["populations"].items():
        rules = list(dict.fromkeys(_rule(row["rule"]) for load in population["loads"] for row in load["rules"]))
        lines: dict[str, list[tuple[float, float]]] = {rule: [] for rule in rules}
        gains: dict[str, list[PlottedBar]] = {}
        for load in population["loads"]:
            for row in load["rules"]:
                lines[_rule(row["rule"])].append((load["load"], row["accepted"][0]))
            gains[f"load {load['load']:g}"] = [_ratio(_rule(row["rule"]), row["gain_jobs"]) for row in load["rules"]]
        key = name.replace(" ", "-")
        plots[f"accepted-{key}"] = curves(lines, f"Share of jobs accepted: {name}", "load")
        plots[f"gain-{key}"] = bars(gains, f"Accepted jobs over first fit: {name}", "times as many", 1.0)
    return plots


def _rule(name: str) -> str:
    return name.split(" (")[0]


def _ratio(name: str, gain: Sequence[float]) -> PlottedBar:
    mean, low, high = (1 + value for value in gain)
    return PlottedBar(name, mean, low, high)


def paris_elsa(result: Result) -> Plots:
    """Plot rates relative to the best homogeneous layout, and the chosen layouts."""
    ours, plots = {}, {}
    gpu = geometry(result["gpu"])
    for entry in result["results"]:
        spread = f"batches of variance {entry['variance']:g}"
        ours[spread] = [PlottedBar(row["model"], *row["ratio"]) for row in entry["models"]]
        means = [PlottedBar(name, value) for name, value in entry["mean_over_best_homogeneous"].items()]
        plots[f"ways-{entry['variance']:g}"] = bars(
            {spread: means}, "Latency-bounded rate over the best homogeneous layout, mean of models", "times", 1.0
        )
        rows = [
            (f"{row['model']}, GPU {number}", _layout(gpu, result["kinds"], counts))
            for row in entry["models"]
            for number, counts in enumerate(row["ours"]["gpus"])
        ]
        plots[f"layouts-{entry['variance']:g}"] = layouts(rows, gpu, f"Our cuts: {spread}")
    return {"ours": bars(ours, "Our rate over the best homogeneous layout's", "times", 1.0), **plots}


def dstack(result: Result) -> Plots:
    """Plot load without a missed deadline relative to the ideal: means, intervals and distribution over mixes."""
    groups = {
        f"batches {entry['batches']}": [PlottedBar(name, *load) for name, load in entry["all"]["load"].items()]
        for entry in result["results"]
    }
    plots = {"load": bars(groups, "Load under all deadlines over the ideal's", "of the ideal", 0.9)}
    for entry in result["results"]:
        names = list(entry["all"]["load"])
        series = {name: [row["load"][name] for row in entry["rows"] if name in row["load"]] for name in names}
        title = f"Mixes that carry at most so much: batches {entry['batches']}"
        plots[f"mixes-{entry['batches']}"] = cdf(series, title, "of the ideal", linear=True)
    return plots


def lending(result: Result) -> Plots:
    """Plot completion times relative to training's own half, restarts, and delays of inference."""
    times, restarts, delays = {}, {}, {}
    for entry in result["results"]:
        ways = entry["ways"]
        times[entry["load"]] = [PlottedBar(name, *_interval(way["jct_ratio"])) for name, way in ways.items()]
        restarts[entry["load"]] = [
            PlottedBar(name, *_interval(way.get("restarts_interval") or [way["restarts"]]))
            for name, way in ways.items()
        ]
        delays[entry["load"]] = [PlottedBar(name, way["delay_p95_s"]) for name, way in ways.items()]
    return {
        "jct": bars(times, "Mean completion time over training on its own half", "times as long", 1.0),
        "restarts": bars(restarts, "Restarts of a training job", "restarts"),
        "delay": bars(delays, "Start delay of inference, 95th percentile", "s"),
    }


def _interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    return (values[0], values[1], values[2]) if len(values) == 3 else (values[0], None, None)


def _layout(gpu: Geometry, kinds: Sequence[str], counts: Sequence[int]) -> Layout:
    profiles = [Profile.parse(kind) for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    return plan_free(gpu, EMPTY, sorted(profiles, reverse=True))


PLOTS: Final[Mapping[str, Callable[[Result], Plots]]] = {
    "instances": instances,
    "fragmentation": fragmentation,
    "dispatch": dispatch,
    "sharing": sharing,
    "placement": placement,
    "paris-elsa": paris_elsa,
    "dstack": dstack,
    "lending": lending,
}
"""Experiment -> its plots."""


def write(name: str, result: Result, folder: Path) -> list[Path]:
    """Draw an experiment's plots into a directory, which is created; empty ones are skipped. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for plot, svg in PLOTS[name](result).items():
        if svg:
            path = folder / f"{name}-{plot}.svg"
            path.write_text(svg, encoding="utf-8")
            written.append(path)
    return written
