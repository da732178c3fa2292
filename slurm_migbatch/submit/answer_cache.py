"""Cache of answers: users submit one script many times over.

A request that is the same to the last byte gets the same answer, under a new name for the decision, for as long as the
site is the same: the answers belong to a `SubmitState` and go with it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from slurm_migbatch.submit.decision import Decide, SubmitDecision

MOST: Final = 4096
LONGEST: Final = 4096
"""Largest cached request in bytes: users write far less, and the total must stay small."""


class CachedAnswer(NamedTuple):
    """One answer. Its bytes are `before`, the decision's name, `after`; without a decision `before` is everything."""

    verdict: str
    before: bytes
    after: bytes
    decide: Decide | None

    def named(self, id: str) -> bytes:
        """Return the answer under another decision name."""
        return self.before + id.encode() + self.after if self.decide is not None else self.before


class AnswerCache:
    """Answers by request; if there are too many, all are dropped."""

    def __init__(self, most: int = MOST) -> None:
        self._given: dict[bytes, CachedAnswer] = {}
        self._most = most

    def get(self, request: bytes) -> CachedAnswer | None:
        """Return the answer to an identical request."""
        return self._given.get(request)

    def keep(self, request: bytes, verdict: str, answer: bytes, decision: SubmitDecision | None, name: str) -> None:
        """Keep an answer made under `name`, unless its decision keeps an older name or shows it twice."""
        before, after, decide = answer, b"", None
        if decision is not None:
            parts = answer.split(name.encode())
            if decision.id != name or len(parts) != 2:
                return
            before, after, decide = *parts, decision.again
        self.put(request, CachedAnswer(verdict, before, after, decide))

    def put(self, request: bytes, answer: CachedAnswer) -> None:
        """Keep an answer, unless its request is long."""
        if len(request) > LONGEST:
            return
        if len(self._given) >= self._most:
            self._given.clear()
        self._given[request] = answer
