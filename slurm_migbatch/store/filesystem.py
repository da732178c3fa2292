"""Which filesystem a path lies on, and whether SQLite may live there.

SQLite's WAL needs shared memory between all who open the file, so a filesystem that several hosts share breaks it
(sqlite.org/wal.html); its locks are often broken there too.
"""

from __future__ import annotations

import os

from slurm_migbatch.values import TYPE_CHECKING, Pattern

if TYPE_CHECKING:
    import re

#: filesystem types, as /proc/self/mountinfo names them, that reach over a network
NETWORK_TYPES = frozenset(
    {
        "9p",
        "acfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "davfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb2",
        "smb3",
        "smbfs",
        "vboxsf",
        "wekafs",
    }
)
#: filesystems in user space that are plain local disks
_LOCAL_FUSE = frozenset({"fuse.ext2", "fuse.ext4", "fuse.ntfs", "fuse.ntfs-3g", "fuse.fuse-overlayfs", "fuse.lxcfs"})
_OCTAL = Pattern(r"\\([0-7]{3})")


def filesystem_type(path: str | os.PathLike[str], mountinfo: str | None = None) -> str:
    """Return the type of the filesystem that holds `path` (or its nearest existing parent), such as "ext4" or "nfs4".

    Args:
        path: need not exist.
        mountinfo: text of a /proc/<pid>/mountinfo; this process's where not given.

    Returns:
        The type, or "" where it cannot be told.
    """
    if mountinfo is None:
        try:
            with open("/proc/self/mountinfo", errors="surrogateescape") as file:  # noqa: PTH123 see `values`
                mountinfo = file.read()
        except OSError:
            return ""
    where = os.path.realpath(path)
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        fields, _, after = line.partition(" - ")
        columns = fields.split(" ")
        if len(columns) < 5 or not after:
            continue
        mount = _OCTAL.made.sub(_character, columns[4]) if "\\" in columns[4] else columns[4]
        below = f"{mount.rstrip('/')}/"
        # of two mounts on one place the later one is on top
        if len(below) >= best and f"{where}/".startswith(below):
            best, kind = len(below), after.split(" ", 1)[0]
    return kind


def _character(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))


def is_network(kind: str) -> bool:
    """Return whether several hosts may share a filesystem of this type. User-space ones count as such unless known."""
    return kind in NETWORK_TYPES or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE) or kind == "fuse"
