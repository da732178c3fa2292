"""Detect out-of-memory errors, in exceptions and in output of failed programs. Standard library only."""

from __future__ import annotations

import re

MARK = "migbatch: oom"
"""Line with which a command reports that its batch does not fit."""

_WORDS = re.compile(
    r"out of memory|out_of_memory|outofmemory|oom-kill|RESOURCE_EXHAUSTED|cudaErrorMemoryAllocation|std::bad_alloc"
    r"|CU(?:BLAS|DNN|SOLVER|SPARSE|FFT)_(?:STATUS_)?ALLOC_FAILED|Cannot allocate memory|\bMemoryError\b",
    re.IGNORECASE,
)


def reports_oom(text: str) -> bool:
    """Return whether a text (of a driver, a framework, the C++ library) reports that memory ran out."""
    return _WORDS.search(text) is not None


def is_oom(error: BaseException) -> bool:
    """Return whether an exception, or one of its causes, means out of memory, on the GPU or the host."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        names = {base.__name__ for base in type(cause).__mro__}
        if isinstance(cause, MemoryError) or "OutOfMemoryError" in names or reports_oom(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
