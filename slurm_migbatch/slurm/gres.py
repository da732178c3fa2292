"""Parse GRES strings.

Slurm writes the same thing in many forms, by version and by command:

- requests: `gres:mig:1g.10gb:2` (up to 23.02), `gres/mig:1g.10gb:2` (from 23.11), `mig:1g.10gb=2`, `mig`, `gpu:2`;
- configured: `mig:1g.10gb:14(S:0-1)`, `gpu:h100:8(S:0,2)`, `bandwidth:lustre:no_consume:4G`;
- in use: `gpu:h100:2(IDX:0,3-4)`, `mig:1g.10gb:0(IDX:N/A)`, `shard:8(-/5,5/5)`, `(null)`, `N/A`;
- job details and TRES: `gres/mig:1g.10gb=2`, `gres/mig=2`, `mig:1g.10gb(CNT:2)`.

Counts may have a suffix k, m, g, t or p, in powers of 1024 as in Slurm: `mig:1g` is not a profile but 2^30 of
mig.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

EMPTY = frozenset({"", "(null)", "n/a", "none"})
_COUNT = re.compile(r"([0-9]{1,30})([kmgtp]?)", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NAME = re.compile(r"[A-Za-z0-9_.+-]+")
_PROFILE = re.compile(
    r"(?<![0-9])([0-9]{1,2}g)[._-]?([0-9]{1,4}gb)([.+]me(?:\.all)?|-me|[.+]gfx)?(?![0-9a-z])", re.IGNORECASE
)
_INNER_COUNT = re.compile(r"CNT:([0-9]{1,30})")
#: advice on types that Slurm takes for the same
SEPARATE_PARTITIONS = (
    "jobs would be sent to nodes that cannot create their slice: put these nodes into separate partitions"
)
#: flag of a node's GRES that jobs do not consume; an update that omits the flag does not clear it
_NO_CONSUME = "no_consume"


class GresError(ValueError):
    """A text that is not a GRES list; the message shows the invalid part."""


@dataclass(frozen=True)
class Gres:
    """One entry of a GRES list.

    `type` is None if the entry names none; `count` is 1 if it has none.
    """

    name: str
    type: str | None = None
    count: int = 1

    def __str__(self) -> str:
        """Return Slurm's own spelling without details: `mig:1g.10gb:2`, `gpu:4`."""
        return f"{self.name}:{self.count}" if self.type is None else f"{self.name}:{self.type}:{self.count}"


def type_number(kind: str) -> int:
    """Return the number by which Slurm compares GRES types, a sum of the name's bytes.

    `4g.20gb` and `1g.23gb` have the same number. Slurm gives a job slices of any type that has the number of the
    requested one (22.05 to 26.05).
    """
    return sum(byte << 8 * (index % 4) for index, byte in enumerate(kind.encode())) & 0xFFFFFFFF


def confused_types(partition: str, kinds: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for GRES types of a partition that Slurm takes for the same."""
    same: dict[int, set[str]] = {}
    for kind in kinds:
        same.setdefault(type_number(kind), set()).add(kind)
    for names in sorted(" and ".join(sorted(names)) for names in same.values() if len(names) > 1):
        yield f"Slurm takes {names} in partition {partition} for the same: it compares a sum of their bytes"


def is_count(token: str) -> bool:
    """Return whether Slurm reads the token as a count: digits with at most one of k, m, g, t, p at the end."""
    return _COUNT.fullmatch(token) is not None


def count_of(token: str) -> int:
    """Return the number that Slurm reads in `token` (`2` is 2, `1k` is 1024); raises GresError."""
    match = _COUNT.fullmatch(token)
    if match is None:
        raise GresError(f"{token!r} is not a count")
    return int(match[1]) << 10 * _POWER[match[2].lower()]


def split(text: str) -> Iterator[str]:
    """Yield the entries of a list, split at the commas outside brackets."""
    depth = start = 0
    for position, char in enumerate(text):
        if char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif char == "," and depth <= 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def prefix_of(entry: str) -> tuple[str, str]:
    """Return `(prefix, rest)` of one entry; the prefix is `gres:`, `gres/` or empty."""
    for prefix in ("gres:", "gres/"):
        if entry.startswith(prefix):
            return prefix, entry[len(prefix) :]
    return "", entry


def parse_entry(entry: str) -> Gres:
    """Read one entry; raises GresError."""
    _, rest = prefix_of(entry)
    detail = ""
    if rest.endswith(")") and "(" in rest:
        rest, _, detail = rest[:-1].partition("(")
    head, equals, number = rest.partition("=")
    tokens = head.split(":")
    if not equals and len(tokens) > 1 and is_count(tokens[-1]):
        number = tokens.pop()
    if len(tokens) > 1 and tokens[-1] == _NO_CONSUME:
        tokens.pop()
    if len(tokens) > 2 or not all(_NAME.fullmatch(token) for token in tokens) or (equals and not is_count(number)):
        raise GresError(f"{entry!r} is not a GRES entry: write name[:type][:count]")
    inner = _INNER_COUNT.fullmatch(detail)
    count = count_of(number) if number else int(inner[1]) if inner else 1
    return Gres(tokens[0], tokens[1] if len(tokens) == 2 else None, count)


def profile_in(kind: str) -> str | None:
    """Return the name of the MIG profile in a GPU type, as a type of `mig` is written; None if there is none.

    `3g.39gb` of AutoDetect's `a100_3g.39gb`, `1g.10gb.me` of `h100_1g10gb+me`.
    """
    match = _PROFILE.search(kind)
    if match is None:
        return None
    return f"{match[1]}.{match[2]}{(match[3] or '').replace('+', '.')}".lower()


def parse(text: str | None) -> tuple[Gres, ...]:
    """Read a whole list, in its order; nothing for None, `(null)`, `N/A` and `none`. Raises GresError."""
    if text is None or prefix_of(text.strip())[1].lower() in EMPTY:
        return ()
    return _entries(text.strip())


@lru_cache(maxsize=1 << 12)
def _entries(text: str) -> tuple[Gres, ...]:
    """Parse a list; cached, because a round reads the same few lists for every job and node."""
    return tuple([parse_entry(entry) for entry in split(text)])


def counts(text: str | None, name: str) -> dict[str, int]:
    """Return how many of each type of `name` a list holds, typed entries only, entries of one type added up.

    `counts("mig:1g.10gb:3,mig:2g.20gb:1(S:0),gpu:4", "mig")` is `{"1g.10gb": 3, "2g.20gb": 1}`.
    """
    return _counted(parse(text), name)


def readable(text: str) -> list[Gres]:
    """Return the readable entries of a job's GRES.

    A user may add entries that Slurm accepts but that have no meaning, such as `gpu:a b:0`.
    """
    entries: list[Gres] = []
    for entry in split(text.strip()):
        with suppress(GresError):
            entries.extend(parse(entry))
    return entries


def readable_counts(text: str, name: str) -> dict[str, int]:
    """Like `counts`, for the readable entries of a job's GRES."""
    return _counted(readable(text), name)


def _counted(entries: Iterable[Gres], name: str) -> dict[str, int]:
    totals: dict[str, int] = {}
    for gres in entries:
        if gres.name == name and gres.type is not None:
            totals[gres.type] = totals.get(gres.type, 0) + gres.count
    return totals
