"""Plot simulations and experiments as SVG: distributions, bars with intervals, stays on GPUs, use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Final, NamedTuple
from xml.etree import ElementTree

from slurm_migbatch.lab.sim.cluster import SimulatedCluster
from slurm_migbatch.lab.sim.spans import MeanLevels, Span
from slurm_migbatch.profiling.colours import COLOURS
from slurm_migbatch.profiling.plot import LINE, decades, document, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 760.0, 300.0
#: height of a plot besides its rows, for title, ticks and label; points
_AROUND = 80.0
_ROW = 24.0
_LEGEND_COLUMNS: Final = 5
_MOST_POINTS: Final = 400
_MOST_SPANS: Final = 6000
_SVG = "http://www.w3.org/2000/svg"


class PlottedBar(NamedTuple):
    """A value with its interval, if it has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


def cdf(series: Mapping[str, Sequence[float]], title: str) -> str:
    """Draw the cumulative share of values (seconds), one line for each name.

    The axis of the values is logarithmic and has no 0: values of 0 or less are not drawn, the line begins above their
    share, and the legend states it. Without any value above 0 the text is empty.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, values in series.items():
        if not len(values):
            continue
        ordered = sorted(values)
        first = sum(value <= 0 for value in ordered)
        step = max(1, (len(ordered) - first) // _MOST_POINTS)
        chosen = sorted({*range(first, len(ordered), step), len(ordered) - 1} - set(range(first)))
        label = f"{name} ({first / len(ordered):.0%} are 0)" if first else name
        lines[label] = [(ordered[i], (i + 1) / len(ordered)) for i in chosen]

    if not any(lines.values()):
        return ""

    def finish(axes: Axes) -> None:
        axes.set_ylim(0.0, 1.0)
        axes.set_xscale("log")
        decades(axes.xaxis)
        axes.xaxis.set_major_formatter(numbers())

    return _lines(lines, title, "s (logarithmic)", finish)


def use(levels: MeanLevels, title: str) -> str:
    """Draw the share of held compute slices, and the pending jobs relative to their maximum, over time."""
    hours = [time / 3600 for time in levels.times]
    most_waiting = max(levels.waiting, default=0.0)
    lines = {"compute slices held": list(zip(hours, levels.held, strict=True))}
    if most_waiting > 0:
        shares = [waiting / most_waiting for waiting in levels.waiting]
        lines[f"jobs waiting (1 = {most_waiting:.0f})"] = list(zip(hours, shares, strict=True))

    def finish(axes: Axes) -> None:
        axes.set_xlim(left=0.0)
        axes.set_ylim(0.0, 1.02)

    return _lines(lines, title, "hours", finish)


def _lines(
    lines: Mapping[str, Sequence[tuple[float, float]]], title: str, label: str, finish: Callable[[Axes], None]
) -> str:
    """Draw one line for each name with a legend below; return an empty text without lines.

    `finish` sets scales and limits of the axes.
    """
    if not lines:
        return ""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set(title=title, xlabel=label)
        drawn = [
            axes.plot(
                [x for x, _ in points], [y for _, y in points], color=colour, linewidth=1.5, gid=f"line-{number}"
            )[0]
            for number, (points, colour) in enumerate(zip(lines.values(), cycle(COLOURS), strict=False))
        ]
        finish(axes)
        figure.legend(drawn, list(lines), loc="outside lower left")

    return document(_WIDTH, _HEIGHT + LINE * len(lines), paint)


def bars(groups: Mapping[str, Sequence[PlottedBar]], title: str, label: str, mark: float | None = None) -> str:
    """Draw a bar from 0 for each value, with its interval as a line; `mark` is a reference value."""
    shown = {group: bars for group, bars in groups.items() if bars}
    if not shown:
        return ""
    rows = len(shown) + sum(len(bars) for bars in shown.values())

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set(title=title, xlabel=label)
        _draw_bars(axes, shown)
        axes.grid(visible=False, axis="y")
        axes.set_ylim(rows - 0.4, -0.6)
        axes.set_xlim(left=0.0)
        axes.margins(x=0.1)  # room for the last value
        axes.xaxis.set_major_formatter(numbers())
        if mark is not None:
            line = axes.axvline(mark, color="#000000", linestyle="--", linewidth=1.0, gid="mark")
            figure.legend([line], [f"reference: {mark:g}"], loc="outside lower left")

    return document(_WIDTH, _AROUND + LINE * (rows + (mark is not None)), paint)


def _draw_bars(axes: Axes, groups: Mapping[str, Sequence[PlottedBar]]) -> None:
    names = list(dict.fromkeys(bar.name for bars in groups.values() for bar in bars))
    rows: list[str] = []
    heads: list[int] = []
    for group, bars in groups.items():
        heads.append(len(rows))
        rows.append(group)
        for bar in bars:
            row, value = len(rows), max(0.0, bar.value)
            rows.append(bar.name)
            colour = COLOURS[names.index(bar.name) % len(COLOURS)]
            axes.barh(row, value, height=0.7, color=colour, alpha=0.75, gid=f"bar-{row}")
            end = value
            if bar.low is not None and bar.high is not None:
                low, high = max(0.0, bar.low), max(0.0, bar.high)
                axes.plot((low, high), (row, row), "|-", color="#000000", linewidth=1.0, gid=f"interval-{row}")
                end = max(value, high)
            axes.annotate(
                f"{bar.value:.3g}", (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
            )
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0)
    labels = axes.get_yticklabels()
    for row in heads:
        labels[row].set_fontweight("bold")


def timeline(spans: Sequence[Span], cluster: SimulatedCluster, title: str, gpus: int = 24) -> str:
    """Draw the slices of the first GPUs over time: a row for each GPU, in it the memory slices from the bottom up.

    Slices of a profile have one colour; the pale beginning of a bar is the time before its job made progress. Every
    bar has a tooltip.
    """
    chosen = [span for span in spans if span.place.gpu < gpus][:_MOST_SPANS]
    rows = min(gpus, len(cluster.gpus))
    if not chosen:
        return ""
    working = [span for span in chosen if span.begin + span.paused < span.end]
    cut = f" (only the first {_MOST_SPANS} stays)" if len(chosen) == _MOST_SPANS else ""
    lines = -(-(1 + len({span.place.slot.profile for span in chosen})) // _LEGEND_COLUMNS)
    svg = document(
        _WIDTH,
        _AROUND + _ROW * rows + LINE * lines,
        partial(_paint_stays, chosen, working, cluster, rows, f"{title}{cut}"),
    )
    return _with_tips(svg, {"stays": [_tip(span) for span in chosen], "progress": [_tip(span) for span in working]})


def _paint_stays(
    stays: Sequence[Span], working: Sequence[Span], cluster: SimulatedCluster, rows: int, title: str, figure: Figure
) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    profiles = sorted({span.place.slot.profile for span in stays})
    colour_of = {profile: COLOURS[number % len(COLOURS)] for number, profile in enumerate(profiles)}
    axes = figure.subplots()
    axes.set(title=title, xlabel="hours", ylim=(rows - 0.5, -0.5))
    axes.set_yticks(range(rows), [f"GPU {row}" for row in range(rows)])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="x")
    for name, spans, alpha in (("stays", stays, 0.35), ("progress", working, 1.0)):
        begins = [span.begin + (span.paused if name == "progress" else 0.0) for span in spans]
        boxes = [_box(span, begin, cluster) for span, begin in zip(spans, begins, strict=True)]
        colours = [colour_of[span.place.slot.profile] for span in spans]
        axes.add_collection(
            PolyCollection(boxes, facecolors=colours, alpha=alpha, edgecolors="#ffffff", linewidths=0.3, gid=name)
        )
    marks = [Patch(facecolor=colour) for colour in colour_of.values()]
    pale = Patch(facecolor=colour_of[profiles[0]], alpha=0.35)
    figure.legend(
        [*marks, pale], [*map(str, profiles), "pale: no progress yet"], loc="outside lower left", ncols=_LEGEND_COLUMNS
    )
    axes.set_xlim(0.0, max(span.end for span in stays) / 3600)


def _box(span: Span, begin: float, cluster: SimulatedCluster) -> list[tuple[float, float]]:
    """Return the corners of a span from `begin` on, as hours and rows; rows are numbered from the top down."""
    unit = 0.9 / cluster.gpus[span.place.gpu].geometry.memory_slices
    placement = span.place.slot.placement
    bottom = span.place.gpu + 0.45 - placement.start * unit
    top = bottom - placement.size * unit * 0.97
    left, right = begin / 3600, span.end / 3600
    return [(left, bottom), (right, bottom), (right, top), (left, top)]


def _tip(span: Span) -> str:
    return f"{span.name}: {span.place.slot}, {span.begin:.0f} to {span.end:.0f} s"


def _with_tips(svg: str, tips: Mapping[str, Sequence[str]]) -> str:
    """Add a title (tooltip) to each path of the groups in `tips`; matplotlib cannot write one."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(svg)  # noqa: S314 our own drawing
    groups = {group.get("id", ""): group for group in root.iter(f"{{{_SVG}}}g")}
    for name, texts in tips.items():
        for path, text in zip(groups[name].iter(f"{{{_SVG}}}path"), texts, strict=True):
            ElementTree.SubElement(path, f"{{{_SVG}}}title").text = text
    return ElementTree.tostring(root, encoding="unicode")
