"""Elastic training jobs at submission and while they wait: what they become, and what their users may change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_migbatch.mig.grant import parse_comment
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, Answer, JobRequest, Pass, Present, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.submit.service import SubmitService
from slurm_migbatch.submit.table import TableCompiler, write_table
from slurm_migbatch.workload.catalog import SiteCatalog
from slurm_migbatch.workload.loans import LOAN, loan_hints, retyped
from tests.support.examples import examples
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import Shim
from tests.support.submit_agreement import AWAY, NOT_READ, hints_of, is_read, unsized

USER = 1001
TRAIN = "migbatch: role=train"
LENDS = ("train", "night")
GPU = SITE.partitions["gpu"]
LENDING = SiteCatalog({**SITE.partitions, **{name: replace(GPU, name=name, lends=True) for name in LENDS}})


@pytest.fixture(scope="session")
def lending_table(tmp_path_factory: pytest.TempPathFactory, chooser: Chooser) -> Path:
    path = tmp_path_factory.mktemp("lending") / "table.lua"
    write_table(path, TableCompiler(chooser, ["bert-large", "resnet50"]).text(LENDING))
    return path


@pytest.fixture(scope="session")
def shims(tmp_path_factory: pytest.TempPathFactory, lending_table: Path) -> Iterator[dict[str, Shim]]:
    """A shim with the compiled table (rendered when the site did not lend), one with only what was rendered in."""
    one, two = tmp_path_factory.mktemp("shim"), tmp_path_factory.mktemp("shim")
    with Shim(one, table=str(lending_table), catalog=SITE) as table, Shim(two, catalog=LENDING) as alone:
        yield {"table": table, "alone": alone}


def answered(request: JobRequest, chooser: Chooser, shims: dict[str, Shim], id: str = "") -> Answer:
    """The service's answer, after a check that the shims without it give the same."""
    plain = rewrite(request, LENDING, chooser, SubmitPolicy())
    seen: Answer = Refuse(plain.sentence, "") if isinstance(plain, Refuse) else plain
    if isinstance(seen, Accept) and not seen.changes:
        seen = Pass(seen.message)
    for name, shim in shims.items():
        if name == "alone" and "model=" in str(request):
            continue  # it knows the site, but no models
        local = shim(request)
        assert shim.errors == []
        if isinstance(local, Refuse) and NOT_READ in local.sentence:
            assert isinstance(plain, Accept) and not is_read(request, plain), name
        elif isinstance(local, Refuse) and AWAY in local.sentence:
            hints = hints_of(request, SubmitPolicy())
            assert hints is not None and unsized(hints, chooser), name
        else:
            assert local == seen, name
    return rewrite(request, LENDING, chooser, SubmitPolicy(), decision_id=id) if id else plain


@pytest.fixture
def ask(chooser: Chooser, shims: dict[str, Shim]):
    def run(gres: str | None = "gres/mig:auto", comment: str | None = TRAIN, **fields: Any) -> Answer:
        values = {"uid": USER, "partition": "train", "batch": 1, **fields}
        return answered(JobRequest(tres_per_node=gres, comment=comment, **values), chooser, shims)

    return run


def waits(answer: Answer) -> bool:
    return isinstance(answer, Accept) and "mig:loan:" in answer.changes.get("tres_per_node", "")


def code(answer: Answer) -> str:
    assert isinstance(answer, Refuse), answer
    return answer.code


# -- submission ------------------------------------------------------------------------------------------------------


def test_elastic_job_waits_and_its_user_is_told_for_which_slices(ask) -> None:
    answer = ask(comment=f"{TRAIN} min=2g.20gb max=4g.40gb signal=usr1")
    assert answer.changes == {
        "tres_per_node": "gres/mig:loan:1",
        "comment": f"{TRAIN} min=2g.20gb max=4g.40gb signal=usr1 [mig:loan:1#loan]",
        "requeue": "1",
    }
    assert "between 2g.20gb and 4g.40gb" in answer.message and "--gres=mig:2g.20gb" in answer.message
    assert "\n" not in answer.message


def test_training_job_that_must_not_be_requeued_is_refused_on_idle_slices(shims: dict[str, Shim]) -> None:
    """--no-requeue says so as clearly as the update that is refused too."""
    job = JobRequest(USER, partition="train", tres_per_node="gres/mig:auto", comment=TRAIN, batch=1)
    for shim in shims.values():
        refused = shim(job, requeue="0")
        assert isinstance(refused, Refuse) and "must allow requeueing" in refused.sentence
        assert waits(shim(job, requeue="1"))
        named = shim(replace(job, tres_per_node="gres/mig:1g.10gb"), requeue="0")
        assert isinstance(named, Accept) and "requeue" not in named.changes


@pytest.mark.parametrize(
    "fields",
    [
        {"gres": "gres/mig"},
        {"gres": "gres/mig:1"},
        {"gres": "gres/gpu:1"},
        {"gres": None, "tres_per_job": "gres/gpu:1"},
        {"gres": None, "tres_per_task": "gres/gpu:1", "num_tasks": 1, "min_nodes": 1, "max_nodes": 1},
        {"gres": "gres/mig:auto", "num_tasks": 4, "min_nodes": 1, "max_nodes": 1},
        {"partition": "train,night"},
        {"comment": f"{TRAIN} model=bert-large batch=32"},
        {"comment": f"{TRAIN} mem=20gib"},
    ],
)
def test_training_job_without_a_profile_waits_for_a_loan(ask, fields: dict[str, Any]) -> None:
    answer = ask(**fields)
    assert waits(answer) and "nothing is known" not in answer.message


def test_user_of_an_elastic_job_is_told_that_it_needs_checkpoints(ask) -> None:
    """migbatch saves nothing of a job: one without checkpoints starts over whenever its slice is reclaimed."""
    message = ask().message
    assert "so it must continue from its checkpoints" in message and "resumed" not in message


def test_user_of_an_elastic_job_is_told_that_it_is_not_retried_on_a_larger_slice(ask) -> None:
    answer = ask(comment=f"{TRAIN} retry=oom")
    assert waits(answer) and "retry=oom does not apply to elastic training" in answer.message
    assert "retry=oom" not in ask().message


def test_training_job_of_an_unknown_model_is_told_that_any_slice_may_be_lent(chooser: Chooser) -> None:
    request = JobRequest(USER, partition="train", tres_per_node="gres/mig:auto", batch=1)
    for words, warned in (("model=other batch=64", True), ("model=other batch=64 mem=20gib", False)):
        answer = rewrite(replace(request, comment=f"{TRAIN} {words}"), LENDING, chooser, SubmitPolicy())
        assert isinstance(answer, Accept) and waits(answer)
        assert ("nothing is known about other" in answer.message and "add mem=" in answer.message) == warned


@pytest.mark.parametrize(
    "fields",
    [
        {"partition": "gpu"},
        {"partition": "train,gpu"},
        {"comment": "migbatch: role=infer"},
        {"comment": "mine"},
        {"comment": None},
        {"gres": "gres/mig:2g.20gb:1"},
        {"gres": "gres/mig:auto,gres/mig:1g.10gb:1"},
        {"gres": "gres/gpu:h100:1"},
        {"batch": 0},
        {"batch": None},
    ],
)
def test_all_other_jobs_are_ordinary_and_get_a_profile(ask, fields: dict[str, Any]) -> None:
    answer = ask(**fields)
    assert isinstance(answer, Accept) and not waits(answer)
    assert parse_comment(answer.changes["comment"]) is not None and "requeue" not in answer.changes


@pytest.mark.parametrize(
    ("expected", "fields"),
    [
        ("loan_one", {"gres": "gres/mig:auto:2"}),
        ("loan_one", {"gres": "gres/mig:auto,gres/mig:auto"}),
        ("loan_one", {"min_nodes": 2, "max_nodes": 2}),
        ("loan_one", {"min_nodes": 1, "max_nodes": 4}),
        ("loan_one", {"num_tasks": 4}),
        ("min_over_max", {"comment": f"{TRAIN} min=4g.40gb max=1g.10gb"}),
        ("unknown_profile", {"comment": f"{TRAIN} min=9g.90gb"}),
        ("hint_value", {"comment": f"{TRAIN} signal=kill"}),
        ("mem_nowhere", {"comment": f"{TRAIN} mem=500gb"}),
        ("mem_nowhere", {"comment": f"{TRAIN} mem=30gib max=2g.20gb"}),
        ("input_unit", {"comment": f"{TRAIN} model=bert-large input=224px"}),
        ("reserved", {"gres": "gres/mig:loan:1"}),
        ("reserved", {"gres": "gres/mig:guest:1"}),
        ("reserved", {"gres": "gres/mig:loan:1", "partition": "gpu"}),
        ("comment_long", {"comment": f"{TRAIN} mem=1gb model={'m' * 90}" + " " * 870}),
        ("forged", {"comment": f"{TRAIN} [mig:loan:1#loan]"}),
    ],
)
def test_impossible_elastic_requests_are_refused(ask, expected: str, fields: dict[str, Any]) -> None:
    assert code(ask(**fields)) == expected


def test_two_loan_gres_are_requested_on_slurm_up_to_23_02(ask) -> None:
    assert ask(gres="gres:fpga:1,gres:mig:auto").changes["tres_per_node"] == "gres:fpga:1,gres:mig:loan:2"


def test_comment_leaves_room_for_the_marker_of_any_slice(ask) -> None:
    longest = f"{TRAIN} mem=1gb model={'m' * 90}"
    longest += " " * (1024 - 1 - len("[mig:10g.1000gb.me.all:1#loan01234567]") - len(longest))
    answer = ask(comment=longest)
    comment = retyped("gres/mig:loan:1", answer.changes["comment"], "10g.1000gb.me.all")["Comment"]
    assert len(comment) <= 1024
    assert code(ask(comment=longest + " ")) == "comment_long"


def test_decision_id_of_an_elastic_job_starts_with_loan(chooser: Chooser) -> None:
    kept: list[Any] = []
    service = SubmitService(LENDING, chooser, kept.append)
    request = JobRequest(USER, partition="train", tres_per_node="gres/mig:auto", comment=TRAIN, batch=1)
    answer = protocol.decode_answer(service.handle(protocol.encode(request.to_fields())))
    while service.record():
        pass
    assert isinstance(answer, Accept) and answer.changes["requeue"] == "1"
    (decision,) = kept
    assert decision.id.startswith(LOAN) and len(decision.id) == 12 and decision.granted == "mig:loan:1"
    assert answer.changes["comment"] == f"{TRAIN} [mig:loan:1#{decision.id}]"


def test_requests_and_updates_by_root_pass_unchanged(ask) -> None:
    assert ask(gres="gres/mig:loan:1", uid=0) == Pass()
    assert ask(gres="gres/mig:2g.20gb:1", comment=None, uid=0, now=Present(tres_per_node="gres/mig:loan:1")) == Pass()


# -- changes while it waits ------------------------------------------------------------------------------------------

WAITING = Present(
    partition="train", tres_per_node="gres/mig:loan:1", comment=f"{TRAIN} max=3g.40gb [mig:loan:1#loan7fq3k000]"
)
RELEASED = replace(
    WAITING, tres_per_node="gres/mig:2g.20gb:1", comment=f"{TRAIN} max=3g.40gb [mig:2g.20gb:1#loan7fq3k000]"
)
OLD = replace(WAITING, tres_per_node="gres:mig:loan:2")


def test_user_may_change_the_hints_of_a_waiting_elastic_job(ask) -> None:
    answer = ask(gres=None, comment=f"{TRAIN} max=4g.40gb", partition=None, now=WAITING)
    assert answer.changes == {"comment": f"{TRAIN} max=4g.40gb [mig:loan:1#loan7fq3k000]"}
    assert "and 4g.40gb" in answer.message
    # a job that root has released keeps its slice; whether that still suits is checked where it was released
    answer = ask(gres=None, comment=f"{TRAIN} max=1g.10gb", partition=None, now=RELEASED)
    assert answer.changes == {"comment": f"{TRAIN} max=1g.10gb [mig:2g.20gb:1#loan7fq3k000]"}
    assert code(ask(gres=None, comment=f"{TRAIN} min=4g.40gb max=1g.10gb", partition=None, now=WAITING)) == (
        "min_over_max"
    )
    assert code(ask(gres=None, comment="x [mig:7g.80gb:1#loan]", partition=None, now=WAITING)) == "forged"


@pytest.mark.parametrize(
    ("comment", "id", "asked"),
    [
        (f"{TRAIN} max=4g.40gb", "loan7fq3k000", {}),
        ("no training", "abc12345", {"tres_per_node": "gres/mig:auto"}),
    ],
)
def test_new_comment_is_recorded_with_the_request_if_the_job_becomes_another(
    chooser: Chooser, comment: str, id: str, asked: dict[str, str]
) -> None:
    request = JobRequest(USER, comment=comment, now=WAITING)
    answer = rewrite(request, LENDING, chooser, SubmitPolicy(), decision_id="abc12345")
    assert isinstance(answer, Accept) and answer.decision is not None
    assert (answer.decision.id, answer.decision.kept) == (id, not asked)
    assert answer.decision.asked == {**asked, "comment": comment}


@pytest.mark.parametrize("now", [WAITING, RELEASED, OLD])
def test_elastic_job_keeps_those_of_several_partitions_that_have_slices(ask, now: Present) -> None:
    answer = ask(gres=None, comment=None, partition="train,cpu", now=now)
    assert isinstance(answer, Accept) and answer.changes == {"partition": "train"}
    assert "it starts only in train: no MIG GPUs in cpu" in answer.message


@pytest.mark.parametrize("now", [WAITING, RELEASED])
def test_elastic_job_that_names_a_profile_becomes_an_ordinary_job(ask, now: Present) -> None:
    for gres in ("gres/mig:2g.20gb:1", "gres/mig:7g.80gb:1"):
        answer = ask(gres=gres, comment="", partition=None, now=now)
        comment = answer.changes.get("comment", now.comment)
        assert loan_hints(comment, "train", gres, LENDS) is None
        grant = parse_comment(comment)
        assert grant is not None and f"gres/{grant.gres}" == answer.changes.get("tres_per_node", gres)


def test_released_job_waits_again_when_its_user_asks_for_auto(ask) -> None:
    answer = ask(gres="gres/mig:auto", comment=None, partition=None, now=RELEASED)
    assert answer.changes == {"tres_per_node": "gres/mig:loan:1", "comment": WAITING.comment}
    assert code(ask(gres="gres/mig:loan:1", comment=None, partition=None, now=RELEASED)) == "reserved"


@pytest.mark.parametrize(
    "change",
    [{"comment": "migbatch: role=infer"}, {"comment": "", "partition": None}, {"comment": None, "partition": "gpu"}],
)
def test_elastic_job_that_loses_its_role_or_partition_gets_a_profile(ask, change: dict[str, Any]) -> None:
    values = {"partition": None, **change}
    answer = ask(gres=None, now=WAITING, **values)
    assert answer.changes["tres_per_node"] == "gres/mig:1g.10gb:1"
    assert answer.changes["comment"].endswith("[mig:1g.10gb:1#auto]")
    assert code(ask(gres=None, now=OLD, **values)) == "loan_kept"


def test_user_cannot_change_the_gres_of_an_elastic_job_up_to_slurm_23_02(ask) -> None:
    for gres in ("gres:mig:2g.20gb:1", "gres:mig:auto", "gres:fpga:1", ""):
        assert code(ask(gres=gres, comment=None, partition=None, now=OLD)) == "loan_kept"
    kept = replace(OLD, tres_per_node="gres:mig:loan:2,gres:mig:2g.20gb:0")
    answer = ask(gres=None, comment=f"{TRAIN} signal=usr2", partition=None, now=kept)
    assert answer.changes == {"comment": f"{TRAIN} signal=usr2 [mig:loan:1#loan7fq3k000]"}


def test_ordinary_job_does_not_become_elastic_by_an_update(ask) -> None:
    now = Present(partition="train", tres_per_node="gres/mig:3g.40gb:1", comment=f"{TRAIN} [mig:3g.40gb:1#abc]")
    answer = ask(gres="gres/mig:auto", comment=None, partition=None, now=now)
    assert answer.changes == {"tres_per_node": "gres/mig:1g.10gb:1", "comment": f"{TRAIN} [mig:1g.10gb:1#auto]"}


def test_running_elastic_job_keeps_its_marker(ask) -> None:
    running = replace(RELEASED, pending=False)
    answer = ask(gres=None, comment="new", partition=None, now=running)
    assert answer.changes == {"comment": "new [mig:2g.20gb:1#loan7fq3k000]"}
    assert code(ask(gres="gres/mig:7g.80gb:1", comment=None, partition=None, now=running)) == "running"


# -- agreement -------------------------------------------------------------------------------------------------------


def words(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.split())


TRES = words(
    "gres/mig:auto gres/mig:auto gres:mig:auto gres/mig gres/mig:2 gres/gpu:1 gres/gpu:h100:1 gres/mig:2g.20gb:1 "
    "gres/mig:loan:1 gres:mig:loan:2 gres/mig:guest:1 gres/fpga:1 gres/mig:auto,gres/fpga:1 gres/mig:auto,gres/mig:1 "
    "gres/mig:none:1 gres/mig:1g gres:gpu:0 mig:auto"
)
TOLD = st.lists(
    words(
        "role=train role=train role=train role=infer min=1g.10gb min=2g.20gb min=9g.9gb min=1g.10gb+me max=3g.40gb "
        "max=1g.10gb max=7g.80gb signal=usr1 signal=kill mem=30gib mem=1gb mem=900gb model=bert-large model=none "
        "batch=8 input=224px slo=1ms"
    ),
    max_size=4,
).map(lambda found: "migbatch: " + " ".join(found))
COMMENTS = st.one_of(TOLD, TOLD, st.sampled_from([None, "", "x", f"{TRAIN}{' ' * 970}", f"{TRAIN}{' ' * 955}"]))
COUNTS = st.sampled_from([None, None, 0, 1, 1, 2])
ASKED = st.builds(
    JobRequest,
    uid=st.just(USER),
    partition=words("train train night train,night train,gpu gpu old train,cpu cpu"),
    tres_per_node=st.one_of(TRES, TRES, TRES, st.none()),
    tres_per_job=st.one_of(st.none(), st.none(), st.none(), TRES),
    comment=COMMENTS,
    batch=st.sampled_from([1, 1, 1, 0, None]),
    min_nodes=COUNTS,
    max_nodes=COUNTS,
    num_tasks=COUNTS,
    tres_bind=st.sampled_from([None, None, "gres/gpu:per_task:1"]),
)
PRESENTS = st.builds(
    Present,
    pending=st.sampled_from([True, True, True, True, False]),
    partition=words("train train night gpu train,gpu"),
    tres_per_node=st.sampled_from(
        [
            "gres/mig:loan:1",
            "gres:mig:loan:2",
            "gres:mig:loan:2,gres:mig:2g.20gb:0",
            "gres/mig:2g.20gb:1",
            "gres:mig:2g.20gb:1",
            "gres/fpga:1,gres/mig:loan:1",
            "gres/mig:guest:1",
            "",
            None,
        ]
    ),
    comment=st.sampled_from(
        [
            f"{TRAIN} [mig:loan:1#loan7fq3k000]",
            f"{TRAIN} max=2g.20gb [mig:2g.20gb:1#loan7fq3k000]",
            f"{TRAIN} [mig:2g.20gb:1#loan]",
            f"{TRAIN} [mig:2g.20gb:1#7fq3k000]",
            f"{TRAIN} [mig:guest:1#loan1]",
            "[mig:loan:1#loan]",
            "[mig:loan:1]",
            "x[mig:loan:1#loan]",
            f"{TRAIN} [mig:loan:2#loan]",
            f"{TRAIN} [mig:loan:1#]",
            f"{TRAIN} [mig:2g.20gb:1#loan0123456789abcdef]",
            f"{TRAIN} [mig:0123456789012345678901234:1#loan]",
            f"{TRAIN} [mig:loan:1#loan] tail",
            TRAIN,
            "",
            None,
        ]
    ),
)


@settings(max_examples=examples(800), deadline=None)
@given(asked=ASKED)
@example(asked=JobRequest(USER, partition="train", tres_per_node="gres/mig:auto", comment=TRAIN, batch=1))
def test_shims_and_service_answer_a_submission_alike(
    shims: dict[str, Shim], chooser: Chooser, asked: JobRequest
) -> None:
    answered(asked, chooser, shims)


@settings(max_examples=examples(1200), deadline=None)
@given(asked=ASKED, now=PRESENTS, given=st.sets(words("tres_per_node tres_per_job comment partition")))
def test_shims_and_service_answer_a_job_update_alike(
    shims: dict[str, Shim], chooser: Chooser, asked: JobRequest, now: Present, given: set[str]
) -> None:
    left = {name: None for name in ("tres_per_node", "tres_per_job", "comment", "partition") if name not in given}
    answered(replace(asked, batch=None, now=now, **left), chooser, shims)


@settings(max_examples=examples(500), deadline=None)
@given(asked=ASKED, now=PRESENTS, given=st.sets(words("tres_per_node comment partition")))
def test_no_update_turns_a_slice_that_the_user_named_into_a_loan(
    chooser: Chooser, asked: JobRequest, now: Present, given: set[str]
) -> None:
    left = {name: None for name in ("tres_per_node", "comment", "partition") if name not in given}
    request = replace(asked, batch=None, tres_per_job=None, now=now, **left)
    answer = rewrite(request, LENDING, chooser, SubmitPolicy(), decision_id="abc12345")
    if not isinstance(answer, Accept) or not now.pending:
        return
    present = now.tres_per_node if request.tres_per_node is None else request.tres_per_node
    after = answer.changes.get("tres_per_node", present) or ""
    comment = answer.changes.get("comment", now.comment if request.comment is None else request.comment) or ""
    partition = request.partition or now.partition or ""
    elastic = loan_hints(comment, partition, after, LENDS)
    if elastic is not None and elastic.slice is not None:  # then it is the slice that root had given the job
        assert request.tres_per_node is None and after == now.tres_per_node
