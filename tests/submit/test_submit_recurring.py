"""The submit filter recognizes a recurring job, from slurmctld's description of it to the answer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.predict.recurring import DONE, FAILED, OUT_OF_MEMORY, PastRun, RunsPolicy
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.decision import SubmitDecision
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, JobRequest, Refuse
from slurm_migbatch.submit.script import MOST_BYTES, digest, recurring_key
from slurm_migbatch.submit.service import SubmitService
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import Shim
from tests.support.submit_running import running

USER = 1001
SCRIPT = "#!/bin/sh\npython train.py --epoch %d\n"


@pytest.fixture
def decisions() -> list[SubmitDecision]:
    return []


@pytest.fixture
def service(
    chooser: Chooser, decisions: list[SubmitDecision], request: pytest.FixtureRequest
) -> Iterator[SubmitService]:
    """The parameter says whether the site gives advice on whole GPUs; by default it does."""
    policy = SubmitPolicy(runs=RunsPolicy(3), advise=getattr(request, "param", True))
    made = SubmitService(SITE, chooser, decisions.append, policy=policy)
    yield made
    made.close()


@pytest.fixture
def shim(tmp_path: Path, service: SubmitService) -> Iterator[Shim]:
    path = tmp_path / "submit.sock"
    with running(path, service), Shim(tmp_path, socket=str(path)) as made:
        yield made


def submitted(
    shim: Shim, number: int = 1, gres: str = "gres/mig:auto", script: str = SCRIPT, name: str = "train.sh", **more: str
) -> Accept:
    job = JobRequest(USER, partition="gpu", tres_per_node=gres, name=name, account="acc", batch=1)
    text = script % number if "%d" in script else script
    answer = shim(job, script=text, **more)
    assert isinstance(answer, Accept)
    return answer


def remember(service: SubmitService, key: str, *gib: float, profile: str = "7g.80gb", **facts: object) -> None:
    past = [PastRun(number, profile, DONE, peak_gib * 1024, **facts) for number, peak_gib in enumerate(gib)]  # type: ignore[arg-type]
    service.learn({key: past})


def key_of(service: SubmitService, decisions: list[SubmitDecision]) -> str:
    service.close()
    return decisions[-1].recurring


def test_recurring_job_is_recognized_from_its_description_in_slurm(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    assert "after 3 completed runs of train.sh (0 so far)" in submitted(shim).message
    key = key_of(service, decisions)
    assert key == recurring_key(USER, "acc", "gpu", "train.sh", digest((SCRIPT % 5).encode()))
    assert decisions[-1].reason == "runs_few"
    remember(service, key, 14, 14, 14)
    answer = submitted(shim, 7)
    assert "your last 3 runs of train.sh used at most 14 GiB" in answer.message
    assert "1g.20gb" in answer.changes["tres_per_node"]
    assert key_of(service, decisions) == key
    assert "(0 so far)" in submitted(shim, script="#!/bin/sh\npython infer.py\n").message
    assert "(0 so far)" in submitted(shim, argv="--big").message  # a job with other arguments is another job


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("entraînement".encode(), "entraînement"),
        ("訓練".encode() * 30, "訓練" * 20 + "..."),
        (b"\xfctf\xff", "�tf�"),
        ('a\x1b[31m\u202eb\nc%s"'.encode(), 'a?[31m?b?c%s"'),
    ],
)
def test_message_has_the_name_of_the_job_as_far_as_it_can_be_printed(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision], name: bytes, shown: str
) -> None:
    message = submitted(shim, name=name.decode("latin-1")).message
    assert f"runs of {shown} (0 so far)" in message.encode("latin-1").decode()
    service.close()
    assert f"runs of {shown} (0 so far)" in decisions[-1].to_dict()["message"]


def test_hints_take_precedence_over_past_runs(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    submitted(shim)
    remember(service, key_of(service, decisions), 14, 14, 14)
    job = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:auto", name="train.sh", account="acc", batch=1)
    for hint, profile in (("mem=30gb", "3g.40gb"), ("max=1g.10gb", "1g.10gb"), ("min=3g.40gb", "3g.40gb")):
        answer = shim(JobRequest(**{**job.__dict__, "comment": f"migbatch: {hint}"}), script=SCRIPT % 1)
        assert isinstance(answer, Accept) and profile in answer.changes["tres_per_node"], hint


HINTS = {
    "model=bert-large batch=8": "model=bert-large batch=4",
    "model=meta-llama/Llama-3.2-1B-Instruct method=lora": "model=meta-llama/Llama-3.2-1B-Instruct method=lora seq=512",
    "model=llama-3.2-1b engine=vllm max_model_len=2048": "model=llama-3.2-1b engine=vllm max_model_len=1024",
    "model=our-own-net batch=8": "model=resnet50 batch=8",
}
"""Hints, and others of the same script that describe less work."""


def hinted(hints: str, user: int = USER, name: str = "train.sh") -> JobRequest:
    return JobRequest(
        user,
        partition="gpu",
        tres_per_node="gres/mig:auto",
        comment=f"migbatch: {hints}",
        name=name,
        account="acc",
        batch=1,
    )


@pytest.mark.parametrize("hints", HINTS)
def test_job_with_hints_gets_a_larger_slice_than_one_on_which_it_ran_out_of_memory(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision], hints: str
) -> None:
    def granted(job: JobRequest) -> tuple[str, str]:
        answer = shim(job, script=SCRIPT % 1)
        assert isinstance(answer, Accept)
        service.close()  # records the decision
        return answer.changes["tres_per_node"], answer.message

    predicted, message = granted(hinted(hints))
    work, key = decisions[-1].bucket, decisions[-1].recurring
    names = [offer.profile.gres_type for offer in SITE.partitions["gpu"].plain]
    memory_mib = {offer.profile.gres_type: offer.memory_mib for offer in SITE.partitions["gpu"].plain}
    past: list[PastRun] = []
    sizes = [predicted]
    for number in range(len(set(memory_mib.values())) - 1):
        profile = next(name for name in names if f":{name}:" in sizes[-1])
        past.append(PastRun(number, profile, OUT_OF_MEMORY, 100.0, work=work))
        service.learn({key: past})
        slice_, message = granted(hinted(hints))
        if "no slice larger" in message:
            assert profile == "7g.80gb"
            break
        assert slice_ not in sizes and "with these hints ran out of memory" in message
        sizes.append(slice_)
    assert "7g.80gb" in sizes[-1]
    # other users, other hints and other work of the same script get what is predicted
    assert granted(hinted(hints, USER + 1))[0] == granted(hinted(hints, name="other.sh"))[0] == predicted
    assert granted(hinted(HINTS[hints]))[0] != sizes[-1]
    small = next(name for name in names if f":{name}:" in predicted)
    service.learn({key: [*past, PastRun(99, "7g.80gb", DONE, 9000.0, work=work)]})
    assert granted(hinted(hints))[0] == sizes[-1]
    service.learn({key: [PastRun(98, small, OUT_OF_MEMORY, work=work), PastRun(99, small, DONE, 9000.0, work=work)]})
    assert granted(hinted(hints))[0] == predicted


@pytest.mark.parametrize("hints", HINTS)
def test_failed_run_with_a_full_slice_counts_unless_its_engine_fills_every_slice(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision], hints: str
) -> None:
    predicted = shim(hinted(hints), script=SCRIPT % 1)
    assert isinstance(predicted, Accept)
    key = key_of(service, decisions)
    offers = SITE.partitions["gpu"].offers
    profile = next(name for name in offers if f":{name}:" in predicted.changes["tres_per_node"])
    full = PastRun(1, profile, FAILED, 0.95 * offers[profile].memory_mib, work=decisions[-1].bucket)
    service.learn({key: [full]})
    again = shim(hinted(hints), script=SCRIPT % 1)
    assert isinstance(again, Accept)
    same = again.changes["tres_per_node"] == predicted.changes["tres_per_node"]
    assert same == ("vllm" in hints)


def test_same_request_gets_a_new_answer_after_new_runs(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    submitted(shim)
    key = key_of(service, decisions)
    for gib, profile in ((14, "1g.20gb"), (5, "1g.10gb"), (30, "3g.40gb")):
        remember(service, key, gib, gib, gib)
        assert profile in submitted(shim).changes["tres_per_node"]


def test_job_without_runs_is_forgotten(shim: Shim, service: SubmitService, decisions: list[SubmitDecision]) -> None:
    submitted(shim)
    key = key_of(service, decisions)
    remember(service, key, 14, 14, 14)
    assert "your last 3 runs" in submitted(shim).message
    remember(service, key)
    assert "(0 so far)" in submitted(shim).message


def test_past_runs_stay_known_while_newer_ones_are_learned(service: SubmitService) -> None:
    """One thread learns runs while another one answers."""
    job = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:auto", name="a", batch=1, digest="d1")
    key, request = recurring_key(USER, "", "gpu", "a", "d1"), protocol.encode(job.to_fields())
    given = []

    class Slow(list[PastRun]):
        def __iter__(self) -> Iterator[PastRun]:
            given.append(service.handle(request))
            return super().__iter__()

    remember(service, key, 30, 30, 30)
    service.learn({key: Slow([PastRun(4, "7g.80gb", DONE, 30 * 1024.0)] * 3)})
    assert given and b"mig:3g.40gb:1" in given[0]


def test_job_without_a_script_is_not_recognized(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    answer = shim(JobRequest(USER, partition="gpu", tres_per_node="gres/mig:auto", name="bash"))
    assert isinstance(answer, Accept) and "the job names no model and no memory; add --comment" in answer.message
    assert key_of(service, decisions) == ""


def test_whole_gpu_advice_beside_an_auto_slice_uses_the_newest_runs(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    hints = "migbatch: model=bert-large"
    job = JobRequest(USER, partition="gpu", tres_per_node="gres/gpu:1,gres/mig:auto", comment=hints, name="a", batch=1)
    before = shim(job, script=SCRIPT % 1)
    remember(service, key_of(service, decisions), 2.0, 2.1, 2.2)
    after = shim(job, script=SCRIPT % 1)
    assert "2.2 GiB" not in before.message and "2.2 GiB" in after.message


@pytest.mark.parametrize("service", [False], indirect=True)
@pytest.mark.parametrize("gres", ["gres/mig:auto,gres/gpu:1", "gres/gpu:1,gres/mig:auto"])
def test_auto_slice_beside_a_whole_gpu_uses_the_newest_runs(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision], gres: str
) -> None:
    """Also on a site that gives no advice on whole GPUs."""
    assert "mig:1g.10gb:1" in submitted(shim, gres=gres).changes["tres_per_node"]
    remember(service, key_of(service, decisions), 30, 30, 30)
    assert "mig:3g.40gb:1" in submitted(shim, gres=gres).changes["tres_per_node"]


def test_refused_request_is_decided_again_with_the_newest_runs(service: SubmitService) -> None:
    """Whether there is room for a request depends on the slice that past runs needed."""
    job = JobRequest(
        USER, partition="gpu", tres_per_node="gres/mig:auto:40,gres/mig:1g.10gb:40", name="a", batch=1, digest="d1"
    )
    request = protocol.encode(job.to_fields())
    assert b"verdict=refuse" in service.handle(request)
    remember(service, recurring_key(USER, "", "gpu", "a", "d1"), 30, 30, 30)
    assert b"mig:3g.40gb:40" in service.handle(request)


@pytest.mark.parametrize("script", ["\xff\x00%%\n=" * 4000, "\n" * 100_000, "script=1\n\nverdict=refuse\n" * 3000])
def test_filter_accepts_any_script(shim: Shim, script: str) -> None:
    assert len(script) > MOST_BYTES
    assert "1g.10gb" in submitted(shim, script=script, argv="\n\nkind=modify\n").changes["tres_per_node"]
    assert not shim.errors


def test_vllm_runs_on_larger_profiles_do_not_change_the_next_choice(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    script = "#!/bin/sh\nvllm serve private/model-%d\n"
    submitted(shim, script=script)
    key = key_of(service, decisions)
    assert decisions[-1].engine == "vllm"
    memory_mib = {name: SITE.view(("gpu",)).offers[name].memory_mib for name in ("3g.40gb", "7g.80gb")}

    def chosen(*profiles: str) -> tuple[str, str]:
        past = [PastRun(n, p, DONE, 0.92 * memory_mib[p], engine="vllm") for n, p in enumerate(profiles)]
        service.learn({key: past})
        answer = submitted(shim, 3, script=script)
        return answer.changes["tres_per_node"], answer.message

    before, message = chosen("3g.40gb", "3g.40gb", "3g.40gb")
    assert "3g.40gb" in before and "vllm allocates a fixed share" in message and "unknown" in message
    assert chosen("3g.40gb", "3g.40gb", "3g.40gb", "3g.40gb", "7g.80gb")[0] == before
    assert chosen("3g.40gb", "7g.80gb", "7g.80gb")[0] == before


def test_job_with_the_retry_hint_may_be_requeued(shim: Shim) -> None:
    job = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:1g.10gb", comment="migbatch: retry=oom", batch=1)
    assert shim(job).changes["requeue"] == "1"
    refused = shim(job, requeue="0")
    assert isinstance(refused, Refuse) and "--no-requeue excludes that" in refused.sentence
    old = shim(JobRequest(**{**job.__dict__, "tres_per_node": "gres:mig:1g.10gb"}))
    assert "for the next submission only" in old.message


def test_whole_gpu_is_granted_with_advice_of_a_smaller_slice(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    """One line of advice, where the site enables it; the job gets what it requested."""
    assert "would do" not in submitted(shim, gres="gres/gpu").message
    key = key_of(service, decisions)
    remember(service, key, 14, 14, 14)
    answer = submitted(shim, gres="gres/gpu")
    assert "your last 3 runs of train.sh used at most 14 GiB: --gres=mig:1g.20gb is enough" in answer.message
    assert "7g.80gb" in answer.changes["tres_per_node"]
    remember(service, key, 70, 70, 70)
    assert "would do" not in submitted(shim, gres="gres/gpu").message
    remember(service, key, 14, 14, 14, sm=0.9, dram=0.2)
    assert "would do" not in submitted(shim, gres="gres/gpu").message


@pytest.mark.parametrize("service", [False], indirect=True)
def test_whole_gpu_is_granted_without_advice_where_the_site_gives_none(
    shim: Shim, service: SubmitService, decisions: list[SubmitDecision]
) -> None:
    submitted(shim, gres="gres/gpu")
    remember(service, key_of(service, decisions), 14, 14, 14)
    assert "is enough" not in submitted(shim, gres="gres/gpu").message
