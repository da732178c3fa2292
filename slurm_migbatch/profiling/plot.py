"""Plot throughput and latency against the batch as one SVG, with helpers for all plots. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from io import StringIO
from itertools import cycle
from typing import TYPE_CHECKING, Any

from slurm_migbatch.profiling.colours import COLOURS
from slurm_migbatch.profiling.curves import KNEE_SHARE, MeasuredCurve, curves
from slurm_migbatch.profiling.measurement import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter

#: points (1/72 inch) of a line of text
LINE = 16.0
_PANEL_WIDTH, _PANEL_HEIGHT = 430.0, 330.0
#: text stays text, a dollar sign in a name is literal, and ids are deterministic
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "slurm-migbatch",
    "text.parse_math": False,
    "font.size": 10.0,
    "axes.titlesize": "medium",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}


def require() -> None:
    """Raise ModuleNotFoundError if matplotlib is not installed, before the work whose result is plotted."""
    import_module("matplotlib")


def document(width: float, height: float, paint: Callable[[Figure], None]) -> str:
    """Return the output of `paint` on an empty figure of this size in points, as deterministic SVG."""
    from matplotlib import style
    from matplotlib.figure import Figure

    text = StringIO()
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        paint(figure)
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]  # embedded in pages without its XML declaration


def draw(rows: Iterable[Measurement], title: str) -> str:
    """Draw rows of one model on one device as SVG. Rings mark the knees, crosses batches that did not fit."""
    drawn = [curve for curve in curves(rows) if curve.points or curve.unfit]
    lines = 2 + len(drawn) / 2
    return document(2 * _PANEL_WIDTH, _PANEL_HEIGHT + LINE * lines, partial(_paint, drawn, title))


def _paint(found: Sequence[MeasuredCurve], title: str, figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    left.set_title("throughput, items/s")
    right.set_title("latency of a batch, ms")
    legend: dict[str, Any] = {}
    for number, (curve, colour) in enumerate(zip(found, cycle(COLOURS), strict=False)):
        legend |= _draw_curve(curve, colour, left, right, number)
    for axes in (left, right):
        axes.set_xlabel("batch")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    left.set_ylim(bottom=0.0)
    left.yaxis.set_major_formatter(numbers())
    if any(curve.points for curve in found):  # a logarithmic scale needs at least one point that ran
        right.set_yscale("log")
        decades(right.yaxis)
    right.yaxis.set_major_formatter("{x:g}")
    if legend:
        figure.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=2)


def _draw_curve(curve: MeasuredCurve, colour: str, left: Axes, right: Axes, number: int) -> dict[str, Any]:
    """Draw a curve in both panels; return the legend's entries."""
    legend: dict[str, Any] = {}
    batches = [point.batch for point in curve.points]
    rates = [point.rate or 0.0 for point in curve.points]
    delays = [_ms(point.seconds or 0.0) for point in curve.points]
    tails = [(point.batch, _ms(point.latency_p99_s)) for point in curve.points if point.latency_p99_s]
    if batches:
        (line,) = left.plot(batches, rates, "o-", color=colour, markersize=4, gid=f"throughput-{number}")
        right.plot(batches, delays, "o-", color=colour, markersize=4, gid=f"latency-{number}")
        if curve.name:
            legend[curve.name] = line
    if tails:
        (line,) = right.plot(*zip(*tails, strict=True), "--", color=colour, alpha=0.7, gid=f"latency-p99-{number}")
        legend["99th percentile"] = line
    ring: dict[str, Any] = {
        "marker": "o",
        "markersize": 12.0,
        "fillstyle": "none",
        "color": colour,
        "linestyle": "none",
    }
    if curve.knee is not None:
        batch = curve.knee.batch
        (mark,) = left.plot([batch], [curve.knee.rate or 0.0], gid=f"knee-throughput-{number}", **ring)
        right.plot([batch], [_ms(curve.knee.seconds or 0.0)], gid=f"knee-latency-{number}", **ring)
        legend[f"smallest batch with {KNEE_SHARE:.0%} of the best throughput"] = mark
    for panel, axes in enumerate((left, right)):
        for batch in curve.unfit:
            (mark,) = axes.plot(
                [batch], [0.03], "x", color=colour, transform=axes.get_xaxis_transform(),
                gid=f"unfit-{panel}-{number}-{batch}",
            )  # fmt: skip
            legend["does not fit"] = mark
    return legend


def _ms(seconds: float) -> float:
    """Return milliseconds of nine digits: the margins of a logarithmic axis are empty if values differ in the last."""
    return float(f"{1000 * seconds:.9g}")


def decades(axis: Axis) -> None:
    """Put ticks of a logarithmic axis at decades, and if there are few also at 2 and 5 times them."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axis.set_minor_formatter(NullFormatter())


def numbers() -> Formatter:
    """Format the ticks of a value axis: 0.25, 8000, 12.5k, 3M."""
    from matplotlib.ticker import EngFormatter, FuncFormatter

    large = EngFormatter(sep="")
    return FuncFormatter(lambda value, position: f"{value:g}" if abs(value) < 1e4 else large(value, position))
