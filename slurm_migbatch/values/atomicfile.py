"""Write files so that at any instant, also after a kill or a power failure, they are the old or the new one.

Hooks of nodes have writers of their own (`node/handoff.py` and others): they import nothing from here, and tests kill
them at each step.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType


def write(
    path: str | Path,
    content: bytes,
    mode: int | None = None,
    owner: tuple[int, int] | None = None,
    *,
    folder: int | None = None,
    attributes: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a file; a link is replaced, not followed. Raises OSError.

    Args:
        path: a path, or a name in the open directory `folder` (a file descriptor).
        content: all of the file.
        mode: None: as the umask allows.
        owner: uid and gid; None: this process's.
        attributes: extended attributes; those that the file system does not support are skipped.
    """
    # a unique name, because hosts that share a directory may write the same file at the same time
    temporary = str(Path(path).with_name(f".{Path(path).name}.migbatch-{secrets.token_hex(8)}"))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o666 if mode is None else 0o600, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            if owner is not None:
                os.fchown(out.fileno(), *owner)
            if mode is not None:
                os.fchmod(out.fileno(), mode)
            for name, value in attributes.items():
                with suppress(OSError):
                    os.setxattr(out.fileno(), name, value)
            os.fsync(out.fileno())
        os.replace(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
