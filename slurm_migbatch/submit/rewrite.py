"""Rewrite a user's request to the one that Slurm gets: a pure function of request, catalog, chooser and policy.

`mig:auto` becomes a profile, whole-GPU requests on MIG partitions become the full profile, and the marker that the
node's Prolog reads goes to the end of the comment (`submit.grants`). The marker always matches the GRES, and only the
submit filter and root can write one. `gres_templates/job_submit.lua.j2` implements the same steps for use without the
service; a property test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.slurm.client import SLURM_LIMIT
from slurm_migbatch.slurm.gpu_defaults import NO_DEFAULTS
from slurm_migbatch.submit.comment import CLEARED, has_marker, split_marker, with_marker
from slurm_migbatch.submit.grants import NO_PAST, Granter, Past
from slurm_migbatch.submit.gres_request import auto_again, mentions
from slurm_migbatch.submit.notes import MESSAGES, message_of
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import (
    TEXT_FIELDS,
    TEXTS,
    TRES_FIELDS,
    Accept,
    Answer,
    JobRequest,
    Pass,
    Present,
    Refuse,
)
from slurm_migbatch.workload import excluded as excluding
from slurm_migbatch.workload.catalog import NODE_FEATURE, SiteCatalog
from slurm_migbatch.workload.loans import LONGEST_MARK, PREFIX_OF_OLD_RELEASES, is_marked
from slurm_migbatch.workload.refusal import Refusal


def rewrite(
    request: JobRequest,
    catalog: SiteCatalog,
    chooser: Chooser,
    policy: SubmitPolicy,
    *,
    decision_id: str = "",
    ts: float = 0.0,
    past: Past = NO_PAST,
) -> Answer:
    """Answer one request. `decision_id` (at most 8 of 0-9a-z) names the decision in the marker, `ts` is its time.

    `past` are the runs of recurring jobs by their key.
    """
    granter = Granter(request, catalog, chooser, policy, decision_id, ts, past)
    try:
        if request.now is None:
            return _submit(request, policy, granter)
        return _Update(request, request.now, catalog, policy, granter).answer()
    except Refusal as refusal:
        return Refuse(str(refusal), refusal.code)


def _submit(request: JobRequest, policy: SubmitPolicy, granter: Granter) -> Answer:
    _check_lengths(request)
    if has_marker(request.comment) or has_marker(request.extra):
        raise Refusal("forged")
    if not request.uid and request.uid in policy.trusted_uids:
        return Pass()
    return granter.grant(request, old_marker="")


@dataclass(frozen=True)
class _Update:
    """An update of a job: `request` has the changed fields, `now` the present ones."""

    request: JobRequest
    now: Present
    catalog: SiteCatalog
    policy: SubmitPolicy
    granter: Granter

    def answer(self) -> Answer:
        request, now = self.request, self.now
        if request.uid in self.policy.trusted_uids:
            return Pass()
        _check_lengths(request)
        _check_lengths(now)
        tres_given = any(getattr(request, name) is not None for name in TRES_FIELDS)
        elastic = is_marked(now.comment or "")
        present = [getattr(now, name) for name in TRES_FIELDS]
        moved = request.partition not in (None, now.partition) and (has_marker(now.comment) or mentions(present))
        other_changes = any(getattr(request, name) is not None for name in (*TEXT_FIELDS, "req_nodes", "exc_nodes"))
        if not (tres_given or moved or other_changes):
            return Pass()
        if has_marker(request.comment) or has_marker(request.extra):
            raise Refusal("forged")
        text, marker = split_marker(now.comment or "")
        text, excluded = excluding.split("" if text == CLEARED else text)
        excluded = _either(request.exc_nodes, excluded) or ""
        if request.req_nodes and marker and now.pending:
            raise Refusal("nodes_later", NODE_FEATURE + "...")
        if not now.pending:
            return self._of_started(marker, excluded, tres_given=tres_given)
        if not (tres_given or moved or marker):
            return Pass()
        kept: dict[str, Any] = {
            name: getattr(now, name)
            for name in ("partition", *TRES_FIELDS, "extra", "features")
            if getattr(request, name) is None
        }
        merged = replace(request, **kept, comment=_either(request.comment, text), exc_nodes=excluded)
        if elastic:
            return self._of_elastic(merged, marker, tres_given=tres_given)
        answer = self.granter.grant(merged, old_marker=marker)
        if isinstance(answer, Accept):
            answer = replace(answer, changes=self._differing(answer.changes))
            return self._with_defaults_noted(answer, merged) if tres_given and marker else answer
        if marker and isinstance(answer, Pass):  # the job requests no slice any more
            return Accept({"comment": merged.comment or CLEARED}, "")
        return Pass()

    def _of_elastic(self, merged: JobRequest, marker: str, *, tres_given: bool) -> Answer:
        """Handle an update of a training job that waits for idle slices, or just got one and has not started.

        If its user changes something else, it keeps its GRES, as set by root. If the user requests a dedicated slice,
        by naming a profile, changing its partition or removing role=train, it becomes an ordinary job, provided that
        Slurm drops the old GRES type of a pending job.
        """
        now = self.now
        keeps = (now.tres_per_node or "").startswith(PREFIX_OF_OLD_RELEASES)
        if tres_given and keeps:
            raise Refusal("loan_kept")
        if not tres_given:
            merged = replace(merged, tres_per_node=auto_again(now.tres_per_node or ""))
        answer = self.granter.grant(merged, old_marker=marker, elastic=True)
        if not isinstance(answer, Accept):  # it requests no slice any more
            return Accept({"comment": merged.comment or CLEARED}, "")
        if not answer.waits:
            if keeps:
                raise Refusal("loan_kept")
        elif not tres_given:
            comment = with_marker(merged.comment or "", marker, merged.exc_nodes, longest=LONGEST_MARK)
            others = {name: text for name, text in answer.changes.items() if name == "partition"}
            answer = replace(answer, changes={**others, "comment": comment})
        return replace(answer, changes=self._differing(answer.changes))

    def _with_defaults_noted(self, answer: Accept, request: JobRequest) -> Accept:
        """Add to an answer that changes the slices that what a partition gives jobs for each GPU does not follow."""
        parts = (self.catalog.partitions.get(name) for name in (request.partition or "").split(","))
        if "comment" not in answer.changes or all(part is None or part.gpu_defaults == NO_DEFAULTS for part in parts):
            return answer
        note = MESSAGES["per_gpu_kept"]
        return replace(answer, message=f"{answer.message}; {note}" if answer.message else message_of([note]))

    def _of_started(self, marker: str, excluded: str, *, tres_given: bool) -> Answer:
        request = self.request
        if tres_given and (marker or mentions(getattr(request, name) for name in TRES_FIELDS)):
            raise Refusal("running")
        if request.req_nodes and marker:  # Slurm takes the others from the job, as with NumNodes=, see `job_submit.lua`
            raise Refusal("running")
        if not marker or request.comment is None:
            return Pass()
        return Accept({"comment": with_marker(request.comment, marker, excluded)}, "")

    def _differing(self, changes: Mapping[str, str]) -> dict[str, str]:
        present = {name: _either(getattr(self.request, name), getattr(self.now, name, None)) or "" for name in changes}
        return {name: value for name, value in changes.items() if value != present[name]}


def _check_lengths(holder: JobRequest | Present) -> None:
    for name, option in TEXTS.items():
        text = getattr(holder, name, None)
        if text is not None and len(text) > SLURM_LIMIT:
            raise Refusal("text_long", option, str(len(text)))


def _either(given: str | None, present: str | None) -> str | None:
    return present if given is None else given
