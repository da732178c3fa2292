"""Throughput and latency against the batch as one SVG: no plotting library is needed for two panels of lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import cycle
from typing import NamedTuple

from slurm_migbatch.profiling.curves import KNEE_SHARE, Curve, curves
from slurm_migbatch.profiling.measurement import Measurement

# distinguishable by people with any colour vision (Okabe and Ito)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")
_PANEL_W, _PANEL_H = 420, 300
_LEFT, _TOP, _GAP, _BELOW, _LINE = 70, 56, 80, 54, 18
_TICKS = 5


class Axis(NamedTuple):
    """A value axis: where a value lies (0 at the bottom, 1 at the top), and its ticks."""

    place: Callable[[float], float]
    ticks: tuple[float, ...]


def draw(rows: Iterable[Measurement], title: str) -> str:
    """The SVG document; rows of one model on one device. Rings mark the knees, crosses batches that did not fit."""
    found = [curve for curve in curves(rows) if curve.points or curve.unfit]
    batches = [point.batch for curve in found for point in curve.points] + [b for c in found for b in c.unfit]
    x = _log2_axis(batches or [1])
    names = [curve.name for curve in found if curve.name]
    width = _LEFT + 2 * _PANEL_W + _GAP + 20
    height = _TOP + _PANEL_H + _BELOW + _LINE * (1 + (len(found) if names else 0))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{width / 2:.0f}" y="24" text-anchor="middle" font-size="15">{escape(title)}</text>',
    ]
    rates = [point.rate or 0.0 for curve in found for point in curve.points]
    delays = [1000 * (point.seconds or 0.0) for curve in found for point in curve.points]
    delays += [1000 * p.latency_p99_s for curve in found for p in curve.points if p.latency_p99_s]
    right = _LEFT + _PANEL_W + _GAP
    out += _frame(_LEFT, "throughput, items/s", x, linear := linear_axis(rates))
    out += _frame(right, "latency of a batch, ms (dashed: 99th percentile)", x, log := log10_axis(delays))
    coloured = list(zip(found, cycle(COLOURS), strict=False))
    for curve, colour in coloured:
        out += _line(_LEFT, x, linear, [(p.batch, p.rate or 0.0) for p in curve.points], colour)
        out += _line(right, x, log, [(p.batch, 1000 * (p.seconds or 0.0)) for p in curve.points], colour)
        tails = [(p.batch, 1000 * p.latency_p99_s) for p in curve.points if p.latency_p99_s]
        out += _line(right, x, log, tails, colour, dashed=True)
        out += _marks(curve, x, linear, log, colour, right)
    below = _TOP + _PANEL_H + _BELOW
    for number, (curve, colour) in enumerate(coloured if names else ()):
        y = below + _LINE * number
        out.append(f'<path d="M{_LEFT} {y - 4}h24" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{_LEFT + 32}" y="{y}">{escape(curve.name or "no input size")}</text>')
    note = f"ring: smallest batch with {KNEE_SHARE:.0%} of the best throughput; cross: does not fit"
    out.append(f'<text x="{_LEFT}" y="{height - _LINE}" fill="#666666">{note}</text>')
    return "\n".join([*out, "</svg>", ""])


def _frame(left: float, title: str, x: Axis, y: Axis) -> list[str]:
    out = [f'<text x="{left}" y="{_TOP - 10}">{escape(title)}</text>']
    for tick in y.ticks:
        at = _y(y, tick)
        out.append(f'<path d="M{left} {at:.1f}h{_PANEL_W}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{shown_number(tick)}</text>')
    for tick in x.ticks:
        at = _x(left, x, tick)
        out.append(f'<path d="M{at:.1f} {_TOP + _PANEL_H}v4" stroke="#333333"/>')
        out.append(f'<text x="{at:.1f}" y="{_TOP + _PANEL_H + 17}" text-anchor="middle">{shown_number(tick)}</text>')
    out.append(f'<path d="M{left} {_TOP}v{_PANEL_H}h{_PANEL_W}" fill="none" stroke="#333333"/>')
    out.append(f'<text x="{left + _PANEL_W / 2}" y="{_TOP + _PANEL_H + 34}" text-anchor="middle">batch</text>')
    return out


def _line(
    left: float, x: Axis, y: Axis, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False
) -> list[str]:
    if not points:
        return []
    path = " ".join(f"{_x(left, x, a):.1f},{_y(y, b):.1f}" for a, b in points)
    style = ' stroke-dasharray="3 3" stroke-opacity="0.7"' if dashed else ' stroke-width="2"'
    out = [f'<polyline points="{path}" fill="none" stroke="{colour}"{style}/>']
    if not dashed:
        out += [f'<circle cx="{_x(left, x, a):.1f}" cy="{_y(y, b):.1f}" r="3" fill="{colour}"/>' for a, b in points]
    return out


def _marks(curve: Curve, x: Axis, linear: Axis, log: Axis, colour: str, right: float) -> list[str]:
    out = []
    if curve.knee is not None:
        for left, axis, value in (
            (_LEFT, linear, curve.knee.rate or 0.0),
            (right, log, 1000 * (curve.knee.seconds or 0.0)),
        ):
            at = f'cx="{_x(left, x, curve.knee.batch):.1f}" cy="{_y(axis, value):.1f}"'
            out.append(f'<circle class="knee" {at} r="7" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for batch in curve.unfit:
        for left in (_LEFT, right):
            at = f"M{_x(left, x, batch) - 4:.1f} {_TOP + _PANEL_H - 10}"
            out.append(f'<path class="unfit" d="{at}l8 8m0 -8l-8 8" stroke="{colour}" stroke-width="2"/>')
    return out


def _x(left: float, axis: Axis, value: float) -> float:
    return left + _PANEL_W * (0.04 + 0.92 * axis.place(value))


def _y(axis: Axis, value: float) -> float:
    return _TOP + _PANEL_H * (1 - axis.place(value))


def _log2_axis(values: Sequence[float]) -> Axis:
    low, high = math.log2(min(values)), math.log2(max(values))
    step = max(1, math.ceil((high - low) / 9))
    powers = range(math.ceil(low), math.floor(high) + 1, step)
    ticks = tuple(2.0**power for power in powers) or (float(min(values)),)
    return Axis(lambda value: (math.log2(value) - low) / (high - low) if high > low else 0.5, ticks)


def linear_axis(values: Sequence[float]) -> Axis:
    """From 0 to a round number above all values."""
    most = max(values, default=0.0) or 1.0
    raw = most / _TICKS
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    top = step * math.ceil(most / step)
    return Axis(lambda value: value / top, tuple(step * i for i in range(round(top / step) + 1)))


def log10_axis(values: Sequence[float]) -> Axis:
    """Whole decades around the values, which are above 0."""
    least, most = min(values, default=1.0), max(values, default=1.0)
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    factors = (1, 2, 5) if high - low <= 2 else (1,)
    steps = [factor * 10.0**power for power in range(low - 1, high + 2) for factor in factors]
    bottom = max(step for step in steps if step <= least)
    top = min(step for step in steps if step >= most and step > bottom)
    span = math.log10(top / bottom)
    return Axis(lambda value: math.log10(value / bottom) / span, tuple(s for s in steps if bottom <= s <= top))


def shown_number(value: float) -> str:
    """A tick's number, short."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= factor:
            return f"{value / (1e3 if unit == 'k' else factor):g}{unit}"
    return f"{value:g}"
