"""Parse and write the grant that the submit filter appends to a job's comment.

The marker `[mig:2g.20gb:1,1g.10gb:2#7fq3k]` means: on each node one 2g.20gb and two 1g.10gb; `7fq3k` names the decision
record and may be missing. Profiles are in GRES spelling. The only other form is `[mig:guest:1]`: a place next to
another job of the same user, on the slice that the node's plan names. Root's hooks read this from a text that users can
edit, so only these forms are accepted and everything else is refused: at most 8 parts, each profile once, counts 1 to
64, ASCII, at the very end, after a space or at the beginning, and only one marker in the whole comment.

If a job update wrote the marker, the decision's name begins with `chg`: slurmctld must then be asked for the job's
GRES.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurm_migbatch.mig._frozen import Frozen
from slurm_migbatch.mig.profile import SUFFIXES, Profile

MARKER_OPEN = "[mig:"
GUEST = "guest"
CHANGED = "chg"
"""Prefix of the decision name in a marker that a job update wrote. If slurmctld finally refuses the update, it keeps
the new comment but not the GRES; so any reader of such a marker asks slurmctld for the job's GRES.
"""
MAX_PARTS = 8
MAX_COUNT = 64

_OPEN = MARKER_OPEN.encode()
_SUFFIX = "|".join(re.escape(suffix.replace("+", ".")) for suffix in SUFFIXES).encode()
_PART = rb"[1-9][0-9]?g\.(?:0|[1-9][0-9]{0,3})gb(?:" + _SUFFIX + rb"):[1-9][0-9]?"
_GUEST = f"{GUEST}:1".encode()
_PARTS = _PART + rb"(?:," + _PART + rb"){0,7}"
_MARKER = re.compile(rb"(?:\A|(?<= ))\[mig:(" + _GUEST + rb"|" + _PARTS + rb")(?:#([0-9a-z]{1,16}))?\]\Z")
_DECISION = re.compile(r"[0-9a-z]{0,16}", re.ASCII)


class GrantError(ValueError):
    """A marker that the submit filter did not write, or values that no marker can hold."""


class Grant(Frozen):
    """Number of slices per profile that a job has on each of its nodes, and the decision behind it.

    A `guest` has none of its own (`parts` is empty), but a place on one slice next to another job.
    """

    __slots__ = ("decision", "guest", "parts")

    parts: tuple[tuple[Profile, int], ...]
    decision: str
    guest: bool

    def __init__(self, parts: Iterable[tuple[Profile, int]], decision: str = "", guest: bool = False) -> None:
        """Set up a grant; raises GrantError if the marker could not be parsed again."""
        listed = tuple([(Profile(*profile), count) for profile, count in parts])
        if guest and listed:
            raise GrantError("a guest does not have its own slices")
        if not guest and not 1 <= len(listed) <= MAX_PARTS:
            raise GrantError(f"a grant has 1 to {MAX_PARTS} different profiles, not {len(listed)}")
        for profile, count in listed:
            if not (1 <= profile.compute <= 99 and 0 <= profile.memory_gb <= 9999 and profile.suffix in SUFFIXES):
                raise GrantError(f"{profile} is not a profile")
            if type(count) is not int or not 1 <= count <= MAX_COUNT:
                raise GrantError(f"{profile}: the count must be 1 to {MAX_COUNT}, not {count!r}")
        if len({profile for profile, _ in listed}) != len(listed):
            raise GrantError("a grant names each profile once")
        if not _DECISION.fullmatch(decision):
            raise GrantError("a decision name has at most 16 characters of 0-9 and a-z")
        self._init(parts=listed, decision=decision, guest=guest)

    @property
    def changed(self) -> bool:
        """Whether a job update wrote it, so that slurmctld may have allocated something else."""
        return self.decision.startswith(CHANGED)

    @property
    def decided(self) -> str:
        """The name of the decision in the record; may be empty."""
        return self.decision.removeprefix(CHANGED)

    @property
    def marker(self) -> str:
        """`[mig:2g.20gb:1,1g.10gb:2#7fq3k]`."""
        listed = ",".join(f"{gres_type}:{count}" for gres_type, count in self._kinds)
        return f"{MARKER_OPEN}{listed}{'#' if self.decision else ''}{self.decision}]"

    @property
    def gres(self) -> str:
        """The request in Slurm's form, `mig:2g.20gb:1,mig:1g.10gb:2`."""
        return ",".join(f"mig:{gres_type}:{count}" for gres_type, count in self._kinds)

    @property
    def _kinds(self) -> list[tuple[str, int]]:
        return [(GUEST, 1)] if self.guest else [(profile.gres_type, count) for profile, count in self.parts]

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """One profile for each slice, in the order of the parts."""
        return tuple([profile for profile, count in self.parts for _ in range(count)])

    @property
    def total(self) -> int:
        """Slices on each node, including a shared one."""
        return sum(count for _, count in self._kinds)

    def attach(self, comment: str) -> str:
        """Append this grant's marker to the comment; raises GrantError if it already holds one."""
        if MARKER_OPEN in comment:
            raise GrantError(f"a comment must not contain {MARKER_OPEN!r}: it is reserved for the submit filter")
        return f"{comment} {self.marker}" if comment else self.marker

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grant):
            return NotImplemented
        return (self.parts, self.decision, self.guest) == (other.parts, other.decision, other.guest)

    def __hash__(self) -> int:
        return hash((self.parts, self.decision, self.guest))

    def __reduce__(self) -> tuple[type[Grant], tuple[tuple[tuple[Profile, int], ...], str, bool]]:
        return (Grant, (self.parts, self.decision, self.guest))

    def __repr__(self) -> str:
        return f"Grant({self.marker!r})"


def parse_comment(comment: bytes | str) -> Grant | None:
    """Parse the grant at the end of a job's comment; None if the comment holds no marker.

    Bytes need not be UTF-8. Raises GrantError, and nothing else, if there is something that looks like a marker but
    is not exactly one well-formed marker at the end.
    """
    raw = comment if isinstance(comment, bytes) else comment.encode("utf-8", "surrogatepass")
    markers = raw.count(_OPEN)
    if not markers:
        return None
    match = _MARKER.match(raw, raw.find(_OPEN))
    if markers > 1 or match is None:
        raise GrantError("the job's comment has a MIG marker that the submit filter did not write")
    decision = (match[2] or b"").decode("ascii")
    if match[1] == _GUEST:
        return Grant((), decision, guest=True)
    parts = []
    for part in match[1].decode("ascii").split(","):
        name, _, count = part.rpartition(":")
        parts.append((Profile.parse(name), int(count)))
    return Grant(parts, decision)


def strip(comment: str) -> str:
    """Remove the marker and the space before it from the comment.

    A comment without a well-formed marker at its end is returned unchanged.
    """
    try:
        if parse_comment(comment) is None:
            return comment
    except GrantError:
        return comment
    return comment[: comment.rfind(MARKER_OPEN)].removesuffix(" ")
