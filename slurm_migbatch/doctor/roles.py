"""Determine the roles of a host by what is installed there."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

Role = Literal["controller", "node", "login"]
ROLES: Final[tuple[Role, ...]] = ("controller", "node", "login")


def roles(config: str, node_conf: str, login_conf: str) -> Iterator[Role]:
    """Yield the roles of this host.

    Args:
        config: path of migbatch.toml: a host that has it is a controller.
        node_conf: path of node.conf: a host that has it is a node.
        login_conf: path of login.conf. A host with none of the three is a controller where the packages of that extra
            are installed, else a login node: `--role login` writes nothing on most.
    """
    found: list[Role] = []
    if Path(config).exists():
        found.append("controller")
    if Path(node_conf).exists():
        found.append("node")
    if Path(login_conf).exists():
        found.append("login")
    yield from found or ["controller" if find_spec("sqlalchemy") else "login"]
