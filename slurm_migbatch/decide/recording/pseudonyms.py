"""Remove names from a recording: users, accounts, jobs, hosts, and users' text.

Decisions break ties by name, so each name is replaced by one with the same sort order; nothing else of it remains.
Hints and markers in comments remain, because decisions depend on them. So do profiles, partitions, features, models and
GPU UUIDs.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

from slurm_migbatch.decide.capacity.model import Reservation
from slurm_migbatch.decide.core import Settings
from slurm_migbatch.decide.dispatch.arrays import Throttle
from slurm_migbatch.decide.dispatch.retype import Retype
from slurm_migbatch.decide.lending.loan import Loan
from slurm_migbatch.decide.recording import memory as memory_state
from slurm_migbatch.decide.recording.codec import CodecError, Json, reading_entry
from slurm_migbatch.decide.recording.memory import State
from slurm_migbatch.decide.recording.segments import (
    Done,
    RecordedOutcomes,
    RecordedRound,
    SegmentReader,
    SegmentWriter,
    begins_segment,
)
from slurm_migbatch.decide.snapshot import Answers, LendingPast
from slurm_migbatch.decide.supply.moves import MOVE
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.nodelist import NodeListError, expand, fold
from slurm_migbatch.slurm.preemption import PreemptionRules
from slurm_migbatch.workload import excluded as excluding
from slurm_migbatch.workload import hints
from slurm_migbatch.workload.catalog import NODE_FEATURE

T = TypeVar("T")

_DECISION: Final = {
    "facts": {"reason"},
    "hints": {"items", "deadline_s", "slo_us", "mem_mib", "min", "max"},
}
"""Parts of the submit filter's decisions that are kept besides the chosen profile and the candidates."""
_CANDIDATE: Final = {"profile", "capacity_mib", "throughput_per_s_range", "ok"}
_THROTTLE: Final = {"ts", "job_id", "kind", "dry_run", "outcome", "before", "after"}
_PLAIN: Final = re.compile(r"[ =._:/+-]")
_MARKER: Final = re.compile(r" ?\[mig:[A-Za-z0-9.:#,*=+-]*\]\Z")
"""Text that the submit filter writes at the end of a comment."""
_NODE_FEATURE: Final = re.compile(rf"\b{NODE_FEATURE}([A-Za-z0-9_.-]+)")
"""A feature that names a host."""
_HOST_IN_ORDER: Final = 6
"""Position of a host in the key of an order."""
_AWAY: Final = re.compile(r"(\bmig:not-)([^:,]+)(?=:)")
"""A node in a job's GRES, see `workload.loans.away`."""


class CollectedNames:
    """Collect names, and leave them unchanged."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}
        self.uids: set[int] = set()

    def of(self, kind: str, name: str) -> str:
        """Record a name."""
        if name:
            self.found.setdefault(kind, set()).add(name)
        return name

    def number(self, uid: int) -> int:
        """Record the number of a user."""
        self.uids.add(uid)
        return uid


class Pseudonyms:
    """Names with the same sort order as the collected ones."""

    def __init__(self, names: CollectedNames) -> None:
        self._names = {
            (kind, name): f"{kind}{rank:06d}"
            for kind, found in names.found.items()
            for rank, name in enumerate(sorted(found), 1)
        }
        self._uids = {uid: 100_000 + rank for rank, uid in enumerate(sorted(names.uids))}

    def of(self, kind: str, name: str) -> str:
        """Return the pseudonym of a name."""
        return self._names[kind, name] if name else ""

    def number(self, uid: int) -> int:
        """Return the pseudonym of a user's number."""
        return self._uids[uid]


Names: TypeAlias = CollectedNames | Pseudonyms


def without_names(entries: Iterable[Json], names: Names) -> Iterator[Json]:
    """Yield a recording with other names.

    Args:
        entries: see `replay.replay`.
        names: `CollectedNames` first, over all of it, and then the `Pseudonyms` built from them.

    Raises:
        CodecError: an entry cannot be read.
    """
    mask = _Mask(names)
    reader: SegmentReader | None = None
    for place, entry in enumerate(entries, 1):
        if reader is None and not begins_segment(entry):
            raise CodecError("not a recording of decisions: it does not begin with a segment")
        with reading_entry(place):
            if reader is None or begins_segment(entry):
                reader, writer = SegmentReader(entry), SegmentWriter()
                settings = reader.segment.settings
                state = None if reader.segment.memory is None else memory_state.take(reader.memory(settings))
                written = writer.begin(mask.settings(settings), None if state is None else mask.memory(state))
            else:
                written = writer.recorded(mask.round(reader.round(entry)), reader.asked(entry))
        yield written


class _Mask:
    """Replace the names in a recording."""

    def __init__(self, names: Names) -> None:
        self._names = names

    # -- names and texts -------------------------------------------------------------------------------------------

    def host(self, name: str) -> str:
        """Replace the name of a host."""
        return self._names.of("host", name)

    def hosts(self, mapping: Mapping[str, T]) -> dict[str, T]:
        """Replace the hosts that are keys of a mapping."""
        return {self.host(name): value for name, value in mapping.items()}

    def comment(self, comment: str) -> str:
        """Replace a comment: hints and the filter's text remain; of other text only the kind of each character does."""
        marker = _MARKER.search(comment)
        text, suffix = (comment, "") if marker is None else (comment[: marker.start()], marker[0])
        text, nodes = excluding.split(text)
        if nodes:
            hosts = fold(self.host(name) for name in excluding.excluded(comment))
            suffix = f"{' ' if text else ''}{excluding.OPEN}{hosts}]{suffix}" if hosts else suffix
        if not hints.is_hint(text):
            return _blank(text) + suffix
        tokens = text[len(hints.PREFIX) :].split(" ")
        return hints.PREFIX + " ".join(self._hint(token) for token in tokens) + suffix

    def _hint(self, token: str) -> str:
        key, _, value = token.partition("=")
        if key == "pipeline":
            return f"{key}={self._names.of('pipeline', value.lower())}"
        return token if key in hints.FORMS else _blank(token)

    # -- observations ---------------------------------------------------------------------------------------------

    def round(self, known: RecordedRound) -> RecordedRound:
        """Replace the names in a round."""
        observed = known.snapshot
        snapshot = replace(
            observed,
            jobs=tuple(self.job(row) for row in observed.jobs),
            nodes=tuple(self.node(row) for row in observed.nodes),
            inventory=self.hosts(observed.inventory),
            plans=self.hosts(observed.plans),
            preemption=self.preemption(observed.preemption),
            past=None if observed.past is None else self.past(observed.past),
            answers=_answers(observed.answers),
        )
        actions = dict(known.actions)
        if "orders" in actions:
            actions["orders"] = [self.order_key(key) for key in actions["orders"]]
        outcomes = RecordedOutcomes(
            tuple(_settled(done, done.key) for done in known.outcomes.dispatch),
            tuple(_settled(done, self.order_key(done.key)) for done in known.outcomes.lending),
            known.outcomes.unsaved,
        )
        return RecordedRound(snapshot, actions, self.hosts(known.offers), {}, outcomes)

    def job(self, row: JobRow) -> JobRow:
        """Replace the names in a job."""
        reason = "" if row.unread else re.split("[,:]", row.reason)[0]
        try:
            requested = ",".join(self.host(name) for name in expand(row.requested_nodes))
        except NodeListError:
            requested = self.host(row.requested_nodes)
        return replace(
            row,
            uid=self._names.number(row.uid),
            user=self._names.of("user", row.user),
            account=self._names.of("account", row.account),
            name=self._names.of("job", row.name),
            nodes=tuple(self.host(name) for name in row.nodes),
            requested_nodes=requested,
            gres=_AWAY.sub(lambda found: found[1] + self.host(found[2]), row.gres),
            comment=self.comment(row.comment),
            reason=reason,
            features=_NODE_FEATURE.sub(lambda found: NODE_FEATURE + self.host(found[1]), row.features),
            reservation=",".join(self._names.of("reservation", name) for name in row.reservation.split(",")),
            qos=self._names.of("qos", row.qos),
            gid=None,  # decisions depend on neither
            wckey="",
        )

    def preemption(self, rules: PreemptionRules) -> PreemptionRules:
        """Replace the names of QOS in the site's rules of preemption."""

        def name(qos: str) -> str:
            return self._names.of("qos", qos)

        partitions = {key: replace(found, qos=name(found.qos)) for key, found in rules.partitions.items()}
        qos = {
            name(key): replace(found, preempts=frozenset(name(other) for other in found.preempts))
            for key, found in rules.qos.items()
        }
        return replace(rules, partitions=partitions, qos=qos)

    def node(self, row: NodeRow) -> NodeRow:
        """Replace the names in a node, and the text of its drain reason."""
        features = {
            _NODE_FEATURE.sub(lambda found: NODE_FEATURE + self.host(found[1]), feature) for feature in row.features
        }
        reservations = frozenset(self._names.of("reservation", name) for name in row.reservations)
        return replace(
            row,
            name=self.host(row.name),
            reason="",
            features=frozenset(features),
            reservations=reservations,
            owner=self._names.of("user", row.owner),
        )

    def past(self, past: LendingPast) -> LendingPast:
        """Replace the names in the record's data."""
        loans = [self.loan(loan).row() for row in past.loans if (loan := Loan.from_row(row)) is not None]
        moves = [{**row, "why": ""} for row in past.actions if row["kind"] == MOVE]  # all that decisions depend on
        return replace(past, loans=loans, actions=moves)

    def loan(self, loan: Loan) -> Loan:
        """Replace the names in a loan."""
        return replace(
            loan,
            uid=self._names.number(loan.uid),
            user=self._names.of("user", loan.user),
            account=self._names.of("account", loan.account),
            node=self.host(loan.node),
            why="",
            why_ended="",
        )

    def order_key(self, key: Json) -> Json:
        """Replace the host in an order."""
        if not isinstance(key, list) or len(key) <= _HOST_IN_ORDER:
            raise CodecError("not an order")
        away = sorted(self.host(str(name)) for name in key[_HOST_IN_ORDER + 1 :])
        return [*key[:_HOST_IN_ORDER], self.host(str(key[_HOST_IN_ORDER])), *away]

    # -- state -----------------------------------------------------------------------------------------------------

    def settings(self, settings: Settings) -> Settings:
        """Replace the names of accounts in settings."""
        lending = settings.lending
        if lending is None:
            return settings
        quota = {self._names.of("account", name): limit for name, limit in lending.rules.quota.items()}
        return replace(settings, lending=replace(lending, rules=replace(lending.rules, quota=quota)))

    def memory(self, state: State) -> State:
        """Replace the names in the result of `memory_state.take`."""
        supply, dispatch, lending = state["supply"], state["dispatch"], state["lending"]
        supply = {
            **supply,
            "reservations": tuple(self._reservation(reservation) for reservation in supply["reservations"]),
            "standing": {
                job: (tuple(self.host(name) for name in nodes), tasks, since)
                for job, (nodes, tasks, since) in supply["standing"].items()
            },
            "avoided": {job: self.hosts(nodes) for job, nodes in supply["avoided"].items()},
            "unexplained": self.hosts(supply["unexplained"]),
        }
        promises = OrderedDict((self._promise(key), promise) for key, promise in dispatch["promises"].items())
        served = dispatch["served"]
        spent = {self._names.of("user", user): seconds for user, seconds in served["spent"].items()}
        pipelines = {
            (self._names.number(uid), self._names.of("pipeline", name)): known
            for (uid, name), known in dispatch["pipelines"].items()
        }
        unsure = [(self._change(change), "refused") for change, _ in dispatch["unsure"]]
        ledger = {
            **lending["ledger"],
            **{
                name: {key: self.loan(loan) for key, loan in lending["ledger"][name].items()}
                for name in ("open", "_unsaved", "_expected")
            },
            "past": {job: replace(past, node=self.host(past.node)) for job, past in lending["ledger"]["past"].items()},
            "targets": {
                job: replace(target, node=self.host(target.node))
                for job, target in lending["ledger"]["targets"].items()
            },
            "ran_on": {job: self.hosts(nodes) for job, nodes in lending["ledger"]["ran_on"].items()},
        }
        pairs = lending["slice_sharing"]["_pairs"]
        shared = {
            **lending["slice_sharing"],
            "runs": self._runs(lending["slice_sharing"]["runs"]),
            "_pairs": {guest: (replace(pair, why=""), since) for guest, (pair, since) in pairs.items()},
        }
        return {
            "supply": supply,
            "dispatch": {
                **dispatch,
                "promises": promises,
                "unsure": unsure,
                "pipelines": pipelines,
                "served": {**served, "spent": spent},
            },
            "lending": {**lending, "ledger": ledger, "slice_sharing": shared},
        }

    def _runs(self, runs: State) -> State:
        number = self._names.number
        slowdowns, lengths = runs["slowdowns"], runs["lengths"]
        kinds = {
            name: {kind._replace(uid=number(kind.uid)): value for kind, value in slowdowns[name].items()}
            for name in ("_usually", "_activity")
        }
        return {
            **runs,
            "slowdowns": {**slowdowns, **kinds},
            "lengths": {**lengths, "_sums": {number(uid): sums for uid, sums in lengths["_sums"].items()}},
            "_limits": {job: (number(uid), limit) for job, (uid, limit) in runs["_limits"].items()},
        }

    def _reservation(self, reservation: Reservation) -> Reservation:
        return replace(
            reservation, places=tuple((self.host(node), gpu, slot) for node, gpu, slot in reservation.places)
        )

    def _promise(self, key: str) -> str:
        comment, at, partition = key.rpartition("@")
        return f"{self.comment(comment)}@{partition}" if at else key

    def _change(self, change: Retype | Throttle) -> Retype | Throttle:
        if isinstance(change, Retype):
            pending = change.pending
            pool = frozenset(self.host(name) for name in pending.pool)
            return replace(change, pending=replace(pending, row=self.job(pending.row), pool=pool), why="")
        array = change.array
        pool = frozenset(self.host(name) for name in array.pool)
        user = self._names.of("user", array.user)
        return replace(change, array=replace(array, user=user, comment=self.comment(array.comment), pool=pool), why="")


def _blank(text: str) -> str:
    """Return `text` with letters and digits replaced by x, and characters that hints cannot have by a question mark."""
    masked = (c if _PLAIN.match(c) else "x" if c.isascii() and c.isalnum() else "?" for c in text)
    return "".join(masked)


def _settled(done: Done, key: Json) -> Done:
    return replace(done, key=key, error="refused" if done.error else "")


def _answers(answers: Answers) -> Answers:
    decisions = {name: None if row is None else _decision(row) for name, row in answers.decisions.items()}
    throttles = [{key: row[key] for key in _THROTTLE & row.keys()} for row in answers.throttles]
    return replace(answers, decisions=decisions, throttles=throttles)


def _decision(row: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {"chosen": row.get("chosen")}
    for part, names in _DECISION.items():
        content = row.get(part)
        if isinstance(content, dict):
            kept[part] = {name: content[name] for name in sorted(names & content.keys())}
    candidates = [candidate for candidate in row.get("candidates") or () if isinstance(candidate, dict)]
    kept["candidates"] = [
        {name: candidate[name] for name in sorted(_CANDIDATE & candidate.keys())} for candidate in candidates
    ]
    return kept
