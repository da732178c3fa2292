"""Plots of simulations and experiments as SVG: distributions, bars with intervals, curves, layouts of GPUs, use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Final, NamedTuple

from slurm_migbatch.lab.sim.cluster import Cluster
from slurm_migbatch.lab.sim.spans import Levels, Span
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.profiling.plot import COLOURS, Axis, linear_axis, log10_axis, shown_number

_W, _H = 760, 280
_LEFT, _TOP, _BELOW, _LINE = 64, 40, 46, 18
_ROW = 26
_NAMES = 230
_MOST_POINTS: Final = 400
_MOST_SPANS: Final = 6000


class Bar(NamedTuple):
    """A value with its interval, where it has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


def cdf(series: Mapping[str, Sequence[float]], title: str, unit: str = "s", *, linear: bool = False) -> str:
    """Share of values that are at most so large, one line for each name; their axis is logarithmic where not linear."""
    shown = {name: sorted(max(value, 1e-3) for value in values) for name, values in series.items() if len(values)}
    if not shown:
        return ""
    ends = [values[0] for values in shown.values()] + [values[-1] for values in shown.values()]
    x = linear_axis(ends) if linear else log10_axis(ends)
    y = Axis(lambda value: value, (0.0, 0.25, 0.5, 0.75, 1.0))
    lines = []
    for (_, values), colour in zip(shown.items(), cycle(COLOURS), strict=False):
        step = max(1, len(values) // _MOST_POINTS)
        chosen = [*range(0, len(values), step), len(values) - 1]
        lines.append(_line([(values[i], (i + 1) / len(values)) for i in chosen], x, y, colour))
    return _chart(title, unit if linear else f"{unit} (logarithmic)", x, y, lines, list(shown))


def curves(series: Mapping[str, Sequence[tuple[float, float]]], title: str, label: str) -> str:
    """One line for each name over a linear axis; both axes begin at 0."""
    shown = {name: points for name, points in series.items() if len(points)}
    if not shown:
        return ""
    x = linear_axis([at for points in shown.values() for at, _ in points])
    y = linear_axis([value for points in shown.values() for _, value in points])
    lines = [_line(points, x, y, colour) for points, colour in zip(shown.values(), cycle(COLOURS), strict=False)]
    return _chart(title, label, x, y, lines, list(shown))


def bars(groups: Mapping[str, Sequence[Bar]], title: str, label: str, mark: float | None = None) -> str:
    """A bar for each value, from 0 on, with its interval as a line; `mark` is a value that they are held against."""
    rows = [(group, bar) for group, bars in groups.items() for bar in bars]
    if not rows:
        return ""
    names = list(dict.fromkeys(bar.name for _, bar in rows))
    x = linear_axis([max(bar.value, bar.high or 0.0) for _, bar in rows] + [mark or 0.0])
    wide = _W - _NAMES - 30  # room for the last value
    height = _TOP + _LINE * (len(rows) + len(groups)) + _BELOW

    def at(value: float) -> float:
        return _LEFT + _NAMES + wide * x.place(max(0.0, value))

    out = [_head(height, title)]
    top = float(_TOP)
    for group, bars in groups.items():
        out.append(f'<text x="{_LEFT}" y="{top + 13}" font-weight="bold">{escape(group)}</text>')
        top += _LINE
        for bar in bars:
            colour, middle = COLOURS[names.index(bar.name) % len(COLOURS)], top + _LINE / 2
            out.append(f'<text x="{_LEFT + _NAMES - 6}" y="{top + 13}" text-anchor="end">{escape(bar.name)}</text>')
            box = f'x="{at(0):.1f}" y="{top + 3}" height="{_LINE - 6}" fill="{colour}"'
            out.append(f'<rect {box} width="{max(at(bar.value) - at(0), 0.3):.1f}" opacity="0.75"/>')
            if bar.low is not None and bar.high is not None:
                path = f"M{at(bar.low):.1f} {middle}H{at(bar.high):.1f}m0 -4v8M{at(bar.low):.1f} {middle - 4}v8"
                out.append(f'<path class="interval" d="{path}" stroke="#000000" fill="none"/>')
            end = at(max(bar.value, bar.high or 0.0)) + 4
            out.append(f'<text x="{end:.1f}" y="{top + 13}" font-size="10">{bar.value:.3g}</text>')
            top += _LINE
    if mark is not None:
        out.append(f'<path class="mark" d="M{at(mark):.1f} {_TOP}V{top}" stroke="#333333" stroke-dasharray="4 3"/>')
    out.append(f'<path d="M{at(0)} {top}h{wide}" stroke="#333333"/>')
    for tick in x.ticks:
        out.append(f'<text x="{at(tick):.1f}" y="{top + 16}" text-anchor="middle">{shown_number(tick)}</text>')
    out.append(f'<text x="{_LEFT + _NAMES + wide / 2}" y="{top + 32}" text-anchor="middle">{escape(label)}</text>')
    return "\n".join([*out, "</svg>", ""])


def layouts(rows: Sequence[tuple[str, Layout]], geometry: Geometry, title: str) -> str:
    """Slices of GPUs: a row for each, memory slices from left to right; a profile keeps its colour."""
    if not rows:
        return ""
    height = _TOP + len(rows) * _ROW + 12
    profiles = [info.profile for info in geometry.profiles]
    unit = (_W - _NAMES) / geometry.memory_slices
    out = [_head(height, title)]
    for number, (name, layout) in enumerate(rows):
        top = _TOP + number * _ROW
        out.append(f'<text x="{_LEFT + _NAMES - 6}" y="{top + 16}" text-anchor="end">{escape(name)}</text>')
        frame = f'x="{_LEFT + _NAMES}" y="{top + 2}" width="{_W - _NAMES}" height="{_ROW - 5}"'
        out.append(f'<rect {frame} fill="none" stroke="#cccccc"/>')
        for slot in layout:
            left, wide = _LEFT + _NAMES + slot.placement.start * unit, slot.placement.size * unit
            colour = COLOURS[profiles.index(slot.profile) % len(COLOURS)]
            box = f'x="{left + 1:.1f}" y="{top + 2}" width="{wide - 2:.1f}" height="{_ROW - 5}"'
            out.append(f'<rect class="slot" {box} fill="{colour}" opacity="0.75"/>')
            text = f'x="{left + wide / 2:.1f}" y="{top + 16}" text-anchor="middle" font-size="10"'
            out.append(f"<text {text}>{slot.profile}</text>")
    return "\n".join([*out, "</svg>", ""])


def use(levels: Levels, title: str) -> str:
    """Share of the compute slices that is held, and the waiting jobs against their most, over time."""
    hours = [time / 3600 for time in levels.times]
    most = max(levels.waiting, default=0.0)
    x = linear_axis(hours)
    y = Axis(lambda value: value, (0.0, 0.25, 0.5, 0.75, 1.0))
    lines = [_line(list(zip(hours, levels.held, strict=True)), x, y, COLOURS[0])]
    names = ["compute slices held"]
    if most > 0:
        lines.append(_line([(h, w / most) for h, w in zip(hours, levels.waiting, strict=True)], x, y, COLOURS[1]))
        names.append(f"jobs waiting (1 = {most:.0f})")
    return _chart(title, "hours", x, y, lines, names)


def timeline(spans: Sequence[Span], cluster: Cluster, title: str, gpus: int = 24) -> str:
    """What lay on the first GPUs over time: a row for each GPU, in it the memory slices from the bottom up.

    A job keeps its colour; the pale beginning of a bar is the time before it made progress.
    """
    chosen = [span for span in spans if span.place.gpu < gpus][:_MOST_SPANS]
    rows = min(gpus, len(cluster.gpus))
    if not chosen:
        return ""
    x = linear_axis([span.end / 3600 for span in chosen])
    height = _TOP + rows * _ROW + _BELOW
    out = [_head(height, title)]
    for row in range(rows):
        at = _TOP + row * _ROW
        out.append(f'<path d="M{_LEFT} {at + _ROW - 2}h{_W}" stroke="#dddddd"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{at + _ROW - 8}" text-anchor="end" font-size="10">GPU {row}</text>')
    for span in chosen:
        total = cluster.gpus[span.place.gpu].geometry.memory_slices
        unit = (_ROW - 4) / total
        placement = span.place.slot.placement
        top = _TOP + (span.place.gpu + 1) * _ROW - 2 - placement.end * unit
        left, right = _x(x, span.begin / 3600), _x(x, span.end / 3600)
        middle = _x(x, (span.begin + span.paused) / 3600)
        colour = COLOURS[span.job % len(COLOURS)]
        tip = escape(f"{span.name}: {span.place.slot}, {span.begin:.0f} to {span.end:.0f} s")
        box = f'y="{top:.1f}" height="{placement.size * unit - 0.5:.1f}" fill="{colour}"'
        out.append(f'<g><title>{tip}</title><rect x="{left:.1f}" width="{max(right - left, 0.3):.1f}" {box} ')
        out[-1] += 'opacity="0.35"/>'
        if right > middle:
            out[-1] += f'<rect x="{middle:.1f}" width="{right - middle:.1f}" {box}/>'
        out[-1] += "</g>"
    out += _ticks(x, _TOP + rows * _ROW, "hours")
    if len(chosen) == _MOST_SPANS:
        out.append(f'<text x="{_LEFT}" y="{height - 4}" fill="#666666">only the first {_MOST_SPANS} stays</text>')
    return "\n".join([*out, "</svg>", ""])


def _chart(title: str, label: str, x: Axis, y: Axis, lines: Sequence[str], names: Sequence[str]) -> str:
    height = _TOP + _H + _BELOW + _LINE * len(names)
    out = [_head(height, title)]
    for tick in y.ticks:
        at = _y(y, tick)
        out.append(f'<path d="M{_LEFT} {at:.1f}h{_W}" stroke="#dddddd"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{shown_number(tick)}</text>')
    out += _ticks(x, _TOP + _H, label)
    out += lines
    for number, (name, colour) in enumerate(zip(names, cycle(COLOURS), strict=False)):
        at = _TOP + _H + _BELOW + _LINE * number
        out.append(f'<path d="M{_LEFT} {at - 4}h24" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{_LEFT + 32}" y="{at}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])


def _head(height: float, title: str) -> str:
    width = _LEFT + _W + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="{width}" height="{height}" fill="#ffffff"/>'
        f'<text x="{width / 2:.0f}" y="22" text-anchor="middle" font-size="15">{escape(title)}</text>'
    )


def _ticks(x: Axis, at: float, label: str) -> list[str]:
    out = [f'<path d="M{_LEFT} {at}h{_W}" stroke="#333333"/>']
    for tick in x.ticks:
        out.append(f'<path d="M{_x(x, tick):.1f} {at}v4" stroke="#333333"/>')
        out.append(f'<text x="{_x(x, tick):.1f}" y="{at + 16}" text-anchor="middle">{shown_number(tick)}</text>')
    out.append(f'<text x="{_LEFT + _W / 2}" y="{at + 32}" text-anchor="middle">{escape(label)}</text>')
    return out


def _line(points: Sequence[tuple[float, float]], x: Axis, y: Axis, colour: str) -> str:
    path = " ".join(f"{_x(x, a):.1f},{_y(y, b):.1f}" for a, b in points if math.isfinite(a) and math.isfinite(b))
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _x(axis: Axis, value: float) -> float:
    return _LEFT + _W * axis.place(value)


def _y(axis: Axis, value: float) -> float:
    return _TOP + _H * (1 - axis.place(value))
