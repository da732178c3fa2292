"""Numbers, times and names as texts of a page, with meaningful precision."""

from __future__ import annotations

import time
from datetime import datetime
from html import escape

_LONGEST = 48


def amount(value: float, unit: str = "") -> str:
    """Write a quantity with three digits at most: 0, 0.4, 2, 12, 1,230, 45,700."""
    if value <= 0:
        text = "0"
    elif value < 0.1:
        text = "under 0.1"
    elif value < 9.95:
        text = f"{value:.1f}".removesuffix(".0")
    else:
        digits = max(0, len(str(round(value))) - 3)
        text = f"{round(value, -digits):,.0f}"
    return f"{text} {unit}".rstrip()


def percent(share: float) -> str:
    """Format a share, 0 to 1, as whole percents; only 0 and 1 become 0 % and 100 %."""
    if 0 < share < 0.005:
        return "under 1 %"
    if 0.995 <= share < 1:
        return "over 99 %"
    return f"{share:.0%}".replace("%", " %")


def seconds(value: float) -> str:
    """Write a duration: 8 s, 3 min, 2.5 h, 4 d."""
    for length, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * length:
            return amount(value / length, unit)
    return amount(value, "s")


def moment(at: float) -> str:
    """Format a time (unix seconds) in local time, to the minute."""
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}"


def axis_moment(at: float) -> str:
    """Format a time (unix seconds) for a date axis, in local time."""
    return datetime.fromtimestamp(at).isoformat(timespec="seconds")


def zone(at: float) -> str:
    """Return the name of the local time zone at a time."""
    return time.localtime(at).tm_zone


def in_chart(text: str) -> str:
    """Return a text of the record for a chart, truncated if long; Plotly interprets some HTML and templates."""
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    visible = "".join(char if char.isprintable() else "?" for char in short)
    return escape(visible, quote=False).replace("%{", "% {")
