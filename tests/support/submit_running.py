"""A submit service that listens on a socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurm_migbatch.submit.server import SubmitServer
from slurm_migbatch.submit.service import SubmitService


@contextmanager
def running(path: Path, service: SubmitService) -> Iterator[None]:
    """Run the service behind its socket."""
    server = SubmitServer(path, service)
    server.start()
    try:
        yield
    finally:
        server.stop()
