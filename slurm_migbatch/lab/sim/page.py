"""The report of a simulation as one HTML file that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

_TEMPLATE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
body { font: 15px/1.45 sans-serif; margin: 2em auto; max-width: 900px; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .9em .2em 0; text-align: left }
th { border-bottom: 1px solid #999 } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f4f4f4; padding: .8em; overflow-x: auto } svg { max-width: 100%; height: auto } .note { color: #666 }
</style>
<h1>{{ title }}</h1>
<p>{{ about }}</p>
{% for note in notices %}<p class="note">{{ note }}</p>
{% endfor %}
<table>
<tr>{% for name in header %}<th{% if not loop.first %} class="n"{% endif %}>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>
{% for cell in row %}<td{% if not loop.first %} class="n"{% endif %}>{{ cell }}</td>{% endfor %}
</tr>
{% endfor %}
</table>
{% for plot in plots %}<p>{{ plot }}</p>
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
    """The document; `plots` are SVG as `plots` makes them, everything else is text."""
    values: Mapping[str, Any] = {
        "title": title,
        "about": about,
        "header": header,
        "rows": rows,
        "plots": [Markup(plot) for plot in plots if plot],  # noqa: S704 our own drawing, its texts are escaped there
        "scenario": scenario,
        "notices": notices,
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_TEMPLATE).render(values)
