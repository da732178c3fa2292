"""Find the files of public data sets below a directory."""

from __future__ import annotations

import glob
from pathlib import Path

from slurm_migbatch.lab.bars import NotMeasurable


def below(data: Path, pattern: str) -> list[Path]:
    """Return the files below a directory that match a pattern, sorted by path; links are followed."""
    paths = glob.glob(f"{glob.escape(str(data))}/**/{pattern}", recursive=True)  # noqa: PTH207 - rglob follows no links
    return sorted(map(Path, paths))


def first_below(data: Path, pattern: str, needed: str) -> Path:
    """Return the first file of `below`. Raises NotMeasurable if there is none.

    `needed` names the data sets that the experiment reads, for the message.
    """
    paths = below(data, pattern)
    if not paths:
        raise NotMeasurable(f"{data} holds no {pattern} ({needed} are needed)")
    return paths[0]
