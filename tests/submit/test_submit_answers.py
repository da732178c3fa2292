"""Repeated answers: the same words with a new decision id, only to the same request and on the same site."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.answer_cache import AnswerCache
from slurm_migbatch.submit.decision import SubmitDecision
from slurm_migbatch.submit.request import Accept, Answer, JobRequest, Present
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.submit.service import SubmitService
from slurm_migbatch.workload.catalog import GpuKind, Partition, SiteCatalog
from tests.support.gpu_kinds import A100_40, H100, SITE


@pytest.fixture
def decisions() -> list[SubmitDecision]:
    return []


@pytest.fixture
def service(chooser: Chooser, decisions: list[SubmitDecision]) -> SubmitService:
    return SubmitService(SITE, chooser, decisions.append)


def asked(**fields: object) -> bytes:
    values = {"partition": "gpu", "tres_per_node": "gres/mig:auto", **fields}
    return protocol.encode(JobRequest(1001, **values).to_fields())


def changes(answer: bytes) -> dict[str, str]:
    got = protocol.decode_answer(answer)
    assert isinstance(got, Accept)
    return dict(got.changes)


def test_the_same_request_gets_the_same_answer_with_a_new_decision_id(
    service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    answers = [service.handle(asked(comment="migbatch: mem=15gb")) for _ in range(3)]
    service.close()
    assert len({decision.id for decision in decisions}) == 3
    for answer, decision in zip(answers, decisions, strict=True):
        assert decision.id in changes(answer)["comment"]
        assert answer.replace(decision.id.encode(), b"") == answers[0].replace(decisions[0].id.encode(), b"")
    assert service.statistics.answers["accept"] == 3


def test_refusals_and_passes_are_repeated(service: SubmitService, decisions: list[SubmitDecision]) -> None:
    for fields in ({"tres_per_node": "gres/mig:1g"}, {"tres_per_node": "gres/fpga:1"}):
        assert service.handle(asked(**fields)) == service.handle(asked(**fields))
    service.close()
    assert service.statistics.answers == {"refuse": 2, "pass": 2} and decisions == []


def test_answers_follow_a_changed_catalog(service: SubmitService) -> None:
    assert "1g.10gb" in changes(service.handle(asked()))["tres_per_node"]
    service.use(catalog=SiteCatalog({"gpu": Partition("gpu", (H100,), Profile.parse("3g.40gb"))}))
    for _ in range(2):
        assert "3g.40gb" in changes(service.handle(asked()))["tres_per_node"]


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[JobRequest]:
    """The requests whose answer was not a repeated one."""
    seen: list[JobRequest] = []

    def counted(job: JobRequest, *given: Any, **more: Any) -> Answer:
        seen.append(job)
        return rewrite(job, *given, **more)

    monkeypatch.setattr("slurm_migbatch.submit.service.rewrite", counted)
    return seen


def other_site(profile: str) -> dict[str, Any]:
    """A catalog with another default profile, as a process reads it."""
    return SiteCatalog({"gpu": Partition("gpu", (H100,), Profile.parse(profile))}).to_dict()


def test_answers_are_kept_for_each_of_alternating_catalogs(service: SubmitService, rewritten: list[JobRequest]) -> None:
    """A node that reports another number of GPUs each time must not make every request take its full time."""
    sites = ["2g.20gb", "3g.40gb", "4g.40gb"]
    for _ in range(3):
        for site in sites:
            service.use(catalog=SiteCatalog.from_dict(other_site(site)))
            assert site in changes(service.handle(asked()))["tres_per_node"]
    assert len(rewritten) == len(sites)


def test_answers_of_few_catalogs_are_kept_and_none_of_another_predictor(
    service: SubmitService, rewritten: list[JobRequest]
) -> None:
    for site in ("1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.20gb"):
        service.use(catalog=SiteCatalog.from_dict(other_site(site)))
        service.handle(asked())
    assert len(rewritten) == 6
    service.use(chooser=Chooser(LearnedPredictor()))
    service.use(catalog=SiteCatalog.from_dict(other_site("7g.80gb")))
    service.handle(asked())
    assert len(rewritten) == 7


FEWER = replace(
    H100,
    geometry=Geometry(
        H100.geometry.name,
        [info for info in H100.geometry.profiles if info.profile.gres_type not in ("1g.20gb", "2g.20gb")],
    ),
)


@pytest.mark.parametrize("before", [FEWER, replace(A100_40, name=H100.name)], ids=["another driver", "another GPU"])
@pytest.mark.parametrize(
    "hints",
    [
        "model=llama-3.1-8b",
        "model=bert-large batch=128 slo=700ms",
        "model=bert-large slo=100ms mem=15gb",
        "model=bert-large mem=15gb",
    ],
)
def test_gpus_that_take_over_the_name_of_others_are_predicted_anew(before: GpuKind, hints: str) -> None:
    """A kind keeps its name with another driver, and kinds of one name are numbered in the order of their nodes."""
    first, second = (SiteCatalog({"gpu": Partition("gpu", (kind,))}) for kind in (before, H100))
    request = asked(comment=f"migbatch: {hints}", batch=1)
    service = SubmitService(first, Chooser(LearnedPredictor()))
    service.handle(request)
    service.use(catalog=second)
    fresh = SubmitService(second, Chooser(LearnedPredictor()))
    answers = [protocol.decode(server.handle(request)) for server in (service, fresh)]
    names = [answer.pop("set_comment").rpartition("#")[0] for answer in answers]
    assert names[0] == names[1] and answers[0] == answers[1]


def test_user_may_not_ask_for_another_user_even_if_the_answer_is_known(
    service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    assert b"verdict=accept" in service.handle(asked(), 0)
    assert b"verdict=error" in service.handle(asked(), 1002)
    assert b"verdict=accept" in service.handle(asked(), 1001)
    service.close()
    assert len(decisions) == 1


def test_repeated_update_keeps_the_decision_id(service: SubmitService) -> None:
    now = Present(True, "gpu", "gres/mig:2g.20gb:1", comment="a [mig:2g.20gb:1#old]")
    request = protocol.encode(JobRequest(1001, comment="b", now=now).to_fields())
    for _ in range(3):
        assert changes(service.handle(request)) == {"comment": "b [mig:2g.20gb:1#old]"}


def test_answers_are_dropped_beyond_the_cache_limit() -> None:
    answers = AnswerCache(most=2)
    for number in range(3):
        answers.keep(b"%d" % number, "pass", b"answer", None, "")
    assert [answers.get(b"%d" % number) is None for number in range(3)] == [True, True, False]
