"""Control garbage collection in migbatchd: none during a round or a query of Slurm, nor while submissions are answered.

On a large site the first two create hundreds of thousands of objects that form no reference cycles and live until the
site changes. The collector would traverse all of them several times, which takes as long as creating them. Answers
would wait for it just when there are many requests.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_MANY: Final = 100_000
"""Number of new objects above which they are frozen."""
_YOUNG: Final = 5000
"""Number of new objects from which they are collected when idle, which takes a fraction of a millisecond."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector for the block; freeze the objects that the block created if they are many.

    Frozen objects are freed when their last reference is dropped, but are not traversed again before `collect_all`. A
    reference cycle of another thread that is frozen with them stays until then, so nothing is frozen after an ordinary
    round, which creates few objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_count()[0] > _MANY:
                gc.freeze()
            gc.enable()


def collect_all() -> None:
    """Collect all objects, frozen ones too: a service that has ended is in reference cycles with all that it knew.

    What remains is frozen again: modules and settings, which no later collection has to traverse.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def collect_when_idle() -> None:
    """Disable automatic collections, and freeze all objects that exist. From then on call `collect_young` when idle.

    That suffices for the process that answers submissions: its longer-lived objects (figures, answers) are bounded and
    form no cycles.
    """
    gc.disable()
    gc.collect()
    gc.freeze()


def collect_young() -> None:
    """Collect new objects if there are many."""
    if gc.get_count()[0] > _YOUNG:
        gc.collect(0)
