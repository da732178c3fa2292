"""Charts as values: Plotly data, a legend, a table of the same figures and a sentence for each chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from slurm_migbatch.profiling.colours import COLOURS
from slurm_migbatch.report.pictures.bins import Reals, TimeBins
from slurm_migbatch.report.pictures.sums import WAITS, Agreement, GpuHours, LayoutOverTime, Loans, Waits
from slurm_migbatch.report.pictures.words import amount, axis_moment, in_chart, moment, percent, seconds
from slurm_migbatch.values.figures import plural

BLUE, ORANGE, GREY = COLOURS[0], COLOURS[4], COLOURS[6]
#: from short to long, for waits: cividis, whose order is visible with any colour vision
_ORDERED: Final = ("#00224e", "#2a3f6d", "#575d6d", "#7d7c78", "#a59c74", "#d2c060", "#fee838")
_OUTLINE: Final = {"color": "#808080", "width": 1}
#: hatching of repeated colours
_HATCH: Final = ("", "/", "x", "-", "|", "+", ".")
_ACTIVITY: Final = (("busy", BLUE, ""), ("idle", ORANGE, "/"), ("not sampled", GREY, "."))
_CAUSES: Final = {
    "reclaim": "reclaimed: inference waits",
    "forecast": "reclaimed: inference was expected",
    "grow": "moved to a larger slice",
    "divide": "its GPU was divided anew",
    "late": "it did not start in time",
    "slurm": "ended by Slurm",
    "left": "its job left the queue",
    "refused": "Slurm refused it",
    "parted": "two jobs on its slice did less than one alone",
    "limit": "it reached its time limit because of sharing",
    "ended": "no recorded cause",
}
_ROW, _AROUND = 66, 70


@dataclass(frozen=True)
class LegendEntry:
    """Meaning of one colour (with a hatching) of a chart; `series`: the traces of that name can be hidden."""

    name: str
    colour: str
    hatch: str = ""
    series: bool = True


@dataclass(frozen=True)
class ChartTable:
    """The figures of a chart as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Chart:
    """One chart; `height` in pixels.

    Attributes:
        title, about: what it shows, and how to read it.
        answer: the main figure in one sentence.
        data, layout: for Plotly; colours of texts and grids are the page's.
        cells: labels of the cells of a layout, see `layout`.
        wide: whether it takes the width of the page.
    """

    id: str
    title: str
    about: str
    answer: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int
    table: ChartTable
    legend: Sequence[LegendEntry] = ()
    cells: dict[str, Any] | None = None
    wide: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the input of the page's script."""
        return {"id": self.id, "data": self.data, "layout": self.layout, "height": self.height, "cells": self.cells}


def use_by_account(uses: Sequence[GpuHours], limit: int) -> Chart:
    """Draw busy, idle and unsampled GPU hours of accounts; those beyond the first `limit` in one bar."""
    shown = list(uses[:limit])
    if rest := uses[limit:]:
        sums = (sum(getattr(use, part) for use in rest) for part in ("busy", "idle", "unknown"))
        shown.append(GpuHours(f"{plural(len(rest), 'other account')}", *sums))
    total = GpuHours("", *(sum(getattr(use, part) for use in uses) for part in ("busy", "idle", "unknown")))
    rows = range(len(shown))
    data = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": list(rows), "width": 0.36,
            "x": [_short(getattr(use, part)) for use in shown],
            "marker": {"color": colour, "line": _OUTLINE, "pattern": _pattern(hatch)},
            "hovertemplate": f"%{{x:,.3~g}} GPU hours {name}<extra></extra>",
        }
        for (name, colour, hatch), part in zip(_ACTIVITY, ("busy", "idle", "unknown"), strict=True)
    ]  # fmt: skip
    labels = [f"<b>{in_chart(use.name)}</b><br>{_use_text(use)}" for use in shown]
    layout = {
        "barmode": "stack", "annotations": _above(labels), "yaxis": _rows_axis(len(shown)),
        "xaxis": {"title": {"text": "GPU hours"}, "rangemode": "tozero", "showgrid": False},
    }  # fmt: skip
    table = ChartTable(
        ("Account", "GPU hours", "busy", "idle", "not sampled", "idle, of the sampled time"),
        [
            (use.name, amount(use.total), amount(use.busy), amount(use.idle), amount(use.unknown), _idle(use))
            for use in uses
        ],
    )
    about = (
        "GPU hours: hours on slices, weighted by their share of a GPU. Idle is the part in which no SM was active, if "
        "the node samples it."
    )
    answer = (
        f"{plural(len(uses), 'account')}: {_use_text(total)}"
        if len(uses) != 1
        else f"{uses[0].name}: {_use_text(uses[0])}"
    )
    return Chart(
        "accounts", "Use by account: busy and idle", about, answer, data, layout, _AROUND + _ROW * len(shown), table,
        [LegendEntry(*entry) for entry in _ACTIVITY],
    )  # fmt: skip


def _use_text(use: GpuHours) -> str:
    text = amount(use.total, "GPU hours")
    if use.idle_share is None:
        return f"{text}, activity not sampled"
    sampled = "" if use.unknown < 0.005 * use.total else f" of the {amount(use.busy + use.idle)} sampled"
    return f"{text}, {percent(use.idle_share)}{sampled} idle"


def _idle(use: GpuHours) -> str:
    return "" if use.idle_share is None else percent(use.idle_share)


def use_over_time(hours: Reals, bins: TimeBins) -> Chart:
    """Draw busy, idle and unsampled GPU hours per bin; `hours` as returned by `sums.use_over_time`."""
    middles = [axis_moment(at) for at in bins.edges[:-1] + bins.lengths / 2]
    data = [
        {
            "type": "bar", "name": name, "x": middles, "y": _shorts(row), "width": [1000 * s for s in bins.lengths],
            "marker": {"color": colour, "line": _OUTLINE, "pattern": _pattern(hatch)},
            "hovertemplate": f"%{{y:,.3~g}} GPU hours {name}<br>%{{x}}<extra></extra>",
        }
        for (name, colour, hatch), row in zip(_ACTIVITY, hours, strict=True)
    ]  # fmt: skip
    uses = [GpuHours(moment(at), *map(float, column)) for at, column in zip(bins.edges, hours.T, strict=False)]
    largest = max(uses, key=lambda use: use.total)
    table = ChartTable(
        ("From", "GPU hours", "busy", "idle", "not sampled"),
        [(use.name, amount(use.total), amount(use.busy), amount(use.idle), amount(use.unknown)) for use in uses],
    )
    layout = {"barmode": "stack", "xaxis": _time_axis(bins), "yaxis": {"title": {"text": "GPU hours"}}}
    width = _width(bins)
    return Chart(
        "activity", "Use over time: busy and idle", f"GPU hours by time, each bar {width}.",
        f"Maximum: {amount(largest.total, 'GPU hours')}, from {largest.name}.", data, layout, 300, table,
        [LegendEntry(*entry) for entry in _ACTIVITY],
    )  # fmt: skip


def profiles_over_time(gpus: Reals, profiles: Sequence[str], bins: TimeBins, known: int) -> Chart:
    """Draw the GPUs used by slices of each profile, stacked; `known` GPUs are present now (0: not stated)."""
    times = [axis_moment(at) for at in bins.edges]
    data: list[dict[str, Any]] = []
    for number, (profile, row) in enumerate(zip(profiles, gpus, strict=True)):
        trace = {
            "type": "scatter", "mode": "lines", "stackgroup": "profiles", "name": in_chart(profile), "x": times,
            "y": _shorts([*row, row[-1]]), "fillcolor": _colour(number),
            "line": {"shape": "hv", "width": 1, "color": _OUTLINE["color"]},
            "hovertemplate": f"{in_chart(profile)}: %{{y:.3~g}} GPUs<br>%{{x}}<extra></extra>",
        }  # fmt: skip
        if hatch := _hatch(number):
            trace["fillpattern"] = {"shape": hatch, "bgcolor": _colour(number), "fgcolor": "#ffffff", "solidity": 0.25}
        data.append(trace)
    layout: dict[str, Any] = {"xaxis": _time_axis(bins), "yaxis": {"title": {"text": "GPUs"}, "rangemode": "tozero"}}
    if known:
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": known, "y1": known}
        layout["shapes"] = [{**line, "line": {"color": "#808080", "width": 2, "dash": "dash"}}]
    means = (gpus * bins.lengths).sum(axis=1) / bins.lengths.sum() if len(profiles) else np.zeros(0)
    table = ChartTable(
        ("Profile", "GPUs on average", "most"),
        [
            (profile, amount(float(mean)), amount(float(row.max())))
            for profile, mean, row in zip(profiles, means, gpus, strict=True)
        ],
    )
    of_known = f" of {known} present now (dashed)" if known else ""
    return Chart(
        "profiles", "Utilisation by profile over time",
        "GPUs used by slices of each profile, stacked, weighted by their share of a GPU; means "
        f"of {_width(bins)}.",
        f"On average slices used {amount(float(means.sum()))} GPUs{of_known}.", data, layout, 340, table,
        [LegendEntry(profile, _colour(number), _hatch(number)) for number, profile in enumerate(profiles)],
    )  # fmt: skip


def layout(usage: LayoutOverTime, profiles: Sequence[str], bins: TimeBins) -> Chart:
    """Draw which profile held each memory slice of GPUs."""
    shown = len(profiles)
    rows: list[list[int | None]] = []
    shares: list[list[int]] = []
    for gpu in range(len(usage.gpus)):
        for cell in range(gpu * usage.slices, (gpu + 1) * usage.slices):
            rows.append([None if value < 0 else int(value) for value in usage.profile[cell]])
            shares.append([round(100 * value) for value in usage.share[cell]])
        rows.append([None] * bins.count)
        shares.append([0] * bins.count)
    step = usage.slices + 1
    scale = [
        [edge / max(shown, 1), _colour(number)] for number in range(max(shown, 1)) for edge in (number, number + 1)
    ]
    data = [
        {
            "type": "heatmap", "x": [axis_moment(at) for at in bins.edges], "z": rows, "customdata": shares,
            "zmin": -0.5, "zmax": max(shown, 1) - 0.5, "colorscale": scale, "showscale": False, "ygap": 0.5,
            "hovertemplate": "%{text}<br>%{x}<extra></extra>",
        }
    ]  # fmt: skip
    ticks = {"tickvals": [row * step + usage.slices / 2 for row in range(len(usage.gpus))]}
    axis = {**ticks, "ticktext": [in_chart(name) for name in usage.gpus], "autorange": "reversed", "showgrid": False}
    held = [usage.share[row * usage.slices : (row + 1) * usage.slices] for row in range(len(usage.gpus))]
    parts = bins.lengths / bins.lengths.sum()
    table = ChartTable(
        ("GPU", "memory slices held on average"),
        [(name, percent(float((share @ parts).mean()))) for name, share in zip(usage.gpus, held, strict=True)],
    )
    cut = f" The first {len(usage.gpus)} GPUs of {usage.left_out + len(usage.gpus)}."
    return Chart(
        "layout", "GPU layouts",
        "One band per GPU with one line per memory slice: the profile that held it most of the time, means "
        f"of {_width(bins)}. Empty: held for less than half of it.{cut if usage.left_out else ''}",
        f"{plural(len(usage.gpus), 'GPU')}, {plural(shown, 'profile')}.", data,
        {"xaxis": {**_time_axis(bins), "showgrid": False}, "yaxis": {**axis, "automargin": True}},
        _AROUND + 26 * len(usage.gpus), table,
        [LegendEntry(profile, _colour(number), series=False) for number, profile in enumerate(profiles)],
        {"gpus": [in_chart(name) for name in usage.gpus], "profiles": [in_chart(name) for name in profiles],
         "slices": usage.slices}, wide=True,
    )  # fmt: skip


def waits(by_profile: Sequence[Waits]) -> Chart:
    """Draw how long runs waited, as shares of the runs of each profile."""
    rows = list(range(len(by_profile)))
    data = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": rows, "width": 0.36,
            "x": [_short(100 * entry.runs[number] / entry.total) for entry in by_profile],
            "text": [
                percent(entry.runs[number] / entry.total) if entry.runs[number] >= 0.08 * entry.total else ""
                for entry in by_profile
            ],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
            "customdata": [entry.runs[number] for entry in by_profile],
            "marker": {"color": colour, "line": _OUTLINE},
            "hovertemplate": f"{name}: %{{customdata:,}} runs<extra></extra>",
        }
        for number, ((_, name), colour) in enumerate(zip(WAITS, _ORDERED, strict=True))
    ]  # fmt: skip
    labels = [f"<b>{in_chart(entry.profile)}</b><br>{plural(entry.total, 'run')}" for entry in by_profile]
    layout = {
        "barmode": "stack", "annotations": _above(labels), "yaxis": _rows_axis(len(by_profile)),
        "xaxis": {"title": {"text": "% of the runs"}, "range": [0, 100], "showgrid": False},
    }  # fmt: skip
    total = sum(entry.total for entry in by_profile)
    quick = sum(sum(entry.runs[:3]) for entry in by_profile)
    table = ChartTable(
        ("Profile", "runs", *(name for _, name in WAITS)),
        [(entry.profile, f"{entry.total:,}", *(f"{runs:,}" for runs in entry.runs)) for entry in by_profile],
    )
    return Chart(
        "waits", "Wait times",
        "From submission to start, for runs that started within the window, by profile.",
        f"{percent(quick / total)} of {plural(total, 'run')} waited under 1 min.", data, layout,
        _AROUND + _ROW * len(by_profile), table,
        [LegendEntry(name, colour) for (_, name), colour in zip(WAITS, _ORDERED, strict=True)],
    )  # fmt: skip


def agreement(comparison: Agreement, figure: str, unit: str) -> Chart:
    """Draw one figure of runs, predicted over measured; the colour of a cell is its number of runs."""
    middles = (comparison.edges[:-1] + comparison.edges[1:]) / 2
    low, high = float(comparison.edges[0]), float(comparison.edges[-1])
    values, texts = _log_ticks(low, high)
    near = float(np.log10(1.25))
    lines = [(0.0, "as measured", "solid"), (near, "25 % more", "dot"), (-near, "25 % less", "dot")]
    data: list[dict[str, Any]] = [
        {
            "type": "heatmap", "x": [_short(value) for value in middles], "y": [_short(value) for value in middles],
            "z": [[int(count) or None for count in row] for row in comparison.counts.T], "colorscale": "Cividis",
            "colorbar": {"title": {"text": "runs"}, "thickness": 12}, "hovertemplate": "%{z} runs<extra></extra>",
        }
    ]  # fmt: skip
    data += [
        {
            "type": "scatter", "mode": "lines", "name": name, "x": [low, high], "y": [low + shift, high + shift],
            "line": {"color": ORANGE, "width": 2, "dash": dash}, "hoverinfo": "skip",
        }
        for shift, name, dash in lines
    ]  # fmt: skip
    axis = {"tickvals": values, "ticktext": texts, "range": [low, high]}
    layout = {
        "xaxis": {**axis, "title": {"text": f"measured, {unit}"}},
        "yaxis": {**axis, "title": {"text": f"predicted, {unit}"}},
    }
    ten, quarter, half = comparison.within
    table = ChartTable(
        ("Runs", "within 10 %", "within 25 %", "within 50 %", "predicted over measured, median"),
        [(f"{comparison.runs:,}", percent(ten), percent(quarter), percent(half), f"{comparison.middle:.2f}")],
    )
    return Chart(
        f"predicted-{figure.split()[0].lower()}", f"{figure}: predicted against measured",
        "Runs by measured (x) and predicted at submission (y) value. On the solid line both are equal, between the "
        "dotted lines the prediction is off by less than 25 %.",
        f"{percent(quarter)} of {plural(comparison.runs, 'run')} within 25 % of the measured value.", data, layout,
        340, table,
        [LegendEntry("measured; dotted: 25 % more and less", ORANGE, series=False)],
    )  # fmt: skip


def loans(summary: Loans, bins: TimeBins) -> Chart:
    """Draw started loans above ended ones, by cause."""
    middles = [axis_moment(at) for at in bins.edges[:-1] + bins.lengths / 2]
    width = [1000 * length for length in bins.lengths]
    series = [("begun", "y", summary.started.tolist(), BLUE, "")]
    for number, (cause, counts) in enumerate(summary.ended.items()):
        colours = [colour for colour in COLOURS if colour != BLUE]
        series.append(
            (_CAUSES.get(cause, cause), "y2", counts.tolist(), colours[number % len(colours)], _HATCH[1 + number % 6])
        )
    data = [
        {
            "type": "bar", "name": in_chart(name), "x": middles, "y": counts, "yaxis": axis, "width": width,
            "marker": {"color": colour, "line": _OUTLINE, "pattern": _pattern(hatch)},
            "hovertemplate": f"%{{y}} {in_chart(name)}<br>%{{x}}<extra></extra>",
        }
        for name, axis, counts, colour, hatch in series
    ]  # fmt: skip
    whole = {"rangemode": "tozero", "tickformat": ",d", "nticks": 4}
    layout = {
        "barmode": "stack", "xaxis": {**_time_axis(bins), "anchor": "y2"},
        "yaxis": {**whole, "domain": [0.55, 1], "title": {"text": "begun"}},
        "yaxis2": {**whole, "domain": [0, 0.45], "title": {"text": "ended"}},
    }  # fmt: skip
    reclaimed = sum(int(summary.ended[cause].sum()) for cause in ("reclaim", "forecast") if cause in summary.ended)
    table = ChartTable(
        ("Loans", "count"),
        [
            ("begun", f"{int(summary.started.sum()):,}"),
            *(
                (f"ended: {_CAUSES.get(cause, cause)}", f"{int(counts.sum()):,}")
                for cause, counts in summary.ended.items()
            ),
            ("GPU hours on loan", amount(summary.hours)),
            ("from signal to requeue, median", "" if summary.leaving_s is None else seconds(summary.leaving_s)),
        ],
    )
    quick = "" if summary.leaving_s is None else f", half of them within {seconds(summary.leaving_s)}"
    return Chart(
        "loans", "Loans of idle slices to training, and their ends", f"Counts per bar of {_width(bins)}.",
        f"{plural(int(summary.started.sum()), 'loan')} started, {amount(summary.hours, 'GPU hours')} on loan; "
        f"{reclaimed:,} reclaimed{quick}.", data, layout, 320, table,
        [LegendEntry(name, colour, hatch) for name, _, _, colour, hatch in series],
    )  # fmt: skip


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _hatch(number: int) -> str:
    return _HATCH[number // len(COLOURS) % len(_HATCH)]


def _pattern(hatch: str) -> dict[str, Any]:
    return {"shape": hatch, "fillmode": "overlay", "fgcolor": "#ffffff", "solidity": 0.25} if hatch else {"shape": ""}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _shorts(values: Sequence[float] | Reals) -> list[float]:
    return [_short(value) for value in values]


def _above(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return a text above each bar; bars have rows of height 1."""
    return [
        {
            "x": 0, "xref": "paper", "xanchor": "left", "y": row - 0.2, "yanchor": "bottom", "text": text,
            "showarrow": False, "align": "left",
        }
        for row, text in enumerate(labels)
    ]  # fmt: skip


def _rows_axis(rows: int) -> dict[str, Any]:
    return {"range": [rows - 0.7, -0.85], "showticklabels": False, "showgrid": False, "zeroline": False, "ticks": ""}


def _time_axis(bins: TimeBins) -> dict[str, Any]:
    return {"type": "date", "range": [axis_moment(bins.start), axis_moment(bins.end)]}


def _width(bins: TimeBins) -> str:
    for length, unit in ((7 * 86400.0, "week"), (86400.0, "day"), (3600.0, "hour"), (60.0, "minute")):
        if bins.width >= length:
            return plural(round(bins.width / length), unit)
    return plural(round(bins.width), "second")


def _log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Return positions and texts of ticks on a log10 axis: decades, and 2 and 5 times them if those are few."""
    steps = (1, 2, 5) if high - low < 2.5 else (1,)
    values = [step * 10.0**power for power in range(int(np.floor(low)), int(np.ceil(high)) + 1) for step in steps]
    shown = [value for value in values if low <= np.log10(value) <= high]
    return [float(np.log10(value)) for value in shown], [
        f"{value:,.0f}" if value >= 1 else f"{value:g}" for value in shown
    ]
