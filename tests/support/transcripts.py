"""Read the output that a page shows below a command, and compare it with a program's output."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def transcript(page: str, command: str) -> str:
    """Return the lines that a page shows below `$ COMMAND`, up to the next command or the end of the block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = text.partition(f"\n$ {command}\n")[2]
    assert shown, f"{page} shows no output of {command}"
    return re.split(r"^(?:\$ |```)", shown, maxsplit=1, flags=re.MULTILINE)[0]


def shows(shown: str, output: str) -> bool:
    """Return whether the output contains what is shown; `...` matches anything, and all whitespace is equal."""
    parts = (re.escape(" ".join(part.split())) for part in shown.split("..."))
    return re.search(".*?".join(parts), " ".join(output.split())) is not None
