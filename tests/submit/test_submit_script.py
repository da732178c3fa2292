"""What a batch script says about a job: a digest without what changes from run to run, and the engine that it names."""

import pytest

from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.request import JobRequest
from slurm_migbatch.submit.script import MOST_BYTES, condense, digest, engine, fold, recurring_key

SCRIPT = b"#!/bin/bash\n#SBATCH --gres=mig:auto\npython train.py --epoch 17 --day 2026-01-03 --out run_17\n"


@pytest.mark.parametrize(
    "other",
    [
        SCRIPT.replace(b"17", b"18"),
        SCRIPT.replace(b"2026-01-03", b"2027/11/30"),
        SCRIPT.replace(b"mig:auto", b"mig:3g.40gb:1"),
        SCRIPT.replace(b"\n", b"\r\n"),
        SCRIPT + b"\n\n# done\n",
    ],
)
def test_digest_ignores_numbers_dates_options_and_comments(other):
    assert digest(other) == digest(SCRIPT)


def test_digest_ignores_names_of_days_and_months():
    assert digest(b"run --until 'Mon Jan 5'") == digest(b"run --until 'Thursday March 12'")


@pytest.mark.parametrize("other", [SCRIPT.replace(b"train", b"infer"), SCRIPT.replace(b"--out", b"--in"), b""])
def test_digest_depends_on_all_other_text(other):
    assert digest(other) != digest(SCRIPT)


def test_digest_covers_only_the_beginning_of_a_script():
    assert digest(b"x" * MOST_BYTES + b"a") == digest(b"x" * MOST_BYTES + b"b")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (b"vllm serve meta-llama/Llama-3.1-8B", "vllm"),
        (b"python -m vllm.entrypoints.openai.api_server", "vllm"),
        (b"apptainer run vllm-openai_v0.11.sif --model Qwen/Qwen3-8B", "vllm"),
        (b"podman run ghcr/huggingface/text-generation-inference:3.3 --model-id x", "tgi"),
        (b"trtllm-serve Qwen/Qwen3-8B", "trtllm"),
        (b"lmdeploy serve api_server internlm/internlm3-8b-instruct", "lmdeploy"),
        (b"lorax-launcher --model-id x", "lorax"),
        (b"python -m lightllm.server.api_server", "lightllm"),
        (b"aphrodite run x", "aphrodite"),
        (b"mlc_llm serve x", "mlc_llm"),
        (b"python3 train_jax.py", "jax"),
        (b"XLA_PYTHON_CLIENT_PREALLOCATE=false python3 train_jax.py", ""),
        (b"python -c 'import tensorflow as tf'", "tensorflow"),
        (b"export TF_FORCE_GPU_ALLOW_GROWTH=true\npython -c 'import tensorflow as tf'", ""),
        (b"# like vllm\npython train.py", ""),
        (b"ajax vllmx", ""),
        (b"python train.py", ""),
    ],
)
def test_engine_is_recognized_by_its_name(script, found):
    assert engine(script) == found


def test_recurring_key_depends_on_user_account_partition_name_and_script():
    base = (1000, "acc", "gpu", "train-17", "d1")
    assert recurring_key(*base) == recurring_key(1000, "acc", "gpu", "train-4", "d1")
    for place, other in enumerate((1001, "other", "big", "infer-17", "d2")):
        assert recurring_key(*base[:place], other, *base[place + 1 :]) != recurring_key(*base)
    assert recurring_key(1, "ab", "c", "n", "d") != recurring_key(1, "a", "bc", "n", "d")
    assert fold("run_17_of_2026-01-03") == fold("run_5_of_2025-12-31")


def test_a_request_carries_the_digest_in_place_of_the_script():
    fields = {"kind": "submit", "uid": "1000", "script": SCRIPT.decode(), "name": "t"}
    fields_sent = protocol.decode(condense(protocol.encode(fields)))
    assert fields_sent == {"kind": "submit", "uid": "1000", "digest": digest(SCRIPT), "name": "t"}
    fields_sent = protocol.decode(condense(protocol.encode({**fields, "script": "vllm serve x"})))
    assert fields_sent["engine"] == "vllm"
    bare = protocol.encode({"kind": "submit", "uid": "1000"})
    assert condense(bare) == bare


@pytest.mark.parametrize(
    "hostile",
    ["#" * MOST_BYTES, " " * MOST_BYTES, "\t" * MOST_BYTES + "x", "1:" * 5000, "Mon" * 3000, "\xff\x00" * 4000],
)
def test_any_script_gives_a_short_and_valid_request(hostile):
    condensed = condense(protocol.encode({"kind": "submit", "uid": "1000", "script": hostile}))
    assert len(condensed) < 100
    assert JobRequest.from_fields(protocol.decode(condensed)).digest == digest(hostile.encode("latin-1"))
