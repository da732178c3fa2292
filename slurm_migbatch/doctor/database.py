"""Whether migbatchd can write the record."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from slurm_migbatch.doctor.programs import Reader, closed_to
from slurm_migbatch.node.findings import BAD, GOOD, UNKNOWN, Finding

_SUBJECT = "database"


def check_file(path: str, writer: Reader | None) -> Iterator[Finding]:
    """Check that an SQLite file can be written; it is opened, and nothing is written.

    Args:
        path: of the file, which is there.
        writer: who migbatchd runs as; None where that is not known.
    """
    folder = str(Path(path).parent)
    if os.geteuid() != 0:
        yield Finding(UNKNOWN, _SUBJECT, f"whether {path} can be written only root sees", "run migbatch doctor as root")
        return
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        text = f"{path} is read-only: {error.strerror}; events of nodes wait there"
        yield Finding(BAD, _SUBJECT, text, f"mount -o remount,rw its file system, or chattr -i {path}")
        return
    for place in (path, folder):
        if closed := closed_to(place, writer, 0o2):
            name = writer.name if writer else "root"
            text = f"read-only for migbatchd, which runs as {name}: {closed}; events of nodes wait there"
            yield Finding(BAD, _SUBJECT, text, f"chown -R {name} {folder}; chmod u+rwX {place}")
            return
    yield Finding(GOOD, _SUBJECT, f"{path} can be written")
