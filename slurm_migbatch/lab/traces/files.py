"""Find the files of public data sets below a directory."""

from __future__ import annotations

import glob
from pathlib import Path

from slurm_migbatch.lab.bars import NotMeasurable


def below(data: Path, pattern: str) -> list[Path]:
    """Return the files below a directory that match a pattern, in the order of their paths; links are followed."""
    found = glob.glob(f"{glob.escape(str(data))}/**/{pattern}", recursive=True)  # noqa: PTH207 - rglob follows no links
    return sorted(map(Path, found))


def first_below(data: Path, pattern: str, needed: str) -> Path:
    """Return the first of them; `needed`: the data sets that an experiment reads. Raises NotMeasurable."""
    found = below(data, pattern)
    if not found:
        raise NotMeasurable(f"{data} holds no {pattern} ({needed} are needed)")
    return found[0]
