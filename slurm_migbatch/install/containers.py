"""Determine what steps in containers of pyxis, Slurm's plugin for Enroot, need. Standard library only.

Slurm runs TaskProlog inside such a container, and the task fails if the program does not exist there.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Final

from slurm_migbatch.install.files import read
from slurm_migbatch.install.slurmconf import Conf

ENROOT: Final = "/etc/enroot"
"""Directory of Enroot's settings."""
HOOK: Final = "hooks.d/50-migbatch.sh"
FSTAB: Final = "mounts.d/50-migbatch.fstab"
"""migbatch's files in it; Enroot's own hook for GPUs is hooks.d/98-nvidia.sh."""
NEEDS_LIBRARIES: Final = ((24, 11), (25, 11))
"""The first release whose slurmstepd starts itself to run TaskProlog, in the container without its libraries, and the
first that is known not to (24.11.5 and 25.11.2 were tested; github.com/NVIDIA/pyxis/issues/163).
"""
_DEPTH: Final = 5
"""Most files of plugstack.conf that include each other."""


def needs_libraries(release: tuple[int, ...]) -> bool:
    """Return whether a release of Slurm can run TaskProlog only in containers that have Slurm's libraries."""
    return NEEDS_LIBRARIES[0] <= release[:2] < NEEDS_LIBRARIES[1]


def has_pyxis(conf: Conf) -> bool:
    """Return whether Slurm loads pyxis on this host."""
    return _loads_pyxis(conf.beside(conf.value("PlugStackConfig") or "plugstack.conf"))


def _loads_pyxis(path: str, depth: int = _DEPTH) -> bool:
    """Return whether a file like plugstack.conf, or one that it includes, loads pyxis."""
    for line in (read(path) or "").splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["include"] and depth:
            pattern = str(Path(path).parent / " ".join(words[1:]))
            if any(_loads_pyxis(name, depth - 1) for name in sorted(glob.glob(pattern))):  # noqa: PTH207
                return True
        elif len(words) > 1 and words[0] in ("required", "optional") and "pyxis" in Path(words[1]).name:
            return True
    return False


def mount_line(path: str) -> str:
    """Return the line of a fstab of Enroot that mounts a program in every container."""
    return f"{path} {path} none x-create=file,bind,ro,nosuid,nodev,nofail,silent\n"


def mounts(enroot: str, program: str) -> bool:
    """Return whether a file like /etc/enroot/mounts.d/x.fstab mounts a program, or a directory above it."""
    for file in sorted(Path(enroot, "mounts.d").glob("*.fstab")):
        for line in (read(str(file)) or "").splitlines():
            words = line.partition("#")[0].split()[:2]
            if words and Path(words[-1]) not in (Path("/"), Path()) and Path(program).is_relative_to(words[-1]):
                return True
    return False
