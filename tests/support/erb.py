"""Render the few forms of ERB that the app in sbatch_examples/ondemand uses, without Ruby.

`<%= name %>`, `<%= name.to_i %>`, `<%= context.name %>`, `if name == "text"`, `names.each do |name|` and `end`,
trimmed as Open OnDemand does (trim mode `-`). Other statements are ignored: the caller passes their results as values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TAG = re.compile(r"(?:(?m:^)[ \t]*<%-|<%)(?P<shown>=?)(?P<code>.*?)(?:-%>\n?|%>)", re.DOTALL)


def _value(code: str, values: Mapping[str, Any]) -> str:
    name, _, method = code.removeprefix("context.").partition(".")
    return str(int(values[name]) if method == "to_i" else values[name])


def _body(parts: list[str]) -> list[str]:
    """Remove the body of a block and its `end` from `parts`; return the body."""
    body, depth = [parts.pop(0)], 1
    while depth:
        shown, code, text = parts.pop(0), parts.pop(0), parts.pop(0)
        statement = code.strip()
        depth += (statement.startswith("if ") or ".each do" in statement) - (statement == "end")
        if depth:
            body += shown, code, text
        else:
            parts.insert(0, text)
    return body


def _rendered(parts: list[str], values: Mapping[str, Any]) -> str:
    """Render `parts`: text, then "=" or "", code and text of each tag."""
    parts = list(parts)
    out = parts.pop(0)
    while parts:
        shown, code = parts.pop(0), parts.pop(0).strip()
        if shown:
            out += _value(code, values)
        elif match := re.fullmatch(r'if (\w+) == "(.*)"', code):
            body = _body(parts)
            out += _rendered(body, values) if values[match[1]] == match[2] else ""
        elif match := re.fullmatch(r"(\w+)\.each do \|(\w+)\|", code):
            body = _body(parts)
            out += "".join(_rendered(body, {**values, match[2]: item}) for item in values[match[1]])
        out += parts.pop(0)
    return out


def render(text: str, **values: Any) -> str:
    """Render a template; `values` are the variables that it reads."""
    return _rendered(TAG.split(text), values)
