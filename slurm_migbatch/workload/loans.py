"""Recognize elastic training jobs, and change them between waiting and a slice.

Such a job waits with the GRES `mig:loan:1`, a type that only the catalog node lists: Slurm keeps its priority,
fairshare and limits, and starts it nowhere. Root releases it by writing a profile into its GRES, and withdraws it by
writing `loan` again. The marker at the end of its comment follows (`mig/grant.py` has its format): it repeats the GRES,
and the decision's name in it begins with `loan` as long as the job is elastic. Users can write neither, so a job with
an explicit profile is never mistaken for a loan and never reclaimed.

Slurm up to 23.02 (tested with 22.05; its GRES begin with `gres:`) keeps the old type: after `scontrol update Gres=` a
pending job needs the old type and the new one. The old count can be reduced to 0 by a separate update (`emptied`), and
then still needs one free unit of that type on the node. There

- every node always offers one `loan`, and a job that waits requests two;
- a job keeps the first profile that it was released for. A count of 0 in its GRES, which Slurm ignores and users
  cannot write, records this (`mig:loan:2,mig:2g.20gb:0`);
- a requeued job must not start on some nodes (`decide.lending.pools.pools_of`). Other counts of 0 name them, and mark
  its ExcNodeList as not set by its user (`mig:2g.20gb:1,mig:not-n1:0`): squeue does not show that.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

from slurm_migbatch.mig.grant import MARKER_OPEN
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.slurm import gres as gres_list
from slurm_migbatch.slurm.gres import GresError
from slurm_migbatch.workload import excluded as excluding
from slurm_migbatch.workload import hints as hinting
from slurm_migbatch.workload.hints import NO_LLM, Hints
from slurm_migbatch.workload.llmhints import LlmHints
from slurm_migbatch.workload.refusal import Refusal

GRES: Final = "mig"
LOAN: Final = "loan"
"""The GRES type of an elastic training job that waits; also the prefix of its decision's name. If Slurm keeps former
types of a pending job, slurm.conf gives every node one, which is never used and never changed.
"""
GUEST: Final = "guest"
"""The GRES type of a training job that shares the slice of another."""
EXCLUDED_NODE_PREFIX: Final = "not-"
"""Prefix of GRES types that name, with a count of 0, a node on which a training job must not start."""
LONGEST_MARK: Final = len("[mig:10g.1000gb.me.all:1#loan01234567]")
"""Maximum bytes of the marker of an elastic job, whatever slice it gets; its comment leaves room for it."""
PREFIX_OF_OLD_RELEASES: Final = "gres:"
"""Prefix of GRES if Slurm keeps former types."""

_MARK = re.compile(r"(?:\A|(?<= ))\[mig:([0-9a-z.-]{1,24}):1(?:#([0-9a-z]{1,16}))?\]\Z")


@dataclass(frozen=True)
class LoanHints:
    """Attributes of an elastic training job. None: not given.

    Attributes:
        slice: the profile that it was released for or runs on; None while it waits, and for a guest.
        guest: it shares the slice of another job.
        min, max: the smallest and the largest profile that it can have; equal if Slurm allows no other.
        signal: `usr1` or `usr2`, on which it writes a checkpoint and continues; without one it only handles TERM.
        mem_mib: GPU memory that it needs.
        model, batch, input, input_unit, items, llm: as in `Hints`.
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
    llm: LlmHints = NO_LLM

    @property
    def waiting(self) -> bool:
        """Whether it waits for a release."""
        return self.slice is None and not self.guest

    @cached_property
    def unplaced(self) -> LoanHints:
        """The same hints for a job without a slice."""
        return self if self.slice is None else replace(self, slice=None)


def loan_hints(comment: str, partition: str, gres: str, partitions: Collection[str]) -> LoanHints | None:
    """Return a job's hints as an elastic training job; None if it is not one.

    Args:
        comment, partition, gres: as Slurm shows them; a pending job may name several partitions, joined by commas, all
            of which must lend.
        partitions: those that lend.

    Invalid hints count as none: the submit filter refuses them, so these were written by root.
    """
    names = [name for name in partition.split(",") if name]
    if not names or not set(names) <= set(partitions):
        return None
    return _hints_of(comment, gres)


@lru_cache(maxsize=1 << 14)
def _hints_of(comment: str, gres: str) -> LoanHints | None:
    """Read the hints of a job whose partitions lend; cached, because each round reads every job's."""
    try:
        counts = gres_list.counts(gres, GRES)
    except GresError:
        return None
    requested = {kind: count for kind, count in counts.items() if count}
    if GRES not in gres and is_marked(comment):
        requested = {LOAN: 1}  # it was emptied, but the second update is missing
    if len(requested) != 1:
        return None
    ((kind, count),) = requested.items()
    profile = None
    if kind not in (LOAN, GUEST):
        profile = _profile(kind)
        if profile is None or count != 1 or not is_marked(comment):
            return None
    hints = _user_hints(comment)
    bound = None if drops_old_gres_type(gres) else profile or next(filter(None, map(_profile, counts)), None)
    return LoanHints(
        slice=profile,
        guest=kind == GUEST,
        min=bound or _profile(hints.min),
        max=bound or _profile(hints.max),
        signal=hints.signal,
        mem_mib=hints.mem_mib,
        model=hints.model,
        batch=hints.batch,
        input=hints.input,
        input_unit=hints.input_unit,
        items=hints.items,
        llm=hints.llm,
    )


def drops_old_gres_type(gres: str) -> bool:
    """Return whether Slurm drops a pending job's old GRES type on a change, according to its GRES format."""
    return not gres.startswith(PREFIX_OF_OLD_RELEASES)


def waiting_count(gres: str) -> int:
    """Return the count of the GRES type `loan` that a waiting job requests, according to Slurm's GRES format."""
    return 1 if drops_old_gres_type(gres) else 2


@lru_cache(maxsize=1 << 14)
def is_marked(comment: str) -> bool:
    """Return whether the filter, or root, has marked the job as elastic at the end of the comment."""
    match = _marker(comment)
    return match is not None and (match[1] == LOAN or (match[2] or "").startswith(LOAN))


def user_text(comment: str) -> str:
    """Return the comment of any job without the text that the filter and migbatchd added."""
    match = _marker(comment)
    return excluding.split(comment[: match.start()].removesuffix(" "))[0] if match else excluding.user_text(comment)


def decided(comment: str) -> str:
    """Return the name of the decision on an elastic training job, from its marker; empty without one."""
    match = _marker(comment) if is_marked(comment) else None
    return (match[2] or "") if match is not None else ""


def decision_name(id: str) -> str:
    """Return the name of an elastic job's decision: `loan` and at most eight more characters."""
    return LOAN + id.removeprefix(LOAN)[:8]


def emptied(gres: str) -> dict[str, str]:
    """Return the fields of a `scontrol update` to send before `retyped`'s; none if Slurm drops the old type itself.

    The job still waits, because it requests a count for the whole job, on one node: two nodes would offer one `loan`
    each.
    """
    if drops_old_gres_type(gres):
        return {}
    anywhere = {"ExcNodeList": ""} if away(gres) else {}
    return {"TresPerNode": "", "TresPerJob": f"{PREFIX_OF_OLD_RELEASES}{GRES}:{LOAN}:2", "NumNodes": "1-1", **anywhere}


def away(gres: str) -> frozenset[str]:
    """Return the nodes on which root has told Slurm not to start an elastic job."""
    if EXCLUDED_NODE_PREFIX not in gres:
        return frozenset()
    return frozenset(
        kind.removeprefix(EXCLUDED_NODE_PREFIX) for kind in _types(gres) if kind.startswith(EXCLUDED_NODE_PREFIX)
    )


def retyped(gres: str, comment: str, kind: str, nodes: Collection[str] = ()) -> dict[str, str]:
    """Return the fields of `scontrol update` that give an elastic job another type of slice: Gres and Comment.

    Args:
        gres, comment: as Slurm shows them; other GRES and the user's own text are kept.
        kind: `LOAN`, `GUEST` or a profile in GRES spelling.
        nodes: where it must not start; its user must have excluded none.
    """
    entries: list[str] = []
    former = _types(gres)
    for entry in gres_list.split(gres):
        name = gres_list.prefix_of(entry)[1].partition(":")[0]
        if name and name != GRES:
            entries.append(gres_list.prefix_of(entry)[1])
    match = _marker(comment)
    text = comment[: comment.rfind(MARKER_OPEN)].removesuffix(" ") if match else comment
    marker = f"{MARKER_OPEN}{kind}:1#{decision_name((match[2] or '') if match else '')}]"
    mig_entries = [f"{GRES}:{kind}:{waiting_count(gres) if kind == LOAN else 1}"]
    fields = {}
    if not drops_old_gres_type(gres):
        mig_entries += [f"{GRES}:{name}:0" for name in former if name != kind and _profile(name)]
    if nodes or away(gres):
        mig_entries += [f"{GRES}:{EXCLUDED_NODE_PREFIX}{node}:0" for node in sorted(nodes)]
        fields["ExcNodeList"] = ",".join(sorted(nodes))
    if not former or not drops_old_gres_type(gres):
        fields["TresPerJob"] = ""  # undoes `emptied`
    return {
        **fields,
        "Gres": ",".join([*entries, *mig_entries]),
        "Comment": f"{text} {marker}" if text.strip(" ") else marker,
    }


def _types(gres: str) -> list[str]:
    """Return the types of MIG GRES in a text, including those with a count of 0; an empty one if a type is missing."""
    entries = (gres_list.prefix_of(entry)[1].split(":") for entry in gres_list.split(gres))
    return [entry[1] if len(entry) > 1 else "" for entry in entries if entry[0] == GRES]


def _marker(comment: str) -> re.Match[str] | None:
    at = comment.find(MARKER_OPEN)
    return None if at < 0 else _MARK.match(comment, at)


@lru_cache(maxsize=1 << 14)
def _user_hints(comment: str) -> Hints:
    text = user_text(comment)
    try:
        return hinting.parse(text)
    except Refusal:
        return Hints()


def _profile(name: str | None) -> Profile | None:
    try:
        return None if name is None else Profile.parse(name)
    except ProfileError:
        return None
