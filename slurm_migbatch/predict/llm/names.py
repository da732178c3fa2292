"""Resolve a model's name: every public spelling, the quantization in it, and a size if nothing else is known.

Organisation, letter case and filler words (instruct, chat) are removed from a name; the longest run of the
remaining words that is a public model's name selects that model. `llama-3-70b`, `Meta-Llama-3-70B-Instruct-AWQ` and
`hermes-2-theta-llama-3-70b.Q4_K_M.gguf` are one model in three precisions.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from slurm_migbatch.predict.llm import precision
from slurm_migbatch.predict.llm.architecture import SEEN_MIB, TOWER, Architecture
from slurm_migbatch.predict.llm.families import ALL, Model
from slurm_migbatch.predict.llm.precision import Precision
from slurm_migbatch.predict.llm.sizedmodels import architecture_of, item_of_generator, kind_of
from slurm_migbatch.predict.llm.sizes import SIZE, Sized, decimals, respelt, size_of, training_counts
from slurm_migbatch.workload.modelfile import without_ending, without_place

_IDLE: Final = (
    "instruct it chat base hf coder math code instruction preview thinking meta mlx exp gguf pt sft dpo rlhf",
    "lora qlora uncensored abliterated",
    "quantized quantised dynamic unsloth nvidia redhatai neuralmagic bartowski thebloke mlc mungert",
    "fp16 bf16 float16 bfloat16 half vllm onnx ct2 faster turbomind g128 g32 128g sym desc tensorrt trtllm",
)
FILLERS: Final = frozenset(" ".join(_IDLE).split())
"""Words that say nothing about the architecture. `turbo` and `mini` do."""
FASTER: Final = "faster"
"""A word of CTranslate2's copies of Whisper, whose weights have 16 bits: `faster-whisper-large-v2`."""
SIZES: Final = frozenset([
    "tiny", "mini", "small", "medium", "base", "large", "xl", "xxl", "huge", "giant", "turbo", "nano", "micro",
    "plus", "pro", "max", "ultra", "super", "next", "h", "g", "vision", "vl", "omni", "moe", "audio", "blip2",
    "instructblip", "llava", "internvl", "minicpm",
])  # fmt: skip
"""Words that change the size when they follow a model's name, with or without a version: `small3.2`."""
ALIKE: Final = 0.75
"""Minimum likeness (`difflib`) of a suggested name."""
MISSPELT: Final = 0.8
"""Minimum likeness (`difflib`) of a word next to a model's name to a misspelled size."""
LONGEST: Final = 48
"""Most characters of a name that are compared, which bounds the cost of a submission."""
COMPARED: Final = 16
"""Most public names that a name is fully compared with."""
SAME_SIZE: Final = 0.2
"""Tolerance of a size in a name below the model's own size."""
LARGER: Final = 0.06
"""Tolerance above it: a model of a larger size needs more."""
SENSES: Final = frozenset([
    "vl", "vlm", "vision", "ocr", "audio", "asr", "speech", "omni", "llava", "voxtral", "molmo", "molmo2",
    "xcomposer2", "xcomposer2d5",
])  # fmt: skip
"""Words that name a language model with an encoder of images or sound, which its size mostly leaves out."""
SENSED: Final = re.compile(
    r"[a-z]*(?:vl|vlm|vla|vision|ocr|audio|asr|speech|omni|llava|vila)[0-9.]*|voxtral|ultravox|salmonn|xgen|mm|v|"
    r"(?:video[a-z]*|idefics|bunny|cogvlm|instructblip|blip|minicpm)[0-9.]*"
)
"""The same beside the name of a language model, whose parameters do not count the encoder: `idefics3-8b-llama3`."""
HEARS: Final = re.compile(r"[a-z]*(?:audio|asr|speech)[0-9.]*|voxtral|ultravox|salmonn")
"""Those of them that name an encoder of sound."""
BESIDE: Final = 7_000_000_000
"""Most parameters of the other parts of a generator of images or video: its text encoder (T5-XXL and UMT5-XXL have up
to 5.7 billion) and those for images.
"""
CONTROL: Final = (0.37, 4_400_000_000)
"""Most parameters of a public ControlNet, relative to the pipeline that it controls (Stable Diffusion XL's), and in all
(Stable Diffusion 3.5 Large's).
"""
_VERSION: Final = re.compile(r"[2-9](?:\.[0-9]{1,2})?")
"""A number after a model's name that makes it another model, whose size may be any: `mistral-small-4`."""
_VERSIONED: Final = re.compile(r"v?[0-9]+(?:\.[0-9]+)*")
SHORTEST: Final = 4
"""Least letters of a family's name that say so alone: `t5`, `opt` and `yi` begin other names too."""
AMBIGUOUS: Final = frozenset({"command", "distil", "neural", "nous", "snowflake", "solar", "step", "tencent"})
"""First words of public models that other names begin with."""
UNSIZED: Final = frozenset([
    "auraflow", "cogview", "cogvlm", "ernie", "hidream", "idefics", "kimi", "kolors", "ling", "minicpm", "mochi",
    "molmo", "skywork", "xverse",
])  # fmt: skip
"""Families of large models of which none is known here."""
NO_PRECISION: Final = frozenset({"none", "qlora"})
"""Words of a name that are no precision of its weights: those of a model tuned by QLoRA are published in 16 bits."""
_LETTERS: Final = re.compile(r"[a-z]+")
_CONTEXT: Final = re.compile(r"([0-9]{1,4})([km])")
_SIDE: Final = re.compile(r"[1-9][0-9]{2}", re.ASCII)
"""A number of three digits, which is the side of images if it is a multiple of a usual patch."""
_SIDES: Final = re.compile(r"-([1-9][0-9]{2,3})-([1-9][0-9]{2,3})", re.ASCII)
"""Both sides of images at the end of a name, each a multiple of 32: `ade-512-512`."""


@dataclass(frozen=True)
class Found:
    """Meaning of a name.

    `name`: the canonical one, or the user's if the model is not public. `how`: `public`; `near`, a public model
    with a similar name and the size given in the name, or with an encoder of images or sound beside it; `size`, only a
    size is known. `stated`: the name says the precision.
    """

    name: str
    architecture: Architecture
    precision: Precision
    how: str = "public"
    stated: bool = False


def squeeze(name: str) -> str:
    """Return a name without its organisation, letter case, `-` and `_`."""
    return "".join(_words(name))


def _words(name: str) -> list[str]:
    short = without_ending(without_place(name).lower().replace("_", "-"))
    return [respelt(word) for word in short.replace(":", "-").split("-") if word]


def side_of(name: str, usual: int) -> int:
    """Return the longer side of the images of a model, `usual` unless its name states both sides (`ade-512-512`) or, of
    a vision transformer, a larger one: 378 of `clip-vit-h-14-378`.
    """
    words = _words(name)
    both = _SIDES.fullmatch("".join(f"-{word}" for word in words[-2:]))
    if both and not any(int(side) % 32 for side in both.groups()):
        return max(map(int, both.groups()))
    sides = (int(word) for word in words if _SIDE.fullmatch(word) and not (int(word) % 14 and int(word) % 16))
    return max((usual, *sides))


def _index() -> Mapping[str, Model]:
    """Return the public models by squeezed name: of all words, without filler words, and without dots."""
    models: dict[str, Model] = {}
    forms = (lambda w: w, lambda w: [x for x in w if x not in FILLERS], lambda w: [x.replace(".", "") for x in w])
    for form in forms:
        for model, words in _PUBLIC:
            models.setdefault("".join(form(words)), model)
    return models


def _stems() -> frozenset[str]:
    """Return the squeezed names that only leaving out the word `base` makes of a public one: `bge` of `bge-base`."""
    stems = {"".join(word for word in words if word not in FILLERS) for _, words in _PUBLIC if "base" in words}
    return frozenset(stems - {"".join(words) for _, words in _PUBLIC})


def _groups(name: str) -> set[str]:
    """Return the trigrams of a name, with its beginning and end marked."""
    marked = f"^{name}$"
    return {marked[at : at + 3] for at in range(len(marked) - 2)}


def _by_group() -> Mapping[str, Sequence[str]]:
    names: dict[str, list[str]] = {}
    for model in ALL:
        for name in (model.name, *model.aliases):
            for group in sorted(_groups(name)):
                names.setdefault(group, []).append(name)
    return names


def _families() -> frozenset[str]:
    """Return the letters with which the names of generative models begin, as far as those say so alone."""
    first = (words[0] for model, words in _PUBLIC if model.architecture.generates)
    letters = {match[0] for word in first if (match := _LETTERS.match(word))}
    return frozenset({word for word in letters if len(word) >= SHORTEST} - AMBIGUOUS | UNSIZED)


_PUBLIC: Final = [(model, _words(name)) for model in ALL for name in (model.name, *model.aliases)]
"""The words of every name of the public models."""
_BY_NAME: Final = _index()
_STEMS: Final = _stems()
_FAMILIES: Final = _families()
_BY_GROUP: Final = _by_group()


def known(name: str) -> Model | None:
    """Return the public model with exactly this name, in any spelling, without other words; None: there is none."""
    return _BY_NAME.get(squeeze(name))


def public(name: str) -> Found | None:
    """Return the public model whose name is a part of this one, as `resolve` does; None if there is none."""
    found = resolve(name)
    return None if found is None or found.how != "public" else found


def generates(name: str) -> bool:
    """Return whether a name is that of a public generative model, whose memory can be computed."""
    model = known(name)
    return model is not None and model.architecture.generates


@lru_cache(maxsize=4096)
def resolve(name: str) -> Found | None:
    """Return the meaning of a name; None if it has none, not even a size."""
    words = _words(name)
    kept, quantization = _without_quantization(words)
    stated = quantization is not None
    controlled = _with_control(kept)
    if controlled is not None:
        generator, whole = controlled
        return Found(generator.name, whole, quantization or native(generator), "near", stated)
    significant = [word for word in kept if word not in FILLERS]
    model = max(_public(kept), _public(significant), key=lambda found: found[1])[0]
    if model is not None:
        architecture = _with_context(model, kept)
        sensing = _senses_beside(model, kept)
        if sensing:
            architecture = replace(architecture, extra=architecture.extra + TOWER, seen_mib=_seen_mib(kept))
        usual = precision.plain("fp16") if FASTER in kept and architecture.source else native(model)
        kept_in = _narrower(quantization, usual)
        return Found(model.name, architecture, kept_in, "near" if sensing else "public", stated)
    size = size_of(kept)
    if size is None:
        return None
    near = _near_of_size("-".join(significant), size)
    if near is not None:
        return Found(near.name, near.architecture, quantization or native(near), "near", stated)
    upper = size_of(kept, upper=True)
    if upper is None:
        return None
    kind = kind_of(kept)
    beside = BESIDE if kind == "generator" else TOWER if kind == "decoder" and SENSES.intersection(kept) else 0
    return _sized(name, kept, quantization, Sized(upper.total + beside, upper.active + beside))


def _with_control(words: Sequence[str]) -> tuple[Model, Architecture] | None:
    """Return the public generator of images that a ControlNet belongs to, and its architecture with that beside it;
    None if the words name none. The other words are those of the ControlNet: `flux.1-dev-controlnet-union-pro`.
    """
    places = (at for at, word in enumerate(words) if word.startswith("controlnet") or (word == "control" and not at))
    place = next(places, None)
    for part in () if place is None else (words[:place], words[place + 1 :]):
        model = _public(part)[0]
        if model is not None and model.architecture.kind == "plain" and model.architecture.item_px:
            share, most = CONTROL
            whole = model.architecture.extra
            return model, replace(model.architecture, extra=whole + min(round(share * whole), most))
    return None


def _senses_beside(model: Model, words: Sequence[str]) -> bool:
    """Return whether words name an encoder of images or sound beside a public language model, which has none itself."""
    if model.architecture.kind != "decoder" or not any(map(SENSED.fullmatch, words)):
        return False
    own = (word for name in (model.name, *model.aliases) for word in _words(name))
    return not any(map(SENSED.fullmatch, own))


def of_stated_size(name: str, parameters: int, *, sees: bool = False) -> Found:
    """Return a model that is not public, of a stated number of all its parameters, by its name alone; `sees`: it takes
    images.
    """
    kept, quantization = _without_quantization(_words(name))
    sees = sees and not any(map(SENSED.fullmatch, kept))
    return _sized(name, kept, quantization, Sized(float(parameters), float(parameters)), sees=sees)


def _sized(
    name: str, words: Sequence[str], quantization: Precision | None, size: Sized, *, sees: bool = False
) -> Found:
    """Return a model of which only the size is known, and from its words the kind."""
    architecture, dtype = architecture_of(words, size, sees=sees)
    if architecture.kind == "decoder":
        architecture = replace(architecture, seen_mib=_seen_mib(words))
    short = without_place(name)
    return Found(short, architecture, quantization or precision.plain(dtype), "size", quantization is not None)


def _seen_mib(words: Sequence[str]) -> int:
    """Return the working memory of the encoder of images that words name; 0 if they name none."""
    return SEEN_MIB if any(SENSED.fullmatch(word) and not HEARS.fullmatch(word) for word in words) else 0


def native(model: Model) -> Precision:
    """Return the precision in which a public model is published."""
    if model.native in precision.DTYPES:
        return precision.plain(model.native)
    return precision.known(model.native)


@lru_cache(maxsize=1024)
def suggestion(name: str) -> str | None:
    """Return the most similar public name; None if there is none.

    Names must be alike without the words of size and versions that both have, too: `raft-large` does not mean
    `bert-large`, nor `chai-1` `mochi-1`.
    """
    kept, _ = _without_quantization(_words(name))
    words = [word for word in kept if word not in FILLERS]
    for candidate in _similar_names("-".join(words)):
        common = {word for word in words if word in SIZES or _VERSIONED.fullmatch(word)} & {*candidate.split("-")}
        own, other = ("-".join(w for w in name if w not in common) for name in (words, candidate.split("-")))
        if difflib.SequenceMatcher(None, own, other).ratio() >= ALIKE:
            return candidate
    return None


def mentions_active(name: str) -> bool:
    """Return whether a word states the active parameters (`a2.7b`), which are not the model's size."""
    return any(word.startswith("a") and SIZE.fullmatch(word[1:]) for word in _words(name))


def mentions_public(name: str) -> bool:
    """Return whether a word is the name of a public generative model or begins with that of a family of such models,
    whatever follows (`granite4:small-h`, `minicpm-v-2.6`), or names a generator of images or video (`flux-pro`). Its
    size may be any.
    """
    words = _words(name)
    if any(map(generates, words)) or any(item_of_generator(words)):
        return True
    return any(match[0] in _FAMILIES for word in words if (match := _LETTERS.match(word)))


def _narrower(named: Precision | None, usual: Precision) -> Precision:
    """Return the precision that a name states, or else the usual one; a copy in GGUF of weights that are published in
    fewer bits has no more (gpt-oss).
    """
    return usual if named is None or (named.name == "gguf" and usual.bits < named.bits) else named


def _without_quantization(words: Sequence[str]) -> tuple[list[str], Precision | None]:
    """Return the words without those that name a precision, and the narrowest precision named; a method's name alone
    (`gptq`) counts only if no word states the bits.
    """
    kept: list[str] = []
    quantizations: list[Precision] = []
    position = 0
    parts = [part for word in words for part in _split_at_dots(word)]
    while position < len(parts):
        for length in (3, 2, 1):
            text = "-".join(parts[position : position + length])
            if position + length <= len(parts) and text not in NO_PRECISION:
                quantized = precision.quantized(text)
                if quantized is not None:
                    quantizations.append(quantized)
                    position += length
                    break
        else:
            kept.append(parts[position])
            position += 1
    specific = [entry for entry in quantizations if any(map(str.isdigit, entry.name))] or quantizations
    plain = next((word for word in kept if precision.DTYPES.get(word)), None)
    if precision.UNDONE.intersection(kept):
        return kept, precision.plain(plain or "auto")
    if specific:
        return kept, min(specific, key=lambda entry: entry.bits)
    return kept, None if plain is None else precision.plain(plain)


def _split_at_dots(word: str) -> list[str]:
    """Split `8b.q4` (of a GGUF file) and `quantized.w4a16`: a dot before a letter separates words."""
    return [respelt(part) for part in re.split(r"\.(?=[a-z])", word) if part]


def _public(words: Sequence[str]) -> tuple[Model | None, int]:
    """Return the public model whose name is the longest run of the words, and the length of that name; of several
    names of equally many words that of the largest model.
    """
    for length in range(min(len(words), 8), 0, -1):
        matches = [named for start in range(len(words) - length + 1) if (named := _named(words, start, start + length))]
        if matches:
            return max(matches, key=lambda named: named[0].architecture.parameters)
    return None, 0


def _named(words: Sequence[str], start: int, end: int) -> tuple[Model, int] | None:
    """Return the public model that a run of the words names, and the length of that name; None if there is none, or if
    the other words state another size, or nothing states one and another version follows, or if `base` is left out and
    there are other words: `bge-code` and `e5-v` are no base models.
    """
    name = "".join(words[start:end])
    model = _BY_NAME.get(name) or _BY_NAME.get(name.replace(".", ""))
    rest = [*words[:start], *words[end:]]
    # an encoder beside a language model makes it no other size of that, if the name states its size
    others = [word for word in rest if not SENSED.fullmatch(word)] if size_of(words) is not None else rest
    if model is None or any(map(_names_size, others)):
        return None
    if name in _STEMS and "base" not in words and not FILLERS.issuperset(rest):
        return None
    if end < len(words) and _VERSION.fullmatch(words[end]) and size_of(words) is None:
        return None
    # 1_6b is the decimal number where it is a part of the name
    decimal = size_of(decimals(words[start:end])) if size_of(rest) is None else None
    if _same_size(model, size_of(words)) or (decimal is not None and _same_size(model, decimal)):
        return model, len(name)
    return None


def _names_size(word: str) -> bool:
    stem = word.rstrip(".0123456789")
    size = word if word in SIZES or len(stem) == 1 else stem
    return (size in SIZES and size != "base") or _misspelt_size(word)


@lru_cache(maxsize=1024)
def _misspelt_size(word: str) -> bool:
    """Return whether a word is a misspelling of one that names another size: `lrge`."""
    if word in SIZES or word in FILLERS or not 4 <= len(word) <= LONGEST or not word.isalpha():
        return False
    return bool(difflib.get_close_matches(word, SIZES, 1, MISSPELT))


def _same_size(model: Model, size: Sized | None) -> bool:
    """Return whether the size in a name may be the model's; some names state only the active parameters."""
    if size is None:
        return True
    shapes = (model.architecture.parameters, model.architecture.active, model.architecture.body)
    if any(1 - SAME_SIZE <= size.total / parameters <= 1 + LARGER for parameters in shapes):
        return True
    mentioned = size_of(_words(model.name)) or next(filter(None, map(size_of, map(_words, model.aliases))), None)
    return mentioned is not None and mentioned.total == size.total


def exceeds(size: Sized, architecture: Architecture) -> bool:
    """Return whether a stated size is larger than an architecture's, beyond rounding."""
    return size.total > (1 + LARGER) * architecture.parameters


def _with_context(model: Model, words: Sequence[str]) -> Architecture:
    """Return the architecture with the context that the name states: `phi-3-mini-128k`.

    A smaller number than the model's own counts something else, as the samples of `llama-2-7b-guanaco-1k`.
    """
    counts = training_counts(words)
    for place, word in enumerate(words):
        match = _CONTEXT.fullmatch(word)
        if match and place not in counts and (match[2] == "k" or int(match[1]) <= 10):
            tokens = int(match[1]) * (1024 if match[2] == "k" else 1024 * 1000)
            return replace(model.architecture, context=max(tokens, model.architecture.context))
    return model.architecture


def _similar_names(name: str) -> list[str]:
    """Return the most similar public names, among those that share most trigrams."""
    if len(name) > LONGEST:
        return []
    shared = Counter(candidate for group in _groups(name) for candidate in _BY_GROUP.get(group, ()))
    candidates = [candidate for candidate, _ in shared.most_common(COMPARED)]
    return difflib.get_close_matches(name, candidates, 3, ALIKE)


def _near_of_size(name: str, size: Sized) -> Model | None:
    for candidate in _similar_names(name):
        model = known(candidate)
        if _distinct(name) != _distinct(candidate):
            continue
        if model is None or exceeds(size, model.architecture):
            continue
        if model.architecture.parameters > (1 + SAME_SIZE) * size.total:
            continue
        if difflib.SequenceMatcher(None, _letters(name), _letters(candidate)).ratio() >= ALIKE:
            return model
    return None


def _distinct(name: str) -> set[str]:
    """Return what distinguishes a model within its family: numbers other than its sizes, and words of size."""
    words = [word for word in name.split("-") if not SIZE.fullmatch(word.removeprefix("a"))]
    return {part for word in words for part in (*re.findall(r"[0-9][0-9.]*[a-z]*", word), *SIZES.intersection([word]))}


def _letters(name: str) -> str:
    """Return a name's letters without those of its sizes."""
    return "".join(word for word in name.split("-") if not any(char.isdigit() for char in word))
