"""Remove edits from a file, even if others have changed it since."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Final

_WORD: Final = re.compile(r"([^\s,=]+)(\s*=)?")


def undo(original: str, written: str, present: str) -> str | None:
    """Return `present` without the changes from `original` to `written`; None if they cannot be identified.

    Each run of written lines must still be there once, unchanged.
    """
    if present == written:
        return original
    before, after, current = (text.splitlines(keepends=True) for text in (original, written, present))
    for tag, i1, i2, j1, j2 in reversed(SequenceMatcher(None, before, after, autojunk=False).get_opcodes()):
        if tag == "equal":
            continue
        block = after[j1:j2]
        positions = [k for k in range(len(current) - len(block) + 1) if current[k : k + len(block)] == block]
        if not block or len(positions) != 1:
            return None
        lines = before[i1:i2]
        below = current[positions[0] + len(block) :]
        if lines and below and lines[-1].splitlines() == [lines[-1]]:
            lines[-1] += "\n"  # the file ended without a line end, and has got more lines since
        current[positions[0] :] = [*lines, *below]
    return "".join(current)


def undone(original: str, written: str, present: str) -> bool:
    """Return whether somebody has removed the changes by hand: none of their words is left."""
    return not added_words(original, written) & _words(present)


def added_words(before: str, after: str) -> set[str]:
    """Return the words that only the second text has, keys aside."""
    return _words(after) - _words(before)


def _words(text: str) -> set[str]:
    return {word for word, key in _WORD.findall(text) if not key}
