"""Read errors of functions of libc that ctypes calls with `use_errno`."""

from __future__ import annotations

import ctypes
import os


def last_error(call: str) -> OSError:
    """Return the error of the last call, which the message names."""
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
