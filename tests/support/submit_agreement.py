"""Compare the answers of the Lua table and of the submit service to one submission."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import strategies as st

from slurm_migbatch.predict.llm.choice import Targets
from slurm_migbatch.predict.requests import canonical
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.comment import split_marker
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, Answer, JobRequest, Pass, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.workload import hints as hinting
from slurm_migbatch.workload.hints import NO_LLM, Hints
from slurm_migbatch.workload.refusal import Refusal
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import Shim

USER = 1001


def of_service(request: JobRequest, chooser: Chooser, policy: SubmitPolicy) -> Answer:
    """Return the service's answer in the shim's form (which has no decision id)."""
    filled = request
    if request.now is None and not request.partition:
        filled = replace(request, partition="gpu")
    answer = rewrite(filled, SITE, chooser, policy)
    if isinstance(answer, Refuse):
        return Refuse(answer.sentence, "")
    if isinstance(answer, Accept):
        return Accept(answer.changes, answer.message) if answer.changes else Pass(answer.message)
    return answer


NOT_READ = "in an update by Gres="
AWAY = "cannot be sized while the submit service is down"


def agree(request: JobRequest, shim: Shim, chooser: Chooser, policy: SubmitPolicy | None = None) -> Answer:
    """Return the shim's answer, which must equal the service's, except that it may refuse more language models.

    The table does not contain them: without mem= the shim refuses them, unknown models, and batches and inputs beyond
    the table.
    """
    local = shim(request)
    assert shim.errors == []
    service = of_service(request, chooser, policy or SubmitPolicy())
    hints = hints_of(request, policy or SubmitPolicy())
    if isinstance(local, Refuse) and NOT_READ in local.sentence:
        assert isinstance(service, Accept) and not is_read(request, service)
    elif isinstance(local, Refuse) and AWAY in local.sentence:
        assert hints is not None and unsized(hints, chooser)
    elif hints is not None and (of_tokens(hints, chooser) or beyond(hints, chooser)):
        if isinstance(local, Accept) and isinstance(service, Accept) and Targets.of(hints) == Targets():
            assert local.changes == service.changes
    else:
        assert local == service
    assert not isinstance(local, Accept) or is_read(request, local)
    return local


def is_read(request: JobRequest, answer: Accept) -> bool:
    """Return whether Slurm reads all MIG entries of the GRES after the answer."""
    text = answer.changes.get("tres_per_node", request.tres_per_node)
    if not text or "mig" not in text.lower():
        return True
    now = request.now.tres_per_node if request.now is not None else None
    known = [entry[:5] for entry in f"{now or ''},{text}".split(",") if entry[:5] in ("gres:", "gres/")]
    entries = [(entry[:5] in known[:1], entry) for entry in text.split(",")]
    if any(not begins and "mig" in entry.lower() for begins, entry in entries):
        return False
    return not any(re.search("gres[:/]", entry[5 * begins :]) for begins, entry in entries)


def unsized(hints: Hints, chooser: Chooser) -> bool:
    """Return whether the shim may refuse these hints: it has no figures for them, and the user states no memory."""
    known = canonical(hints.model or "", chooser.grids, chooser.aliases) in chooser.grids
    return hints.mem_mib is None and (hints.llm != NO_LLM or not known or beyond(hints, chooser))


def beyond(hints: Hints, chooser: Chooser) -> bool:
    """Return whether the batch or the input is larger than all in the table."""
    grid = chooser.grids.get(canonical(hints.model or "", chooser.grids, chooser.aliases))
    if grid is None:
        return False
    return (hints.batch or 0) > grid.batches[-1] or (hints.input or 0) > grid.inputs[-1]


def hints_of(request: JobRequest, policy: SubmitPolicy) -> Hints | None:
    """Return the hints of a submission, or of the job after a change; None if they are refused."""
    comment, extra = request.comment, request.extra
    if request.now is not None:
        present = split_marker(request.now.comment or "")[0]
        comment = present if comment is None else comment
        extra = request.now.extra if extra is None else extra
    try:
        return hinting.parse(comment or "", (extra or "") if policy.hints_in_extra else "")
    except Refusal:
        return None


def of_tokens(hints: Hints, chooser: Chooser) -> bool:
    """Return whether the service treats the hints as those of a language model."""
    try:
        return chooser.workload(hints) is not None
    except Refusal:
        return True


def words(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.split())


numbers = st.sampled_from([None, None, 0, 1, 2, 3, 4, 8])


OBJECTIVES = (
    "",
    " slo=60ms",
    " slo=1s",
    " items=10m deadline=1h",
    " slo=300ms items=1m deadline=10h max=3g.40gb",
    " mem=12gib",
)
