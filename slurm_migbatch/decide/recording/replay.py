"""Repeat recorded decisions, and report differences.

Every segment begins with the recorded state, so a difference lasts at most to the end of its segment. Within a segment
the cluster is the recorded one: the recorded decisions were carried out, the replayed ones were not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from slurm_migbatch.decide.core import DecisionMemory, Settings, decide, needed, settle
from slurm_migbatch.decide.recording.codec import CodecError, Json, canonical, reading_entry
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
    """One difference in a decision.

    Attributes:
        what: orders, retypes, throttles, start_now, offers, ...
        subject: the node of an offer; else empty.
        recorded, replayed: the recorded and the new decision; None if nothing.
        why_recorded, why_replayed: their reasons, if any.
    """

    what: str
    subject: str
    recorded: Json
    replayed: Json
    why_recorded: tuple[str, ...] = ()
    why_replayed: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplayedRound:
    """One repeated round.

    Attributes:
        number: number of the round, from 1; `segment`: number of its segment.
        at: unix seconds.
        differences: empty if the decision is the same.
        unknown: number of predictions that were needed and that the recording does not have.
    """

    number: int
    segment: int
    at: float
    differences: tuple[Difference, ...] = ()
    unknown: int = 0


Change = Callable[[Settings], Settings]
"""Settings that replace those of the recording."""
See = Callable[[ClusterSnapshot], ClusterSnapshot]
"""Snapshot under another configuration."""


def replay(
    entries: Iterable[Json], change: Change = lambda settings: settings, see: See = lambda snapshot: snapshot
) -> Iterator[ReplayedRound]:
    """Run `decide` over a recording.

    Args:
        entries: of one segment or of several one after the other.
        change: the settings to decide with, given those of the recording.
        see: applies another configuration to a snapshot.

    Raises:
        CodecError: an entry cannot be read.
    """
    reader: SegmentReader | None = None
    segment = number = 0
    for place, entry in enumerate(entries, 1):
        if reader is None and not begins_segment(entry):
            raise CodecError("not a recording of decisions: it does not begin with a segment")
        with reading_entry(place):
            if reader is None or begins_segment(entry):
                reader, segment = SegmentReader(entry), segment + 1
                settings = change(reader.segment.settings)
                memory = reader.memory(settings)
                continue
            number += 1
            recorded_round = reader.round(entry)
            memory, differences, unknown = _decided(
                replace(recorded_round, snapshot=see(recorded_round.snapshot)), memory, settings
            )
        yield ReplayedRound(number, segment, recorded_round.snapshot.now, differences, unknown)


def _decided(
    known: RecordedRound, memory: DecisionMemory, settings: Settings
) -> tuple[DecisionMemory, tuple[Difference, ...], int]:
    snapshot = known.snapshot
    needed(replace(snapshot, answers=Answers()), memory, settings)  # like a round, which records its queries
    decision = decide(snapshot, memory, settings)
    settle(known.outcomes.on(decision, settings, snapshot.now), decision.memory)
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
    return [
        (name, recorded, replayed) for name, recorded, replayed in pairs if canonical(recorded) != canonical(replayed)
    ]


def _why(actions: Json, reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return the reasons of a list of actions, if any; see `order_key` and `change_key`."""
    jobs = [str(action[1]) for action in actions or () if isinstance(action, list) and len(action) > 1]
    return tuple(f"job {job}: {reasons[job]}" for job in jobs if job in reasons)
