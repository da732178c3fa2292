"""Plots of a simulation as SVG: distribution of times, layouts of GPUs over time, use of the cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Final

from slurm_migbatch.profiling.plot import COLOURS, Axis, linear_axis, log10_axis, shown_number
from slurm_migbatch.sim.cluster import Cluster
from slurm_migbatch.sim.spans import Levels, Span

_W, _H = 760, 280
_LEFT, _TOP, _BELOW, _LINE = 64, 40, 46, 18
_ROW = 26
_MOST_POINTS: Final = 400
_MOST_SPANS: Final = 6000


def cdf(series: Mapping[str, Sequence[float]], title: str, unit: str = "s") -> str:
    """Share of jobs that took at most so long, one line for each name; the time axis is logarithmic."""
    shown = {name: sorted(max(value, 1e-3) for value in values) for name, values in series.items() if len(values)}
    if not shown:
        return ""
    x = log10_axis([values[0] for values in shown.values()] + [values[-1] for values in shown.values()])
    y = Axis(lambda value: value, (0.0, 0.25, 0.5, 0.75, 1.0))
    lines = []
    for (_, values), colour in zip(shown.items(), cycle(COLOURS), strict=False):
        step = max(1, len(values) // _MOST_POINTS)
        chosen = [*range(0, len(values), step), len(values) - 1]
        lines.append(_line([(values[i], (i + 1) / len(values)) for i in chosen], x, y, colour))
    return _chart(title, f"{unit} (logarithmic)", x, y, lines, list(shown))


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
