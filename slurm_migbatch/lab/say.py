"""Report the progress of long work to the user."""

from __future__ import annotations

from collections.abc import Callable

#: called with the next step, and how many steps there are (0: unknown)
Say = Callable[[str, int], None]


def silent(_text: str, _of: int) -> None:
    """Report nothing."""
