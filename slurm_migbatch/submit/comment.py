"""Read and write a job's comment: the user's text, the nodes that the user excludes, and the marker."""

from __future__ import annotations

import re
from typing import Final

from slurm_migbatch.mig.grant import MARKER_OPEN
from slurm_migbatch.slurm.client import SLURM_LIMIT
from slurm_migbatch.submit.nodes import READ
from slurm_migbatch.workload import excluded as excluding
from slurm_migbatch.workload.refusal import Refusal, lower

DECISION_BYTES: Final = 8
"""Length of a decision's name in the marker. Space for it is reserved even if none is written, so that the service and
the table accept the same comments.
"""

CLEARED: Final = " "
"""An empty comment, in an update: older releases read "" as no change, and the marker would stay without its slices."""

_MARKER = re.compile(r"\[mig:[0-9a-z.:,#-]+\]")


def has_marker(text: str | None) -> bool:
    """Return whether a text contains the beginning of a marker, which only the filter may write; ignoring case."""
    return text is not None and MARKER_OPEN in lower(text)


def split_marker(comment: str) -> tuple[str, str]:
    """Return `(the user's text, the marker)` of a job's current comment.

    The marker is empty if it is malformed.
    """
    at = comment.find(MARKER_OPEN)
    if at < 0:
        return comment, ""
    text, tail = comment[:at], comment[at:]
    text = text.removesuffix(" ")
    return text, tail if _MARKER.fullmatch(tail) else ""


def with_marker(text: str, marker: str, nodes: str | None, decision: str | None = None, longest: int = 0) -> str:
    """Return the comment with the excluded `nodes`, as far as they fit, and its marker.

    Space is reserved for a full decision name if `decision` is given, and for a marker of
    `longest` bytes.
    """
    comment = f"{text} {marker}" if text else marker
    reserved = max(0, longest - len(marker))
    if decision is not None:
        reserved = max(DECISION_BYTES - len(decision), 0) + (0 if decision else 1)
    if len(comment) + reserved > SLURM_LIMIT:
        raise Refusal("comment_long", str(len(comment) + reserved - SLURM_LIMIT))
    free = SLURM_LIMIT - len(comment) - reserved - excluding.SPARE
    text = excluding.attached(text, nodes if nodes and len(nodes) <= READ else "", free)
    return f"{text} {marker}" if text else marker
