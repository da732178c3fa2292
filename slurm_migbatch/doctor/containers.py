"""Check that containers which pyxis, Slurm's plugin for Enroot, starts on a node run their tasks and get slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurm_migbatch.install import containers
from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.node.findings import FAIL, OK, WARN, Finding

NAME: Final = "pyxis"


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


def gather(conf: Conf, enroot: str = containers.ENROOT) -> ContainerFacts | None:
    """Read the settings of Slurm and of Enroot in the directory `enroot`; None if Slurm does not load pyxis."""
    if not containers.has_pyxis(conf):
        return None
    values = conf.values("TaskProlog")
    program = conf.beside(values[-1]) if values else ""
    hook = Path(enroot, containers.HOOK)
    return ContainerFacts(program, containers.mounts(enroot, program), str(hook), hook.exists())


def check_containers(facts: ContainerFacts | None, release: tuple[int, ...]) -> Iterator[Finding]:
    """Check that TaskProlog can run in containers, and that they get slices. `release`: of Slurm; empty if unknown."""
    if facts is None:
        return
    problems: list[Finding] = []
    if facts.program and not facts.mounted:
        path = facts.program
        text = f"tasks in containers fail: Slurm runs TaskProlog inside, where {path} does not exist"
        where = Path(containers.ENROOT, containers.FSTAB)
        advice = f"write to {where}, on each node with pyxis: {containers.mount_line(path).strip()}"
        problems.append(Finding(FAIL, NAME, text, advice))
    if facts.program and containers.needs_libraries(release):
        text = "Slurm 24.11 can run TaskProlog only in containers that have its libraries: tasks in others fail"
        advice = "upgrade Slurm to 25.11, or have Enroot mount libslurmfull.so and the libraries that it needs"
        problems.append(Finding(WARN, NAME, text, advice))
    if not facts.present:
        text = f"{facts.hook} is missing: containers get no slices"
        problems.append(Finding(WARN, NAME, text, "migbatch install --role node --apply"))
    yield from problems or [Finding(OK, NAME, "containers get the slices of their jobs")]
