"""Elastic training jobs: how one is told from any other, and how it changes between waiting and a slice.

Such a job waits with the GRES `mig:loan:1`, a type that only the catalog node lists: Slurm keeps its priority,
fairshare and limits, and starts it nowhere. Root releases it by writing a profile into its GRES, and puts it back by
writing `loan` again. The marker at the end of its comment follows (`mig/grant.py` has its form): it says what the GRES
says, and the decision's name in it begins with `loan` for as long as the job is elastic. Users can write neither, so
that a job that names a profile of its own is never taken for a loan and never called back.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.mig.grant import MARKER_OPEN
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.gres import GresError
from slurm_migbatch.workload import hints as hinting
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.refusal import Refusal

GRES: Final = "mig"
LOAN: Final = "loan"
"""The GRES type of an elastic training job that waits; also how its decision's name begins."""
GUEST: Final = "guest"
"""The GRES type of a training job that shares the slice of another."""
LONGEST_MARK: Final = len("[mig:10g.1000gb.me.all:1#loan01234567]")
"""Bytes that the marker of an elastic job may come to have, whatever slice it gets; its comment leaves room for it."""

_MARK = re.compile(r"(?:\A|(?<= ))\[mig:([0-9a-z.-]{1,24}):1(?:#([0-9a-z]{1,16}))?\]\Z")


@dataclass(frozen=True)
class LoanHints:
    """What is known of an elastic training job. None: not told.

    Attributes:
        slice: the profile that it was released for or runs on; None while it waits, and for a guest.
        guest: it shares the slice of another job.
        min, max: the smallest and the largest profile that it may have.
        signal: `usr1` or `usr2`, on which it writes a checkpoint and goes on; without one it only knows TERM.
        mem_mib: GPU memory that it needs.
        model, batch, input, input_unit, items: as in `Hints`.
    """

    slice: Profile | None = None
    guest: bool = False
    min: Profile | None = None
    max: Profile | None = None
    signal: str | None = None
    mem_mib: int | None = None
    model: str | None = None
    batch: int | None = None
    input: int | None = None
    input_unit: str = ""
    items: int | None = None

    @property
    def waiting(self) -> bool:
        """Whether it waits for a release."""
        return self.slice is None and not self.guest


def loan_hints(
    comment: str, partition: str, gres: str, partitions: Collection[str], extra: str = ""
) -> LoanHints | None:
    """What a job is as an elastic training job; None where it is none.

    Args:
        comment, partition, gres: as Slurm shows them; a pending job may name several partitions, joined by commas, all
            of which must lend.
        partitions: those that lend.
        extra: the job's extra text, where the site reads hints from it.

    Hints that are not understood are as good as none: the submit filter refuses them, so these are root's.
    """
    names = [name for name in partition.split(",") if name]
    if not names or not set(names) <= set(partitions):
        return None
    try:
        asked = gres_list.counts(gres, GRES)
    except GresError:
        return None
    if len(asked) != 1 or set(asked.values()) != {1}:
        return None
    (kind,) = asked
    profile = None
    if kind not in (LOAN, GUEST):
        profile = _profile(kind)
        if profile is None or not is_marked(comment):
            return None
    told = _told(comment, extra)
    return LoanHints(
        slice=profile,
        guest=kind == GUEST,
        min=_profile(told.min),
        max=_profile(told.max),
        signal=told.signal,
        mem_mib=told.mem_mib,
        model=told.model,
        batch=told.batch,
        input=told.input,
        input_unit=told.input_unit,
        items=told.items,
    )


def is_marked(comment: str) -> bool:
    """Whether the filter, or root, wrote at the end of the comment that the job is elastic."""
    match = _marker(comment)
    return match is not None and (match[1] == LOAN or (match[2] or "").startswith(LOAN))


def decision_name(id: str) -> str:
    """The name of an elastic job's decision: `loan` and at most eight more characters."""
    return LOAN + id.removeprefix(LOAN)[:8]


def retyped(gres: str, comment: str, kind: str, slice: str = "") -> dict[str, str]:
    """The fields of `scontrol update` that give an elastic job another type of slice: Gres and Comment.

    Args:
        gres, comment: as Slurm shows them; other GRES and the user's own text stay.
        kind: `LOAN`, `GUEST` or a profile in GRES spelling.
        slice: the profile for the marker, where it is another than `kind` (that of a guest's host).
    """
    entries = [gres_list.prefix_of(entry)[1] for entry in gres_list.split(gres)]
    kept = [entry for entry in entries if entry.partition(":")[0].partition("=")[0] not in (GRES, "")]
    match = _marker(comment)
    text = comment[: comment.rfind(MARKER_OPEN)].removesuffix(" ") if match else comment
    decision = decision_name((match[2] or "") if match else "")
    marker = f"{MARKER_OPEN}{slice or kind}:1#{decision}]"
    return {
        "Gres": ",".join([*kept, f"{GRES}:{kind}:1"]),
        "Comment": f"{text} {marker}" if text.strip(" ") else marker,
    }


def _marker(comment: str) -> re.Match[str] | None:
    at = comment.find(MARKER_OPEN)
    return None if at < 0 else _MARK.match(comment, at)


def _told(comment: str, extra: str) -> Hints:
    match = _marker(comment)
    text = comment[: match.start()] if match else comment
    try:
        return hinting.parse(text, extra)
    except Refusal:
        return Hints()


def _profile(name: str | None) -> Profile | None:
    try:
        return None if name is None else Profile.parse(name)
    except ProfileError:
        return None
