"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 120.0  # machines that do much else at the same time are slow

T = TypeVar("T")


def eventually(check: Callable[[], T], timeout: float = PATIENCE_S) -> T:
    """Return the first result of `check()` that is true; a test never sleeps for a guessed time.

    The longer a check takes, the longer is the pause after it: what is waited for needs the processors.
    """
    end = time.monotonic() + timeout
    while True:
        begin = time.monotonic()
        if result := check():
            return result
        now = time.monotonic()
        assert now < end, "did not happen"
        time.sleep(max(0.01, min(9 * (now - begin), 0.5)))
