"""Hints that are nearly right are answered with a sentence, by the service and by the shim alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.request import Accept, JobRequest, Refuse
from slurm_migbatch.workload.hints import FORMS
from slurm_migbatch.workload.nearmiss import nearest
from tests.support.examples import examples
from tests.support.lua_shim import Shim
from tests.support.submit_agreement import agree, words

USER = 1001


def ask(shim: Shim, chooser: Chooser, comment: str | None, gres: str = "gres/mig:auto", extra: str | None = None):
    return agree(JobRequest(USER, partition="gpu", tres_per_node=gres, comment=comment, extra=extra), shim, chooser)


@pytest.mark.parametrize(
    ("comment", "shown"),
    [
        ("migbatch model=resnet50", "model=resnet50"),
        ("Migbatch: model=resnet50", "model=resnet50"),
        ("MIGBATCH:mem=40gb", "mem=40gb"),
        (" migbatch: batch=8", "batch=8"),
        ("project ABC; migbatch: mem=40gb", "mem=40gb"),
        ('"migbatch: mem=40gb"', "mem=40gb"),
        ("'migbatch: batch=8 mem=40gb'", "batch=8"),
        ("project=ABC,migbatch:Model=llama3:8b", "model=llama3:8b"),
    ],
)
def test_hints_with_a_wrong_prefix_are_refused_with_the_right_form(
    shim: Shim, chooser: Chooser, comment: str, shown: str
) -> None:
    for gres in ("gres/mig:auto", "gres/mig:1g.10gb"):
        answer = ask(shim, chooser, comment, gres)
        assert isinstance(answer, Refuse) and f"write --comment='migbatch: {shown}'" in answer.sentence


def test_text_that_may_be_meant_as_a_hint_is_mentioned(shim: Shim, chooser: Chooser) -> None:
    answer = ask(shim, chooser, "run 7 of model=resnet50")
    assert isinstance(answer, Accept) and "'model=resnet50' in the comment is not read" in answer.message
    answer = ask(shim, chooser, None, extra="migbatch: model=resnet50")
    assert isinstance(answer, Accept) and "hints in --extra are not read here" in answer.message
    for comment in ("run 7", "made with migbatch", "colour=red", "model=", "a=b=c"):
        answer = ask(shim, chooser, comment)
        assert isinstance(answer, Accept) and "read" not in answer.message
    assert ask(shim, chooser, "model=resnet50", "gres/mig:1g.10gb").message == ""  # the profile is named


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("modle", "model"),
        ("Model", "model"),
        ("bacth", "batch"),
        ("batchsize", ""),
        ("batch_size", "batch"),
        ("mode", "role"),
        ("imgsz", "input"),
        ("memory", "mem"),
        ("context_length", "max_model_len"),
        ("mem_fraction_static", "gpu_memory_utilization"),
        ("gradient_checkpointing", "checkpointing"),
        ("lora_r", "lora_rank"),
        ("deadine", "deadline"),
        ("max_modellen", "max_model_len"),
        ("sol", "slo"),
        ("colour", ""),
        ("x" * 400, ""),
    ],
)
def test_refusal_suggests_the_nearest_hint_key(shim: Shim, chooser: Chooser, key: str, meant: str) -> None:
    assert nearest(key, FORMS) == meant
    answer = ask(shim, chooser, f"migbatch: {key}=1")
    assert isinstance(answer, Refuse)
    assert (f"did you mean {meant}=?" in answer.sentence) == bool(meant)


@pytest.mark.parametrize("key", ["tensor_parallel_size", "tp_size", "pipeline_parallel_size", "gpus", "Nproc_Per_Node"])
def test_hints_about_several_devices_are_refused_with_the_reason(shim: Shim, chooser: Chooser, key: str) -> None:
    answer = ask(shim, chooser, f"migbatch: mem=8gb {key}=2")
    assert isinstance(answer, Refuse)
    assert f"'{key}'" in answer.sentence and "whole GPUs outside MIG" in answer.sentence


typed = st.builds(
    lambda key, at, char, how: key[:at] + char + key[at + how :],
    st.sampled_from(sorted(FORMS)),
    st.integers(0, 12),
    st.sampled_from(["", "x", "_", "M", "ba"]),
    st.integers(0, 2),
)
comments = st.lists(
    st.one_of(typed.map("{}=8".format), words("migbatch: Migbatch model=vgg19 ; , project=A a:b=c = : mem=1gb,x")),
    max_size=4,
)


@settings(max_examples=examples(600), deadline=None)
@given(parts=comments, between=st.sampled_from([" ", "; ", ","]), ours=st.booleans())
def test_service_and_shim_agree_on_nearly_right_hints(
    shim: Shim, chooser: Chooser, parts: list[str], between: str, ours: bool
) -> None:
    ask(shim, chooser, ("migbatch: " if ours else "") + between.join(parts))
