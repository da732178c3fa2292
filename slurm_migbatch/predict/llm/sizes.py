"""Read the size of a model from the words of its name: `70b`, `8x7b`, `235b-a22b`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LARGEST: Final = 5e12
"""Largest number in a name that is read as a size."""
ROUNDED: Final = 1.1
"""Tolerance above the size in a model's name: a "7b" has up to 7.7 billion parameters, a "2b", whose last digit is
rounded, up to 2.5.
"""
SIZE: Final = re.compile(r"(?:([0-9]{1,3})x)?([0-9]{1,4}(?:\.[0-9]{1,3})?)([bmt])")
_SPELT: Final = (
    (re.compile(r"([0-9]{1,3})b([0-9])"), r"\1.\2b"),
    (re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?[bm])x([0-9]{1,3})"), r"\2x\1"),
)
"""Other spellings of a size, and the usual one: `6b7`, and `34bx2` of merged models."""
_IMAGE_TEXT: Final = frozenset({"clip", "vit"})
"""Words of a model of images and texts, whose name gives its images instead of its size."""
_COUNT: Final = re.compile(r"[0-9]{1,3}e")
"""A number of experts, which follows the active parameters in `17b-16e`."""
_STEPS: Final = re.compile(r"[0-9]+k|[0-9]{3,}")
"""A number of training steps, after the word `step`."""
_COUNTED: Final = frozenset({"examples", "samples", "seqlen", "steps", "tokens"})
"""Words after a number that is no size and no context."""
_MILLIONS: Final = {"m": 1.0, "b": 1e3, "t": 1e6}


@dataclass(frozen=True)
class Sized:
    """A number of parameters: all of them, and those that one token uses."""

    total: float
    active: float


def respelt(word: str) -> str:
    """Return a word with the usual spelling of a size: `6.7b` of `6b7`."""
    return next((form.sub(usual, word) for form, usual in _SPELT if form.fullmatch(word)), word)


def size_of(words: Sequence[str], *, upper: bool = False) -> Sized | None:
    """Return the size in a name's words: `70b`, `8x7b` (as if nothing were shared), `235b` and `a22b`, `9b-2b` (an
    encoder and a decoder) but `1b-7b` (active and all parameters).

    `upper`: return the most that it may mean. `17b-16e` means only that more than the stated parameters exist: None.
    The numbers in `clip-vit-bigg-14-laion2b-39b-b160k` are those of its images.
    """
    if _IMAGE_TEXT.issubset(words):
        return None
    if upper and any(map(_COUNT.fullmatch, words)):
        return None
    total = active = last = 0.0
    sizes = [
        (index, word, match) for index, word in enumerate(words) if (match := SIZE.fullmatch(word.removeprefix("a")))
    ]
    tokens = {"t"} if any(match[3] == "b" for _, _, match in sizes) else set()  # 1.1b-3t: the tokens of its training
    previous = -1
    counts = training_counts(words)
    for index, word, match in sizes:
        if match[3] in tokens or index in counts:
            continue
        params = float(match[2]) * _MILLIONS[match[3]] * 1e6
        counted = _rounded_up(match) if upper else params
        if word.startswith("a"):
            active = active or counted
            continue
        count = float(match[1] or 1)
        total = total + counted if index == previous + 1 and 0 < params <= last else max(total, count * counted)
        active = active or (2 * counted if match[1] else 0.0)
        previous, last = index, params
    if not 1e6 <= total <= LARGEST:
        return None
    return Sized(total, min(active, total) or total)


def training_counts(words: Sequence[str]) -> set[int]:
    """Return the places of numbers that count the steps, tokens or samples of a training: `step-50k-105b`,
    `100b-tokens`.
    """
    counted = {place for place, word in enumerate(words[1:]) if word in _COUNTED}
    steps = [place for place in range(1, len(words)) if words[place - 1] == "step" and _STEPS.fullmatch(words[place])]
    return counted.union(*((place, place + 1) for place in steps))


def _rounded_up(match: re.Match[str]) -> float:
    """Return the most parameters that a size may mean; those of `8x7b` share enough to need no tolerance."""
    unit, digits = _MILLIONS[match[3]] * 1e6, len(match[2].partition(".")[2])
    stated = float(match[2]) * unit
    return stated if match[1] else max(stated * ROUNDED, stated + 0.5 * unit / 10**digits)


def decimals(words: Sequence[str]) -> list[str]:
    """Return the words with a number joined to a size that follows it, as `1` and `6b` to `1.6b`."""
    pairs = zip(("", *words), words, strict=False)
    return [f"{before}.{word}" if before.isdigit() and SIZE.fullmatch(word) else word for before, word in pairs]
