"""Plot the experiments' results, by name, for `--plot`. They are drawn from the printed figures alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.lab.sim.plots import PlottedBar, bars

Result = Mapping[str, Any]
Plots = dict[str, str]


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


PLOTS: Final[Mapping[str, Callable[[Result], Plots]]] = {
    "fragmentation": fragmentation,
    "dispatch": dispatch,
    "sharing": sharing,
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
