"""Compute marks of a configuration, which let two hosts compare theirs without revealing them."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from slurm_migbatch.config.schema import Config

_OWN: Final[Mapping[str, frozenset[str]]] = {
    "cluster": frozenset({"slurm_bin", "slurm_conf", "backend", "pyslurm_python"}),
    "node_api": frozenset({"listen", "munge_socket"}),
    "query": frozenset({"listen"}),
    "store": frozenset({"url"}),  # one database may have several URLs: its identity is the key
    "daemon": frozenset({"run_dir", "log_level"}),
}
"""Keys by section that may differ between hosts."""


def marks(config: Config, identity: str) -> dict[str, str]:
    """Return a mark for each section of a host's configuration and for the release; equal for equal contents and the
    same database, whose `identity` is secret: a section's contents cannot be guessed from its mark.
    """
    texts: dict[str, Any] = {name: values for name, values in dataclasses.asdict(config).items() if name != "path"}
    for section, own in _OWN.items():
        texts[section] = {key: value for key, value in texts[section].items() if key not in own}
    texts["release"] = version("slurm-migbatch")
    forms = {name: f"{name} {json.dumps(values, sort_keys=True)}".encode() for name, values in texts.items()}
    return {name: hmac.new(identity.encode(), form, hashlib.sha256).hexdigest()[:16] for name, form in forms.items()}
