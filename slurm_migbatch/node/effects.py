"""Name every point at which the hooks change something outside the process.

`point(name)` is called right before each write, commit, driver change, chown, mknod, rename and unlink. It does
nothing; the crash tests set `hook` to a function that ends the process there, and so find all of them by counting.
"""

from __future__ import annotations

from collections.abc import Callable

hook: Callable[[str], None] | None = None


def point(name: str) -> None:
    """Report that the effect `name` comes next."""
    if hook is not None:
        hook(name)
