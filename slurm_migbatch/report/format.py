"""`-o a,b%30,c%-20,+d`: columns and their widths."""

from __future__ import annotations

from slurm_migbatch.report.columns import COLUMNS, Column
from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.values import TYPE_CHECKING, Pattern, replace

if TYPE_CHECKING:
    from collections.abc import Iterable

_ITEM = Pattern(r"(\+?)([A-Za-z]+)(?:%(-?\d{0,4}))?\Z")


def split(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the comma-separated words of all `texts`."""
    return tuple(word for text in texts for word in (part.strip() for part in text.split(",")) if word)


def find(name: str) -> Column:
    """Return the column of that name in any case, or the one that it abbreviates.

    Raises:
        ReportError: no column, or several, have this prefix.
    """
    word = name.lower()
    matches = [column for column in COLUMNS if column.name.lower().startswith(word)]
    exact = [column for column in matches if column.name.lower() == word]
    if exact or len(matches) == 1:
        return (exact or matches)[0]
    # "elap" means Elapsed and not ElapsedRaw, which only lengthens it
    shortest = min(matches, key=lambda column: len(column.name), default=None)
    if shortest and all(column.name.lower().startswith(shortest.name.lower()) for column in matches):
        return shortest
    if matches:
        raise ReportError(
            f"{name!r} is ambiguous: {', '.join(column.name for column in matches)}; write a longer prefix"
        )
    import difflib

    near = difflib.get_close_matches(word, [column.name.lower() for column in COLUMNS], 1)
    suggestion = next((f"did you mean {column.name}? " for column in COLUMNS if [column.name.lower()] == near), "")
    raise ReportError(f'Invalid field requested: "{name}"; {suggestion}-e lists them')


def parse_format(text: str, default: str) -> tuple[Column, ...]:
    """Return the columns that `text` lists, with their widths; `+name` adds to those of `default`.

    Raises:
        ReportError: an item is not a column.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    if any(item.startswith("+") for item in items):
        items = [*(item for item in default.split(",") if item.strip()), *items]
    columns: list[Column] = []
    for item in items:
        # a plain name needs no pattern, which takes longer to compile than finding the runs
        if item.isalpha() and item.isascii() and item.lower() != "all":
            columns.append(find(item))
            continue
        match = _ITEM.match(item)
        if not match:
            raise ReportError(
                f'Invalid field requested: "{item}"; write its name, name%20 or name%-20 (left-justified)'
            )
        if match[2].lower() == "all":
            columns.extend(COLUMNS)
            continue
        column = find(match[2])
        # as in sacct, a width of 0 or none keeps the column's own
        width = int(match[3]) if match[3] not in (None, "", "-") else 0
        columns.append(replace(column, width=width) if width else column)
    if not columns:
        raise ReportError("no columns; list some or omit -o")
    return tuple(columns)


def name_list() -> str:
    """Return all names, four to a line, as sacct -e prints them."""
    rows = [COLUMNS[start : start + 4] for start in range(0, len(COLUMNS), 4)]
    return "\n".join(" ".join(f"{column.name:<19}" for column in row).rstrip() for row in rows)
