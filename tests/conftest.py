"""Fixtures that several rooms share: private Slurm clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from slurm_migbatch.testbed.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One cluster of two nodes with two H100s each for the whole run: submit to it, do not restart its daemons."""
    with Cluster() as running:
        yield running


@pytest.fixture
def new_cluster() -> Iterator[Callable[..., Cluster]]:
    """Makes clusters for one test, which may restart or kill what it likes: `new_cluster(nodes=1, dbd=True)`."""
    with ExitStack() as stack:

        def make(**spec: object) -> Cluster:
            return stack.enter_context(Cluster(None, **spec))

        yield make
