"""Define what slurm.conf and gres.conf need for migbatch: changes of their lines, and sentences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from slurm_migbatch.install.slurmconf import Line, LineEdit
from slurm_migbatch.site import Site
from slurm_migbatch.slurm.nodelist import NodeListError, expand

INCLUDED_GRES: Final = "migbatch-gres.conf"


@dataclass
class SlurmPlan:
    """Needs of slurm.conf and gres.conf.

    Attributes:
        site: input for rendering migbatch's own files.
        edits: lines of the site's to change.
        notes: remaining steps elsewhere, and unsupported settings, as sentences.
        problems: what prevents migbatch from working, as sentences.
    """

    site: Site
    edits: list[LineEdit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def hosts_of(line: Line, text: str, done: SlurmPlan) -> tuple[str, ...]:
    """Return the hosts of a list; none, and a problem of `done`, if it is malformed."""
    try:
        return tuple(expand(text))
    except NodeListError as error:
        done.problems.append(f"{line.place}: {error}")
        return ()
