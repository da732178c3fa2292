"""Parse slurmctld's configuration as printed by `scontrol show config`.

This module needs the standard library only, because login nodes import it."""

from __future__ import annotations

from slurm_migbatch.values import Pattern

_SETTING = Pattern(r"\s*([A-Za-z][\w\[\]]*)\s*=\s*(.*?)\s*")


def parse_settings(output: str) -> dict[str, str]:
    """Return the settings, keys in lower case, values empty for (null)."""
    matches = filter(None, map(_SETTING.fullmatch, output.splitlines()))
    return {match[1].lower(): "" if match[2] == "(null)" else match[2] for match in matches}
