"""Parse the address of slurmrestd: a unix socket, or a host and a port."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_WRITTEN: Final = re.compile(r"unix:(/.+)|(https?)://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})/?")


@dataclass(frozen=True)
class RestAddress:
    """`unix:/PATH`, or `http://HOST:PORT`, or the same with https."""

    path: str = ""
    scheme: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> RestAddress:
        """Read an address; raises ValueError."""
        match = _WRITTEN.fullmatch(text)
        if match is None or int(match[4] or 1) > 65535:
            raise ValueError(
                f"{text!r} is not an address of slurmrestd: unix:/PATH, http://HOST:PORT or https://HOST:PORT"
            )
        path, scheme, host, port = match.groups("")
        return cls(path, scheme, host.strip("[]"), int(port or 0))
