"""Run the parts of an experiment in several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

Submit = Callable[..., Callable[[], Any]]
"""Takes a function and its arguments after the inputs; returns a function that waits for its result."""

_inputs: list[Any] = []


@contextmanager
def pool(processes: int, inputs: Any) -> Iterator[Submit]:
    """Yield a `Submit` that runs up to `processes` parts at once; each process gets the inputs once.

    With one process a part runs when its result is requested.
    """
    if processes <= 1:
        yield lambda call, *args: lambda: call(inputs, *args)
        return
    # forked also from Python 3.14 on, where it is no longer the default: so no process imports everything again
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(processes, os.cpu_count() or 1), forked, _keep, (inputs,)) as executor:

        def submit(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
            future: Future[Any] = executor.submit(_with_inputs, call, *args)
            return future.result

        yield submit


def _keep(inputs: Any) -> None:
    _inputs.append(inputs)


def _with_inputs(call: Callable[..., Any], *args: Any) -> Any:
    return call(_inputs[-1], *args)
