"""Read the documentation pages: their text, the shell commands in them, and the calls of our programs."""

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
    """Return the text below a second-level heading, up to the next one."""
    return text_of(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def inline(page: Path) -> list[str]:
    """Return the inline code spans; a span that continues on the next line is one."""
    return [" ".join(code.split()) for code in CODE.findall(FENCE.sub("", text_of(page)))]


def shell(page: Path) -> list[str]:
    """Return the shell commands: the lines of sh blocks, and those after `$ ` in other blocks."""
    lines: list[str] = []
    for language, block in FENCE.findall(text_of(page)):
        block_lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
        lines += block_lines if language == "sh" else [line[2:] for line in block_lines if line.startswith("$ ")]
    return lines


def calls(line: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the calls of our programs in a shell line, each with its arguments."""
    for match in CALL.finditer(line):
        arguments = line[match.end() :]
        lexer = shlex.shlex(
            arguments.partition(")")[0] if arguments.count('"') % 2 else arguments, posix=True, punctuation_chars=True
        )
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= ENDS:
                break
            words.append(word)
        yield match[1], words


def inline_calls(code: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the call of our program in inline code.

    `a|b` and `{a,b}` are alternatives, `[...]` may be left out, `...` stands for more words.
    """
    if match := re.match(r"(?:[\w./-]+/|srun (?:\S+ )*)?(migbatch|migacct)( .*)?$", code):
        try:
            words = shlex.split((match[2] or "").replace("[", "").replace("]", ""))
        except ValueError:
            words = (match[2] or "").split()
        yield match[1], [word for word in words if word != "..."]
