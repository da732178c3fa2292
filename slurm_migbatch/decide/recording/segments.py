"""Record rounds as JSON values, from which `decide` can be repeated: observations, decisions, outcomes.

A recording consists of independent segments. A segment begins with the settings and the state, and its
first round with all observations; later rounds hold the changes. Predictions are stored as queries
and answers. Explanations for users are stored with the decision, but not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, NewType, TypeVar

from slurm_migbatch.decide.actions import MoveOrder, Offer
from slurm_migbatch.decide.capacity.facts import NodeFacts
from slurm_migbatch.decide.core import Decision, DecisionMemory, Outcomes, Settings
from slurm_migbatch.decide.dispatch.arrays import Throttle
from slurm_migbatch.decide.dispatch.retype import Retype
from slurm_migbatch.decide.dispatch.stage import DispatchOutcome
from slurm_migbatch.decide.lending.loan import Loan
from slurm_migbatch.decide.lending.model import LoanOrder
from slurm_migbatch.decide.lending.stage import OrderOutcome
from slurm_migbatch.decide.recording import memory as memory_state
from slurm_migbatch.decide.recording.codec import AS_IT_IS, Codec, CodecError, Codes, Json, canonical
from slurm_migbatch.decide.recording.deltas import Delta, RowDelta
from slurm_migbatch.decide.snapshot import ClusterSnapshot, PlanStatus, Predictions, WeighedProfile
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.loans import LoanHints

T = TypeVar("T")

FORMAT: Final = 5
"""Version of the entries; others are not read."""

#: key and answer of a prediction
_QUESTIONS: Final[Mapping[str, tuple[Any, Any]]] = {
    "training_speeds": (LoanHints, dict[Profile, float]),
    "rates": (Hints, dict[Profile, float]),
    "candidates": (Hints, tuple[Profile, tuple[WeighedProfile, ...]] | None),
}
_Written = NewType("_Written", object)
"""A value that is JSON already."""
#: parts of a snapshot that are written separately from it
_APART: Final = [(ClusterSnapshot, name) for name in ("jobs", "nodes", "inventory", "plans", "predictions")]


# -- predictions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One query of the predictor and its answer."""

    kind: str
    hints: Hints | LoanHints
    partition: str
    answer: Any


class AskedPredictions:
    """Predictions that record their queries."""

    def __init__(self, predictions: Predictions) -> None:
        self._predictions = predictions
        self.version = predictions.version
        #: in the order of the queries
        self.asked: list[Asked] = []

    def _noted(self, kind: str, hints: Hints | LoanHints, partition: str, answer: T) -> T:
        self.asked.append(Asked(kind, hints, partition, answer))
        return answer

    def training_speeds(self, hints: LoanHints, partition: str, /) -> Mapping[Profile, float]:
        """See `Predictions`."""
        return self._noted("training_speeds", hints, partition, self._predictions.training_speeds(hints, partition))

    def rates(self, hints: Hints, partition: str, /) -> Mapping[Profile, float]:
        """See `Predictions`."""
        return self._noted("rates", hints, partition, self._predictions.rates(hints, partition))

    def candidates(self, hints: Hints, partition: str, /) -> tuple[Profile, Sequence[WeighedProfile]] | None:
        """See `Predictions`."""
        return self._noted("candidates", hints, partition, self._predictions.candidates(hints, partition))


class RecordedPredictions:
    """Recorded predictions; queries that were not recorded have no answer, and `unknown` counts them."""

    def __init__(self, version: str, answers: Mapping[tuple[str, Any, str], Any]) -> None:
        self.version, self._answers = version, answers
        self.unknown = 0

    def _answer(self, *key: Any) -> Any:
        self.unknown += key not in self._answers
        return self._answers.get(key)

    def training_speeds(self, hints: LoanHints, partition: str, /) -> Mapping[Profile, float]:
        """See `Predictions`."""
        return self._answer("training_speeds", hints, partition) or {}

    def rates(self, hints: Hints, partition: str, /) -> Mapping[Profile, float]:
        """See `Predictions`."""
        return self._answer("rates", hints, partition) or {}

    def candidates(self, hints: Hints, partition: str, /) -> tuple[Profile, Sequence[WeighedProfile]] | None:
        """See `Predictions`."""
        answer: tuple[Profile, Sequence[WeighedProfile]] | None = self._answer("candidates", hints, partition)
        return answer


# -- decisions ---------------------------------------------------------------------------------------------------------


def order_key(order: LoanOrder) -> Json:
    """Return the content of an order, without its reason."""
    profile = order.profile.name if order.profile is not None else ""
    return [
        order.kind.value,
        order.job,
        order.restart,
        order.cause.value,
        profile,
        order.signal,
        order.node,
        *order.away,
    ]


def change_key(change: Retype | Throttle) -> Json:
    """Return the content of a change to a pending job, without its reason."""
    if isinstance(change, Retype):
        return ["retype", *change.targets, change.after.name]
    return ["throttle", change.array.array, change.after]


def actions_of(decision: Decision) -> dict[str, Json]:
    """Return the content of a decision except offers; empty if there is none."""
    content: dict[str, Json] = {"failed": {stage: type(error).__name__ for stage, error in decision.failed.items()}}
    if decision.supply is not None:
        content["start_now"] = list(decision.supply.start_now)
        content["moves"] = [[_step(order), order.job, order.restart, order.signal] for order in decision.supply.moves]
    if (dispatch := decision.dispatch) is not None:
        content["retypes"] = [change_key(change) for change in dispatch.retypes]
        content["throttles"] = [change_key(change) for change in dispatch.throttles]
        content["repairs"] = sorted(dispatch.repairs)
        content["unknown"] = list(dispatch.unknown)
    if decision.lending is not None:
        content["orders"] = [order_key(order) for order in decision.lending.orders]
    return {name: value for name, value in content.items() if value}


def _step(order: MoveOrder) -> str:
    return "signal" if order.signal else "cancel" if order.cancel else "requeue"


def offer_of(offer: Offer) -> Json:
    """Return the offer of a node."""
    plan, sharing = offer.plan, offer.sharing
    content: dict[str, Json] = {
        "layouts": {uuid: [str(slot) for slot in layout.slots] for uuid, layout in plan.layouts.items()},
        "offers": {profile.name: count for profile, count in plan.offers.items()},
        "withdrawn": sorted(profile.name for profile in plan.withdrawn),
        "guests": {str(guest): list(place) for guest, place in sharing.places.items()},
        "fixed": plan.fixed,
        "closed": not plan.open,
        "held_back": {profile.name: count for profile, count in plan.held_back.items()},
    }
    return {name: value for name, value in content.items() if value}


def offers_of(decision: Decision) -> dict[str, Json]:
    """Return the offer of every node of a plan."""
    return {} if decision.supply is None else {offer.plan.node: offer_of(offer) for offer in decision.supply.offers}


def reasons_of(decision: Decision) -> dict[str, str]:
    """Return why jobs are changed, by job."""
    reasons = {}
    if decision.supply is not None:
        reasons.update({str(order.job): order.why for order in decision.supply.moves})
    if decision.dispatch is not None:
        for retype in decision.dispatch.retypes:
            reasons[str(retype.pending.row.job_id)] = retype.why
        for throttle in decision.dispatch.throttles:
            reasons[str(throttle.array.array)] = throttle.why
    if decision.lending is not None:
        reasons.update({str(order.job): order.why for order in decision.lending.orders})
    return reasons


# -- outcomes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """Outcome of an action; `key` identifies it, see `DispatchOutcome` and `OrderOutcome`."""

    key: Any
    at: float
    error: str = ""
    applied: bool = True
    unsure: bool = False


@dataclass(frozen=True)
class RecordedOutcomes:
    """Outcome of a round's actions.

    Attributes:
        unsaved: whether the loans that the decision changed could not be recorded.
    """

    dispatch: tuple[Done, ...] = ()
    lending: tuple[Done, ...] = ()
    unsaved: bool = False

    @classmethod
    def of(cls, outcomes: Outcomes) -> RecordedOutcomes:
        """Return the stored form of outcomes."""
        return cls(
            tuple(Done(change_key(o.change), o.at, o.error, o.applied, o.unsure) for o in outcomes.dispatch),
            tuple(Done(order_key(o.order), o.at, o.error, o.applied) for o in outcomes.lending),
            bool(outcomes.unsaved),
        )

    def on(self, decision: Decision, settings: Settings, now: float) -> Outcomes:
        """Return these as outcomes of a decision; actions without a recorded outcome count as not carried out."""
        dispatch: list[DispatchOutcome] = []
        lending: list[OrderOutcome] = []
        changed: Sequence[Loan] = ()
        not_applied = Done(None, now, NOT_RECORDED, applied=False)
        if decision.dispatch is not None and settings.dispatch is not None and not settings.dispatch.dry_run:
            by_key = {canonical(done.key): done for done in self.dispatch}
            changes: list[Retype | Throttle] = [*decision.dispatch.retypes, *decision.dispatch.throttles]
            for change in changes:
                done = by_key.get(canonical(change_key(change)), not_applied)
                dispatch.append(DispatchOutcome(change, done.at, done.error, done.applied, done.unsure))
        if decision.lending is not None and settings.lending is not None and not settings.lending.dry_run:
            by_key = {canonical(done.key): done for done in self.lending}
            for order in decision.lending.orders:
                done = by_key.get(canonical(order_key(order)), not_applied)
                lending.append(OrderOutcome(order, "", "", done.at, done.error, done.applied))
            changed = decision.lending.changed if self.unsaved else ()
        return Outcomes(dispatch, lending, changed)


NOT_RECORDED: Final = "it was not decided in the recording"


# -- entries -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """Beginning of a segment.

    Attributes:
        memory: the state, see `memory_state.encode`; None: no state, because the service had just started.
    """

    settings: Settings
    memory: Any = None


@dataclass(frozen=True)
class RecordedRound:
    """One decoded round.

    Attributes:
        snapshot: the observations; its predictions are those that were recorded so far.
        actions, offers, reasons: the decision, see `actions_of`, `offers_of` and `reasons_of`.
    """

    snapshot: ClusterSnapshot
    actions: Mapping[str, Any] = field(default_factory=dict)
    offers: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    outcomes: RecordedOutcomes = field(default_factory=RecordedOutcomes)


class _Tables:
    """Common state of writing and reading a segment: the geometries by number, and the previous round."""

    def __init__(self) -> None:
        self.geometries: list[Geometry] = []
        self.numbers: dict[Geometry, int] = {}
        self.codec = Codec({Geometry: Codes(self._number, self._geometry), _Written: AS_IT_IS}, _APART)
        self.jobs: RowDelta[int] = RowDelta(self.codec, JobRow, attrgetter("job_id"))
        self.nodes: RowDelta[str] = RowDelta(self.codec, NodeRow, attrgetter("name"))
        self.inventory: Delta[str] = Delta(self.codec, NodeFacts)
        self.plans: Delta[str] = Delta(self.codec, PlanStatus)
        self.offers: Delta[str] = Delta(self.codec, _Written)
        self.answers: dict[tuple[str, Any, str], Any] = {}
        self.version: str | None = None
        self.written = 0

    def _number(self, geometry: Geometry) -> int:
        if geometry not in self.numbers:
            self.numbers[geometry] = len(self.geometries)
            self.geometries.append(geometry)
        return self.numbers[geometry]

    def _geometry(self, number: Json) -> Geometry:
        if type(number) is not int or not 0 <= number < len(self.geometries):
            raise CodecError(f"there is no geometry {number!r}")
        return self.geometries[number]

    def with_geometries(self, entry: dict[str, Json]) -> dict[str, Json]:
        """Return the entry with the geometries that it is the first to use."""
        new, self.written = self.geometries[self.written :], len(self.geometries)
        return {"geometries": [geometry.to_dict() for geometry in new], **entry} if new else entry

    def learn_geometries(self, entry: Mapping[str, Json]) -> None:
        """Add the geometries of an entry."""
        self.geometries += Codec().decode(entry.get("geometries", []), list[Geometry])


class SegmentWriter:
    """Encode rounds as entries of one segment."""

    def __init__(self) -> None:
        self._tables = _Tables()
        #: by node, its offer of the previous round and the encoded offer
        self._offers: dict[str, tuple[Offer, Json]] = {}

    def begin(self, settings: Settings, state: memory_state.State | None) -> Json:
        """Return the first entry of a segment; `state`: see `memory_state.take`."""
        tables = self._tables
        memory = None if state is None else memory_state.encode(state, tables.codec)
        entry = {"format": FORMAT, "settings": tables.codec.encode(settings, Settings), "memory": memory}
        return tables.with_geometries(entry)

    def round(self, snapshot: ClusterSnapshot, decision: Decision, outcomes: Outcomes, asked: Iterable[Asked]) -> Json:
        """Return the entry of a round."""
        recorded_outcomes = RecordedOutcomes.of(outcomes)
        offers = self._offers_of(decision)
        return self.recorded(
            RecordedRound(snapshot, actions_of(decision), offers, reasons_of(decision), recorded_outcomes), asked
        )

    def _offers_of(self, decision: Decision) -> dict[str, Json]:
        """Return `offers_of`; an offer that is the same object as in the previous round is not encoded again."""
        before, self._offers = self._offers, {}
        for offer in () if decision.supply is None else decision.supply.offers:
            previous = before.get(offer.plan.node)
            self._offers[offer.plan.node] = (
                previous if previous is not None and previous[0] is offer else (offer, offer_of(offer))
            )
        return {node: written for node, (_, written) in self._offers.items()}

    def recorded(self, known: RecordedRound, asked: Iterable[Asked]) -> Json:
        """Return the entry of a round from its recorded parts."""
        tables, snapshot = self._tables, known.snapshot
        entry: dict[str, Json] = {
            "seen": tables.codec.encode(snapshot, ClusterSnapshot),
            "jobs": tables.jobs.write_rows(snapshot.jobs),
            "nodes": tables.nodes.write_rows(snapshot.nodes),
            "inventory": tables.inventory.write(snapshot.inventory),
            "plans": tables.plans.write(snapshot.plans),
            "asked": self._asked(snapshot.predictions.version, asked),
            "actions": dict(known.actions),
            "offers": tables.offers.write(known.offers),
            "reasons": dict(known.reasons),
            "outcomes": tables.codec.encode(known.outcomes, RecordedOutcomes),
        }
        return tables.with_geometries({name: value for name, value in entry.items() if value})

    def _asked(self, version: str, asked: Iterable[Asked]) -> Json:
        tables, entry = self._tables, {}
        if version != tables.version:
            tables.version, tables.answers = version, {}
            entry["version"] = version
        answers = []
        for question in asked:
            key = question.kind, question.hints, question.partition
            if key not in tables.answers:
                tables.answers[key] = question.answer
                question_kind, answer_kind = _QUESTIONS[question.kind]
                encoded = tables.codec.encode(question.answer, answer_kind)
                answers.append(
                    [question.kind, tables.codec.encode(question.hints, question_kind), question.partition, encoded]
                )
        return {**entry, "answers": answers} if answers else entry


class SegmentReader:
    """Decode entries as rounds; one for each segment.

    Args:
        entry: the first one of the segment.

    Raises:
        CodecError: it does not begin a segment of this format.
    """

    def __init__(self, entry: Json) -> None:
        if not begins_segment(entry) or entry["format"] != FORMAT:
            raise CodecError("not a recording of decisions, or one of another version of migbatch")
        self._tables = tables = _Tables()
        tables.learn_geometries(entry)
        self.segment = Segment(tables.codec.decode(entry["settings"], Settings), entry["memory"])

    def memory(self, settings: Settings) -> DecisionMemory:
        """Return the state, for decisions with these settings."""
        memory, data = DecisionMemory(settings), self.segment.memory
        if data is None:
            return memory
        recorded, wanted = self.segment.settings.lending, settings.lending
        if recorded is not None and wanted is not None and recorded.day_s != wanted.day_s and isinstance(data, dict):
            # minutes of a day of another length are meaningless
            data = {**data, "lending": {k: v for k, v in data.get("lending", {}).items() if k != "expected"}}
        memory_state.restore(data, memory, self._tables.codec)
        return memory

    def round(self, entry: Json) -> RecordedRound:
        """Read the next entry.

        Raises:
            CodecError: it cannot be read as the next entry.
        """
        tables = self._tables
        if not isinstance(entry, dict) or "seen" not in entry:
            raise CodecError("an entry without a snapshot")
        tables.learn_geometries(entry)
        self._answers(entry.get("asked", {}))
        observed = tables.codec.decode(entry["seen"], ClusterSnapshot)
        snapshot = replace(
            observed,
            jobs=tuple(tables.jobs.read(entry.get("jobs")).values()),
            nodes=tuple(tables.nodes.read(entry.get("nodes")).values()),
            inventory=tables.inventory.read(entry.get("inventory")),
            plans=tables.plans.read(entry.get("plans")),
            predictions=RecordedPredictions(tables.version or "", tables.answers),
        )
        codec = tables.codec
        return RecordedRound(
            snapshot,
            codec.decode(entry.get("actions", {}), dict[str, Any]),
            tables.offers.read(entry.get("offers")),
            codec.decode(entry.get("reasons", {}), dict[str, str]),
            codec.decode(entry.get("outcomes", {}), RecordedOutcomes),
        )

    def asked(self, entry: Json) -> list[Asked]:
        """Return the queries that a round was the first to make."""
        return [
            Asked(kind, self._tables.codec.decode(hints, _QUESTIONS[kind][0]), partition, answer)
            for kind, hints, partition, answer in self._decoded(entry.get("asked", {}))
        ]

    def _decoded(self, data: Json) -> list[tuple[str, Any, str, Any]]:
        answers = self._tables.codec.decode(data.get("answers", []), list[tuple[str, Any, str, Any]])
        if any(kind not in _QUESTIONS for kind, _, _, _ in answers):
            raise CodecError("an unknown query")
        return [(k, h, p, self._tables.codec.decode(answer, _QUESTIONS[k][1])) for k, h, p, answer in answers]

    def _answers(self, data: Json) -> None:
        tables = self._tables
        if "version" in data:
            tables.version, tables.answers = str(data["version"]), {}
        for kind, hints, partition, answer in self._decoded(data):
            tables.answers[kind, tables.codec.decode(hints, _QUESTIONS[kind][0]), partition] = answer


def begins_segment(entry: Json) -> bool:
    """Return whether a segment begins with this entry."""
    return isinstance(entry, dict) and {"format", "settings", "memory"} <= entry.keys()
