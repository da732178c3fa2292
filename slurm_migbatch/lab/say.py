"""How work that takes long tells who waits how far it is."""

from __future__ import annotations

from collections.abc import Callable

#: told which step begins, and how many steps there are (0: not known)
Say = Callable[[str, int], None]


def silent(_text: str, _of: int) -> None:
    """Tell nobody."""
