"""A simulated machine with a node's configuration on it, and hooks that run in this process."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_migbatch.testbed.simdriver import build
from tests.support.nodes import Node


@pytest.fixture(scope="session")
def sim_library() -> Path:
    return build()


@pytest.fixture
def new_node(tmp_path, sim_library):
    """Makes nodes: `new_node(gpus=[...], **settings)`."""
    with _nodes(tmp_path, sim_library) as make:
        yield make


@pytest.fixture
def many_nodes(sim_library):
    """The same for tests that need dozens: in memory where there is such a place, and deleted at once."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="migbatch-test-", dir=base) as root,
        _nodes(Path(root), sim_library) as make,
    ):
        yield make


@contextmanager
def _nodes(root, library):
    made = []

    def make(gpus=("h100-80gb",), name="n1", mig=True, latency=0.0, **settings):
        node = Node(root / name, name, gpus, library, mig=mig, latency=latency, settings=settings)
        made.append(node)
        return node

    yield make
    for node in made:
        node.close()


@pytest.fixture
def node(new_node):
    """One node with one H100."""
    return new_node()


@pytest.fixture(autouse=True)
def _as_root_and_tidy():
    """Hooks set the umask; the next test must not find it so."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def _root_only():
    assert os.geteuid() == 0, "these tests make device nodes and change owners: run them as root"
    assert sys.platform == "linux"
