"""Check that containers which pyxis, Slurm's plugin for Enroot, starts on a node run their tasks and get slices."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurm_migbatch.install import scripts
from slurm_migbatch.install.files import read
from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.node.findings import FAIL, OK, WARN, Finding

ENROOT: Final = "/etc/enroot"
NAME: Final = "pyxis"
NEEDS_LIBRARIES: Final = ((24, 11), (25, 11))
"""The first release whose slurmstepd starts itself to run TaskProlog, in the container without its libraries, and the
first that is known not to (24.11.5 and 25.11.2 were tested; github.com/NVIDIA/pyxis/issues/163).
"""
_DEPTH: Final = 5
"""Most files of plugstack.conf that include each other."""


@dataclass(frozen=True)
class ContainerFacts:
    """What the check needs.

    Attributes:
        program: path that Slurm runs as TaskProlog; empty for none.
        mounted: whether Enroot's settings mount it in every container.
        hook: path of migbatch's hook of Enroot.
        present: whether it exists.
    """

    program: str
    mounted: bool
    hook: str
    present: bool


def gather(conf: Conf, enroot: str = ENROOT) -> ContainerFacts | None:
    """Read the settings of Slurm and of Enroot in the directory `enroot`; None if Slurm does not load pyxis."""
    if not _loads_pyxis(conf.beside(conf.value("PlugStackConfig") or "plugstack.conf")):
        return None
    values = conf.values("TaskProlog")
    program = conf.beside(values[-1]) if values else ""
    hook = Path(enroot, scripts.ENROOT_HOOK)
    return ContainerFacts(program, _mounts(enroot, program), str(hook), hook.exists())


def check_containers(facts: ContainerFacts | None, release: tuple[int, ...]) -> Iterator[Finding]:
    """Check that TaskProlog can run in containers, and that they get slices. `release`: of Slurm; empty if unknown."""
    if facts is None:
        return
    problems: list[Finding] = []
    if facts.program and not facts.mounted:
        path = facts.program
        text = f"tasks in containers fail: Slurm runs TaskProlog inside, where {path} does not exist"
        line = scripts.enroot_mount(path).strip()
        advice = f"write to {Path(ENROOT, scripts.ENROOT_FSTAB)}, on each node with pyxis: {line}"
        problems.append(Finding(FAIL, NAME, text, advice))
    if facts.program and release and NEEDS_LIBRARIES[0] <= release[:2] < NEEDS_LIBRARIES[1]:
        text = "Slurm 24.11 can run TaskProlog only in containers that have its libraries: tasks in others fail"
        advice = "upgrade Slurm to 25.11, or have Enroot mount libslurmfull.so and the libraries that it needs"
        problems.append(Finding(WARN, NAME, text, advice))
    if not facts.present:
        text = f"{facts.hook} is missing: containers get no slices"
        problems.append(Finding(WARN, NAME, text, "migbatch install --role node --apply"))
    yield from problems or [Finding(OK, NAME, "containers get the slices of their jobs")]


def _loads_pyxis(path: str, depth: int = _DEPTH) -> bool:
    """Return whether a file like plugstack.conf, or one that it includes, loads pyxis."""
    for line in (read(path) or "").splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["include"] and depth:
            pattern = str(Path(path).parent / " ".join(words[1:]))
            if any(_loads_pyxis(name, depth - 1) for name in sorted(glob.glob(pattern))):  # noqa: PTH207
                return True
        elif len(words) > 1 and words[0] in ("required", "optional") and NAME in Path(words[1]).name:
            return True
    return False


def _mounts(enroot: str, program: str) -> bool:
    """Return whether a file like /etc/enroot/mounts.d/x.fstab mounts a program, or a directory above it."""
    for file in sorted(Path(enroot, "mounts.d").glob("*.fstab")):
        for line in (read(str(file)) or "").splitlines():
            words = line.partition("#")[0].split()[:2]
            if words and Path(words[-1]) not in (Path("/"), Path()) and Path(program).is_relative_to(words[-1]):
                return True
    return False
