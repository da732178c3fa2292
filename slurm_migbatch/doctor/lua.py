"""Check the scripts that slurmctld and the user commands load."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from slurm_migbatch.doctor.programs import Reader, unreadable
from slurm_migbatch.install import scripts
from slurm_migbatch.install.files import read
from slurm_migbatch.node.conf import insecure
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, WARN, Finding
from slurm_migbatch.submit import shim

#: (name, module): content of a script of that name as rendered now
Rendering = Callable[[str, bool], str]
JOB_SUBMIT: Final = shim.JOB_SUBMIT
CLI_FILTER: Final = shim.CLI_FILTER
_INSTALL: Final = "migbatch install --role controller --apply"
_KNOWN: Final = re.compile(r"^(?:--:)?M\.BUILT_IN = \{\n(?:.*\n)*?(?:--:)?\}$", re.MULTILINE)
"""The site as a script knows it: a table of several lines."""


class RenderingError(RuntimeError):
    """A script cannot be rendered; the message says why and what to do."""


def check_script(
    path: str, rendering: Rendering, slurm_user: Reader | None, *, users: bool, known: bool = True
) -> Iterator[Finding]:
    """Check that a script is this release's, or that the site's own loads one that is.

    Args:
        slurm_user: user of slurmctld; None if this host does not have it.
        users: whether every user must be able to read it.
        known: whether `rendering` knows the current site.
    """
    name = Path(path).name
    text = read(path)
    if text is None:
        yield Finding(FAIL, path, "is missing", _INSTALL)
        return
    paths = [path]
    if not text.startswith(scripts.OURS):
        ours = str(Path(path).with_name(scripts.BESIDE[name]))
        if not scripts.calls_lua(text, ours):
            lines = re.sub(r" --.*\n", "; ", scripts.call_lua("", ours)).strip()
            yield Finding(
                FAIL, path, "belongs to the site and does not load ours", f"{_INSTALL} --edit, or add: {lines}"
            )
            return
        paths.append(ours)
        path = ours
    problems = [*_access(paths, slurm_user, users)]
    try:
        if known or read(path) is None:
            problems += _differs(path, rendering(name, path != paths[0]))
    except RenderingError as error:
        problems.append(Finding(UNKNOWN, path, f"cannot determine its content: {error}", "see migbatchd's log"))
    yield from problems or [Finding(OK, path, "up to date" if known else "exists, with safe permissions")]


def _differs(path: str, wanted: str) -> Iterator[Finding]:
    text = read(path)
    if text is None:
        yield Finding(FAIL, path, "is missing: every submission fails", _INSTALL)
    elif _KNOWN.sub("", text) != _KNOWN.sub("", wanted):
        text = "differs from what this release renders: it was edited, or migbatch.toml or migbatch have changed"
        # install refuses to overwrite an edited file and says so; without the file submissions fail for that moment
        advice = "migbatch install --role controller shows the difference, and with --apply writes ours"
        yield Finding(FAIL, path, text, advice)
    elif text != wanted:
        text = "has outdated profiles, which are used for submissions while migbatchd is down"
        yield Finding(WARN, path, text, _INSTALL)


def _access(places: list[str], slurm_user: Reader | None, users: bool) -> Iterator[Finding]:
    for script in (script for script in places if Path(script).exists()):
        owner = slurm_user.uid if slurm_user else 0
        if reason := insecure(script, owner):
            yield Finding(FAIL, script, reason, f"slurmctld runs it: chown root {script}; chmod go-w {script}")
        user = None if users else slurm_user
        if (users or slurm_user) and (closed := unreadable(script, user)):
            name = user.name if user else "users"
            yield Finding(FAIL, script, f"{name} cannot read it: {closed}", f"chmod a+r {script}")
