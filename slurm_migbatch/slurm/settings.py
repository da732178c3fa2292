"""Parse slurmctld's configuration as printed by `scontrol show config`.

This module needs the standard library only, because login nodes import it."""

from __future__ import annotations

from slurm_migbatch.values import TYPE_CHECKING, Pattern

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_COMMAND = ("scontrol", "show", "config")
"""Command whose output `parse_settings` reads."""
PARTITIONS_COMMAND = ("scontrol", "--all", "--oneliner", "show", "partition")
BACKFILL_WINDOW_S = 86_400.0
"""How far ahead backfill plans starts if bf_window is not set."""
_WINDOW, _LONGEST_MIN = Pattern(r".*?bf_window=(\d{1,9}).*"), 30 * 24 * 60
_SETTING = Pattern(r"\s*([A-Za-z][\w\[\]]*)\s*=\s*(.*?)\s*")


def parse_settings(output: str) -> dict[str, str]:
    """Return the settings, keys in lower case, values empty for (null)."""
    matches = filter(None, map(_SETTING.fullmatch, output.splitlines()))
    return {match[1].lower(): "" if match[2] == "(null)" else match[2] for match in matches}


def backfill_window_s(settings: Mapping[str, str]) -> float:
    """Return how far ahead Slurm's backfill plans starts (bf_window, in minutes), in seconds; 0: it does not backfill.

    Slurm takes the default instead of a value that it refuses.
    """
    if settings.get("schedulertype", "sched/backfill") != "sched/backfill":
        return 0.0
    match = _WINDOW.fullmatch(settings.get("schedulerparameters", "").lower())
    return 60.0 * int(match[1]) if match and 1 <= int(match[1]) <= _LONGEST_MIN else BACKFILL_WINDOW_S


def controllers(settings: Mapping[str, str]) -> dict[str, str]:
    """Return slurmctld's hosts with their addresses in the order of slurm.conf, by `scontrol show config`."""
    return dict(_host(value) for key, value in settings.items() if key.startswith("slurmctldhost") and value)


def controller_hosts(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names or addresses of slurmctld's hosts by `scontrol show config`; of `name(address)` the address."""
    backup = settings.get("slurmctldaddr", "")
    return tuple(dict.fromkeys([*controllers(settings).values(), *([_host(backup)[1]] if backup else [])]))


def _host(value: str) -> tuple[str, str]:
    """Return the name and the address of `name(address)`; for `name` alone it is both."""
    name, _, address = value.partition("(")
    return name, address.rstrip(")") or name
