"""Read the table of public models (`models.toml`): their architecture and all their names.

Parameters are computed from the layers (`architecture`), and a test compares them with the published numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Final

from slurm_migbatch.predict.llm.architecture import Architecture, Experts, Latent, Recurrent

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]


@dataclass(frozen=True)
class Model:
    """One public model. `native`: how its weights are published, a data type or a quantization."""

    name: str
    architecture: Architecture
    native: str = "bf16"
    aliases: tuple[str, ...] = ()


def _decoder(
    width: int,
    heads: int,
    experts: tuple[int, ...] = (),
    latent: tuple[int, ...] = (),
    recurrent: tuple[int, ...] = (),
    parameters: int = 0,
    **more: Any,
) -> Architecture:
    """Return a decoder, with other parts (a vision tower) up to its published number of `parameters`."""
    decoder = Architecture(
        width=width,
        heads=heads,
        experts=Experts(*experts) if experts else None,
        latent=Latent(*latent) if latent else None,
        recurrent=Recurrent(*recurrent) if recurrent else None,
        **{"head": width // max(heads, 1), **more},
    )
    extra = decoder.extra + max(parameters - decoder.parameters, 0) if parameters else decoder.extra
    # in layers without attention it has matrices of theirs, too
    return replace(decoder, extra=extra, aside=0 if recurrent else extra)


def _stateful(layers: int, width: int, state: int, widening: float = 2.0, **more: Any) -> Architecture:
    """Return a model without attention: the matrices of a block are those of a gated feed-forward of `widening` times
    the width, six squares of the width in Mamba and thirteen in RWKV.
    """
    return _decoder(
        width, 0, (), (), (layers, state), layers=layers, kv_heads=0, head=0, ffn=int(widening * width), **more
    )


def _t5(
    *, layers: int, heads: int, head: int = 64, first: bool = False, vocab: int = 32128, **more: Any
) -> Architecture:
    """Return a T5; `first`: version 1.0, whose feed-forward is not gated and whose output shares the embedding."""
    return Architecture(
        layers,
        heads=heads,
        kv_heads=heads,
        head=head,
        vocab=vocab,
        context=512,
        gated=not first,
        tied=first,
        extra=2 * 32 * heads,
        kind="both",
        scores=True,
        **{"encoder_layers": layers, **more},
    )


def _bart(layers: int, width: int, heads: int, ffn: int, vocab: int, positions: int = 1026) -> Architecture:
    """Return a BART: encoder and decoder of as many layers, each with `positions` and a norm after the embedding."""
    return Architecture(
        layers,
        width,
        heads,
        heads,
        head=width // heads,
        ffn=ffn,
        vocab=vocab,
        context=1024,
        gated=False,
        tied=True,
        bias="all",
        norm_bias=True,
        positions=2 * positions,
        encoder_layers=layers,
        kind="both",
    )


def _whisper(layers: int, width: int, heads: int, mels: int = 80, encoder: int = 0) -> Architecture:
    stem = 3 * mels * width + width + 3 * width * width + width
    # keys have no bias: one vector less in each of the attentions
    missing_biases = width * (2 * layers + (encoder or layers))
    return Architecture(
        layers,
        width,
        heads,
        heads,
        ffn=4 * width,
        vocab=51866 if mels == 128 else 51865,
        context=448,
        gated=False,
        tied=True,
        bias="all",
        norm_bias=True,
        positions=448,
        encoder_layers=encoder or layers,
        source=1500,
        extra=stem + 1500 * width - missing_biases,
        kind="both",
    )


def _bert(width: int, heads: int, types: int = 2, extra: int = 0, context: int = 512, **more: Any) -> Architecture:
    """Return a BERT-like encoder: token types, a norm after the embedding and a pooler are `extra`."""
    return Architecture(
        width=width,
        heads=heads,
        kv_heads=heads,
        head=width // heads,
        context=context,
        gated=False,
        headless=True,
        bias="all",
        norm_bias=True,
        extra=types * width + 2 * width + (width * width + width) - 2 * width + extra,
        kind="encoder",
        **{"positions": context, **more},
    )


def _plain(millions: float, item_mib: int, item_px: int = 0, kept_mib: int = 0) -> Architecture:
    extra = round(millions * 1e6)
    return Architecture(0, 0, extra=extra, kind="plain", item_mib=item_mib, item_px=item_px, kept_mib=kept_mib)


_SHAPES: Final[Mapping[str, Callable[..., Architecture]]] = {
    "decoder": _decoder,
    "stateful": _stateful,
    "t5": _t5,
    "bart": _bart,
    "whisper": _whisper,
    "bert": _bert,
    "plain": _plain,
}


def _models() -> Iterator[Model]:
    sections = tomllib.loads(files("slurm_migbatch.predict.llm").joinpath("models.toml").read_text(encoding="utf-8"))
    for section in sections.values():
        common = section.pop("each", {})
        for name, row in section.items():
            fields = {"shape": "decoder", "native": "bf16", "also": "", **common, **row}
            shape, native, also = _SHAPES[fields.pop("shape")], fields.pop("native"), fields.pop("also")
            yield Model(name, shape(**fields), native, tuple(also.split()))


ALL: Final = tuple(_models())
"""All public models of the table."""
