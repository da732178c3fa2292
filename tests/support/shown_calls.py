"""What the pages for people show: their texts, lines that are typed, and calls of our programs in these."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*(ROOT / "docs").glob("*.md"), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY"))]
)
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
CALL = re.compile(r"(?:^|(?<=[\s(;|&\"]))(?:[\w./-]+/)?(migbatch|migacct)(?=[\s)]|$)")
ENDS = frozenset(";|&()<>")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next one of second order."""
    return text_of(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def inline(page: Path) -> list[str]:
    """Inline code, a piece that goes over a line's end as one."""
    return [" ".join(code.split()) for code in CODE.findall(FENCE.sub("", text_of(page)))]


def shell(page: Path) -> list[str]:
    """Lines that are typed: those of sh blocks, and those behind `$ ` of others."""
    lines: list[str] = []
    for language, block in FENCE.findall(text_of(page)):
        whole = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
        lines += whole if language == "sh" else [line[2:] for line in whole if line.startswith("$ ")]
    return lines


def calls(line: str) -> Iterator[tuple[str, list[str]]]:
    """Programs of ours in a shell line, each with its words."""
    for found in CALL.finditer(line):
        rest = line[found.end() :]
        lexer = shlex.shlex(rest.partition(")")[0] if rest.count('"') % 2 else rest, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= ENDS:
                break
            words.append(word)
        yield found[1], words


def told(code: str) -> Iterator[tuple[str, list[str]]]:
    """Programs of ours in inline code: `a|b` and `{a,b}` are alternatives, `[...]` may be left out, `...` is more."""
    if found := re.match(r"(?:[\w./-]+/|srun (?:\S+ )*)?(migbatch|migacct)( .*)?$", code):
        try:
            words = shlex.split((found[2] or "").replace("[", "").replace("]", ""))
        except ValueError:
            words = (found[2] or "").split()
        yield found[1], [word for word in words if word != "..."]
