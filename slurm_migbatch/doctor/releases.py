"""List Slurm releases with bugs that break migbatch, and their conditions: for `migbatch doctor`.

Sources: 25.05.0, Slurm's release notes of 25.05.1; 25.11 with metrics, SlinkyProject/slurm-operator issue 90
(26.05 answers without the lock on nodes, and is tested in tests/e2e/test_slurm_releases.py); takeover by a backup
controller, Slurm's release notes of 25.05.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.node.findings import FAIL, OK, WARN, Finding
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.versions import NEWEST, OLDEST, Release

_SUBJECT: Final = "Slurm release"


@dataclass(frozen=True)
class SiteTraits:
    """Conditions of a bug; `conf`: keys in lower case, `untyped`: entries of Gres= in slurm.conf that name no type."""

    conf: Mapping[str, str]
    untyped: Sequence[str] = ()

    @property
    def metrics(self) -> bool:
        """Whether slurmctld exports metrics itself."""
        return self.conf.get("metricstype", "") not in ("", "none", "metrics/none")

    @property
    def backup(self) -> bool:
        """Whether there is a second controller."""
        return bool(self.conf.get("slurmctldhost[1]"))


@dataclass(frozen=True)
class Fault:
    """A bug in the releases from `first` to before `fixed`, under the condition `when`."""

    first: Release
    fixed: Release
    level: str
    text: str
    advice: str
    when: Callable[[SiteTraits], bool] = lambda site: True


FAULTS: Final = (
    Fault(
        (25, 5, 0),
        (25, 5, 1),
        FAIL,
        "it allocates the same GRES to several jobs",
        "install 25.05.1 or later before any job requests slices",
    ),
    Fault(
        (25, 11, 0),
        (25, 11, 5),
        WARN,
        "with MetricsType set, slurmctld may crash (double free) while nodes are updated, which migbatchd does often",
        "remove MetricsType from slurm.conf, or install 25.11.5 or later",
        lambda site: site.metrics,
    ),
    Fault(
        (0, 0, 0),
        (25, 5, 0),
        WARN,
        "a takeover by the backup controller drains nodes whose Gres= in slurm.conf has no type ({untyped})",
        "add the types in slurm.conf as in gres.conf (Gres=gpu:h100:8), or install 25.05.1 or later",
        lambda site: site.backup and bool(site.untyped),
    ),
)


def check_release(release: Release, site: SiteTraits) -> Iterator[Finding]:
    """Check whether slurmctld's release was tested, and whether it has a bug that matters here."""
    shown = "{}.{:02d}.{}".format(*release)
    faults = [fault for fault in FAULTS if fault.first <= release < fault.fixed and fault.when(site)]
    for fault in faults:
        text = fault.text.format(untyped=", ".join(site.untyped))
        yield Finding(fault.level, _SUBJECT, f"{shown}: {text}", fault.advice)
    if release[:2] > NEWEST:
        tested = " to ".join("{}.{:02d}".format(*tested) for tested in (OLDEST, NEWEST))
        text = f"{shown} is later than the releases that migbatch was tested with ({tested})"
        yield Finding(WARN, _SUBJECT, text, "look for a later migbatch, and test this one before users depend on it")
    elif not faults:
        yield Finding(OK, _SUBJECT, f"{shown} has no known bug that breaks slices here")


def untyped_gres(conf: Conf) -> tuple[str, ...]:
    """Return the entries of nodes' Gres= in slurm.conf that name no type, each once."""
    entries: dict[str, None] = {}
    for _, values in conf.records("nodename"):
        for entry in gres.split(values.get("gres", "")):
            with suppress(gres.GresError):
                entries.update((entry, None) for part in gres.parse(entry) if part.type is None)
    return tuple(entries)
