"""Build architectures of models of which a name says only the size and the kind."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from slurm_migbatch.predict.llm.architecture import STATE_WIDTHS, VOCAB, Architecture, Experts
from slurm_migbatch.predict.llm.sizes import Sized

GROUPED: Final = 10 * 128
"""Width of the keys of a layer of unknown architecture: those of ten heads. Most public models have eight, in up to a
quarter more layers than assumed here.
"""
SHALLOW: Final = 32 * 8 * 128
"""Width of the keys of all layers of a small model with eight such heads; one of unknown architecture caches no less,
unless it has fewer heads.
"""
_OF_VIDEO: Final = re.compile(
    r"(?:t|i|ti|v|s|flf|text|image|video)2(?:v|video|world)|vace|cogvideox.*|ltxv?|skyreels|magi|wan[0-9.]*|"
    r"seedvr[0-9]*|(?:predict|transfer)[0-9.]+"
)
_OF_IMAGES: Final = re.compile(r"(?:t|i|ti|v|text|image|video)2(?:i|img|image)|flux.*|sana[0-9.]*|cogview[0-9]*")
"""Words that name a generator of video (`cosmos-predict2.5` is one) or of images, whose size is that of the part that
removes noise.
"""
STATES: Final = (
    (re.compile(r"mamba1?"), 2 * 2 * (16 + 4)),
    (re.compile(r"rwkv[0-9]?"), 2 * (64 + 2)),
    (re.compile(r"mamba[2-9]|xlstm"), STATE_WIDTHS),
)
"""Words that name a model whose layers keep a state instead of keys and values, and the values of 16 bits of a layer's,
in widths of the model.
"""
ENCODERS: Final = re.compile(
    r"[a-z]*berta?(?:v?[0-9])?|electra|longformer|bigbird|esm[0-9]?[a-z]?|saprot|nucleotide|geneformer|"
    r"encoder|timesfm|internvit|prithvi|vggt"
)
"""A word that names an encoder of texts, proteins, genomes or images, like BERT: it has no key-value cache. Nor has
TimesFM, a decoder of time series that passes its whole input for every patch of its forecast.
"""
ENCODED: Final = 8192
"""Its longest input, as of the longest of the public ones."""
SPEECH: Final = re.compile(r"(?:wav2vec|hubert|wavlm|unispeech|data2vec|mms|parakeet|kokoro)[0-9]*")
"""A word that names an encoder of sound, or a voice, which has no key-value cache either."""
SPEECH_MIB: Final = 2048
SPEECH_KEPT: Final = (317_000_000, 752)
"""Working memory of one recording, the most of the public ones but Bark; what training keeps of it is that of wav2vec
2.0 of this many parameters, and grows with layers and width.
"""
CLIP_MIB: Final = 16 * 1024
CLIP_PX: Final = 832
"""Working memory of a generator of video for one clip, and the longer side of the clip, as those of Wan 2.1."""
IMAGE_MIB: Final = 8 * 1024
IMAGE_PX: Final = 1024
"""The same for one image, the most of the public generators."""
IMAGES: Final = re.compile(
    r"[a-z]*(?:resnet|densenet|convnet|convnext|efficientnet|mobilenet|unet|gan)[a-z0-9.]*|[a-z]+cnn|vgg[0-9]*|vit|"
    r"swin|yolo[a-z0-9.]*"
)
"""A word that names a network that takes images and generates no text; `cnn` alone is also a collection of texts."""
IMAGES_PX: Final = 224
IMAGES_MIB: Final = 50
IMAGES_KEPT: Final = (25_000_000, 300)
"""Its working memory for one image of this side, and what training keeps of it in a network of this many parameters,
which grows with layers and width: nearly the most of the public ones; half of them need a quarter of it.
"""
MOST_OF_IMAGES: Final = 1_000_000_000
"""Most parameters of a network that is sized so: a larger one may be a language model that sees."""
CYCLES: Final = re.compile(r"(?:cycle|star|disco|dual)gan[0-9.]*|munit")
PASSES: Final = 6
"""Words that name two generators each of which passes the images of the other, and the passes of a step of training, of
which all are kept (arXiv 1703.10593 with its identity loss).
"""


def architecture_of(words: Sequence[str], size: Sized, *, sees: bool) -> tuple[Architecture, str]:
    """Return the architecture of a model of this size that the words of its name describe, and its data type; `sees`:
    it takes images, which the words may not say.
    """
    kind = kind_of(words)
    if size.total <= MOST_OF_IMAGES and (kind == "images" or (sees and kind == "decoder")):
        return _of_images(round(size.total), PASSES if any(map(CYCLES.fullmatch, words)) else 1), "fp32"
    if kind == "generator":
        item_mib, item_px = item_of_generator(words)
        extra = round(size.total)
        return Architecture(0, 0, extra=extra, kind="plain", item_mib=item_mib, item_px=item_px), "auto"
    if kind == "speech":
        return _of_speech(round(size.total)), "fp32"
    if kind == "encoder":
        return _encoder(of_size(size)), "fp32"
    architecture = of_size(size)
    widths = max((widths for form, widths in STATES if any(map(form.fullmatch, words))), default=0)
    if widths and "hybrid" not in words:
        architecture = _stateful(architecture, widths)
    return architecture, "auto"


@lru_cache(maxsize=1024)
def of_size(size: Sized) -> Architecture:
    """Return a decoder of this many parameters with otherwise unknown architecture.

    Depth and width are those between public models of that size (a width of 128 to a layer). Heads share keys and
    values as in most public models since 2024: nine tenths of those that share them cache no more. Where every head has
    its own (Llama 2, OLMo 2) the cache is three to four times as large. (Heads have one dimension here, as only their
    total width counts.)
    """
    layers = min(max(round((size.active / 12 / 128**2) ** (1 / 3)), 2), 128)
    width = layers * 128
    # logits of a large vocabulary, unless so few parameters cannot be its embedding: training keeps 12 bytes of each,
    # which is most of a small model's memory (the width before rounding: a larger model has no fewer)
    outputs = min(VOCAB, int(size.total / (128 * (size.active / 12 / 128**2) ** (1 / 3))))
    sparse = size.active < 0.9 * size.total
    key_width = min(width, max(GROUPED, math.ceil(SHALLOW / layers)))
    vocab = 32_000 if size.total < 1e9 else 128_000
    base = Architecture(
        layers, width, width, key_width, 1, 4 * width, vocab, 32768, tied=size.total < 4e9, outputs=outputs
    )
    experts = None
    if sparse:
        # a count of experts that has the share of active parameters; the remainder is `extra`
        count = max(round(size.total / size.active), 2)
        experts = Experts(count, 1, 1)
    smallest = replace(base, ffn=1, experts=experts)
    remaining = size.total - smallest.parameters
    if remaining < 0:
        return replace(base, vocab=0, ffn=1, extra=max(round(size.total) - replace(base, vocab=0, ffn=1).parameters, 0))
    ffn = int(remaining / (3.0 * layers * width * (experts.count if experts else 1)))
    full = replace(base, ffn=max(ffn, 1), experts=Experts(experts.count, 1, max(ffn, 1)) if experts else None)
    return replace(full, extra=max(round(size.total) - full.parameters, 0))


def kind_of(words: Sequence[str]) -> str:
    """Return the kind of model that these words name: a generator of images or video, or a model of speech, images or
    text.
    """
    if any(item_of_generator(words)):
        return "generator"
    if any(map(SPEECH.fullmatch, words)):
        return "speech"
    if any(map(ENCODERS.fullmatch, words)):
        return "encoder"
    return "images" if any(map(IMAGES.fullmatch, words)) else "decoder"


def item_of_generator(words: Sequence[str]) -> tuple[int, int]:
    """Return the working memory in MiB of what a generator named by these words makes, and its longer side in pixels;
    zeros if they name none.
    """
    if any(map(_OF_VIDEO.fullmatch, words)):
        return CLIP_MIB, CLIP_PX
    return (IMAGE_MIB, IMAGE_PX) if any(map(_OF_IMAGES.fullmatch, words)) else (0, 0)


def _stateful(architecture: Architecture, widths: int) -> Architecture:
    """Return the architecture with a cache that does not grow: a window of as many values as its state has."""
    values = 2 * architecture.kv_heads * architecture.head
    return replace(architecture, window=math.ceil(widths * architecture.width / values), wide_layers=0)


def _of_images(parameters: int, passes: int) -> Architecture:
    """Return a network of images with this many parameters."""
    usual, kept = IMAGES_KEPT
    kept_mib = math.ceil(passes * kept * max(parameters / usual, 1.0) ** 0.5)
    return Architecture(0, 0, extra=parameters, kind="plain", item_mib=IMAGES_MIB, item_px=IMAGES_PX, kept_mib=kept_mib)


def _of_speech(parameters: int) -> Architecture:
    """Return a model of sound with this many parameters."""
    usual, kept = SPEECH_KEPT
    kept_mib = max(math.ceil(kept * (parameters / usual) ** (2 / 3)), SPEECH_MIB)
    return Architecture(0, 0, extra=parameters, kind="plain", item_mib=SPEECH_MIB, kept_mib=kept_mib)


def _encoder(decoder: Architecture) -> Architecture:
    """Return an encoder with the layers and the parameters of a decoder."""
    encoder = replace(decoder, kind="encoder", headless=True, outputs=0, context=ENCODED)
    return replace(encoder, extra=encoder.extra + decoder.parameters - encoder.parameters)
