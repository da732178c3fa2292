"""Text from others never controls a terminal or breaks a line; printable characters stay."""

from __future__ import annotations

import ast

from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.mig.text import escaped, printable


@given(st.text())
def test_text_is_made_printable(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable() and len(shown) == len(text)
    assert all(new == old or (new == "?" and not old.isprintable()) for new, old in zip(shown, text, strict=True))
    assert escaped(text).isprintable()


@given(st.text(st.characters(exclude_characters="\\'")))
def test_escaped_text_is_read_back(text: str) -> None:
    assert ast.literal_eval(f"'{escaped(text)}'") == text


def test_terminal_escape_sequences_are_replaced_or_escaped() -> None:
    assert printable("a\x1b[2Jé\n") == "a?[2Jé?"
    assert escaped("a\x1b[2Jé\n") == "a\\x1b[2Jé\\n"
