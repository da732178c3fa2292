"""Records created by the controller: decisions and supply changes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from slurm_migbatch.store import clean
from slurm_migbatch.store.models import Run, StoredDecision, SupplyChange, portions

_TEXTS = ("user", "partition", "asked", "bucket", "chosen", "message", "source", "recurring")
_TEXT_OPTION = re.compile(r"(?:^| )--(?:comment|extra)=")
_FIGURES = ("latency_ms", "throughput_per_s", "memory_mib")


def record_decisions(session: Session, decisions: Sequence[Mapping[str, Any]], now: float) -> None:
    """Store decisions, replacing or updating those with the same ids, and update the runs that have their ids.

    Raises:
        ValueError: a decision has no id.
    """
    for portion in portions(decisions):
        _record(session, portion, now)


def _record(session: Session, decisions: Sequence[Mapping[str, Any]], now: float) -> None:
    by_id: dict[str, Mapping[str, Any]] = {}
    for decision in decisions:
        id = clean.text(decision.get("id"), 16)
        if id is None:
            raise ValueError("a decision needs an id")
        by_id[id] = decision
    rows = {row.id: row for row in session.scalars(select(StoredDecision).where(StoredDecision.id.in_(by_id)))}
    for decision in decisions:
        id = str(clean.text(decision.get("id"), 16))
        row = rows.get(id)
        if row is not None and decision.get("kept"):
            _update(row, decision)
            continue
        if row is None:
            row = rows[id] = StoredDecision(id=id)
            session.add(row)
        _fill(row, decision, now)
    session.flush()
    for run in session.scalars(select(Run).where(Run.decision.in_(by_id))):
        copy_decision(rows[str(run.decision)], run)


def _fill(row: StoredDecision, decision: Mapping[str, Any], now: float) -> None:
    row.ts = clean.moment(decision.get("ts")) or now
    row.uid = clean.whole(decision.get("uid"))
    for name in _TEXTS:
        setattr(row, name, StoredDecision.fitting(name, decision.get(name)))
    row.hints = clean.document(decision.get("hints"))
    row.candidates = clean.document(decision.get("candidates") or [])
    others = (key for key in decision if key != "kept" and not hasattr(StoredDecision, key))
    row.facts = clean.document({key: decision[key] for key in others})


def _update(row: StoredDecision, decision: Mapping[str, Any]) -> None:
    """Add an update of a job that keeps its slices. The figures of candidates are those for the previous hints."""
    options = _TEXT_OPTION.split(row.asked or "", maxsplit=1)[0]
    row.asked = StoredDecision.fitting("asked", " ".join(filter(None, (options, decision.get("asked")))))
    row.partition = StoredDecision.fitting("partition", decision.get("partition"))
    hints = clean.document(decision.get("hints"))
    if hints != row.hints:
        row.hints = hints
        row.candidates = clean.document(decision.get("candidates") or [])
        row.bucket = StoredDecision.fitting("bucket", decision.get("bucket"))


def copy_decision(decision: StoredDecision, run: Run) -> None:
    """Copy the decision's fields used by reports into a run; figures are those of its actual profile once it has one,
    which may differ from the first choice.
    """
    run.asked, run.bucket, run.source = decision.asked or run.asked, decision.bucket, decision.source
    profiles = _profiles(run.profile or decision.chosen or "")
    listed = decision.candidates if isinstance(decision.candidates, list) else ()
    candidate = next((row for row in listed if isinstance(row, dict) and row.get("profile") in profiles), {})
    for figure in _FIGURES:
        setattr(run, f"predicted_{figure}", clean.real(candidate.get(figure)))


def _profiles(chosen: str) -> set[str]:
    """Return the profile names in "mig:2g.20gb:1,1g.10gb.me:2", in either spelling."""
    names = {part.removeprefix("mig:").split(":")[0].strip() for part in chosen.split(",")}
    return names | {name.replace("gb.", "gb+") for name in names}


def record_supply(session: Session, node: str, ts: float, version: int, counts: Mapping[str, int], why: str) -> None:
    """Store the counts that Slurm was given for a node."""
    session.add(
        SupplyChange(
            node=SupplyChange.fitting("node", node) or "?", ts=ts, version=version, counts=clean.document(dict(counts)),
            why=SupplyChange.fitting("why", why),
        )
    )  # fmt: skip
