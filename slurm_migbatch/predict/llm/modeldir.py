"""Describe a model on disk by its `config.json` and its weight files.

No part of the model is run or loaded. The configuration is read up to a size limit.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.predict.llm.configuration import LIMITS
from slurm_migbatch.predict.llm.describe import Described, DescribeError, of_config, of_size
from slurm_migbatch.predict.llm.memory import MIB, weights_mib
from slurm_migbatch.predict.llm.precision import Precision, known, plain, quantised
from slurm_migbatch.predict.llm.weightfiles import held

MOST_BYTES: Final = 1 << 20
"""Size limit of a configuration, which has a few kilobytes."""
MODELOPT: Final = "hf_quant_config.json"
"""The file in which ModelOpt states its quantisation, besides or instead of the configuration."""
FILES: Final = "weight files"
ROUNDING: Final = 0.001
"""What the files may hold beyond the weights (headers), as a share."""
NARROWER: Final = 0.1
"""What weights may have beyond the size of their complete files, as a share, before another quantisation is assumed."""
BY_BITS: Final = ("int8", "6bit", "4bit", "3bit", "2bit")
"""Quantisations that are assumed by size, the widest first."""


def describe(path: Path) -> Described:
    """Return the configuration of a model on disk; `path` is its directory or the file itself.

    Raises:
        DescribeError: there is none, or it does not describe a language model.
    """
    file = _configuration(path) if path.is_dir() else path
    config = _read(file)
    if "quantization_config" not in config:
        config["quantization_config"] = _of_modelopt(file.parent / MODELOPT)
    described = of_config(config, _name(file.resolve().parent.name))
    found = _with_files(described, file.parent)
    if found.dtype or found.quantization or found.architecture.kind == "decoder":
        return found
    return replace(found, dtype="fp32")  # PyTorch's own, as in the table of public encoders; another type is stated


def _of_modelopt(file: Path) -> dict[str, Any] | None:
    """Return the quantisation that ModelOpt states; None if it states none that can be read."""
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


def _configuration(folder: Path) -> Path:
    """Return the configuration in a directory, that of Mistral's own form if it has no other; raises DescribeError."""
    if (folder / "model_index.json").is_file():
        raise DescribeError(f"{folder} is a pipeline of several models: use its public name, or add mem=")
    usual, own = folder / "config.json", folder / "params.json"
    return own if own.is_file() and not usual.exists() else usual


def _with_files(found: Described, folder: Path) -> Described:
    """Return the description with the number of parameters that the weight files hold, by their headers. Where those
    do not say it, the size of the files may only add some (a vision tower, layers that a quantisation leaves out).
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
    """Return the description with a narrower quantisation if complete files are too small for the stated one: some
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
        return quantised(found.quantization)
    return plain(found.dtype) if found.dtype else None


def _name(text: str) -> str:
    cleaned = "".join(char if (char.isalnum() and char.isascii()) or char in "._-" else "-" for char in text.lower())
    return cleaned.strip("._-")[:96] or "model"
