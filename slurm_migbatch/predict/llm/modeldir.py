"""Describe a model on disk by its `config.json` and its weight files.

No part of the model is run or loaded. The configuration is read up to a size limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.predict.llm import names
from slurm_migbatch.predict.llm.architecture import SEEN_MIB, TOWER
from slurm_migbatch.predict.llm.configuration import LIMITS
from slurm_migbatch.predict.llm.describe import Described, DescribeError, of_config, of_size
from slurm_migbatch.predict.llm.gguffile import GgufError, read, shards_of
from slurm_migbatch.predict.llm.memory import MIB, weights_mib
from slurm_migbatch.predict.llm.precision import GGUF, Precision, known, plain, quantized
from slurm_migbatch.predict.llm.weightfiles import held

MOST_BYTES: Final = 1 << 20
"""Size limit of a configuration, which has a few kilobytes."""
MODELOPT: Final = "hf_quant_config.json"
"""The file in which ModelOpt states its quantization, besides or instead of the configuration."""
SNAPSHOTS: Final = "snapshots"
"""The directory with the revisions of a model in the cache of Hugging Face's hub."""
ADAPTER: Final = "adapter_config.json"
"""The file in which peft names the model that an adapter is for."""
PIPELINE: Final = "model_index.json"
"""The file in which diffusers lists the parts of a pipeline."""
PIPELINES: Final[Mapping[str, tuple[str, ...]]] = {
    "StableDiffusionXL": ("ssd-1b", "stable-diffusion-xl"),
    "StableDiffusion3": ("stable-diffusion-3-medium", "stable-diffusion-3.5-medium", "stable-diffusion-3.5-large"),
    "StableDiffusionPipeline": ("stable-diffusion-v1-5", "stable-diffusion-2.1"),
    "StableDiffusionI": ("stable-diffusion-v1-5", "stable-diffusion-2.1"),
    "StableVideoDiffusion": ("stable-video-diffusion",),
    "Flux2": ("flux.2-dev",), "FluxPipeline": ("flux.1-dev",), "FluxI": ("flux.1-dev",), "FluxFill": ("flux.1-dev",),
    "FluxKontext": ("flux.1-dev",), "PixArt": ("pixart-sigma",), "CogView4": ("cogview4-6b",),
    "CogVideoX": ("cogvideox-2b", "cogvideox-5b"),
    "Wan": ("wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.2-t2v-a14b"),
    "HunyuanVideo15": ("hunyuanvideo-1.5",), "HunyuanVideoP": ("hunyuanvideo",), "HunyuanVideoI": ("hunyuanvideo",),
    "QwenImage": ("qwen-image",), "ZImage": ("z-image",),
}  # fmt: skip
"""Public pipelines by the beginning of the class; of several that with as many parameters, or the next larger one."""
UNCOUNTED: Final = "safety_checker"
"""A part of a pipeline that its public number of parameters leaves out."""
ROUNDED: Final = 0.03
"""What a pipeline may have beyond the public number of parameters, as a share."""
FILES: Final = "weight files"
ROUNDING: Final = 0.001
"""What the files may hold beyond the weights (headers), as a share."""
NARROWER: Final = 0.1
"""What weights may have beyond the size of their complete files, as a share, before another quantization is assumed."""
BY_BITS: Final = ("int8", "6bit", "4bit", "3bit", "2bit")
"""Quantizations that are assumed by size, the widest first."""


def describe(path: Path) -> Described:
    """Return the configuration of a model on disk; `path` is its directory or the file itself, or one in GGUF.

    Raises:
        DescribeError: there is none, or it does not describe a language model.
    """
    path = _snapshot(path)
    files = shards_of(path)
    if files and (path.is_file() or held(path) is None):
        return _of_gguf(files)
    file = _configuration(path) if path.is_dir() else path
    config = _read(file)
    if "quantization_config" not in config:
        config["quantization_config"] = _of_modelopt(file.parent / MODELOPT)
    folder = file.parent.resolve()
    # in the cache a directory is named models--ORGANISATION--NAME, and its snapshots by their revisions
    named = folder.parent.parent.name.rsplit("--", 1)[-1] if folder.parent.name == SNAPSHOTS else folder.name
    described = of_config(config, _name(named))
    found = _with_files(described, file.parent)
    if found.dtype or found.quantization or found.architecture.kind == "decoder":
        return found
    return replace(found, dtype="fp32")  # PyTorch's own, as in the table of public encoders; another type is stated


def _snapshot(path: Path) -> Path:
    """Return the newest revision of a model in the cache of Hugging Face's hub; any other path unchanged."""
    found = [revision for revision in (path / SNAPSHOTS).glob("*") if revision.is_dir()]
    return max(found, key=lambda revision: (revision.stat().st_mtime, revision.name), default=path)


def _of_gguf(files: list[Path]) -> Described:
    """Return the description of a model in GGUF: with the quantization of as many bits as its weights have, and the
    encoder of images that llama.cpp reads from a file beside it.
    """
    try:
        config, parameters, size = read(files)
    except GgufError as error:
        raise DescribeError(f"{error}: add mem=") from None
    described = of_config(config, _name(files[0].stem))
    levels = [name for name, bits in GGUF.items() if parameters and bits * 1.01 >= 8 * size / parameters]
    level = min(levels, key=lambda name: GGUF[name], default="f32")
    beside = [file for file in files[0].parent.glob("mmproj*.gguf") if file.is_file()]
    seeing = max((file.stat().st_size for file in beside), default=0)
    bits, wide = GGUF[level], max(16.0 - GGUF[level], 0.0)  # of an encoder beside it, as `memory.widened_mib` counts it
    parameters += math.ceil(max(seeing * 8 / (bits + wide), (seeing * 8 - TOWER * wide) / bits))
    numbers = of_size(described.numbers, min(parameters, LIMITS["params"])) | ({"seen": SEEN_MIB} if seeing else {})
    return replace(described, numbers=numbers, dtype="", quantization=level, counted=FILES)


def _of_modelopt(file: Path) -> dict[str, Any] | None:
    """Return the quantization that ModelOpt states; None if it states none that can be read."""
    try:
        found = _read(file).get("quantization")
    except DescribeError:
        return None
    return {"quant_method": "modelopt", **found} if isinstance(found, dict) else None


def _read(file: Path) -> dict[str, Any]:
    """Return the contents of a configuration; raises DescribeError."""
    if file.exists() and not file.is_file():  # reading a pipe may never end
        raise DescribeError(f"{file} is not a plain file: give a directory with a config.json")
    try:
        with file.open("rb") as stream:
            text = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise DescribeError(f"{file} cannot be read ({error.strerror}): give a directory with a config.json") from None
    if len(text) > MOST_BYTES:
        raise DescribeError(f"{file} is larger than {MOST_BYTES} bytes: give a model's config.json")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        raise DescribeError(f"{file} is not JSON: give a model's config.json") from None
    if not isinstance(config, dict):
        raise DescribeError(f"{file} is not a configuration: give a model's config.json")
    return config


def stands_for(folder: Path) -> str | None:
    """Return the name or directory of the model that a directory means by its own: the base of an adapter, the public
    pipeline of which diffusers' has the form; None if it is neither, or no public one.

    Raises:
        DescribeError: an adapter names no base.
    """
    folder = _snapshot(folder)
    if (folder / ADAPTER).is_file() and not (folder / "config.json").exists():
        base = _read(folder / ADAPTER).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise DescribeError(f"{folder / ADAPTER} names no base model: add mem=")
        return base
    if not (folder / PIPELINE).is_file():
        return None
    kind = str(_read(folder / PIPELINE).get("_class_name"))
    folders = [part for part in sorted(folder.iterdir()) if part.is_dir() and part.name != UNCOUNTED]
    parts = [files for part in folders if (files := held(part)) is not None]
    count = sum(files.parameters or files.size // 2 for files in parts)
    forms = [names.known(name) for form, names_of in PIPELINES.items() if kind.startswith(form) for name in names_of]
    able = [model for model in forms if model and 0 < count <= (1 + ROUNDED) * model.architecture.parameters]
    return min(able, key=lambda model: model.architecture.parameters).name if able else None


def _configuration(folder: Path) -> Path:
    """Return the configuration in a directory, that of Mistral's own form if it has no other; raises DescribeError."""
    if (folder / PIPELINE).is_file():
        raise DescribeError(f"{folder} is a pipeline of several models: use its public name, or add mem=")
    usual, own = folder / "config.json", folder / "params.json"
    return own if own.is_file() and not usual.exists() else usual


def _with_files(found: Described, folder: Path) -> Described:
    """Return the description with the number of parameters that the weight files hold, by their headers. Where those
    do not say it, the size of the files may only add some (a vision tower, layers that a quantization leaves out).
    """
    files = held(folder)
    if files is None:
        return found
    computed = found.architecture
    if files.parameters and not found.quantization:
        numbers = of_size(found.numbers, min(files.parameters, LIMITS["params"]))
        return replace(found, numbers=numbers, dtype=found.dtype or files.dtype, counted=FILES)
    if files.complete:
        found = _narrowed(found, files.size)
    kept = _kept(found)
    if kept is None:
        return found
    beyond = files.size - weights_mib(computed, kept) * MIB
    counted = f"config.json and the size of the weight files, which is {files.size / 2**30:.2f} GiB"
    if beyond <= files.size * ROUNDING:
        return replace(found, counted=counted)
    more = computed.parameters + math.floor(beyond * 8 / kept.embedding_bits)
    return replace(found, numbers={**found.numbers, "params": min(more, LIMITS["params"])}, counted=counted)


def _narrowed(found: Described, size: int) -> Described:
    """Return the description with a narrower quantization if complete files are too small for the stated one: some
    checkpoints do not state theirs, others mix several. What is wider counts as further parameters.
    """
    kept = _kept(found) or plain("auto")
    if weights_mib(found.architecture, kept) * MIB <= size * (1 + NARROWER):
        return found
    held = [name for name in BY_BITS if weights_mib(found.architecture, known(name)) * MIB <= size * (1 + NARROWER)]
    return replace(found, quantization=(held or BY_BITS[-1:])[0])


def _kept(found: Described) -> Precision | None:
    """Return the precision of the weights in the files; None if it is not known."""
    if found.quantization:
        return quantized(found.quantization)
    return plain(found.dtype) if found.dtype else None


def _name(text: str) -> str:
    cleaned = "".join(char if (char.isalnum() and char.isascii()) or char in "._-" else "-" for char in text.lower())
    return cleaned.strip("._-")[:96] or "model"
