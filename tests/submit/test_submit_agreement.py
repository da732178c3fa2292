"""Without the service, the shim gives the service's answers: the same verdict, the same fields, the same words."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, JobRequest, Pass, Present, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.workload.hints import FORMS
from tests.support.examples import examples
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import Shim
from tests.support.submit_agreement import OBJECTIVES, USER, agree, numbers, words

prefixes = st.sampled_from(["gres:", "gres/", "", "gres:gres/"])
counts = st.sampled_from(["", "", ":1", ":2", "=3", ":0", ":64", ":65", ":1k", ":-1", ":", "=x", ":99999", ":007"])
types = words(
    "auto none 1g 3g 1g.10gb 1g.10gb+me 1g.10gb.me 2g.20gb 3g.40gb 7g.80gb 1g.5gb 7g.40gb 9g.9gb AUTO "
    "1G.10gb h100 a100 a100-40gb v100 a:b 2 h100_3g.39gb 3g.39gb A100_1g.4gb x1g10gb+me 1g.10gb.me5 123g.10gb 3g.39gbx "
    "nvidia_h100_80gb_hbm3_mig_2g.19gb 1g.9gb-me 1g_9gb.me.all 2g.10gb.gfx"
)
entries = st.one_of(
    st.builds("{}mig:{}{}".format, prefixes, types, counts),
    st.builds("{}mig{}".format, prefixes, counts),
    st.builds("{}gpu{}".format, prefixes, counts),
    st.builds("{}gpu:{}{}".format, prefixes, types, counts),
    st.sampled_from(
        ["gres:fpga:1", "cpu:2", "gres:migration:1", "gres/MIG:auto", " mig:auto", "mig:auto ", "", "mi g:1"]
    ),
    st.text(alphabet="mig:=auto.1gpu ,\t\xe4", max_size=12),
)
tres = st.lists(entries, min_size=1, max_size=3).map(",".join)
models = words("bert-large google/bert_large resnet50.a1_in1k llama-3.1-8b no-model Mistral-7B vgg19.onnx /data/vit")
pairs = st.one_of(
    st.builds("model={}".format, models),
    st.builds("batch={}".format, words("1 7 32 100 1024 5000 65536 65537 0 1e12 x -1")),
    st.builds("input={}".format, words("128 512tok 4k 224px 224x320 1ktok 99999999999 0 5furlong 1.5k 1.024tok 1.024")),
    st.builds("slo={}".format, words("1ms 20ms 200ms 0.2s 5s 1m 99us 200 0s 1h30m 0.0001s 1.2.3s")),
    st.builds("items={}".format, words("1 50000 50k 1.5m 1e6 1e99 2g 1e12 3e12 0 k 50.000 50000.0 1.125k")),
    st.builds("deadline={}".format, words("1s 2h 30m 1-02:00:00 02:00:00 3-4 400d 10:30 1s1s")),
    st.builds("pipeline={}".format, words("a caption-7 Night_2.b -x x/y a:b " + "y" * 65)),
    st.builds("mem={}".format, words("1gb 9.75gib 18GiB 18G 30gb 79gib 900mb 1tb -1 18 99999999tb")),
    st.builds("role={}".format, st.sampled_from(["infer", "train", "serve", "INFER", "both"])),
    st.builds("min={}".format, types),
    st.builds("max={}".format, types),
    st.builds("signal={}".format, words("usr1 usr2 USR1 kill term 10")),
    st.builds("engine={}".format, words("vllm VLLM tgi mine")),
    st.builds("quantization={}".format, words("awq q4_k_m none xyz x" + "y" * 30)),
    st.builds("max_model_len={}".format, words("8192 8k 8ktok 0 224px 1.5k 99999999")),
    st.builds("gpu_memory_utilization={}".format, words("0.9 0.05 1 0 1.01 .9")),
    st.builds("rate={}".format, words("2 0.5 0 0.0001 100000 1e3")),
    st.builds("tpot={}".format, words("40ms 99us 2d x")),
    st.builds("params={}".format, words("8b 350m 1e9 7 1000000b")),
    st.builds("arch={}".format, words("layers:2+hidden:64+heads:4 layers:2 layers:+x layers:2++x:1 Layers:2")),
    st.sampled_from(
        ["colour=red", "model", "=x", "batch=", "a==b", "batch=3;rm", "x=$(id)", "batch=3\xff", "batch=3\n"]
    ),
)
hints = st.lists(pairs, max_size=5).map(lambda found: "migbatch: " + " ".join(found))
comments = st.one_of(
    st.none(),
    hints,
    hints,
    st.sampled_from(["", "hello", "x [mig:7g.80gb:1]", "[MIG:1]", "m" * 995, "m" * 1005, "migbatch:" + "a" * 1000]),
    st.text(alphabet="migbatch: []#\xe4\n%=,", max_size=30),
)
partitions = st.sampled_from([None, "gpu", "gpu", "old", "mixed", "cpu", "gpu,cpu", "old,gpu", "gpu,gpu", ""])

VALUES = {
    "model": "bert-large google/bert_large resnet50 llama-3.1-8b no-such-model Mistral-7B vgg19 vit gpt2-xl",
    "batch": "1 7 32 100 1024 5000 65536",
    "input": "128 512 4k 300 1.5k 8000 40000",
    "slo": "1ms 20ms 200ms 0.25s 5s 1m 37ms 0.0125s 3h",
    "items": "1 50000 50k 1.5m 1e6 2g 1e12",
    "deadline": "1s 2h 30m 1-02:00:00 02:00:00 7m13s",
    "pipeline": "a caption-7 Night_2.b",
    "mem": "1gb 9.75gib 18GiB 18G 30gb 79gib 900mb",
    "role": "infer train serve",
    "min": "1g.10gb 2g.20gb 1g.20gb 4g.40gb 2g.10gb",
    "max": "7g.80gb 4g.40gb 3g.40gb 2g.20gb 7g.40gb 1g.10gb+me",
    "signal": "usr1 usr2 USR1",
    "engine": "vllm tgi transformers",
    "max_num_seqs": "1 16 200",
    "rate": "2 0.5 300",
    "method": "full lora qlora",
    "dtype": "bf16 fp32 auto",
}


def written(keys: list[str]) -> st.SearchStrategy[str]:
    hint_pairs = [st.sampled_from(VALUES[key].split()).map(f"{key}={{}}".format) for key in keys]
    return st.tuples(*hint_pairs).map(lambda found: "migbatch: " + " ".join(found))


good_hints = st.lists(st.sampled_from(sorted(VALUES)), max_size=5, unique=True).flatmap(written)
model_hints = st.sets(words("batch input slo work mem role rate min max")).flatmap(
    lambda keys: written(["model", *sorted(keys - {"work"}), *(["items", "deadline"] if "work" in keys else [])])
)
good_entries = words(
    "gres:mig:auto gres/mig:auto gres:mig gres:mig:2 gres/mig:auto:3 gres:mig:1g.10gb "
    "gres:mig:2g.20gb:2 gres/mig:3g.40gb=1 gres:gpu:1 gres/gpu:h100:2 gres:gpu gres:fpga:1 gres/gpu:h100_3g.39gb:1 "
    "gres/mig:1g.20gb:4 gres:mig:7g.80gb gres:mig:1g.10gb+me"
)
sensible = st.builds(
    JobRequest,
    uid=st.just(USER),
    partition=st.sampled_from(["gpu", "gpu", "mixed", None]),
    tres_per_node=st.lists(good_entries, min_size=1, max_size=2).map(",".join),
    comment=st.one_of(st.none(), good_hints, model_hints, model_hints, model_hints),
    batch=st.sampled_from([None, 1]),
    cpus_per_task=st.sampled_from([None, None, 2]),
    memory_given=st.sampled_from([None, None, 1]),
)
spread = st.builds(
    JobRequest,
    uid=st.just(USER),
    partition=st.sampled_from(["gpu", "mixed"]),
    tres_per_job=st.one_of(st.none(), good_entries),
    tres_per_task=st.one_of(st.none(), st.none(), good_entries),
    tres_per_socket=st.one_of(st.none(), st.none(), good_entries),
    min_nodes=numbers,
    max_nodes=numbers,
    num_tasks=numbers,
    ntasks_per_node=numbers,
    sockets_per_node=numbers,
    cpus_per_tres=st.sampled_from([None, None, "gres:gpu:2", "gres/gpu:7", "gres/gpu:3000", "gres:gpu:a:2"]),
    mem_per_tres=st.sampled_from([None, None, "gres:gpu:4000", "gres/gpu:9999999"]),
    batch=st.sampled_from([None, 1, 1, 1]),
)

wild = st.builds(
    JobRequest,
    uid=st.sampled_from([USER] * 9 + [0]),
    partition=partitions,
    tres_per_node=st.one_of(st.none(), tres, tres, tres),
    tres_per_job=st.one_of(st.none(), st.none(), tres),
    tres_per_socket=st.one_of(st.none(), st.none(), st.none(), tres),
    tres_per_task=st.one_of(st.none(), st.none(), st.none(), tres),
    comment=comments,
    extra=st.one_of(st.none(), comments),
    cpus_per_tres=st.sampled_from([None, None, None, "gres:gpu:2"]),
    mem_per_tres=st.sampled_from([None, None, None, "gres/gpu:4000", "gres:gpu:0"]),
    batch=st.sampled_from([None, 1]),
    tres_bind=st.sampled_from([None, None, "gres/gpu:per_task:1", "gres/mig:per_task:1", "x"]),
    shared=st.sampled_from([None, None, None, 0, 1]),
    ntasks_per_tres=st.sampled_from([None, None, None, 1]),
    min_nodes=numbers,
    max_nodes=numbers,
    num_tasks=numbers,
    ntasks_per_node=numbers,
    sockets_per_node=numbers,
)
presents = st.builds(
    Present,
    pending=st.sampled_from([True, True, True, False]),
    partition=st.sampled_from(["gpu", "gpu", "old", "cpu"]),
    tres_per_node=st.sampled_from([None, "gres:mig:2g.20gb:1", "gres/mig:1g.10gb:2", "gres:gpu:1", "gres:fpga:1"]),
    comment=st.sampled_from(
        [
            None,
            "hello",
            "hello [mig:2g.20gb:1#abc]",
            "[mig:2g.20gb:1]",
            "[mig:2g.20gb:1#k]",
            " ",
            "  [mig:2g.20gb:1#k]",
            "migbatch: mem=30gib [mig:1g.10gb:2#0123456789abcdef]",
            "bad [mig:x",
            "[mig:2g.20gb:1] tail",
        ]
    ),
    extra=st.sampled_from([None, "e", "migbatch: mem=30gib"]),
)
submissions = st.one_of(sensible, sensible, sensible, spread, wild)
changes = st.builds(
    lambda request, now, given: replace(
        request,
        now=now,
        **{
            name: None
            for name in ("tres_per_node", "tres_per_job", "comment", "extra", "partition")
            if name not in given
        },
    ),
    submissions,
    presents,
    st.sets(st.sampled_from(["tres_per_node", "comment", "extra", "partition"])),
)


@settings(max_examples=examples(1500), deadline=None)
@given(asked=submissions)
@example(asked=JobRequest(USER, tres_per_node="gres:mig:auto", comment="migbatch: items=1e12 deadline=1s model=vgg19"))
@example(asked=JobRequest(USER, tres_per_node="gres:mig:2g.20gb", comment="m" * 995))
@example(asked=JobRequest(USER, partition="gpu", tres_per_job="gres:gpu:2", num_tasks=2))
@example(asked=JobRequest(USER, partition="gpu", tres_per_job="gres:gpu:2", comment="migbatch: mem=20gib"))
@example(asked=JobRequest(USER, partition="gpu", tres_per_job="gres:gpu:2", comment="migbatch: mem=200gib max=3g.40gb"))
@example(asked=JobRequest(USER, partition="gpu", tres_per_job="gres/gpu:3g.39gb:04", num_tasks=3, min_nodes=1))
@example(asked=JobRequest(USER, partition="gpu", tres_per_job="gres/gpu:16", num_tasks=16))
@example(asked=JobRequest(USER, partition="gpu", tres_per_task="gres/gpu=4", num_tasks=16))
@example(asked=JobRequest(USER, partition="gpu", tres_per_task="gres/gpu:1", num_tasks=65))
@example(asked=JobRequest(USER, tres_per_socket="gres:mig", tres_per_task="gres:gres/gpu,gres:gpu"))
def test_shim_and_service_answer_a_submission_alike(shim: Shim, chooser: Chooser, asked: JobRequest) -> None:
    agree(asked, shim, chooser)


@settings(max_examples=examples(1000), deadline=None)
@given(asked=changes)
def test_shim_and_service_answer_a_job_update_alike(shim: Shim, chooser: Chooser, asked: JobRequest) -> None:
    if asked.uid:
        agree(asked, shim, chooser)
    else:  # root's changes are not sent to the service
        answer = shim(asked)
        assert shim.errors == []
        assert isinstance(answer, Pass | Refuse) or set(answer.changes) == {"comment"}


TEXTS = (
    "a.b-c/d:e 1 16 65537 512tok 4k 224px 1.5 0.9 200ms 2h 18gb 8b 1e6 infer train serve 1g.10gb 1g.10gb+me usr1 uuid "
    "oom vllm trtllm TensorRT-LLM llama.cpp bf16 tf32 awq fp8 lora adamw adamw_torch paged_adamw_8bit on off 2 0.0005 "
    "layers:32+hidden:64 -1 x="
)
"""At least one valid value of each hint, separated by blanks; each is tried with every hint."""


@pytest.mark.parametrize("key", FORMS)
def test_shim_and_service_read_each_hint_alike(shim: Shim, chooser: Chooser, key: str) -> None:
    asked = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:auto", batch=1)
    answers = [agree(replace(asked, comment=f"migbatch: {key}={text}"), shim, chooser) for text in TEXTS.split()]
    assert not all(isinstance(answer, Refuse) and f"invalid hint {key}=" in answer.sentence for answer in answers)


def test_shim_and_service_read_hints_in_extra_alike(tmp_path, table, chooser: Chooser) -> None:
    policy = SubmitPolicy(hints_in_extra=True)
    with Shim(tmp_path, table=str(table), policy=policy) as shim:
        for extra in ("migbatch: mem=30gib", "migbatch: mem=x", "node=7", None):
            asked = JobRequest(USER, tres_per_node="gres/mig:auto", comment="migbatch: role=train", extra=extra)
            agree(asked, shim, chooser, policy)


@pytest.mark.parametrize(("more", "refused"), [("batch=1024", False), ("batch=1024 max=1g.10gb", True), ("", False)])
def test_shim_and_service_refuse_many_times_the_largest_slice_alike(
    shim: Shim, chooser: Chooser, more: str, *, refused: bool
) -> None:
    hint = f"migbatch: model=resnet50 role=train {more}"
    local = agree(JobRequest(USER, partition="gpu", tres_per_node="gres/mig:auto", comment=hint), shim, chooser)
    assert isinstance(local, Refuse if refused else Accept)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("convnext_base.fb_in22k_ft_in1k_384", "384px"),
        ("timm/convnext_base.e600_r320_in1k", "320px"),
        ("timm/convnext_base.fb_in22k_ft_in1k", "224px"),
        ("resnet50.a1_in1k_160.pt", "224px"),
        ("resnet50.x999", "224px"),
        ("bert-large.ft_384", "128tok"),
        ("vit_base_patch16_384.augreg_in21k_ft_in1k", "384px"),
        ("google/vit-large-patch16-384", "384px"),
        ("vit_large_patch16_224", "224px"),
        ("resnet-101", "224px"),
    ],
)
def test_images_are_as_large_as_the_tag_of_the_model_states(
    shim: Shim, chooser: Chooser, model: str, size: str
) -> None:
    asked = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:auto")
    tagged = replace(asked, comment=f"migbatch: model={model} batch=256")
    answer = agree(tagged, shim, chooser)
    stated = agree(replace(tagged, comment=f"{tagged.comment} input={size}"), shim, chooser)
    assert isinstance(answer, Accept) and isinstance(stated, Accept)
    assert answer.changes["tres_per_node"] == stated.changes["tres_per_node"]
    assert answer.message == stated.message


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["gpu", "mixed"])
def test_shim_and_service_choose_the_same_slice_and_batch(shim: Shim, chooser: Chooser, partition: str) -> None:
    """For all models and inputs, with limits and services in turn; both also give the job the same batch."""
    limits = itertools.cycle(
        f"slo={slo}{more}"
        for slo in ("2ms", "9ms", "30ms", "100ms", "1s")
        for more in ("", " items=1m deadline=2h", " role=serve rate=50", " role=serve", " mem=12gib", " max=3g.40gb")
    )
    chosen = 0
    for model, grid in chooser.grids.items():
        for size in grid.inputs[:: max(len(grid.inputs) // examples(8), 1)]:
            hint = f"migbatch: model={model} input={size}{grid.unit} {next(limits)}"
            asked = JobRequest(USER, partition=partition, tres_per_node="gres/mig:auto", comment=hint, batch=1)
            local = agree(asked, shim, chooser)
            assert isinstance(local, Accept)
            service = rewrite(asked, SITE, chooser, SubmitPolicy())
            assert isinstance(service, Accept) and service.decision is not None
            if service.decision.reason == "batch_chosen":
                chosen += 1
                assert f"batches of {service.advice['batch']} (MIGBATCH_BATCH)" in local.message
                batch = str(service.advice["batch"])
                written = f"MIGBATCH_BATCH={batch} MIGBATCH_COPIES=1"
                advised = {"MIGBATCH_BATCH": batch, "MIGBATCH_COPIES": "1", "MIGBATCH_ADVISED": written}
                assert shim.environment | advised == shim.environment
            else:
                assert not shim.environment.keys() & {"MIGBATCH_BATCH", "MIGBATCH_COPIES", "MIGBATCH_ADVISED"}
    assert chosen > 10


def test_job_submitted_from_a_job_gets_its_own_batch(shim: Shim) -> None:
    """sbatch passes on the environment of the job that runs it, with the batch for that job's slice."""

    def environment(hints: str, **inherited: str) -> dict[str, str]:
        asked = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:auto", comment=f"migbatch: {hints}", batch=1)
        assert isinstance(shim(asked, **{name.lower(): value for name, value in inherited.items()}), Accept)
        return shim.environment

    parent, alone = environment("model=bert-large slo=1s"), environment("model=vgg19 slo=20ms")
    assert parent["MIGBATCH_BATCH"] != alone["MIGBATCH_BATCH"]
    assert environment("model=vgg19 slo=20ms", **parent) == alone
    without = environment("mem=8gb", **parent)
    assert set(without) == set(parent) and not any(without.values())
    assert environment("model=vgg19 slo=20ms", **without) == alone
    mine = environment("model=vgg19 slo=20ms", **{**parent, "MIGBATCH_BATCH": "7"})
    assert mine == {**alone, "MIGBATCH_BATCH": "7", "MIGBATCH_ADVISED": "MIGBATCH_COPIES=1"}


@pytest.mark.parametrize("partition", ["gpu", "mixed"])
def test_compiled_table_gives_the_answers_of_the_service(shim: Shim, chooser: Chooser, partition: str) -> None:
    """A sample of the buckets of all models, roles, batches and inputs, with the objectives in turn."""
    objectives = itertools.cycle(OBJECTIVES)
    buckets = [
        f"migbatch: model={model} role={role} batch={batch} input={size}{grid.unit}"
        for model, grid in chooser.grids.items()
        for role, batch, size in itertools.product(("infer", "train"), grid.batches, grid.inputs)
    ]
    sample_size = examples(3000)
    sample = buckets[:: max(len(buckets) // sample_size, 1)]
    assert len(sample) >= sample_size
    for bucket in sample:
        asked = JobRequest(USER, partition=partition, tres_per_node="gres/mig:auto", comment=bucket + next(objectives))
        agree(asked, shim, chooser)
