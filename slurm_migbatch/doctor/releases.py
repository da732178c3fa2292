"""List Slurm releases with bugs that break migbatch, and their conditions: for `migbatch doctor`.

Sources: 25.05.0, Slurm's release notes of 25.05.1; 25.11 with metrics, SlinkyProject/slurm-operator issue 90
(26.05 answers without the lock on nodes, and is tested in tests/e2e/test_slurm_releases.py); takeover by a backup
controller, Slurm's release notes of 25.05.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.node.findings import FAIL, OK, WARN, Finding
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.versions import NEWEST, OLDEST, Release

_SUBJECT: Final = "Slurm release"


def _faults(release: Release, conf: Mapping[str, str], untyped: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield level, text and advice for each bug of a release whose condition this site meets."""
    if (25, 5, 0) <= release < (25, 5, 1):
        advice = "install 25.05.1 or later before any job requests slices"
        yield FAIL, "it allocates the same GRES to several jobs", advice
    if (25, 11, 0) <= release < (25, 11, 5) and conf.get("metricstype", "") not in ("", "none", "metrics/none"):
        text = "with MetricsType set, slurmctld may crash (double free) while nodes are updated"
        advice = "remove MetricsType from slurm.conf, or install 25.11.5 or later"
        yield WARN, f"{text}, which migbatchd does often", advice
    if release < (25, 5, 0) and conf.get("slurmctldhost[1]") and untyped:
        text = "a takeover by the backup controller drains nodes whose Gres= in slurm.conf has no type"
        advice = "add the types in slurm.conf as in gres.conf (Gres=gpu:h100:8), or install 25.05.1 or later"
        yield WARN, f"{text} ({', '.join(untyped)})", advice


def check_release(release: Release, conf: Mapping[str, str], untyped: Sequence[str] = ()) -> Iterator[Finding]:
    """Check whether slurmctld's release was tested, and whether it has a bug that matters here.

    Args:
        conf: `scontrol show config`, keys in lower case.
        untyped: entries of Gres= in slurm.conf that name no type.
    """
    shown = "{}.{:02d}.{}".format(*release)
    faults = [*_faults(release, conf, untyped)]
    for level, text, advice in faults:
        yield Finding(level, _SUBJECT, f"{shown}: {text}", advice)
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
