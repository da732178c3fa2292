"""Record why the last hook failed: slurmd drains the node with a reason that does not say why.

Imported by the fast path of hooks: built-in modules only.
"""

from __future__ import annotations

import posix
import time

NAME = "last-failure"
LONGEST = 1000


def note(directory: str, hook: str, code: int, line: str) -> None:
    """Record that a hook ended with a code that drains the node; `directory` is RunDir. Best effort."""
    text = f"{time.time():.0f} {hook} {code} {line}".encode("utf-8", "backslashreplace")[:LONGEST]
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC | posix.O_NOFOLLOW
    try:
        handle = posix.open(f"{directory}/{NAME}", flags, 0o600)
    except OSError:
        return
    try:
        posix.write(handle, text)
    except OSError:
        pass
    finally:
        posix.close(handle)


def last(directory: str) -> str:
    """Return the last failure, as `prolog exited with 11 (2026-11-22 22:10): ...`; empty if there was none."""
    try:
        handle = posix.open(f"{directory}/{NAME}", posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        text = posix.read(handle, LONGEST).decode("utf-8", "replace")
    finally:
        posix.close(handle)
    moment, _, rest = text.partition(" ")
    hook, _, rest = rest.partition(" ")
    code, _, line = rest.partition(" ")
    if not (moment.isdigit() and code.isdigit()):
        return ""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(int(moment)))
    return f"{hook} exited with {code} ({when}): {line}"
