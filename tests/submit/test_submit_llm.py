"""Language models in the submit filter: neither the service nor the shim alone grants a slice below the need."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from slurm_migbatch.daemon.facts import SitePredictions
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, JobRequest, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.workload.catalog import SiteCatalog
from slurm_migbatch.workload.hints import parse
from slurm_migbatch.workload.loans import loan_hints
from tests.support.gpu_kinds import SITE, P
from tests.support.llm_requests import LADDER, SIZES, TABLE, Asked
from tests.support.lua_shim import Shim
from tests.support.submit_agreement import agree

USER = 1001


def request(hints: str, gres: str = "gres/mig:auto") -> JobRequest:
    return JobRequest(USER, partition="gpu", tres_per_node=gres, comment=f"migbatch: {hints}")


def ask(chooser: Chooser, hints: str, gres: str = "gres/mig:auto") -> Accept | Refuse:
    answer = rewrite(request(hints, gres), SITE, chooser, SubmitPolicy(), decision_id="abc")
    assert isinstance(answer, Accept | Refuse)
    return answer


def granted(answer: Accept | Refuse) -> str:
    assert isinstance(answer, Accept), answer.sentence
    return answer.changes["tres_per_node"].split(":")[1]


@pytest.mark.parametrize("asked", TABLE, ids=lambda asked: asked.hints.split(" ")[0])
def test_request_gets_a_slice_that_meets_its_need_or_is_refused(chooser: Chooser, asked: Asked) -> None:
    answer = ask(chooser, asked.hints)
    if asked.refused:
        assert isinstance(answer, Refuse), answer.message
        assert asked.refused in answer.sentence
        assert asked.params == 0 or asked.smallest is None, "the expert's estimate fits on a slice"
        return
    size = SIZES[granted(answer)]
    assert size >= asked.need_gib, f"{asked.need_gib:.1f} GiB needed: {answer.message}"
    if asked.named:
        assert LADDER.index(size) <= LADDER.index(asked.smallest) + 1, f"{asked.need_gib:.1f} GiB: {answer.message}"


def test_most_requests_of_the_table_get_the_smallest_slice_that_fits(chooser: Chooser) -> None:
    assert len(TABLE) >= 60 and len({asked.hints for asked in TABLE}) == len(TABLE)
    held = [asked for asked in TABLE if not asked.refused]
    exact = [asked for asked in held if SIZES[granted(ask(chooser, asked.hints))] == asked.smallest]
    assert len(exact) >= 0.8 * len(held)


@pytest.mark.slow
@pytest.mark.parametrize("asked", TABLE, ids=lambda asked: asked.hints.split(" ")[0])
def test_shim_alone_grants_no_slice_below_the_need(shim: Shim, asked: Asked) -> None:
    answer = shim(request(asked.hints))
    if isinstance(answer, Accept):
        assert SIZES[granted(answer)] >= asked.need_gib
    else:
        assert isinstance(answer, Refuse) and "add mem=" in answer.sentence
    with_memory = shim(request(f"{asked.hints} mem=30gib"))
    assert granted(with_memory) == "3g.40gb"


def test_refused_generator_of_clips_is_not_advised_to_shorten_tokens(chooser: Chooser) -> None:
    answer = ask(chooser, "model=tencent/HunyuanVideo input=1344px")
    assert isinstance(answer, Refuse)
    assert "use input=1024px (7g.80gb), or input=512px (7g.80gb), or quantization=fp8 (7g.80gb)" in answer.sentence
    assert granted(ask(chooser, "model=tencent/HunyuanVideo")) == "7g.80gb", "it needs 74.2 of 79.2 GiB"
    answer = ask(chooser, "model=Wan-AI/Wan2.2-T2V-A14B-Diffusers max=4g.40gb")
    assert isinstance(answer, Refuse) and "quantization=awq (3g.40gb)" in answer.sentence
    assert "max_model_len" not in answer.sentence


def test_named_slice_is_granted_with_a_warning_if_it_is_too_small(chooser: Chooser) -> None:
    tight = ask(chooser, "model=llama-3.1-8b max_model_len=8192 max_num_seqs=16", "gres/mig:1g.10gb")
    assert granted(tight) == "1g.10gb" and "is predicted to need 35.3 of its 9.75 GiB" in tight.message
    assert granted(ask(chooser, "model=mixtrall engine=vllm", "gres/mig:1g.10gb")) == "1g.10gb"


@pytest.mark.parametrize(
    ("hints", "warning"),
    [
        ("model=llama-3.1-70b mem=10gb", "mem=9537 MiB as requested, but llama-3.1-70b/bf16 needs 131 GiB for its"),
        ("params=70b mem=8gb", "mem=7630 MiB as requested, but this model/bf16 needs 130 GiB for its weights"),
        ("model=llama-3.1-8b method=lora mem=9gb", "mem=8584 MiB as requested, but llama-3.1-8b/bf16 needs 15 GiB"),
        ("model=llama-3.1-70b-awq mem=40gb", ""),
        ("model=llama-3.1-8b mem=18gb", ""),
        ("model=our-own-model engine=vllm mem=1gb", ""),
    ],
)
@pytest.mark.parametrize("gres", ["gres/mig:auto", "gres/mig:3g.40gb"])
def test_memory_hint_below_the_weights_is_granted_with_a_warning(
    chooser: Chooser, hints: str, warning: str, gres: str
) -> None:
    answer = ask(chooser, hints, gres)
    assert isinstance(answer, Accept), answer.sentence
    assert warning in answer.message and ("weights alone" in answer.message) == bool(warning)


def test_model_of_unknown_size_is_not_taken_for_a_language_model(chooser: Chooser) -> None:
    answer = ask(chooser, "model=facebook/unknown-detector batch=16")
    assert isinstance(answer, Refuse)
    assert "add mem=, or params= if it is a language model (for example params=8b)" in answer.sentence


def test_model_without_tokens_accepts_a_precision_but_no_token_hints(chooser: Chooser) -> None:
    def message(hints: str) -> str:
        answer = ask(chooser, hints)
        assert isinstance(answer, Accept)
        return answer.message

    for words in ("dtype=fp16", "quantization=int8 engine=trtllm", "role=train optimizer=sgd checkpointing=on"):
        kind = "role=train" if "train" in words else ""
        assert message(f"model=resnet50 batch=32 {words}") == message(f"model=resnet50 batch=32 {kind}")
    refused = ask(chooser, "model=resnet50 max_num_seqs=32 tpot=40ms dtype=fp16")
    assert isinstance(refused, Refuse) and refused.code == "hint_tokens"
    assert "resnet50 is no language model" in refused.sentence
    assert "leave out max_num_seqs=, tpot= (use batch=" in refused.sentence
    assert isinstance(ask(chooser, "model=resnet50 batch=32 tpot=40ms mem=8gb"), Accept), (
        "the request states the memory"
    )
    assert isinstance(ask(chooser, "model=bert-large batch=32 dtype=fp16"), Accept)


@pytest.mark.parametrize("more", ["dtype=fp16 slo=50ms", "tpot=40ms slo=50ms", "engine=vllm role=serve slo=1s"])
def test_shim_also_chooses_the_batch_of_a_model_without_tokens(shim: Shim, chooser: Chooser, more: str) -> None:
    answer = agree(replace(request(f"model=resnet50 {more} mem=8gib"), batch=1), shim, chooser)
    assert isinstance(answer, Accept) and "MIGBATCH_BATCH" in answer.message


@pytest.mark.parametrize(
    ("usual", "others"),
    [
        ("optimizer=adamw", ["adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"]),
        ("optimizer=adamw_8bit", ["adamw_bnb_8bit", "paged_adamw_8bit", "adamw8bit"]),
        ("engine=trtllm", ["tensorrt-llm", "tensorrt_llm"]),
        ("engine=llamacpp", ["llama.cpp"]),
    ],
)
def test_words_of_frameworks_count_as_the_usual_ones(
    usual: str, others: list[str], shim: Shim, chooser: Chooser
) -> None:
    key = usual.partition("=")[0]
    rest = "role=train method=full" if key == "optimizer" else "max_model_len=4096"
    known = ask(chooser, f"model=qwen2.5-1.5b {usual} {rest}")
    assert isinstance(known, Accept)
    for other in others:
        asked = ask(chooser, f"model=qwen2.5-1.5b {key}={other} {rest}")
        assert isinstance(asked, Accept) and asked.message == known.message
        assert isinstance(agree(request(f"mem=8gib {key}={other}"), shim, chooser), Accept)


def test_alternatives_proposed_by_a_refusal_are_granted(chooser: Chooser) -> None:
    base = "model=mixtral-8x7b max_model_len=4096 max_num_seqs=8"
    refused = ask(chooser, base)
    assert isinstance(refused, Refuse) and refused.code == "model_nowhere"
    assert "quantization=awq (3g.40gb)" in refused.sentence
    assert granted(ask(chooser, f"{base} quantization=awq")) == "3g.40gb"
    tuned = ask(chooser, "model=llama-3.1-8b method=full seq=2048 micro_batch=4")
    assert isinstance(tuned, Refuse) and "method=qlora checkpointing=on (3g.40gb)" in tuned.sentence
    again = "model=llama-3.1-8b method=qlora checkpointing=on seq=2048 micro_batch=4"
    assert granted(ask(chooser, again)) == "3g.40gb"
    capped = ask(chooser, "model=llama-3.1-8b max_model_len=8192 max_num_seqs=16 max=2g.20gb")
    assert isinstance(capped, Refuse) and "a larger max= (3g.40gb)" in capped.sentence


def test_mem_hint_replaces_the_calculated_memory(chooser: Chooser) -> None:
    stated = ask(chooser, "model=llama-3.1-8b mem=20gb")
    assert granted(stated) == "1g.20gb" and "18.6 of 19.6 GiB, from mem=" in stated.message
    curve = ask(chooser, "model=bert-large role=train batch=64 input=512 mem=20gb")
    assert "18.6 of 19.6 GiB" in curve.message


def test_tpot_ttft_and_rate_hints_choose_a_slice_that_is_fast_enough(chooser: Chooser) -> None:
    base = "model=llama-3.1-8b max_model_len=4096 max_num_seqs=4"
    assert granted(ask(chooser, base)) == "3g.40gb"
    assert granted(ask(chooser, f"{base} tpot=60ms")) == "3g.40gb"
    assert granted(ask(chooser, f"{base} tpot=11ms")) == "7g.80gb"
    assert granted(ask(chooser, f"{base} ttft=400ms")) == "7g.80gb"
    missed = ask(chooser, f"{base} tpot=1ms")
    assert granted(missed) == "7g.80gb" and "fast enough" in missed.message
    few, many = ask(chooser, f"{base} rate=0.1"), ask(chooser, f"{base} rate=1000")
    assert granted(few) == "3g.40gb" and "fast enough" in many.message


def test_the_rate_of_a_service_is_that_of_all_its_instances(chooser: Chooser) -> None:
    base = "model=llama-3.1-8b max_model_len=4096 max_num_seqs=4 role=serve tpot=60ms"
    assert granted(ask(chooser, f"{base} rate=1000")) == granted(ask(chooser, base)) == "3g.40gb"
    curve = "model=bert-large batch=8 slo=200ms"
    served = ask(chooser, f"{curve} role=serve rate=100000")
    assert granted(served) == granted(ask(chooser, curve)) and "bert-large/infer/b8" in served.message


def test_rate_of_one_instance_meets_the_latency_limit_at_the_advised_batch(chooser: Chooser) -> None:
    def carried(text: str) -> dict[str, float]:
        rates = SitePredictions(chooser, SITE).rates(parse(f"migbatch: role=serve {text}"), "gpu")
        return {profile.name: rate for profile, rate in rates.items()}

    free, tight = carried("model=bert-large rate=5"), carried("model=bert-large rate=5 slo=100ms")
    assert set(tight) <= set(free) and tight
    assert all(0 < tight[name] <= free[name] for name in tight)
    assert carried("model=bert-large batch=64 slo=1ms") == {} == carried("model=never-heard-of rate=2")
    engine = "model=llama-3.1-8b max_model_len=4096 max_num_seqs=4"
    assert set(carried(f"{engine} tpot=11ms")) < set(carried(f"{engine} tpot=60ms"))
    assert carried(f"{engine} rate=1000") == carried(engine)


def test_answer_states_what_was_assumed(chooser: Chooser) -> None:
    assert "Assumed: max_num_seqs=8 max_model_len=8192" in ask(chooser, "model=llama-3.1-8b").message
    assert "Assumed: max_model_len=1280" in ask(chooser, "model=llama-3.1-8b batch=128").message
    assert "max_model_len=131072" in ask(chooser, "model=llama-3.1-8b engine=vllm").message
    assert "max_model_len=1280 given to the engine" in ask(
        chooser, "model=llama-3.1-8b engine=vllm max_num_seqs=4 input=1k output=256"
    ).message  # fmt: skip
    assert "taken for llama-3.1-8b" in ask(chooser, "model=lama-3.1-8b").message
    sized = ask(chooser, "model=acme-7b").message
    assert "only the size of acme-7b is known" in sized and "add arch=" in sized
    assert "add arch=" not in ask(chooser, "model=llama-3.1-8b").message
    assert "add arch=" not in ask(chooser, "model=acme-7b method=qlora").message


@pytest.mark.parametrize(
    ("hints", "code"),
    [
        ("model=llama-3.1-8b quantization=magic", "model_quantization"),
        ("model=llama-3.1-8b kv_cache_dtype=magic", "model_cache"),
        ("model=x arch=layers:2+hidden:64+heads:4+wings:2", "model_arch"),
        ("model=x arch=layers:999999+hidden:64+heads:4", "model_arch"),
        ("max_model_len=4096", "model_none"),
        ("rate=5", "model_none"),
        ("model=acme/chat max_model_len=4096", "model_size"),
        ("model=llama-3.1-8b input=224px", "input_unit"),
        ("model=/data/llama-3.1-8b", "model_path"),
        ("model=granite5:small-h", "model_size"),
        ("model=minicpm-v-3 batch=4", "model_size"),
    ],
)
def test_unusable_model_hints_are_refused(chooser: Chooser, hints: str, code: str) -> None:
    answer = ask(chooser, hints)
    assert isinstance(answer, Refuse) and answer.code == code


@pytest.mark.parametrize("role", ["", "role=infer", "role=serve"])
@pytest.mark.parametrize("more", ["", "mem=70gb", "slo=400ms mem=15gb"])
def test_method_says_that_a_model_of_images_is_trained(chooser: Chooser, shim: Shim, role: str, more: str) -> None:
    """A vision transformer with adapters got the slice for inference, too small by far."""
    batch = "" if "slo" in more else "batch=256"
    words = f"model=vit-b-16 {batch} {role} {more}"
    tuned = ask(chooser, f"{words} method=lora")
    kind = "infer" if role else "train"
    assert isinstance(tuned, Accept) and f"vit-b-16/{kind}/" in tuned.message
    other = ask(chooser, f"{words} {'' if role else 'role=train'}")
    ignored = f"; these hints are not applied, because the job has {role}: method=" if role else ""
    assert isinstance(other, Accept) and tuned.message == other.message + ignored
    agree(request(f"{words} method=lora"), shim, chooser)


@pytest.mark.parametrize("hint", ["optimizer=sgd", "checkpointing=on", "checkpointing=off", "lora_rank=16"])
@pytest.mark.parametrize("more", ["", "mem=70gb"])
def test_hints_about_training_say_that_a_model_is_trained(chooser: Chooser, shim: Shim, hint: str, more: str) -> None:
    """Without a method too: the job got the slice for inference."""
    words = f"model=resnet50 batch=256 {hint} {more}"
    tuned = ask(chooser, words)
    assert isinstance(tuned, Accept) and "resnet50/train/b256" in tuned.message
    agree(request(words), shim, chooser)
    served = ask(chooser, f"{words} role=infer")
    assert isinstance(served, Accept) and "resnet50/infer/b256" in served.message
    agree(request(f"{words} role=infer"), shim, chooser)


def test_rank_of_adapters_that_are_served_does_not_say_so(chooser: Chooser, shim: Shim) -> None:
    words = "model=vit-b-16 batch=8 engine=vllm lora_rank=16"
    assert "vit-b-16/infer/b8" in ask(chooser, words).message
    agree(request(words), shim, chooser)


@pytest.mark.parametrize("model", ["resnet50", "llama-3.2-1b"])
@pytest.mark.parametrize("role", ["infer", "serve"])
def test_hints_about_training_are_named_where_the_job_does_not_train(
    chooser: Chooser, shim: Shim, model: str, role: str
) -> None:
    """They had no effect, or with a language model the role had none."""
    words = f"model={model} role={role}"
    trained = f"{words} method=lora optimizer=sgd checkpointing=on{' seq=2k micro_batch=4' if 'llama' in model else ''}"
    served, answer = ask(chooser, words), ask(chooser, trained)
    assert isinstance(served, Accept) and isinstance(answer, Accept)
    assert answer.changes["tres_per_node"] == served.changes["tres_per_node"]
    names = re.findall(r"(\w+=)", trained.removeprefix(words))
    note = f"these hints are not applied, because the job has role={role}: {', '.join(names)}"
    assert answer.message == f"{served.message}; {note}"
    agree(request(trained), shim, chooser)
    local = shim(request(f"{trained} mem=9gb"))
    assert isinstance(local, Accept) and note in local.message
    named = ask(chooser, trained, "gres/mig:3g.40gb")
    assert isinstance(named, Accept) and "not applied" not in named.message


@pytest.mark.parametrize("words", ["role=train", "method=lora"])
def test_hints_about_serving_are_named_where_the_job_trains(chooser: Chooser, shim: Shim, words: str) -> None:
    served = f"model=llama-3.2-1b {words} max_num_seqs=64 output=256 kv_cache_dtype=fp8 engine=transformers"
    note = "these hints are not applied, because the job trains: max_num_seqs=, output=, kv_cache_dtype="
    answer, local = ask(chooser, served), shim(request(f"{served} mem=9gb"))
    assert isinstance(answer, Accept) and answer.message.endswith(note)
    assert isinstance(local, Accept) and local.message.endswith(note)


@pytest.mark.parametrize("hint", ["optimizer=paged_adamw_8bit", "checkpointing=on", "micro_batch=2"])
def test_language_model_with_hints_about_training_is_trained(chooser: Chooser, hint: str) -> None:
    said, stated = (ask(chooser, f"model=llama-3.2-1b {hint} {role}") for role in ("", "role=train"))
    assert isinstance(said, Accept) and isinstance(stated, Accept)
    assert said.message == stated.message and "/full/" in said.message


def test_bert_means_bert_base_and_a_given_batch_is_kept(chooser: Chooser) -> None:
    assert ask(chooser, "model=bert batch=8").decision.bucket.startswith("bert-base/")
    assert ask(chooser, "model=bert-large batch=30", "gres/mig:3g.40gb").advice["batch"] == 30


LENDS = SiteCatalog({"train": replace(SITE.partitions["gpu"], name="train", lends=True)})


def test_elastic_training_job_waits_for_slices_that_hold_its_model(chooser: Chooser) -> None:
    def lent(hints: str) -> Accept | Refuse:
        asked = replace(request(hints), partition="train", batch=1)
        answer = rewrite(asked, LENDS, chooser, SubmitPolicy(), decision_id="abc")
        assert isinstance(answer, Accept | Refuse)
        return answer

    qlora = lent("role=train model=llama-3.1-8b method=qlora seq=2048 micro_batch=4")
    assert isinstance(qlora, Accept) and "between 3g.40gb and 7g.80gb" in qlora.message
    full = lent("role=train model=llama-3.1-8b")
    assert isinstance(full, Refuse) and full.code == "model_nowhere"
    speeds = SitePredictions(chooser, LENDS).training_speeds
    loan = loan_hints(qlora.changes["comment"], "train", "mig:loan:1", {"train"})
    assert loan is not None and set(speeds(loan, "train")) == {P("3g.40gb"), P("4g.40gb"), P("7g.80gb")}
    found = [speeds(loan, "train")[P(name)] for name in ("3g.40gb", "4g.40gb", "7g.80gb")]
    assert found == sorted(found) and found[-1] == 1.0
