"""`migbatch model describe`: the hints of a model, by its folder or its name, without a configuration of the site."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_migbatch.cli.model import describe
from slurm_migbatch.predict.llm.workload import workload_of
from slurm_migbatch.workload.hints import parse

CONFIG = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip


def described(*arguments: str) -> Result:
    return CliRunner().invoke(describe, arguments, standalone_mode=False)


def test_model_folder_or_its_config_file_gives_the_hints(tmp_path: Path) -> None:
    folder = tmp_path / "Our_Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for path in (str(folder), str(folder / "config.json")):
        found = json.loads(described(path, "--json").output)
        assert found["model"] == "our_model" and found["parameters"] == pytest.approx(494_032_768, rel=1e-4)
        asked = workload_of(parse("migbatch: " + found["hints"]))
        assert asked is not None and asked.architecture.parameters == found["parameters"]


def test_public_model_name_gives_the_hints() -> None:
    found = json.loads(described("Qwen/Qwen2.5-7B-Instruct-AWQ", "--json").output)
    assert found["parameters"] == 7_615_616_512 and found["kv_cache_bytes_a_token"] == 57344
    assert found["hints"] == "model=qwen2.5-7b quantization=awq"
    assert "params=7700m" in described("acme-7b").output
    # without what the decoder keeps of the sound, which does not grow
    assert json.loads(described("whisper-large-v3", "--json").output)["kv_cache_bytes_a_token"] == 32 * 2 * 1280 * 2


@pytest.mark.parametrize(
    "name",
    [
        "Systran/faster-whisper-large-v2",
        "meta-llama/Llama-3.1-8B-float32",
        "microsoft/Phi-3-mini-128k-instruct-AWQ",
        "HuggingFaceM4/Idefics3-8B-Llama3",
        "Qwen/Qwen2.5-7B-Instruct-1M",
    ],
)
def test_hints_of_a_public_name_mean_what_the_name_means(name: str) -> None:
    found = json.loads(described(name, "--json").output)
    asked, named = (workload_of(parse(f"migbatch: {hints}")) for hints in (found["hints"], f"model={name}"))
    assert asked is not None and named is not None
    assert (asked.architecture, asked.precision) == (named.architecture, named.precision)


def test_unknown_model_name_is_an_error_with_a_suggestion() -> None:
    assert "did you mean mixtral" in str(described("mixtrall").exception)
    assert "neither a directory" in str(described("something-else-entirely").exception)


def test_folder_without_config_json_is_an_error(tmp_path: Path) -> None:
    assert "config.json" in str(described(str(tmp_path)).exception)
