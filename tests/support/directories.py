"""Directories of a test that other users may enter."""

from __future__ import annotations

import tempfile
from pathlib import Path


def open_to_users(directory: Path) -> None:
    """Let others read and enter a directory, and the directories above it that pytest created for this run.

    Their number depends on how pytest was started: with several processes, each has its own directory.
    """
    outer = Path(tempfile.gettempdir())
    for folder in (directory, *directory.parents):
        if folder == outer or folder in outer.parents:
            break
        folder.chmod(folder.stat().st_mode & 0o7777 | 0o055)
