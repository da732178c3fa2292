"""Report the progress of long work to the user."""

from __future__ import annotations

from collections.abc import Callable

#: called with the name of the next step and the number of steps (0: unknown)
Progress = Callable[[str, int], None]


def silent(_text: str, _of: int) -> None:
    """Report nothing."""
