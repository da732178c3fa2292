"""Recognise submissions that differ only in parts that do not affect the answer, or that the answer repeats.

Users submit many similar jobs: different scripts and names, with the same hints or with numbers in the same bucket; and
all jobs of a bucket get the same slice (`workload.buckets`). So the answer to one of them applies to the others, except
that each answer has its job's own comment, and each decision is recorded with its own request.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.slurm.client import SLURM_LIMIT
from slurm_migbatch.submit.answer_cache import CachedAnswer
from slurm_migbatch.submit.decision import SubmitDecision
from slurm_migbatch.submit.request import TRES_FIELDS
from slurm_migbatch.submit.script import recurring_key
from slurm_migbatch.workload import hints as hinting
from slurm_migbatch.workload.buckets import rounded
from slurm_migbatch.workload.refusal import Refusal

MOST: Final = 4096
"""Most cached answers."""
_OWN: Final = frozenset({"comment", "name", "account", "digest", "engine"})
"""Fields that may differ: the comment is compared by its hints, and the others count only if it has no valid ones."""
_AROUND: Final = frozenset({"extra", "exc_nodes"})
"""Fields that are read or written together with the comment."""


class KeyedRequest(NamedTuple):
    """A submission; those with the same `key` are equivalent."""

    key: Hashable
    request: Mapping[str, str]

    @classmethod
    def of(cls, request: Mapping[str, str], chooser: Chooser) -> KeyedRequest | None:
        """Return the cache key of a request; None if it may not be equivalent to others."""
        comment = request.get("comment", "")
        if request.get("kind") != "submit" or not hinting.is_hint(comment) or not _AROUND.isdisjoint(request):
            return None
        for name in TRES_FIELDS:
            if name in request and "gpu" in request[name].lower():
                return (
                    None  # whole GPUs: the answer has a note on how much of the GPU earlier runs of the same job used
                )
        try:
            hints, of_llm = hinting.given_fields(comment)
        except Refusal:
            return None
        model = hints.get("model")
        if model is None and "mem_mib" not in hints:
            return None  # earlier runs of the same job affect the answer
        if isinstance(model, str) and not of_llm and chooser.has_curve(model):
            hints = rounded(hints)
        common = tuple([pair for pair in request.items() if pair[0] not in _OWN])
        return cls((common, frozenset(hints.items()), frozenset(of_llm.items())), request)

    @property
    def comment(self) -> str:
        """The user's comment, which the answer repeats."""
        return self.request["comment"]

    def decision(self, like: SubmitDecision, id: str, ts: float) -> SubmitDecision:
        """Return the decision on this submission, made from the decision on an equivalent one."""
        request = self.request
        digest = request.get("digest")
        identity = request.get("account", ""), request.get("partition", ""), request.get("name", "")
        return replace(
            like,
            id=id,
            ts=ts,
            asked={**like.asked, "comment": self.comment},
            hints=hinting.parse(self.comment),
            recurring="" if digest is None else recurring_key(like.uid, *identity, digest),
            engine=request.get("engine", ""),
        )


class AlikeAnswer(NamedTuple):
    """An answer in parts: `before`, the user's comment, `between`, the decision's name, `after`.

    `longest` is the length of the longest comment that fits.
    """

    before: bytes
    between: bytes
    after: bytes
    longest: int
    decision: SubmitDecision

    def to(self, question: KeyedRequest) -> CachedAnswer:
        """Return the answer to an equivalent submission."""
        before = self.before + question.comment.encode("latin-1") + self.between
        return CachedAnswer("accept", before, self.after, partial(question.decision, self.decision))


class AlikeAnswers:
    """Answers by cache key; if there are too many, all are dropped."""

    def __init__(self, most: int = MOST) -> None:
        self._given: dict[Hashable, AlikeAnswer] = {}
        self._most = most

    def get(self, question: KeyedRequest) -> CachedAnswer | None:
        """Return the answer to a submission; None if no equivalent one was answered, or its comment does not fit."""
        answer = self._given.get(question.key)
        return answer.to(question) if answer is not None and len(question.comment) <= answer.longest else None

    def keep(self, question: KeyedRequest, answer: bytes, decision: SubmitDecision, name: str) -> None:
        """Store an answer made under `name`, unless the decision kept an older name or the name is in it twice."""
        start = b"\nset_comment="
        before, comment, after = answer.partition(start + question.comment.encode("latin-1") + b" ")
        marker = after.partition(b"\n")[0]
        parts = after.split(name.encode())
        if not comment or decision.id != name or len(parts) != 2 or name.encode() in before:
            return
        if len(self._given) >= self._most:
            self._given.clear()
        longest = SLURM_LIMIT - len(b" " + marker)
        self._given[question.key] = AlikeAnswer(before + start, b" " + parts[0], parts[1], longest, decision)
