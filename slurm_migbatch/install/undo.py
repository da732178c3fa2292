"""Remove edits from a file, even if others have changed it since."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Final

from slurm_migbatch.slurm.nodelist import NodeListError, expand

_WORD: Final = re.compile(r"((?:\[[^\]\n]*\]|[^\s,=])+)(\s*=)?")
_VALUE: Final = re.compile(r"=\s*\"?([^\s\"]+)")


def undo(original: str, written: str, present: str) -> str | None:
    """Return `present` without the changes from `original` to `written`; None if they cannot be identified.

    Each run of written lines must still be there once, unchanged; or each line of it, if it is known which one it
    replaced.
    """
    if present == written:
        return original
    before, after, current = (text.splitlines(keepends=True) for text in (original, written, present))
    for tag, i1, i2, j1, j2 in reversed(SequenceMatcher(None, before, after, autojunk=False).get_opcodes()):
        if tag == "equal":
            continue
        lines, block = before[i1:i2], after[j1:j2]
        pairs = [(lines, block)] if _place(block, current) is not None else _parts(lines, block)
        for replaced, wanted in reversed(pairs):
            place = _place(wanted, current)
            if place is None:
                return None
            below = current[place + len(wanted) :]
            if replaced and below and replaced[-1].splitlines() == [replaced[-1]]:
                # the file ended without a line end, and has got more lines since
                replaced = [*replaced[:-1], f"{replaced[-1]}\n"]
            current[place:] = [*replaced, *below]
    return "".join(current)


def _place(block: list[str], lines: list[str]) -> int | None:
    """Return where the block is among the lines; None if it is not there once."""
    places = [k for k in range(len(lines) - len(block) + 1) if lines[k : k + len(block)] == block]
    return places[0] if block and len(places) == 1 else None


def _parts(lines: list[str], block: list[str]) -> list[tuple[list[str], list[str]]]:
    """Return the parts of a run of written lines, each after the lines that it replaced: others' may be between them.

    Lines at the end that have nothing in common with those replaced were added (`Include migbatch.conf`). If the
    others are as many as those replaced, each of them replaced one.
    """
    known = {token for line in lines for token in _tokens(line)}
    end = len(block)
    while end and known.isdisjoint(_tokens(block[end - 1])):
        end -= 1
    changed = [([line], [new]) for line, new in zip(lines, block, strict=False)]
    parts = changed if end == len(lines) else [(lines, block[:end])]
    return [*parts, ([], block[end:])] if end < len(block) else parts


def _tokens(line: str) -> list[str]:
    return re.findall(r"[^\s,=]+", line)


def remaining(original: str, written: str, present: str) -> list[str]:
    """Return the words of the changes from `original` to `written` that `present` still has; none if somebody has
    removed them by hand.

    If any has migbatch in its name only such words count: `Include` and `Alloc` may be the site's too by now.
    """
    added = added_words(original, written)
    return sorted(({word for word in added if "mig" in word.lower()} or added) & _words(present))


def added_words(before: str, after: str) -> set[str]:
    """Return the words that only the second text has, without keys, and hosts that the first has in other lists."""
    known = {host for value in _VALUE.findall(before) for host in _hosts(value)}
    return {word for word in _words(after) - _words(before) if not known.issuperset(_hosts(word))}


def _words(text: str) -> set[str]:
    return {word for word, key in _WORD.findall(text) if not key}


def _hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a list; if it is none, the text itself."""
    try:
        return expand(text)
    except NodeListError:
        return (text,)
