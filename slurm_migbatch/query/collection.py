"""Reading many rows without Python's search for cycles among them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Look for no cycles meanwhile: rows of the record make none, and up to a third of the time would go into it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
