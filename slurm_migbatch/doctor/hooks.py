"""Check Prolog, Epilog and TaskProlog of a node: slurmd runs migbatch's, and only root can change them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurm_migbatch.doctor.programs import HostProgram, read_program
from slurm_migbatch.install import scripts
from slurm_migbatch.install.hosts import HOOKS as HOOKS
from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, WARN, Finding
from slurm_migbatch.node.install import closed_to_users, is_current, read_by_users

_INSTALL: Final = "migbatch install --role node --edit --apply"
_BY_CONTROLLER: Final = "on the controller: migbatch install --role controller --edit --apply; then its /etc/slurm here"
_OURS: Final = re.compile(r"^ {4}from slurm_migbatch\.node\.\w+ import main$", re.MULTILINE)
_CALLED: Final = re.compile(r"^\[ (?:! )?-e (/\S+) \] \|\|", re.MULTILINE)
_PATHS: Final = re.compile(r"^PATHS = \((.*)\)$", re.MULTILINE)


@dataclass(frozen=True)
class HookFacts:
    """One hook.

    Attributes:
        key: of slurm.conf.
        values: its values in slurm.conf.
        programs: their programs on this host.
        hook: migbatch's hook, by the path that one of the programs names, else by the directory of hooks.
        broken: a directory that it loads and that does not exist.
        closed: the part of TaskProlog's code that users cannot read.
        several: whether Slurm runs all of several values, so that the controller adds migbatch's.
    """

    key: str
    values: tuple[str, ...]
    programs: tuple[HostProgram, ...]
    hook: HostProgram
    broken: str = ""
    closed: str = ""
    several: bool = False


def gather(conf: Conf, directory: str, *, several: bool) -> list[HookFacts]:
    """Read the hooks of this host. `directory`: where `migbatch install` puts them. `several`: whether Slurm runs all
    of several values, instead of the last.
    """
    return [_gather(conf, key, f"{directory}/{name}", several) for key, name in HOOKS]


def _gather(conf: Conf, key: str, usual: str, several: bool) -> HookFacts:
    several = several and key in scripts.SEVERAL
    values = conf.values(key) if several else conf.values(key)[-1:]
    programs = [read_program(path) for value in values for path in scripts.programs_of(conf.beside(value))]
    hook = next((program for program in programs if is_ours(program)), None)
    if hook is None:
        called_paths = [path for program in programs for path in _CALLED.findall(program.text or "")]
        hook = read_program(next((path for path in called_paths if Path(path).name == Path(usual).name), usual))
    paths = _loaded(hook)
    broken = ", ".join(path for path in paths if not Path(path).is_dir())
    closed = closed_to_users(read_by_users(paths)) if key == "TaskProlog" and paths and not broken else ""
    return HookFacts(key, tuple(values), tuple(programs), hook, broken, closed, several)


def is_ours(program: HostProgram) -> bool:
    """Return whether a program is one of migbatch's hooks."""
    return program.text is not None and _OURS.search(program.text) is not None


def _loaded(hook: HostProgram) -> list[str]:
    """Return the directories from which a hook loads its code; none for an example, which computes them."""
    match = _PATHS.search(hook.text or "")
    return re.findall(r'"([^"]+)"', match[1]) if match and 'f"' not in match[1] else []


def check_hooks(facts: Sequence[HookFacts]) -> Iterator[Finding]:
    """Check that slurmd runs migbatch's hooks, and that they can run."""
    for hook in facts:
        # slurm.conf may name the hook itself, which both check
        problems = list(dict.fromkeys([*_check_called(hook), *_sound(hook)]))
        yield from problems or [Finding(OK, hook.key, f"runs {hook.hook.path}")]


def _check_called(facts: HookFacts) -> Iterator[Finding]:
    ours = facts.hook.path
    if not facts.values:
        text = f"slurm.conf has no {facts.key}=: no job gets a slice on this node"
        yield Finding(
            FAIL, facts.key, text, f"set {facts.key}={ours}, or run migbatch install --role controller --edit"
        )
        return
    shown = ", ".join(facts.values)
    present = [program for program in facts.programs if program.text is not None]
    if any(program.closed for program in facts.programs):
        yield from (_closed(facts.key, program) for program in facts.programs if program.closed)
        return
    missing = [program.path for program in facts.programs if program.text is None]
    for path in missing:
        yield _missing_program(facts.key, path)
    if (missing and not present) or any(Path(path).name == f"migbatch-{Path(ours).name}" for path in missing):
        return
    calling = [program for program in present if program.path == ours or scripts.calls_hook(program.text or "", ours)]
    if not calling:
        advice = _BY_CONTROLLER if facts.several else _INSTALL
        by_hand = not facts.several and not any(map(scripts.is_pattern, facts.values))
        if by_hand and scripts.is_shell(present[-1].text or ""):
            advice = f"add to {present[-1].path} below its first line: {scripts.hook_line(ours)}"
        yield Finding(FAIL, facts.key, f"{shown} does not run {ours}: jobs start without slices", advice)
    if len(calling) > 1:
        # one that does nothing but run our hook is kept, if there is any
        *others, kept = sorted(calling, key=lambda found: found.path == ours or found.text == scripts.stub(ours))
        text = f"{ours} runs {len(calling)} times for each job, by {', '.join(program.path for program in calling)}"
        advice = " and ".join(f"remove its line from {program.path}" for program in others)
        yield Finding(WARN, facts.key, text, f"{advice}: {kept.path} is sufficient")
    for program in calling:
        if program.path != ours:
            yield from _runs(facts.key, program)
            yield from _hides(facts.key, program, ours)


def _hides(key: str, program: HostProgram, ours: str) -> Iterator[Finding]:
    """Warn of a site's TaskProlog that prints CUDA_VISIBLE_DEVICES itself, after ours."""
    if key == "TaskProlog" and scripts.hides_slices(program.text or "", ours):
        text = f"{program.path} changes CUDA_VISIBLE_DEVICES after {ours}: tasks may not find their slices"
        advice = f"in {program.path} move the line that runs ours below; it does nothing for jobs without slices"
        yield Finding(WARN, key, text, advice)


def _closed(key: str, program: HostProgram) -> Finding:
    return Finding(UNKNOWN, key, f"{program.path} is readable by root only", "run migbatch doctor as root")


def _missing_program(key: str, path: str) -> Finding:
    """Name a program of slurm.conf that does not exist on this host."""
    effect = "every task fails" if key == "TaskProlog" else "slurmd drains the node at the next job"
    advice = f"install it, or run {_INSTALL}"
    if Path(path).name.startswith("migbatch-"):
        advice = f"copy the controller's {path} here; configless nodes get no programs from slurmctld"
    return Finding(FAIL, key, f"{path} is not on this host: {effect}", advice)


def _sound(facts: HookFacts) -> Iterator[Finding]:
    if facts.hook.closed:
        yield _closed(facts.key, facts.hook)
        return
    if facts.hook.text is None:
        text = f"{facts.hook.path} is missing: jobs get no slices on this node"
        yield Finding(FAIL, facts.key, text, "migbatch install --role node --apply")
        return
    yield from _runs(facts.key, facts.hook)
    if not is_ours(facts.hook):
        text = f"{facts.hook.path} differs from the file that migbatch writes"
        advice = f"mv {facts.hook.path} {facts.hook.path}.old, then migbatch install --role node --apply"
        yield Finding(FAIL, facts.key, text, advice)
    elif facts.broken:
        text = f"{facts.hook.path} loads {facts.broken}, which does not exist"
        yield Finding(FAIL, facts.key, text, f"rm {facts.hook.path}, then migbatch install --role node --apply")
    elif facts.closed:
        text = f"users cannot read {facts.closed}, which TaskProlog needs: every task on this node fails"
        yield Finding(FAIL, facts.key, text, "migbatch install --role node says what to change")
    elif not is_current(dict(HOOKS)[facts.key], facts.hook.text):
        yield Finding(
            WARN, facts.key, f"{facts.hook.path} is another release's", "migbatch install --role node --apply"
        )


def _runs(key: str, program: HostProgram) -> Iterator[Finding]:
    if not program.executable:
        text = f"{program.path} is not executable: slurmd fails and drains the node"
        yield Finding(FAIL, key, text, f"chmod 755 {program.path}")
    if program.insecure:
        yield Finding(
            FAIL, key, f"users other than root can change code that root runs: {program.insecure}", _secured(program)
        )


def _secured(program: HostProgram) -> str:
    path = program.insecure.partition(" ")[0]
    return f"chown root {path}; chmod go-w {path}"
