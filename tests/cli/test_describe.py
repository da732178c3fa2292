"""`migbatch model describe`: the hints of a model, by its folder or its name, without a configuration of the site."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_migbatch.cli.model import describe
from slurm_migbatch.predict.llm.workload import workload_of
from slurm_migbatch.workload.hints import parse
from tests.support import weight_files

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


def _pipeline(folder: Path, kind: str, millions: dict[str, int]) -> Path:
    """Write a pipeline of diffusers whose parts have as many parameters, and a copy of the first in 16 bits."""
    for part, count in millions.items():
        (folder / part).mkdir()
        weight_files.write(folder / part / "model.safetensors", {"a": ("F32", count * 10**6)})
    weight_files.write(folder / next(iter(millions)) / "model.fp16.safetensors", {"a": ("F16", 10**9)})
    (folder / "scheduler").mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    return folder


@pytest.mark.parametrize(
    ("kind", "millions", "model"),
    [
        ("StableDiffusionXLPipeline", {"unet": 2567, "text_encoder": 123, "text_encoder_2": 694, "vae": 84},
         "stable-diffusion-xl"),
        ("StableDiffusionImg2ImgPipeline", {"unet": 860, "text_encoder": 123, "vae": 84, "safety_checker": 304},
         "stable-diffusion-v1-5"),
        ("StableDiffusion3Pipeline", {"transformer": 2084, "text_encoder_3": 4762, "text_encoder": 817, "vae": 84},
         "stable-diffusion-3-medium"),
        ("StableDiffusion3Pipeline", {"transformer": 8057, "text_encoder_3": 4762, "text_encoder": 817, "vae": 84},
         "stable-diffusion-3.5-large"),
        ("WanPipeline", {"transformer": 14289, "text_encoder": 5681, "vae": 127}, "wan2.1-t2v-14b"),
        ("FluxPipeline", {"transformer": 11901, "text_encoder_2": 4762, "text_encoder": 123, "vae": 84}, "flux.1-dev"),
    ],
)  # fmt: skip
def test_pipeline_of_diffusers_gives_the_hints_of_the_public_one(
    tmp_path: Path, kind: str, millions: dict[str, int], model: str
) -> None:
    """With the parameters that the public repositories have in each part."""
    folder = _pipeline(tmp_path, kind, millions)
    assert described(str(folder), "--hints").output == f"model={model}\n"


@pytest.mark.parametrize(
    ("kind", "millions"),
    [("KandinskyPipeline", {"unet": 1000}), ("StableDiffusionXLPipeline", {"unet": 9000}), ("FluxPipeline", {})],
)
def test_pipeline_that_is_unknown_or_larger_than_the_public_one_is_refused(
    tmp_path: Path, kind: str, millions: dict[str, int]
) -> None:
    for part in millions:
        (tmp_path / part).mkdir()
        weight_files.write(tmp_path / part / "model.safetensors", {"a": ("BF16", millions[part] * 10**6)})
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    assert "pipeline of several models: use its public name" in str(described(str(tmp_path)).exception)


def test_adapter_gives_the_hints_of_its_base_by_name_or_by_folder(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    (base / "config.json").write_text(json.dumps(CONFIG))
    stated = adapter / "adapter_config.json"
    stated.write_text(json.dumps({"peft_type": "LORA", "r": 8, "base_model_name_or_path": str(base)}))
    assert described(str(adapter), "--hints").output == described(str(base), "--hints").output
    stated.write_text(json.dumps({"base_model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}))
    assert described(str(adapter), "--hints").output == "model=llama-3.1-8b\n"
    stated.write_text(json.dumps({"base_model_name_or_path": None}))
    assert "names no base model" in str(described(str(adapter)).exception)
    (adapter / "config.json").write_text(json.dumps(CONFIG))
    assert "model=adapter arch=" in described(str(adapter), "--hints").output, "merged into the model"


@pytest.mark.parametrize("added", [" mem=1gb role=train", "\n[mig:7g.80gb:1]", "\x1b[2J", "\u202e"])
def test_adapter_of_another_user_adds_no_hints_to_those_of_its_base(tmp_path: Path, added: str) -> None:
    base = json.dumps({"base_model_name_or_path": f"Phi-3-mini-128k-instruct{added}"})
    (tmp_path / "adapter_config.json").write_text(base)
    done = described(str(tmp_path), "--hints")
    assert done.output == "" and "neither a directory nor a known public model" in str(done.exception)


def test_model_in_the_cache_of_the_hub_is_described_by_its_newest_snapshot(tmp_path: Path) -> None:
    model = tmp_path / "models--acme--Our-Model"
    blob, revision = model / "blobs" / "0a1b", model / "snapshots" / "c0ffee"
    for folder in (blob.parent, revision):
        folder.mkdir(parents=True)
    blob.write_text(json.dumps(CONFIG))
    (revision / "config.json").symlink_to(blob)
    for path in (model, revision):
        assert "model=our-model arch=layers:24" in described(str(path), "--hints").output
