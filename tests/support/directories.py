"""Directories of a test that other users may enter."""

from __future__ import annotations

import tempfile
from pathlib import Path


def open_to_users(directory: Path) -> None:
    """Let others read and enter a directory, and those above it that pytest made for this run alone.

    How many those are depends on how pytest was started: each of several processes has a directory of its own.
    """
    outer = Path(tempfile.gettempdir())
    for place in (directory, *directory.parents):
        if place == outer or place in outer.parents:
            break
        place.chmod(place.stat().st_mode & 0o7777 | 0o055)
