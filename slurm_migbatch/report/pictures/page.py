"""One HTML file with all charts: it includes the chart library, loads nothing, and allows no script but its own two."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import plotly
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from slurm_migbatch.report.pictures.charts import Chart, LegendEntry

_HATCHES = {
    "/": "M0 8 8 0M8 16 24 0", "x": "M0 0 16 16M0 16 16 0", "-": "M0 8H24", "|": "M8 0V16M16 0V16",
    "+": "M0 8H24M12 0V16", ".": "M5 5h2M12 11h2M18 5h2",
}  # fmt: skip


def render(title: str, about: str, charts: Sequence[Chart], made: str, notes: Sequence[str] = ()) -> str:
    """Return the document: heading and description as text, charts in display order, creation time and source, and
    remarks.
    """
    script = text_of("page.js")
    hashes = " ".join(f"'sha256-{_digest(part)}'" for part in (library(), script))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(text_of("page.html.j2")).render(
        title=title,
        about=about,
        notes=notes,
        charts=charts,
        made=made,
        policy=policy,
        swatch=swatch,
        css=Markup(text_of("style.css") + text_of("page.css")),  # noqa: S704 our own file
        data=in_script([chart.to_dict() for chart in charts]),
        library=Markup(library()),  # noqa: S704 the library, which has no end of a script in it
        script=Markup(script),  # noqa: S704 our own file
    )


def in_script(value: object) -> Markup:
    """Return JSON for a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)  # noqa: S704 no markup is left


def swatch(entry: LegendEntry) -> Markup:
    """Return the mark of a legend's entry: its colour with its hatching."""
    path = _HATCHES.get(entry.hatch, "")
    lines = f'<path d="{path}" stroke="#ffffff" stroke-width="2" fill="none"/>' if path else ""
    return Markup(  # noqa: S704 the colour is escaped
        f'<svg viewBox="0 0 24 16" aria-hidden="true"><rect width="24" height="16" fill="{escape(entry.colour)}" '
        f'stroke="#808080"/>{lines}</svg>'
    )


@cache
def text_of(name: str) -> str:
    """Return a file of this package."""
    return (files(__package__) / name).read_text(encoding="utf-8")


@cache
def library() -> str:
    """Return Plotly's JavaScript, as its Python package ships it."""
    return (files(plotly) / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


@cache
def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
