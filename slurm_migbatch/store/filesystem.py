"""File system of a path, and whether SQLite can be used on it.

SQLite's WAL needs shared memory between all processes that open the file, so a file system shared by several hosts
breaks it (sqlite.org/wal.html); its locks are often broken there too.
"""

from __future__ import annotations

import os

from slurm_migbatch.values import Pattern

#: network file system types, as in /proc/self/mountinfo
NETWORK_TYPES = frozenset({
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs", "lustre",
    "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf", "wekafs",
})  # fmt: skip
#: user-space file systems that are local disks
_LOCAL_FUSE = frozenset({"fuse.ext2", "fuse.ext4", "fuse.ntfs", "fuse.ntfs-3g", "fuse.fuse-overlayfs", "fuse.lxcfs"})
_OCTAL = Pattern(r"\\([0-7]{3})")


def filesystem_type(path: str | os.PathLike[str], mountinfo: str | None = None) -> str:
    """Return the type of the file system of `path` (or its nearest existing parent), such as "ext4" or "nfs4"; "" if
    unknown. `mountinfo`: text of a /proc/<pid>/mountinfo; default: this process's.
    """
    if mountinfo is None:
        try:
            with open("/proc/self/mountinfo", errors="surrogateescape") as file:  # noqa: PTH123 see `values`
                mountinfo = file.read()
        except OSError:
            return ""
    real_path = os.path.realpath(path)
    longest, kind = -1, ""
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        columns = fields.split(" ")
        if len(columns) < 5 or not rest:
            continue
        mount = columns[4]
        if "\\" in mount:
            mount = _OCTAL.made.sub(lambda match: chr(int(match[1], 8)), mount)
        prefix = f"{mount.rstrip('/')}/"
        # of two mounts on one path the later one is on top
        if len(prefix) >= longest and f"{real_path}/".startswith(prefix):
            longest, kind = len(prefix), rest.split(" ", 1)[0]
    return kind


def is_network(kind: str) -> bool:
    """Return whether several hosts can share a file system of this type. Unknown user-space ones count as shared."""
    return kind in NETWORK_TYPES or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE) or kind == "fuse"
