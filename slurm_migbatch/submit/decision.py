"""Define the record of one decision: the request, the candidates, the grant, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slurm_migbatch.predict.candidate import Candidate
from slurm_migbatch.predict.recommend import Advice
from slurm_migbatch.workload.hints import Hints


@dataclass(frozen=True)
class SubmitDecision:
    """One decision. `id` is also in the job's marker; `ts` is unix seconds.

    `asked` holds the user's own request (GRES fields, comment, extra) as far as given; `kept`: the job keeps the slices
    of an earlier decision with this id, and `asked` has its comment and extra only. `bucket` is its stable name, empty
    if no known model was named; `advice` is the batch and copies passed to the job; `reason` is a key of
    `predict.selection.REASONS` or of `predict.recurring.SENTENCES`, or `explicit`, or `whole_gpu`. `recurring` is the
    key of the recurring job, `engine` the program in its script that takes a fixed share of a slice; empty: unknown.
    """

    id: str
    ts: float
    uid: int
    user: str
    partition: str
    job_id: int | None
    asked: Mapping[str, str]
    hints: Hints
    bucket: str
    predictor: str
    candidates: tuple[Candidate, ...]
    granted: str
    reason: str
    message: str
    source: str = "service"
    advice: Advice | None = None
    recurring: str = ""
    engine: str = ""
    kept: bool = False

    def again(self, id: str, ts: float) -> SubmitDecision:
        """Return the decision on an identical request, under its own name."""
        return self if id == self.id else replace(self, id=id, ts=ts)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form; texts of the user that are not UTF-8 have their odd bytes replaced."""
        return {
            **vars(self),
            "asked": {key: as_utf8(text) for key, text in self.asked.items()},
            "message": as_utf8(self.message),
            "hints": self.hints.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "advice": None if self.advice is None else {"batch": self.advice.batch, "copies": self.advice.copies},
        }


def as_utf8(text: str) -> str:
    """Return a value of a request, which has a character for each byte, as the user wrote it."""
    return text.encode("latin-1").decode("utf-8", "replace")


def as_bytes(value: Any) -> Any:
    """Return a JSON document with its texts as those of requests, a character for each byte."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("latin-1")
    if isinstance(value, Mapping):
        return {as_bytes(key): as_bytes(item) for key, item in value.items()}
    return [as_bytes(item) for item in value] if isinstance(value, list) else value


Decide = Callable[[str, float], SubmitDecision]
"""Makes a decision whose answer has been given, of its name and its time: only the record needs it."""
