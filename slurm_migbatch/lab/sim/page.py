"""Render the report of a simulation as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from slurm_migbatch.report.pictures.page import text_of

#: matplotlib's colours of texts, lines, grids and backgrounds, each with the page's replacement
_SCHEME = (
    ("stroke: #000000", "stroke: currentColor"), ("fill: #000000", "fill: currentColor"),
    ("#dddddd", "var(--grid)"), ("#cccccc", "var(--line)"), ("fill: #ffffff", "fill: none"),
    ("stroke: #ffffff", "stroke: var(--page)"),
)  # fmt: skip

_TEMPLATE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{{ css }}
svg { max-width: 100%; min-width: 40rem; height: auto } svg text { fill: currentColor }
</style>
<h1>{{ title }}</h1>
<p>{{ about }}</p>
{% for note in notices %}<p class="note">{{ note }}</p>
{% endfor %}
<div class="scrolls"><table>
<tr>{% for name in header %}<th scope="col">{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>
{% for cell in row %}<td>{{ cell }}</td>{% endfor %}
</tr>
{% endfor %}
</table></div>
{% for plot in plots %}<div class="scrolls" tabindex="0" role="region" aria-label="Plot">{{ plot }}</div>
{% endfor %}
<h2>Scenario</h2>
<pre>{{ scenario }}</pre>
</html>
"""


def page(
    title: str,
    about: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    plots: Iterable[str],
    scenario: str,
    notices: Iterable[str] = (),
) -> str:
    """Return the document; `plots` are SVG from the module `plots`, everything else is plain text."""
    values: Mapping[str, Any] = {
        "title": title,
        "about": about,
        "header": header,
        "rows": rows,
        "css": Markup(text_of("style.css")),  # noqa: S704 our own file
        "plots": [Markup(_in_scheme(plot)) for plot in plots if plot],  # noqa: S704 its texts are escaped there
        "scenario": scenario,
        "notices": notices,
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_TEMPLATE).render(values)


def _in_scheme(svg: str) -> str:
    """Return the drawing with colours that follow the page's light or dark setting."""
    for colour, replacement in _SCHEME:
        svg = svg.replace(colour, replacement)
    return svg
