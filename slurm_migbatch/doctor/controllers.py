"""Check that the migbatchd of two controllers can replace each other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from slurm_migbatch.config import Config
from slurm_migbatch.doctor.health import DaemonState
from slurm_migbatch.install.scripts import PRIMARY
from slurm_migbatch.node.findings import FAIL, OK, WARN, Finding
from slurm_migbatch.slurm.settings import controllers

_SUBJECT: Final = "controllers"
_BEAT_S: Final = 120.0
"""Seconds within which slurmctld's primary must renew its heartbeat file; it does so every few seconds."""


def other_hosts(conf: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the other hosts of slurmctld with their addresses, by `scontrol show config`."""
    own_names = (host, host.partition(".")[0])
    return {name: address for name, address in controllers(conf).items() if name not in own_names}


def check_controllers(
    config: Config, conf: Mapping[str, str], local_state: DaemonState, remote_states: Mapping[str, DaemonState]
) -> Iterator[Finding]:
    """Check this host against the other controllers.

    Args:
        conf: `scontrol show config`, keys in lower case.
        local_state: health of this host's migbatchd; `remote_states`: of the others, by host.
    """
    if not remote_states:
        return
    if config.store.url.startswith("sqlite"):
        text = f"slurm.conf also has {', '.join(remote_states)}, but SQLite supports one host: no fail-over"
        advice = "set [store] url on both to one database in MariaDB or PostgreSQL (docs/install.md)"
        yield Finding(WARN, _SUBJECT, text, advice)
        return
    problems = [*_state(conf), *_programs(conf)]
    for host, state in remote_states.items():
        problems += _compare(host, local_state, state)
    yield from problems
    if not problems:
        yield Finding(OK, _SUBJECT, f"fail-over with {', '.join(remote_states)} is configured")


def _state(conf: Mapping[str, str]) -> Iterator[Finding]:
    heartbeat = Path(conf.get("statesavelocation", "")) / "heartbeat"
    age = None
    for pause_s in (0.0, 0.1, 0.4):  # slurmctld removes the file before it writes a new one
        time.sleep(pause_s)
        try:
            age = time.time() - heartbeat.stat().st_mtime
            break
        except PermissionError:
            return
        except OSError:
            continue
    if age is None or age > _BEAT_S:
        sign = "no sign" if age is None else f"no sign for {age:.0f} s"
        text = f"StateSaveLocation {heartbeat.parent} has {sign} of slurmctld's primary here"
        yield Finding(FAIL, _SUBJECT, text, "both hosts must share this directory; without it there is no fail-over")


def _programs(conf: Mapping[str, str]) -> Iterator[Finding]:
    for key, name in zip(("SlurmctldPrimaryOnProg", "SlurmctldPrimaryOffProg"), PRIMARY, strict=True):
        path = conf.get(key.lower(), "")
        if not path:
            text = f"{key} is not set: migbatchd detects a takeover some seconds later"
            yield Finding(WARN, _SUBJECT, text, "migbatch install --role controller --edit --apply sets it")
        elif Path(path).name == name and not Path(path).exists():
            text = f"{key}={path} is not on this host"
            yield Finding(FAIL, _SUBJECT, text, "copy /etc/slurm from the other controller")


def _compare(host: str, local_state: DaemonState, other: DaemonState) -> Iterator[Finding]:
    if other.silent:
        effect = "so no slices are supplied" if local_state.standby else "so it would not take over"
        text = f"migbatchd on {host} does not answer, {effect}: {other.silent}"
        yield Finding(FAIL, _SUBJECT, text, f"on {host}: systemctl status migbatchd; and the firewall between the two")
        return
    if local_state.silent:
        return  # reported by its own checks
    if bool(local_state.standby) == bool(other.standby):
        roles = "both are on standby" if local_state.standby else "both are active"
        text = f"migbatchd of this host and of {host}: {roles}"
        advice = "normal for some seconds after a takeover; otherwise [store] url must be the same database on both"
        yield Finding(FAIL, _SUBJECT, f"{text}{f': {local_state.standby}' if local_state.standby else ''}", advice)
    if not (local_state.marks and other.marks):
        return
    differing = [name for name, mark in local_state.marks.items() if other.marks.get(name) != mark]
    if len(differing) == len(local_state.marks):
        text = f"migbatchd of {host} uses another database: the two have separate records"
        yield Finding(FAIL, _SUBJECT, text, "set [store] url in migbatch.toml to the same on both; restart migbatchd")
        return
    sections = ", ".join(f"[{name}]" for name in differing if name != "release")
    if sections:
        text = f"migbatch.toml here and on {host} differ in {sections}: decisions change after a takeover"
        yield Finding(FAIL, _SUBJECT, text, "make them equal, then on both: systemctl reload migbatchd")
    if "release" in differing:
        text = f"slurm-migbatch here and on {host} have different releases"
        yield Finding(FAIL, _SUBJECT, text, "install the same release on both")
