"""Store the nodes that a job's user excludes (`--exclude`) in the job's comment, and read them from it.

squeue does not print a pending job's ExcNodeList. So the filter writes it before the marker: `[mig-exclude:n[1-2],m7]
[mig:1g.10gb:1#7fq3k]`. What does not fit in `LONGEST` bytes, or in the remaining space of the comment, is omitted, name
by name from the end. It grants nothing: a user who forges it only gets fewer offers.

An update of ExcNodeList by the job's user passes the filter, which rewrites it. An update by root does not. Nodes added
by root are detected by offers that are not taken (`avoid` in `decide.capacity.demand`), as are those omitted here;
nodes removed by root get no offers for that job until its user changes the list. `gres_templates/migbatch_core.lua.j2`
has the same steps.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from slurm_migbatch.mig.grant import strip
from slurm_migbatch.slurm.nodelist import NodeListError, expand

OPEN: Final = "[mig-exclude:"
LONGEST: Final = 256
"""Maximum bytes of a list that the filter writes."""
SPARE: Final = 64
"""Bytes of a comment that the list leaves free, for longer markers of later grants."""
MOST: Final = 1024
"""Maximum names of an accepted list: users can write the comment."""

_ITEM = re.compile(r"[A-Za-z0-9_.\[\],-]+")
_LIST = re.compile(r"(?:\A| )\[mig-exclude:([A-Za-z0-9_.\[\],-]+)\](?=(?: \[mig:[^\[\]]*\])?\Z)")


def split(text: str) -> tuple[str, str]:
    """Split a comment without its marker into the user's text and the node list after it, which may be empty."""
    match = _LIST.search(text) if OPEN in text else None
    return (text[: match.start()], match[1]) if match and match.end() == len(text) else (text, "")


def user_text(comment: str) -> str:
    """Return a job's comment without the text that the filter added."""
    return split(strip(comment))[0]


def attached(text: str, nodes: str, max_bytes: int) -> str:
    """Return the user's text followed by as much of a node list as fits in `max_bytes` bytes in total."""
    listed = _shortened(nodes, min(LONGEST, max_bytes - len(OPEN) - 2))
    if not listed:
        return text
    return f"{text} {OPEN}{listed}]" if text else f"{OPEN}{listed}]"


def _shortened(nodes: str, most: int) -> str:
    """Return the beginning of a node list, in whole items, of at most `most` bytes."""
    beginning = ""
    depth = start = 0
    for at, char in enumerate(f"{nodes},"):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            item = nodes[start:at]
            start = at + 1
            longer = f"{beginning},{item}" if beginning else item
            if len(longer) > most:
                break
            if _ITEM.fullmatch(item):
                beginning = longer
    return beginning


def excluded(comment: str) -> frozenset[str]:
    """Return the excluded nodes in a job's comment; none if the list is malformed or has more than `MOST`."""
    match = _LIST.search(comment) if OPEN in comment else None
    return _named(match[1]) if match else frozenset()


def excluded_among(comment: str, nodes: frozenset[str]) -> frozenset[str]:
    """Return which of these nodes are `excluded`. Nothing is kept of others, of which users can name any number."""
    match = _LIST.search(comment) if OPEN in comment else None
    return _among(match[1], nodes) if match else frozenset()


def _named(listed: str) -> frozenset[str]:
    try:
        return frozenset(expand(listed, MOST))
    except NodeListError:
        return frozenset()


@lru_cache(maxsize=1 << 14)
def _among(listed: str, nodes: frozenset[str]) -> frozenset[str]:
    return nodes & _named(listed)
