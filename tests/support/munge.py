"""A private munged for tests."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.directories import open_to_users
from tests.support.waiting import eventually


@contextmanager
def private_munged(root: Path) -> Iterator[str]:
    """Run a munged with its own key below `root`; yield its socket, which every user may open."""
    if not shutil.which("munged"):
        pytest.fail("munged is missing: run `make system`")
    key = root / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    open_to_users(root)
    paths = {"socket": root / "socket", "pid-file": root / "pid", "log-file": root / "log", "seed-file": root / "seed"}
    options = [f"--{name}={path}" for name, path in paths.items()]
    daemon = subprocess.Popen(
        ["munged", "--foreground", "--force", f"--key-file={key}", "--num-threads=2", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(paths["socket"].exists)
        yield str(paths["socket"])
    finally:
        daemon.terminate()
        daemon.wait()
