"""Grant slices to one request: the profiles, the marker, the fields to change, and the decision for the record."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

from slurm_migbatch.mig.grant import MAX_PARTS, Grant, GrantError, parse_comment
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.limits import NO_LIMITS, JobLimits, limits_of
from slurm_migbatch.predict.recommend import Advice
from slurm_migbatch.predict.recurring import PastRun, RecurringJob, advise
from slurm_migbatch.predict.selection import Chooser, SliceChoice
from slurm_migbatch.slurm.client import SLURM_LIMIT
from slurm_migbatch.submit import nodes, per_gpu
from slurm_migbatch.submit.comment import with_marker
from slurm_migbatch.submit.decision import SubmitDecision
from slurm_migbatch.submit.gres_request import (
    AUTO,
    MAX_COUNT,
    GresRequest,
    by_profile,
    check_options,
    count_of,
    even_tasks,
    is_auto,
    is_open,
    mentions,
    named_offer,
    nodes_of,
    nodes_of_tasks,
    of_range,
    per_node,
    read,
    takes_one_node,
    whole_gpu,
    wider,
)
from slurm_migbatch.submit.nodes import NodeChoice
from slurm_migbatch.submit.notes import (
    MESSAGES,
    below_weights,
    converted,
    message_of,
    named_slice,
    several,
    tight,
    times,
    unapplied,
    unknown,
    whole,
)
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import TEXT_FIELDS, TRES_FIELDS, Accept, Answer, JobRequest, Pass
from slurm_migbatch.submit.script import recurring_key
from slurm_migbatch.workload import hints as hinting
from slurm_migbatch.workload.buckets import Bucket
from slurm_migbatch.workload.catalog import Partition, ProfileOffer, SiteCatalog
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.loans import LOAN, LONGEST_MARK, PREFIX_OF_OLD_RELEASES, decision_name, waiting_count
from slurm_migbatch.workload.refusal import Refusal, show, show_name

Past = Mapping[str, Sequence[PastRun]]
"""Runs of recurring jobs, the newest last, by the job's key."""
NO_PAST: Final[Past] = MappingProxyType({})
_UNRECORDED: Final = frozenset({"", AUTO, LOAN})
"""Names in the markers of jobs that were granted while the service was down."""


@dataclass(frozen=True)
class _ReadRequest:
    """A request with what was read from it: the slices that it asks for, where they may be, and the hints with their
    limits. `old_marker`: the job's marker before an update.
    """

    request: JobRequest
    asking: GresRequest
    partition: Partition
    hints: Hints
    limits: JobLimits
    old_marker: str


@dataclass(frozen=True)
class _Outcome:
    """Result of a decision; `name` is the decision's name in the marker."""

    name: str
    granted: str
    reason: str
    message: str
    bucket: Bucket | None
    choice: SliceChoice | None = None
    advice: Advice | None = None


@dataclass(frozen=True)
class Granter:
    """Grants slices to one request of a user.

    `request` is what the user sent; an update is granted merged with what the job has.
    """

    request: JobRequest
    catalog: SiteCatalog
    chooser: Chooser
    policy: SubmitPolicy
    decision_id: str
    ts: float
    past: Past

    def grant(self, request: JobRequest, old_marker: str, *, elastic: bool = False) -> Answer:
        """Grant slices to the request; `elastic`: it already is an elastic training job."""
        names = list(dict.fromkeys(name for name in (request.partition or "").split(",") if name))
        managed = [name for name in names if name in self.catalog]
        if not mentions(getattr(request, name) for name in TRES_FIELDS):
            if request.ntasks_per_tres and managed and request.now is None:  # Slurm requests GPUs then
                return Pass(MESSAGES["tasks_alone"])
            return Pass(MESSAGES["idle"] if request.comment and hinting.is_hint(request.comment) else "")
        asking = read(request, gpus=bool(managed))
        if asking is None or self._is_for_others(request, asking, managed):
            return Pass()
        self._check_partitions(names, managed, asking)
        choice = nodes.choose(request, self.catalog, managed, MESSAGES["nodes_left"])
        kinds = None if choice.nodes is None else {kind for node in choice.nodes for kind in node.gpus}
        partition = self.catalog.view(managed, kinds)
        asking = by_profile(asking, partition)
        texts = [request.comment or "", *([request.extra or ""] if self.policy.hints_in_extra else [])]
        hints = hinting.parse(*texts)
        unread = hinting.unread(*texts)
        numbers = tuple(of_range(asking, request))
        if numbers:
            request = _on(request, numbers[0])
        case = _ReadRequest(request, asking, partition, hints, limits_of(hints, partition), old_marker)
        check_options(asking, request)
        batch = request.now is None and request.batch == 1
        notes = self._ignored(unread, hints, request.extra, asking)
        if partition.lends and hints.role == "train" and (elastic or batch) and all(map(is_open, asking.parts)):
            answer = self._lend(case)
        else:
            answer, slices = self._compose(case)
            if spread := self._spread(case, slices, choice, managed, numbers):
                request = spread
                answer, slices = self._compose(replace(case, request=spread))
            if spread or numbers:
                number = str(request.min_nodes)
                answer = replace(answer, changes={**answer.changes, "min_nodes": number, "max_nodes": number})
                reason = "" if numbers else MESSAGES["wider_why"]
                notes.append(MESSAGES["wider"] % (number, sum(slices.values()), reason))
            nodes.check_capacity(slices, choice, self.catalog, managed, request.min_nodes or 1)
        if others := [name for name in names if name not in managed]:
            answer = replace(answer, changes={**answer.changes, "partition": ",".join(managed)})
            notes.append(MESSAGES["partitions"] % (",".join(managed), show(",".join(others))))
        return self._among(answer, choice, notes)

    def _is_for_others(self, request: JobRequest, asking: GresRequest, managed: Sequence[str]) -> bool:
        """Return whether the request is for GPUs of nodes without MIG, by their types or by a choice of nodes."""
        if any(part.name != "gpu" for part in asking.parts):
            return False
        partition = self.catalog.view(managed) if managed else None
        if partition is None or not partition.others:
            return False
        types = [part.type for part in asking.parts]
        return all(kind in partition.others and partition.kind_of(kind) is None for kind in types) or (
            nodes.excludes_mig(request, self.catalog, managed)
        )

    def _spread(
        self,
        case: _ReadRequest,
        slices: Mapping[str, int],
        choice: NodeChoice,
        managed: Collection[str],
        numbers: tuple[int, ...],
    ) -> JobRequest | None:
        """Return the request for the fewest nodes that can hold the slices in equal shares; None if these are those of
        the request, which has `slices` on each, or it does not leave the number open.

        `numbers`: of the request's range, if it has one.
        """
        numbers = numbers or (1, *wider(case.asking, case.request, sum(slices.values())))
        for number in numbers if len(numbers) > 1 else ():
            share = {kind: count * numbers[0] // number for kind, count in slices.items()}
            if (nodes.able_to_hold(share, choice, self.catalog, managed) or 0) >= number:
                return None if number == numbers[0] else _on(case.request, number)
        return None

    def _ignored(self, unread: str, hints: Hints, extra: str | None, asking: GresRequest) -> list[str]:
        """Return notes on hints without effect, if the profile is left to migbatch."""
        if not any(is_auto(part) for part in asking.parts):
            return []
        notes = [MESSAGES["unread"] % show(unread)] if unread else []
        if names := hints.ignored:
            notes.append(MESSAGES["ignored"] % ("trains" if hints.kind == "train" else f"has role={hints.role}", names))
        if extra and not self.policy.hints_in_extra and hinting.is_hint(extra):
            notes.append(MESSAGES["extra"])
        return notes

    def _among(self, answer: Accept, choice: NodeChoice, notes: list[str]) -> Accept:
        """Return the answer with notes and the changes that let it pend for its nodes; updates do not change nodes."""
        new = self.request.now is None
        if new and choice.note:
            notes.append(choice.note)
        if new and self.request.uncatalogued:
            notes.append(MESSAGES["reserved"] % self.catalog.stem)
        changes = {**answer.changes, **choice.changes} if new else answer.changes
        wanted = int(changes.get("min_nodes", self.request.min_nodes or 1))
        if new and 0 < self.catalog.catalog_nodes < wanted:
            notes.append(MESSAGES["catalog"] % wanted)
        message = "; ".join([answer.message, *notes]) if answer.message else message_of(notes)
        return replace(answer, changes=changes, message=message)

    def _check_partitions(self, names: Sequence[str], managed: Sequence[str], asking: GresRequest) -> None:
        """Refuse partitions without MIG GPUs, unless a job for slices names others too: it can start only there,
        whereas one for GPUs may start in each.
        """
        if not self.catalog.partitions:
            raise Refusal("no_site")
        if not managed:
            raise Refusal("no_partition", show(",".join(names)), self.catalog.suggested)
        if len(managed) < len(names) and any(part.name == "gpu" for part in asking.parts):
            raise Refusal("mixed_partitions", show(",".join(names)), ",".join(managed))

    def _compose(self, case: _ReadRequest) -> tuple[Accept, dict[str, int]]:
        """Accept the request; return the answer, and the number of slices by GRES type."""
        request, asking, partition, hints = case.request, case.asking, case.partition, case.hints
        slices, reason, choice, messages = self._slices(case)
        messages += [*several(asking, request, sum(slices.values())), *below_weights(self.chooser, hints, asking)]
        chosen = all(is_auto(part) for part in asking.parts)
        grant = self._named(Grant(slices.items()), case.old_marker, self.decision_id or (AUTO if chosen else ""))
        prefix = asking.parts[0].prefix
        granted = [f"{prefix}mig:{profile.gres_type}:{count}" for profile, count in grant.parts]
        comment = with_marker(request.comment or "", grant.marker, request.exc_nodes, grant.decision)
        changes = _changes(request, asking, granted, comment, partition, slices)
        messages += converted(changes)
        if hints.retry and request.now is None and request.batch == 1:
            changes["requeue"] = "1"
            if prefix == PREFIX_OF_OLD_RELEASES:
                messages.append(MESSAGES["retry_later"])
        bucket = choice.bucket if choice is not None else None
        if choice is not None and choice.batch is not None:
            advice: Advice | None = Advice(choice.batch, 1)
        else:
            advice = self._advice(bucket, hints, partition, grant)
        outcome = _Outcome(grant.decided, grant.gres, reason, message_of(messages), bucket, choice, advice)
        decision = self._decision(case, outcome)
        advised = {} if advice is None else {"batch": advice.batch, "copies": advice.copies}
        accepted = Accept(changes, outcome.message, decision, advised)
        return accepted, {profile.gres_type: count for profile, count in slices.items()}

    def _slices(self, case: _ReadRequest) -> tuple[dict[Profile, int], str, SliceChoice | None, list[str]]:
        """Return the number of slices on each node by profile, the reason, the choice for `auto`, and messages."""
        request, asking, partition, hints = case.request, case.asking, case.partition, case.hints
        slices: dict[Profile, int] = {}
        messages = [named_slice(part, partition) for part in asking.parts if part.as_gpu]
        choice: SliceChoice | None = None
        warned: set[Profile] = set()
        reason = "explicit"
        free = any(is_auto(part) for part in asking.parts)  # then the hints apply to that part only
        limits = NO_LIMITS if free else case.limits
        chosen = all(is_auto(part) for part in asking.parts)
        in_environment = chosen and request.now is None and request.batch == 1  # the job's environment can be extended
        for part in asking.parts:
            count = per_node(asking, count_of(part, partition.profile_list), request)
            if part.name == "gpu":
                offer = whole_gpu(part, partition)
                messages += whole(part, partition, times(count, offer))
                messages += unapplied(offer, limits)
                messages += self._advise(offer, partition)
                reason = "whole_gpu" if choice is None else choice.reason
            elif is_auto(part):
                choice = choice or self.chooser.choose(
                    hints, partition, self._recurring(), self.policy.runs, passes_batch=in_environment
                )
                offer, reason = choice.offer, choice.reason
                messages.append(MESSAGES["chosen"] % (times(count, offer), choice.text))
            else:
                offer = named_offer(part, partition, limits)
                if not free and offer.profile not in warned:
                    warned.add(offer.profile)
                    messages += tight(self.chooser, offer, partition, hints)
            slices[offer.profile] = slices.get(offer.profile, 0) + count
            if slices[offer.profile] > MAX_COUNT:
                raise Refusal("count", str(slices[offer.profile]))
        if len(slices) > MAX_PARTS:
            raise Refusal("kinds")
        return slices, reason, choice, messages

    def _lend(self, case: _ReadRequest) -> Accept:
        """Accept an elastic training job, which waits for one slice of any profile that it may have."""
        request, asking, partition, hints = case.request, case.asking, case.partition, case.hints
        total = sum(per_node(asking, count_of(part, partition.profile_list), request) for part in asking.parts)
        if total != 1 or not (nodes_of(request) == 1 or takes_one_node(asking, request)):
            raise Refusal("loan_one", partition.name)
        allowed = [offer for offer in partition.plain if case.limits.within(offer)]
        if not allowed:
            raise Refusal("range_empty", partition.name, partition.profile_list)
        bucket = self.chooser.bucket(hints)
        fitting = self.chooser.holding(hints, partition, allowed)
        low, high = fitting[0].profile.gres_type, fitting[-1].profile.gres_type
        old_name = case.old_marker.partition("#")[2].removesuffix("]")
        name = old_name if old_name.startswith(LOAN) else decision_name(self.decision_id)
        prefix = asking.parts[0].prefix
        marker = f"[mig:{LOAN}:1#{name}]"
        comment = with_marker(request.comment or "", marker, request.exc_nodes, longest=LONGEST_MARK)
        smallest = {fitting[0].profile: 1}
        changes = _changes(
            request, asking, [f"{prefix}mig:{LOAN}:{waiting_count(prefix)}"], comment, partition, smallest
        )
        if request.now is None:
            changes["requeue"] = "1"
        notes = [*below_weights(self.chooser, hints, asking), *unknown(self.chooser, hints), *converted(changes)]
        if hints.retry and request.now is None:
            notes.append(MESSAGES["loan_retry"])
        message = message_of([MESSAGES["loan"] % (low, high, low), *notes])
        outcome = _Outcome(name, f"mig:{LOAN}:1", "loan", message, bucket)
        return Accept(changes, message, self._decision(case, outcome), waits=True)

    @cached_property
    def _key(self) -> str:
        """Key of the recurring job; empty if it cannot be recognised."""
        request = self.request
        if request.digest is None or request.now is not None:
            return ""
        return recurring_key(
            request.uid, request.account or "", request.partition or "", request.name or "", request.digest
        )

    def _recurring(self) -> RecurringJob | None:
        key = self._key
        return RecurringJob(show_name(self.request.name or "this job"), tuple(self.past.get(key, ()))) if key else None

    def _advise(self, whole: ProfileOffer, partition: Partition) -> list[str]:
        """Return the note, if the site enables it, for a job that requests a whole GPU and whose runs used less."""
        job = self._recurring() if self.policy.advise and self.policy.runs.runs else None
        advice = "" if job is None else advise(job, whole, partition.offers, self.policy.runs)
        return [advice] if advice else []

    def _decision(self, case: _ReadRequest, outcome: _Outcome) -> SubmitDecision | None:
        """Return the decision for the record; None for an update of a job whose decision is not in the record."""
        request, bucket, choice = case.request, outcome.bucket, outcome.choice
        update = self.request.now is not None
        if update and outcome.name in _UNRECORDED:
            return None
        own = {name: text for name in TRES_FIELDS if (text := getattr(self.request, name))}
        kept = update and not own and outcome.name not in (self.decision_id, decision_name(self.decision_id))
        if not own and not kept:  # an update of something else, because of which the same request is granted anew
            own = {name: text for name in TRES_FIELDS if (text := getattr(request, name))}
        return SubmitDecision(
            id=outcome.name,
            ts=self.ts,
            uid=request.uid,
            user=request.user,
            partition=case.partition.name,
            job_id=request.job_id,
            asked={**own, **{name: text for name in TEXT_FIELDS if (text := getattr(request, name))}},
            hints=case.hints,
            bucket=choice.label if choice is not None else "" if bucket is None else bucket.name,
            predictor=self.chooser.predictor.version,
            candidates=() if choice is None else choice.candidates,
            granted=outcome.granted,
            reason=outcome.reason,
            message=outcome.message,
            advice=outcome.advice,
            recurring=self._key,
            engine=self.request.engine or "",
            kept=kept,
        )

    def _advice(self, bucket: Bucket | None, hints: Hints, partition: Partition, grant: Grant) -> Advice | None:
        """Return the advice for jobs whose slices are all of one profile; it is never a reason to refuse."""
        if len(grant.parts) != 1:
            return None
        try:
            bucket = bucket or self.chooser.bucket(hints)
        except Refusal:
            return None
        if bucket is None:
            return None
        advice = self.chooser.advice(bucket, partition, partition.offers[grant.parts[0][0].gres_type], hints.batch)
        # the user's own batch size is kept, even if it is between two edges of the grid
        if advice is None or not hints.batch or advice.batch == hints.batch:
            return advice
        return replace(advice, batch=hints.batch)

    def _named(self, grant: Grant, old_marker: str, name: str) -> Grant:
        """Return the grant with its decision's name: the old one if only the comment changes.

        Without a recorded decision, the name `auto` means that the user named no profile.
        """
        try:
            old_grant = parse_comment(old_marker)
        except GrantError:
            old_grant = None
        if (
            old_grant is not None
            and old_grant.decision
            and old_grant.parts == grant.parts
            and not old_grant.decision.startswith(LOAN)
        ):
            return old_grant
        return Grant(grant.parts, name)


def _on(request: JobRequest, number: int) -> JobRequest:
    """Return the request for this number of nodes."""
    return replace(request, min_nodes=number, max_nodes=number)


def _changes(
    request: JobRequest,
    asking: GresRequest,
    granted: Sequence[str],
    comment: str,
    partition: Partition,
    slices: Mapping[Profile, int],
) -> dict[str, str]:
    """Return the fields to set for the GRES in `granted`, `slices` on each node."""
    count = sum(slices.values())
    if asking.field == "tres_per_node":
        first = asking.entries.index(asking.parts[0])
        tres = ",".join([*asking.others[:first], *granted, *asking.others[first:]])
    else:
        present = next((a.others for a in asking.again if a.field == "tres_per_node"), [request.tres_per_node])
        tres = ",".join([*filter(None, present), *granted])
    if len(tres) > SLURM_LIMIT:
        raise Refusal("gres_long")
    changes = {**{again.field: ",".join(again.others) for again in asking.again}, "tres_per_node": tres}
    changes["comment"] = comment
    if asking.field != "tres_per_node":
        changes[asking.field] = ",".join(asking.others)
    request, tasks_of_slices = per_gpu.with_tasks(asking, request, count)
    changes |= tasks_of_slices
    if takes_one_node(asking, request):
        changes["max_nodes"] = "1"
    elif nodes_filled := nodes_of_tasks(asking, request):
        changes |= dict.fromkeys(("min_nodes", "max_nodes"), str(nodes_filled))
    if tasks := even_tasks(asking, request, count):
        changes["ntasks_per_node"] = str(tasks)
    changes |= per_gpu.requested(asking, request, count)
    changes |= per_gpu.by_default(asking, request, changes, partition, slices)
    if mentions((request.tres_bind,)):  # bindings to tasks; the node binds slices itself
        changes["tres_bind"] = ""
    return changes
