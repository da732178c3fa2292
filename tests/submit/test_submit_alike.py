"""Similar jobs get the answers that each would get alone, and each is recorded as it was requested."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.predict.recurring import DONE, PastRun, RunsPolicy
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import protocol, service
from slurm_migbatch.submit.alike import AlikeAnswers, KeyedRequest
from slurm_migbatch.submit.decision import SubmitDecision
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import JobRequest
from slurm_migbatch.submit.script import recurring_key
from slurm_migbatch.submit.service import SubmitService
from slurm_migbatch.workload.catalog import SiteCatalog
from tests.support.examples import examples
from tests.support.gpu_kinds import SITE
from tests.support.submit_agreement import words

GPU = SITE.partitions["gpu"]
CATALOG = SiteCatalog({**SITE.partitions, "train": replace(GPU, name="train", lends=True)})
POLICIES = [SubmitPolicy(), SubmitPolicy(runs=RunsPolicy(1), advise=True), SubmitPolicy(hints_in_extra=True)]
NAME = "abcdefgh"
SCRIPTS = ("d1", "d2")
#: past runs of these scripts, which used little memory
PAST = {
    recurring_key(1001, account, partition, name, digest): [PastRun(1, "7g.80gb", DONE, 2048)]
    for account in ("", "acc")
    for partition in ("gpu", "mixed")
    for name in ("a-1", "b")
    for digest in SCRIPTS
}

BERT = "migbatch: model=bert-large"
#: similar to each other, so that some are answered alike
COMMENTS = [
    *("", "hello", "migbatch: ", "migbatch: role=train", "migbatch: mem=15gb", BERT),
    *(f"{BERT} slo={slo}" for slo in ("201ms", "0.21s", "230ms", "1ms")),
    *(
        f"{BERT} slo=201ms {more}"
        for more in ("batch=8", "batch=7", "mem=15gb", "max=2g.20gb", "retry=oom", "role=train")
    ),
    *(f"{BERT} slo={slo} role=serve rate={rate}" for slo in ("201ms", "0.21s") for rate in (5, 900)),
    *(f"{BERT} items={items} deadline={time}" for items, time in (("1e6", "30m"), ("1e6", "1801s"), ("50000", "9s"))),
    *(f"{BERT} items={items} pipeline=p" for items in ("1e6", "50000")),
    *(
        f"{BERT} slo={slo} {more}"
        for slo in ("201ms", "0.21s")
        for more in ("engine=vllm", "params=340m", "colour=red")
    ),
    *(f"migbatch: model=llama-3.1-8b slo={slo}" for slo in ("1s", "1001ms", "9ms")),
    *(f"migbatch: model=no-such-model slo={slo}" for slo in ("1s", "1001ms")),
]
own = st.fixed_dictionaries(
    {"comment": st.sampled_from(COMMENTS), "name": words("a-1 b")},
    optional={"account": st.just("acc"), "engine": st.just("vllm"), "digest": st.sampled_from(SCRIPTS)},
)
rest = st.fixed_dictionaries(
    {
        "partition": words("gpu gpu mixed train"),
        "tres_per_node": words("gres/mig:auto gres/mig:auto gres/mig:1g.10gb:1 gres/GPU:1 gres/gpu:1,gres/mig:auto"),
    },
    optional={"batch": st.just(1), "extra": st.just("migbatch: mem=15gb"), "exc_nodes": words("n1 n2")},
)


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "new_id", lambda: NAME)


def answers(chooser: Chooser, policy: SubmitPolicy, *requests: bytes) -> list[tuple[bytes, list[SubmitDecision]]]:
    """The answers of one service, each with the decision behind it."""
    decisions: list[SubmitDecision] = []
    made = SubmitService(CATALOG, chooser, decisions.append, policy=policy, clock=lambda: 7.0)
    made.learn(PAST)
    given = []
    for request in requests:
        answer = made.handle(request)
        made.close()
        given.append((answer, [*decisions]))
        decisions.clear()
    return given


@settings(max_examples=examples(2000))
@given(rest, st.lists(own, min_size=6, max_size=12), st.sampled_from(POLICIES))
def test_answer_does_not_depend_on_earlier_requests(
    chooser: Chooser, rest: dict[str, object], submissions: list[dict[str, str]], policy: SubmitPolicy
) -> None:
    requests = [protocol.encode(JobRequest(1001, **rest, **fields).to_fields()) for fields in submissions]
    made = answers(chooser, policy, *requests)
    assert made == [alone for request in requests for alone in answers(chooser, policy, request)]


AUTO = {"partition": "gpu", "tres_per_node": "gres/mig:auto"}
WHOLE = {"partition": "gpu", "tres_per_node": "gres/gpu:1", "batch": 1, "name": "b", "comment": BERT}


@pytest.mark.parametrize(
    ("policy", "submissions"),
    [
        (SubmitPolicy(), [{**AUTO, "comment": f"{BERT} {hints}"} for hints in ("slo=201ms", "slo=0.21s", "slo=202ms")]),
        (SubmitPolicy(), [{**AUTO, "comment": f"{BERT} slo=3s {hints}"} for hints in ("", "items=5", "deadline=2h")]),
        (SubmitPolicy(), [{**AUTO, "comment": f"{BERT} engine=vllm slo={number}ms"} for number in range(1, 200)]),
        (
            SubmitPolicy(),
            [{**AUTO, "comment": f"migbatch: model=llama-3.1-8b slo={ms}ms"} for ms in range(100, 4000, 20)],
        ),
        (POLICIES[1], [WHOLE, {**WHOLE, "digest": "d1"}]),
        (POLICIES[1], [WHOLE | {"tres_per_node": "gres/gpu,gres/mig:auto"} | more for more in ({}, {"digest": "d1"})]),
        (POLICIES[2], [{**AUTO, "comment": f"{BERT} items={n}", "extra": "migbatch: deadline=9s"} for n in (1, 50000)]),
        (
            SubmitPolicy(),
            [
                {**AUTO, "comment": f"{BERT} slo={ms}ms{role}", "batch": 1}
                for ms in (9, 20, 40, 80, 160, 400)
                for role in ("", " role=serve")
            ],
        ),
    ],
    ids=[
        "what was asked",
        "half of a rate",
        "times of an engine",
        "times of a language model",
        "runs",
        "runs beside a choice",
        "hints elsewhere",
        "a service",
    ],
)
def test_similar_requests_with_different_answers_keep_their_own(
    chooser: Chooser, policy: SubmitPolicy, submissions: list[dict[str, object]]
) -> None:
    requests = [protocol.encode(JobRequest(1001, **fields).to_fields()) for fields in submissions]
    made = answers(chooser, policy, *requests)
    assert len({str(answer) for answer in made}) > 1
    assert made == [alone for request in requests for alone in answers(chooser, policy, request)]


def test_gres_text_that_looks_like_an_answer_field_is_kept(chooser: Chooser) -> None:
    gres = f"fpga:set_comment={BERT} slo=201ms ,gres/mig:auto"
    submissions = [
        JobRequest(1001, partition="gpu", tres_per_node=gres, comment=f"{BERT} slo={slo}") for slo in ("201ms", "0.21s")
    ]
    requests = [protocol.encode(job.to_fields()) for job in submissions]
    given = answers(chooser, SubmitPolicy(), *requests)
    assert given == [alone for request in requests for alone in answers(chooser, SubmitPolicy(), request)]


def test_long_texts_of_requests_are_not_kept_in_memory(chooser: Chooser) -> None:
    long = "fpga:" + 900 * "x"
    asked = dict.fromkeys(("tres_per_job", "tres_per_task", "tres_bind", "mem_per_tres", "cpus_per_tres"), long)
    job = JobRequest(1001, partition="gpu", tres_per_node="gres/mig:auto", comment="migbatch: mem=5gb", **asked)
    made = SubmitService(CATALOG, chooser)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(300):
            request = replace(job, tres_per_socket=f"fpga:{number}")
            assert b"verdict=accept" in made.handle(protocol.encode(request.to_fields()))
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < 300 * len(long)


def question(chooser: Chooser, comment: str, **fields: object) -> KeyedRequest | None:
    values = {"partition": "gpu", "tres_per_node": "gres/mig:auto", **fields}
    return KeyedRequest.of(JobRequest(1001, comment=comment, **values).to_fields(), chooser)


def test_requests_that_differ_only_within_a_bucket_share_a_key(chooser: Chooser) -> None:
    """Numbers of one bucket share a key; name, account and script of the job are not part of it."""
    asked = question(chooser, "migbatch: model=bert-large slo=201ms", name="a", digest="d1", engine="vllm")
    other = question(chooser, "migbatch: slo=0.21s model=bert_large", name="b", digest="d2", account="c")
    assert asked is not None and other is not None and asked.key != other.key  # answers name a model as it was written
    other = question(chooser, "migbatch: slo=0.21s  model=bert-large", name="b", digest="d2", account="c")
    assert other is not None and asked.key == other.key
    served = [question(chooser, f"{BERT} slo=201ms role=serve rate={rate}").key for rate in (5, 900)]
    others = ["slo=230ms", *(f"slo=201ms {more}" for more in ("batch=8", "retry=oom", "max=3g.40gb", "role=train"))]
    keys = [asked.key, *served, *(question(chooser, f"{BERT} {comment}").key for comment in others)]
    assert len(set(keys)) == len(keys)
    for hints in ("model=llama-3.1-8b max_model_len=8k", "mem=15gb", "model=no-such-model"):
        first, second = (question(chooser, f"migbatch: {hints}{blank}", name=blank) for blank in ("", " "))
        assert first is not None and second is not None and first.key == second.key
    for comment in ("migbatch:", "migbatch: role=train", "migbatch: batch=8 slo=3ms", "hello", "", "migbatch: model"):
        assert question(chooser, comment) is None
    for fields in ({"partition": "mixed"}, {"batch": 1}, {"req_nodes": "n1"}, {"tres_per_node": "gres/mig:auto:2"}):
        other = question(chooser, "migbatch: model=bert-large slo=201ms", **fields)
        assert other is not None and asked.key != other.key


@pytest.mark.parametrize("more", [{}, {"exc_nodes": "n[1-9],m[1-9]"}], ids=["the marker", "excluded nodes too"])
def test_answer_to_a_longer_comment_is_the_one_it_would_get_alone(chooser: Chooser, more: dict[str, str]) -> None:
    gres = "gres/mig:auto,gres/mig:2g.20gb:1,gres/mig:3g.40gb:1"
    asked = JobRequest(1001, partition="gpu", tres_per_node=gres, comment=BERT, **more)
    requests = [
        protocol.encode(replace(asked, comment=BERT + " " * blanks).to_fields()) for blanks in (0, *range(850, 970, 3))
    ]
    given = answers(chooser, SubmitPolicy(), *requests)
    assert b"verdict=accept" in given[0][0] and b"verdict=refuse" in given[-1][0]
    assert given == [alone for request in requests for alone in answers(chooser, SubmitPolicy(), request)]


def test_answers_are_dropped_beyond_the_cache_limit(chooser: Chooser) -> None:
    kept = AlikeAnswers(most=2)
    asked = [question(chooser, f"migbatch: model=bert-large batch={batch}") for batch in (1, 2, 3)]
    made: list[SubmitDecision] = []
    maker = SubmitService(SITE, chooser, made.append)
    for entry in asked:
        answer = maker.handle(protocol.encode(entry.request))
        maker.close()
        kept.keep(entry, answer, made[-1], NAME)
    assert [kept.get(entry) is None for entry in asked] == [True, True, False]
