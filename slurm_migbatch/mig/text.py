"""Make external texts safe to print: users, drivers and servers may choose any name.

It is here because hooks, which import no other package, print such texts too. Standard library only.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text with a question mark for each character that a terminal could interpret."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def escaped(text: str) -> str:
    """Return the text with each character that a terminal or a journal could interpret escaped (`\\x1b`)."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
