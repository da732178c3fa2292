"""Cache answers, because users submit the same script many times.

A request that is byte for byte the same gets the same answer, under a new name for the decision, as long as the site
is unchanged: the answers belong to a `SubmitState` and are dropped with it.
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
        """Store an answer made under `name`, unless the decision kept an older name or the name is in it twice."""
        before, after, decide = answer, b"", None
        if decision is not None:
            parts = answer.split(name.encode())
            if decision.id != name or len(parts) != 2:
                return
            before, after, decide = *parts, decision.again
        self.put(request, CachedAnswer(verdict, before, after, decide))

    def put(self, request: bytes, answer: CachedAnswer) -> None:
        """Store an answer, unless its request is longer than `LONGEST`."""
        if len(request) > LONGEST:
            return
        if len(self._given) >= self._most:
            self._given.clear()
        self._given[request] = answer
