"""Apply what `migbatch install` plans to files of a test, and remove it again."""

from __future__ import annotations

from slurm_migbatch.install import files
from slurm_migbatch.install.files import FileChange, InstallRecord, Wanted


def install(record: InstallRecord, *wanted: Wanted) -> list[FileChange]:
    """Write the wanted files; return the changes."""
    changes = files.differing(wanted, record)
    files.apply(changes, record)
    return changes


def leave(record: InstallRecord) -> list[str]:
    """Remove everything again; return the conflicts."""
    changes = files.leaving(record)
    files.apply(changes, record)
    return [change.conflict for change in changes if change.conflict]
