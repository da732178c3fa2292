"""Decide again on recorded rounds, and tell where that differs from what was decided then.

Every segment begins with what was remembered, so a difference lasts to the end of its segment at most. Within one, the
recorded cluster goes its way: what was decided then was done, and what is decided now was not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from slurm_migbatch.decide.core import DecisionMemory, Settings, decide, needed, settle
from slurm_migbatch.decide.recording.codec import CodecError, Json, canonical
from slurm_migbatch.decide.recording.segments import (
    RecordedPredictions,
    RecordedRound,
    SegmentReader,
    actions_of,
    begins_segment,
    offers_of,
    reasons_of,
)
from slurm_migbatch.decide.snapshot import Answers, ClusterSnapshot


@dataclass(frozen=True)
class Difference:
    """One thing that is decided otherwise.

    Attributes:
        what: orders, retypes, throttles, start_now, offers, ...
        subject: the node of an offer; else empty.
        recorded, replayed: what was decided, and what would be; None where nothing.
        why_recorded, why_replayed: the reasons for that, where there are any.
    """

    what: str
    subject: str
    recorded: Json
    replayed: Json
    why_recorded: tuple[str, ...] = ()
    why_replayed: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplayedRound:
    """One round that was decided on again.

    Attributes:
        number: of the round, from 1; `segment`: of its segment.
        at: unix seconds.
        differences: what is decided otherwise; empty: all is the same.
        unknown: predictions that were needed and that the recording does not hold.
    """

    number: int
    segment: int
    at: float
    differences: tuple[Difference, ...] = ()
    unknown: int = 0


Change = Callable[[Settings], Settings]
"""Settings to decide with in place of those of the recording."""
See = Callable[[ClusterSnapshot], ClusterSnapshot]
"""A snapshot as another configuration shows it."""


def replay(
    entries: Iterable[Json], change: Change = lambda settings: settings, see: See = lambda snapshot: snapshot
) -> Iterator[ReplayedRound]:
    """Run `decide` over a recording.

    Args:
        entries: of one segment or of several one after the other.
        change: the settings to decide with, given those of the recording.
        see: what another configuration shows otherwise in a snapshot.

    Raises:
        CodecError: an entry cannot be read.
    """
    reader: SegmentReader | None = None
    segment = number = 0
    for entry in entries:
        if begins_segment(entry):
            reader, segment = SegmentReader(entry), segment + 1
            settings = change(reader.segment.settings)
            memory = reader.memory(settings)
        elif reader is None:
            raise CodecError("not a recording of decisions: it does not begin with a segment")
        else:
            number += 1
            known = reader.round(entry)
            memory, differences, unknown = _decided(replace(known, snapshot=see(known.snapshot)), memory, settings)
            yield ReplayedRound(number, segment, known.snapshot.now, differences, unknown)


def _decided(
    known: RecordedRound, memory: DecisionMemory, settings: Settings
) -> tuple[DecisionMemory, tuple[Difference, ...], int]:
    snapshot = known.snapshot
    needed(replace(snapshot, answers=Answers()), memory, settings)  # as a round does, which notes what it asks
    decision = decide(snapshot, memory, settings)
    settle(known.outcomes.on(decision, settings, snapshot.now), decision.memory, settings)
    actions, offers, reasons = actions_of(decision), offers_of(decision), reasons_of(decision)
    differences = [
        Difference(name, "", then, now, _why(then, known.reasons), _why(now, reasons))
        for name, then, now in _unequal(known.actions, actions)
    ]
    differences += [Difference("offer", node, then, now) for node, then, now in _unequal(known.offers, offers)]
    predictions = snapshot.predictions
    unknown = predictions.unknown if isinstance(predictions, RecordedPredictions) else 0
    return decision.memory, tuple(differences), unknown


def _unequal(then: Mapping[str, Json], now: Mapping[str, Json]) -> list[tuple[str, Json, Json]]:
    pairs = [(name, then.get(name), now.get(name)) for name in sorted({*then, *now})]
    return [(name, before, after) for name, before, after in pairs if canonical(before) != canonical(after)]


def _why(actions: Json, reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return the reasons of those of a list of actions that have any; see `order_key` and `change_key`."""
    jobs = [str(action[1]) for action in actions or () if isinstance(action, list) and len(action) > 1]
    return tuple(f"job {job}: {reasons[job]}" for job in jobs if job in reasons)
