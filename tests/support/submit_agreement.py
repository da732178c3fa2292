"""One submission answered by the Lua table and by the submit service."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.request import Accept, Answer, JobRequest, Pass, Refuse
from slurm_migbatch.submit.rewrite import SubmitPolicy, rewrite
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import Shim

USER = 1001


def of_service(request: JobRequest, chooser: Chooser, policy: SubmitPolicy) -> Answer:
    """What the service answers, put as the shim's outcome (the decision has no name there)."""
    filled = request
    if request.now is None and not request.partition:
        filled = replace(request, partition="gpu")
    answer = rewrite(filled, SITE, chooser, policy)
    if isinstance(answer, Refuse):
        return Refuse(answer.sentence, "")
    if isinstance(answer, Accept):
        return Accept(answer.changes, answer.message) if answer.changes else Pass(answer.message)
    return answer


def agree(request: JobRequest, shim: Shim, chooser: Chooser, policy: SubmitPolicy | None = None) -> Answer:
    local = shim(request)
    assert shim.errors == []
    assert local == of_service(request, chooser, policy or SubmitPolicy())
    return local


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
