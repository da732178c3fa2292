"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 120.0  # machines that do much else at the same time are slow

T = TypeVar("T")


def eventually(check: Callable[[], T], timeout: float = PATIENCE_S) -> T:
    """Return the first result of `check()` that is true; a test never sleeps for a guessed time."""
    end = time.monotonic() + timeout
    while not (result := check()):
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)
    return result
