"""Wait for effects of other threads or processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 120.0  # long, for busy machines

T = TypeVar("T")


def eventually(check: Callable[[], T], timeout: float = PATIENCE_S) -> T:
    """Return the first result of `check()` that is true; a test never sleeps for a guessed time.

    The longer a check takes, the longer the pause after it, so that the awaited work gets the processors.
    """
    end = time.monotonic() + timeout
    while True:
        begin = time.monotonic()
        if result := check():
            return result
        now = time.monotonic()
        assert now < end, "did not happen"
        time.sleep(max(0.01, min(9 * (now - begin), 0.5)))
