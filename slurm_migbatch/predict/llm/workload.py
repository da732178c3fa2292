"""Describe a language model workload: how it is served or tuned, with omitted hints filled in and listed.

Unspecified values are the engine's documented defaults: vLLM uses 0.9 of the memory it sees and needs room for one
sequence of `max_model_len`, by default the model's whole context (docs.vllm.ai, "Engine Arguments"); SGLang reserves
what it expects to need besides weights and cache, by the GPU's memory (server_args.py of 0.5;
`memory.sglang_reserve_mib`); TensorRT-LLM and TGI take 0.9 of the free memory; llama.cpp and Ollama keep one
sequence of 4096 tokens. Transformers and trainers take what they need, up to 0.95 of a slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Final

from slurm_migbatch.predict.llm import names, precision
from slurm_migbatch.predict.llm.architecture import Architecture, Stored
from slurm_migbatch.predict.llm.describe import ArchError, read_arch
from slurm_migbatch.predict.llm.names import Found
from slurm_migbatch.predict.llm.precision import Precision
from slurm_migbatch.predict.llm.sizes import Sized
from slurm_migbatch.workload.hints import NO_LLM, SERVE, Hints
from slurm_migbatch.workload.llmhints import LlmHints
from slurm_migbatch.workload.modelfile import without_place
from slurm_migbatch.workload.refusal import Refusal, show

SHARES: Final[Mapping[str, float]] = MappingProxyType(
    {
        "vllm": 0.9, "sglang": 1.0, "trtllm": 0.9, "tgi": 0.9, "llamacpp": 0.95, "ollama": 0.95,
        "transformers": 0.95, "": 0.9,
    }
)  # fmt: skip
"""Share of a slice that an engine may fill, by engine; empty: unspecified."""
TRAINING_SHARE: Final = 0.95
ALONE: Final = frozenset({"llamacpp", "ollama", "transformers"})
"""Engines that serve one sequence at a time by default."""
CASTING: Final = frozenset({"vllm", "sglang", "trtllm", "tgi"})
"""Engines that load 32-bit weights as 16-bit ones."""
EXPANDING: Final[Mapping[str, Stored]] = MappingProxyType(
    {"transformers": "expanded", "llamacpp": "expanded", "ollama": "expanded", "tgi": "padded"}
)
"""What engines cache of latent attention, if it is not the latent vector: llama.cpp expands it for files converted
before April 2025 (its pull request 12801), and Ollama's library has such files; TGI pads the values
(flash_deepseek_v2_modeling.py).
"""
ANYWHERE: Final = frozenset({"engine", "dtype", "quantization", "method", "lora_rank", "optimizer", "checkpointing"})
"""Hints that may be given for any model."""
OLLAMA: Final = "q4-k-m"
"""Default quantization of tags in Ollama's library."""
SHORT: Final = 4096
"""Default context of llama.cpp and Ollama."""
TRAINING_ITEMS: Final = 3
"""What training keeps for an item of a plain model if nothing is known, relative to its working memory in inference."""
USUAL_LENGTH: Final = 8192
USUAL_CONCURRENCY: Final = 8
USUAL_INPUT: Final = 1024
USUAL_OUTPUT: Final = 256
USUAL_SEQ: Final = 2048
USUAL_MICRO_BATCH: Final = 1
USUAL_RANK: Final = 16


@dataclass(frozen=True)
class Serving:
    """How a model is served: `concurrency` sequences of at most `length` tokens, with `input` tokens per request and
    `output` generated ones; bits of a cached value; the engine (empty: unspecified) and the share that it may fill.
    `reserve`: tokens of the one sequence that the engine needs room for (0: no such minimum).
    """

    length: int
    concurrency: int
    input: int
    output: int
    cache_bits: float
    engine: str
    share: float
    reserve: int = 0


@dataclass(frozen=True)
class Training:
    """How a model is tuned: method (full, lora, qlora), optimizer, activation checkpointing, tokens of a sequence,
    sequences in one pass, rank of LoRA's adapters.
    """

    method: str
    optimizer: str
    checkpointing: bool
    seq: int
    micro_batch: int
    share: float
    rank: int = USUAL_RANK


@dataclass(frozen=True)
class Workload:
    """One model with one kind of work. `assumed`: the values filled in, in words. `beside`: correction factor of the
    estimated part of training memory (activations, runtime) by measurements. `px`: longer side of the images of a plain
    model, 0 if it takes none.
    """

    model: Found
    serving: Serving | None
    training: Training | None
    assumed: tuple[str, ...] = ()
    beside: float = 1.0
    px: int = 0

    @property
    def architecture(self) -> Architecture:
        """Architecture of the model."""
        return self.model.architecture

    @property
    def precision(self) -> Precision:
        """Precision of its weights."""
        return self.model.precision

    @property
    def served(self) -> Serving:
        """How it is served, if it is."""
        assert self.serving is not None
        return self.serving

    @property
    def tuned(self) -> Training:
        """How it is tuned, if it is."""
        assert self.training is not None
        return self.training

    def cache_values(self, tokens: int) -> int:
        """Return the number of values that a served sequence of this many tokens keeps in the engine's cache."""
        engine = "" if self.serving is None else self.serving.engine
        return self.architecture.cache_values(tokens, EXPANDING.get(engine, "latent"))

    @property
    def label(self) -> str:
        """A stable name of everything that figures depend on, for messages and the record."""
        head = f"{self.model.name}/{self.precision.name}"
        if self.training is not None:
            training = self.training
            checkpointing = "/checkpointing" if training.checkpointing else ""
            items = self._items(training.micro_batch, training.seq)
            rank = f"/r{training.rank}" if training.method != "full" and training.rank != USUAL_RANK else ""
            return f"{head}/{training.method}{rank}/{training.optimizer}/{items}{checkpointing}"
        serving = self.served
        if self.architecture.kind == "plain":
            return f"{head}/infer/{self._items(serving.concurrency, 0)}"
        return f"{head}/serve/{serving.concurrency}x{serving.length}tok"

    def _items(self, count: int, tokens: int) -> str:
        if self.architecture.kind != "plain":
            return f"{count}x{tokens}tok"
        return f"{count}x{self.px}px" if self.px else f"{count} at once"

    @property
    def item_mib(self) -> float:
        """Working memory in MiB of one item of a plain model, which grows with the pixels of an image."""
        return self.architecture.item_mib * self._pixels

    @property
    def kept_mib(self) -> float:
        """MiB that training without activation checkpointing keeps for one item of a plain model."""
        architecture = self.architecture
        return (architecture.kept_mib or TRAINING_ITEMS * architecture.item_mib) * self._pixels

    @property
    def _pixels(self) -> float:
        """Pixels of an image relative to the model's usual ones."""
        usual = self.architecture.item_px
        return (self.px / usual) ** 2 if self.px and usual else 1.0


def fills(workload: Workload) -> bool:
    """Return whether the program that serves a workload takes its share of any slice at once, whatever it needs."""
    if workload.serving is None or workload.architecture.kind == "plain":
        return False
    return workload.serving.engine not in ALONE


def asks(hints: Hints) -> bool:
    """Return whether hints are for a language model, whatever its name.

    A service's rate does not count: services of any model may have one.
    """
    if hints.llm is NO_LLM:
        return False
    counted = replace(hints.llm, rate=None) if hints.role == SERVE else hints.llm
    return counted != NO_LLM


def of_tokens(hints: Hints) -> str:
    """Return the given hints that apply to language models only; "" if there are none.

    Precision, engine and the like (ANYWHERE) are not among them: figures of other models are for 32 bits, and never too
    small.
    """
    given = [field.name.removesuffix("_us") for field in fields(LlmHints) if getattr(hints.llm, field.name) is not None]
    if hints.role == SERVE:
        given = [name for name in given if name != "rate"]
    return ", ".join(f"{name}=" for name in given if name not in ANYWHERE)


def workload_of(hints: Hints) -> Workload | None:
    """Return the workload that hints describe; None if they name no language model.

    Raises:
        Refusal: its size is unknown, or a hint's value is.
    """
    resolved = _model(hints)
    if resolved is None:
        return None
    if hints.input_unit == "px" and resolved.architecture.kind != "plain":
        raise Refusal("input_unit", resolved.name, "tok", "input=1024tok")
    if hints.kind == "train" or (hints.role is None and hints.llm.seq is not None):
        return replace(_training(hints, resolved), px=_pixels(hints, resolved))
    assumed: tuple[str, ...] = ()
    if hints.llm.engine is None and resolved.architecture.kind == "decoder" and _of_library(hints.model or ""):
        hints, assumed = replace(hints, llm=replace(hints.llm, engine="ollama")), ("engine=ollama",)
        resolved = replace(resolved, precision=_precision(hints.llm, resolved))
    served = _serving(hints, resolved)
    return replace(served, assumed=assumed + served.assumed, px=_pixels(hints, resolved))


def _of_library(name: str) -> bool:
    """Return whether a name is a tag of Ollama's library, which alone has such names (`llama3.1:8b`), or as Ollama has
    one for a file of Hugging Face's hub (`hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M`).
    """
    return ":" in name and ("/" not in name or name.startswith("hf.co/"))


def _pixels(hints: Hints, found: Found) -> int:
    """Return the longer side of a plain model's images; 0: it takes no images. If the hints give none, it is the usual
    one, or what the model's name states.
    """
    usual = found.architecture.item_px
    if usual and hints.input and hints.input_unit != "tok":
        return hints.input
    return names.side_of(hints.model or "", usual) if usual else 0


def _model(hints: Hints) -> Found | None:
    llm_hints = hints.llm
    resolved = None if hints.model is None else names.resolve(hints.model)
    name = "this model" if hints.model is None else without_place(hints.model)
    named_precision, stated = (
        (precision.plain("auto"), False) if resolved is None else (resolved.precision, resolved.stated)
    )
    if llm_hints.arch is not None:
        try:
            architecture = read_arch(llm_hints.arch)
        except ArchError as error:
            raise Refusal("model_arch", show(str(error))) from None
        resolved = Found(name, architecture, named_precision, stated=stated)
    elif llm_hints.params is not None:
        size = Sized(float(llm_hints.params), float(llm_hints.params))
        # the published size of a public model is known better, unless this is another model of that name
        if resolved is None or resolved.how != "public" or names.exceeds(size, resolved.architecture):
            found = names.of_stated_size(name, llm_hints.params, sees=hints.input_unit == "px")
            resolved = found if resolved is None else replace(found, precision=named_precision, stated=stated)
    if resolved is None:
        _refuse_unsized(hints)
        return None
    return replace(resolved, precision=_precision(llm_hints, resolved))


def _refuse_unsized(hints: Hints) -> None:
    """Refuse a model whose size is unknown. Unknown names without any language model hint are left to the curves and to
    the site's default.
    """
    if hints.mem_mib is not None:
        return
    if hints.model is None:
        if asks(hints):
            raise Refusal("model_none")
        return
    near = names.suggestion(hints.model)
    if near is not None:
        raise Refusal("model_near", show(hints.model), near)
    # a name with an organisation is one of a public hub, and another size of a language model is a language model too:
    # such a model may be too large for the site's default
    if asks(hints) or "/" in hints.model or names.mentions_active(hints.model) or names.mentions_public(hints.model):
        raise Refusal("model_size", show(hints.model))


def _precision(llm_hints: LlmHints, found: Found) -> Precision:
    if llm_hints.quantization is not None:
        name = llm_hints.quantization.replace("_", "-")
        stated = precision.quantized(name)
        if stated is None:
            raise Refusal("model_quantization", show(llm_hints.quantization))
        if name != "none":
            return stated
        kept = found.precision if found.precision.bits >= 16 else stated
        found = replace(found, precision=kept, stated=True)
    if found.precision.name not in precision.UNQUANTIZED:
        return found.precision
    if llm_hints.dtype not in (None, "auto"):
        return precision.plain(llm_hints.dtype or "auto")
    if llm_hints.engine == "ollama" and not found.stated:
        return precision.known(OLLAMA)
    if found.precision.bits > 16 and llm_hints.engine in CASTING:
        return precision.plain("fp16")
    return found.precision


def _serving(hints: Hints, found: Found) -> Workload:
    """Return the workload of a server; values that the hints leave out are the usual ones, and noted as assumed."""
    llm_hints, architecture, assumed = hints.llm, found.architecture, list[str]()
    engine = llm_hints.engine or ""
    # no engine that reserves a share serves models without a cache: they run in PyTorch
    usual_share = SHARES[engine or ("transformers" if architecture.kind == "plain" else "")]
    share = usual_share if llm_hints.gpu_memory_utilization is None else llm_hints.gpu_memory_utilization / 1000
    concurrency = llm_hints.max_num_seqs or hints.batch
    if concurrency is None:
        concurrency = 1 if engine in ALONE or architecture.kind == "plain" else USUAL_CONCURRENCY
        assumed.append(f"max_num_seqs={concurrency}")
    length, reserve = llm_hints.max_model_len, 0
    if length is None and (hints.input or llm_hints.output):
        length, note = _length_of_request(hints, found)
        assumed += [note] if note else []
    elif length is None and architecture.kind != "plain":
        length = _usual_length(engine, architecture, concurrency)
        reserve = architecture.context if engine == "vllm" else 0
        assumed.append(f"max_model_len={max(length, reserve)}")
    length = length or 1
    # a model that generates nothing takes its longest input, if none is stated
    usual = hints.input if architecture.generates else hints.input or USUAL_INPUT
    inputs, outputs = _request(usual, llm_hints.output, length)
    if architecture.generates and length <= inputs + outputs and length < USUAL_INPUT + USUAL_OUTPUT:
        stated = {"input": hints.input, "output": llm_hints.output}
        used = {"input": inputs, "output": outputs}
        assumed.extend(f"{key}={used[key]}" for key, value in stated.items() if value is None)
    bits = _cache_bits(llm_hints, found)
    return Workload(
        found, Serving(length, concurrency, inputs, outputs, bits, engine, share, reserve), None, tuple(assumed)
    )


def _length_of_request(hints: Hints, found: Found) -> tuple[int, str]:
    """Return the length of sequences for a stated input or output, and what is assumed with it, if anything."""
    architecture, length, shortened = found.architecture, hints.input or USUAL_INPUT, False
    if architecture.kind != "encoder":
        length += hints.llm.output or USUAL_OUTPUT
        shortened = _knows_context(hints.llm, found) and length > architecture.context and not architecture.unbounded
        length = max(architecture.context, 1) if shortened else length
    if (hints.llm.engine or "") in CASTING:
        return length, f"max_model_len={length} given to the engine"
    return length, f"max_model_len={length}" if shortened and architecture.generates else ""


def _cache_bits(llm_hints: LlmHints, found: Found) -> float:
    cache = (llm_hints.kv_cache_dtype or "auto").replace("_", "-")
    if cache not in precision.CACHE:
        raise Refusal("model_cache", show(llm_hints.kv_cache_dtype or ""))
    # CASTING engines too, as their user then gave dtype=
    return 32.0 if found.precision.bits == 32 and cache == "auto" else precision.CACHE[cache]


def _knows_context(llm_hints: LlmHints, found: Found) -> bool:
    """Return whether a model's context is known, not only assumed."""
    return found.how != "size" and (llm_hints.arch is None or "context:" in llm_hints.arch)


def _request(inputs: int | None, outputs: int | None, length: int) -> tuple[int, int]:
    """Return the tokens of a request's input and output, which together have at most `length`.

    What is not stated is as usual. If that is too long, it is shortened; if neither is stated, both in proportion.
    """
    if inputs is None:
        longest = length - (outputs or length * USUAL_OUTPUT // (USUAL_INPUT + USUAL_OUTPUT))
        inputs = max(min(USUAL_INPUT, longest), 1)
    inputs = min(inputs, length)
    return inputs, max(min(outputs or USUAL_OUTPUT, length - inputs), 1)


def _usual_length(engine: str, architecture: Architecture, concurrency: int) -> int:
    """Return the length that is assumed if none is specified: the concurrent sequences share a cache of USUAL_LENGTH *
    USUAL_CONCURRENCY tokens, but each has room for a usual request.
    """
    if architecture.kind == "encoder":
        return architecture.context
    usual = SHORT if engine in ALONE else USUAL_LENGTH
    shared = max(USUAL_LENGTH * USUAL_CONCURRENCY // concurrency, USUAL_INPUT + USUAL_OUTPUT)
    return min(architecture.context, usual, shared)


def training_of(found: Found, micro_batch: int, size: int) -> Workload:
    """Return the full training of a public model with AdamW, on texts of `size` tokens or images of `size` pixels."""
    model = replace(found, precision=_trainable(found.precision))
    training = Training("full", "adamw", False, min(size, found.architecture.context), micro_batch, TRAINING_SHARE)
    return Workload(model, None, training, px=size if found.architecture.item_px else 0)


def plain_serving_of(found: Found, batch: int, size: int) -> Workload:
    """Return the inference of a plain model on `batch` items at once, if they are images of `size` pixels."""
    serving = Serving(1, batch, 1, 1, 16.0, "", SHARES["transformers"])
    return Workload(found, serving, None, px=size if found.architecture.item_px else 0)


def encoder_serving_of(found: Found, batch: int, size: int) -> Workload:
    """Return the inference of an encoder on `batch` texts of `size` tokens at once."""
    serving = Serving(size, batch, size, 1, 16.0, "", SHARES["transformers"])
    return Workload(found, serving, None)


def _trainable(kept: Precision) -> Precision:
    """Return the precision of weights that a full training keeps: quantized ones are trained in 16 bits."""
    return kept if kept.bits >= 16 else precision.plain("bf16")


def _training(hints: Hints, found: Found) -> Workload:
    """Return the workload of a training job; values that the hints leave out are noted as assumed."""
    llm_hints, assumed = hints.llm, list[str]()
    method = llm_hints.method
    if method is None:
        method = "full" if llm_hints.lora_rank is None else "lora"
        assumed.append(f"method={method}")
    if method != "full" and llm_hints.lora_rank is None:
        assumed.append(f"lora_rank={USUAL_RANK}")
    seq = llm_hints.seq or llm_hints.max_model_len or hints.input
    if seq is None:
        seq = min(found.architecture.context, USUAL_SEQ)
        if found.architecture.kind != "plain":
            assumed.append(f"seq={seq}")
    micro_batch = llm_hints.micro_batch or hints.batch
    if micro_batch is None:
        micro_batch = USUAL_MICRO_BATCH
        assumed.append(f"micro_batch={micro_batch}")
    checkpointing = llm_hints.checkpointing
    if checkpointing is None:
        checkpointing = "on" if method == "qlora" else "off"  # peft's prepare_model_for_kbit_training enables it
        assumed.append(f"checkpointing={checkpointing}")
    model = found
    if method == "qlora":
        model = replace(found, precision=precision.known("qlora"))
    elif method == "full":
        model = replace(found, precision=_trainable(found.precision))
    elif method == "lora" and llm_hints.quantization is None:
        model = replace(found, precision=precision.tuned(found.precision))
    share = TRAINING_SHARE if llm_hints.gpu_memory_utilization is None else llm_hints.gpu_memory_utilization / 1000
    optimizer, rank = llm_hints.optimizer or "adamw", llm_hints.lora_rank or USUAL_RANK
    training = Training(method, optimizer, checkpointing == "on", seq, micro_batch, share, rank)
    return Workload(model, None, training, tuple(assumed))
