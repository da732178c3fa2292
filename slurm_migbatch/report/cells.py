"""Fit texts into the columns of a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len, set_cell_size

from slurm_migbatch.mig.text import printable

#: texts of columns, with their widths
Cells = Sequence[tuple[str, int]]


def columns(cells: Cells, width: int) -> str:
    """Return texts in columns of these widths, right-justified if negative; a text without a width takes the rest."""
    parts = []
    for text, size in cells:
        text = printable(text)
        if not size:
            parts.append(text)
        elif size < 0:
            parts.append(text.rjust(-size) if cell_len(text) <= -size else _cut(text, -size))
        else:
            parts.append(set_cell_size(text, size) if cell_len(text) <= size else _cut(text, size))
    line = " ".join(parts)
    return set_cell_size(line, width) if cell_len(line) > width else line


def _cut(text: str, size: int) -> str:
    return set_cell_size(set_cell_size(text, size - 1).rstrip() + "+", size)


def longest_name(nodes: Iterable[str], width: int) -> int:
    """Return the length of the longest of these names of nodes, at most three tenths of the page."""
    return min(width * 3 // 10, max(map(cell_len, nodes), default=0))


def job_text(job: int, names: Mapping[int, str]) -> str:
    """Return how a job is shown; `names`: those that Slurm does not print as their number. Empty for job 0."""
    return names.get(job, str(job)) if job else ""
