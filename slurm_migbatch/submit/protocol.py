"""Encode and decode the line protocol between the Lua shim and the service: `key=value` lines, ended by an empty line.

In values only `%` and the line feed are percent-encoded: encoding costs time for each byte that it
changes, under slurmctld's locks. Any byte may be encoded, and is decoded. Values are bytes decoded with latin-1.
`script` may be as long as all other values together; it follows the empty line unescaped. The socket
is of type SOCK_SEQPACKET: one packet is one request, one packet its answer. A Lua client needs few lines, sending to a
closed peer gives EPIPE instead of a SIGPIPE (slurmctld is a large threaded process whose signal handling must not be
changed), and no client can send half a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from slurm_migbatch.submit.request import Accept, Answer, Pass, Refuse, RequestError

MAX_REQUEST: Final = 65536
"""Size limit in bytes. An update has eighteen strings of at most 1024 bytes; the encoding at most triples them."""
_END: Final = "\n"
_SCRIPT: Final = "script"
_KEY = re.compile(r"[a-z_0-9]{1,40}")


def encode(fields: Mapping[str, str]) -> bytes:
    """Return the keys and latin-1 values as a message."""
    lines = [
        f"{key}={value.replace('%', '%25').replace(_END, '%0A')}\n" for key, value in fields.items() if key != _SCRIPT
    ]
    return f"{''.join(lines)}\n{fields.get(_SCRIPT, '')}".encode("latin-1")


def decode(message: bytes) -> dict[str, str]:
    """Return a message's keys and latin-1 values; raises RequestError."""
    if len(message) > MAX_REQUEST:
        raise RequestError("the message is too long")
    head, end, script = message.partition(b"\n\n")
    if not end:
        raise RequestError("the message is not complete")
    fields = {_SCRIPT: script.decode("latin-1")} if script else {}
    for line in head.decode("latin-1").split("\n"):
        key, equals, value = line.partition("=")
        if not equals or key in fields or not _is_key(key):
            raise RequestError("a line is not key=value, or a key comes twice")
        fields[key] = unquote(value, "latin-1") if "%" in value else value
    return fields


@lru_cache(256)
def _is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def encode_answer(answer: Answer) -> bytes:
    """Return an answer as a message; changed fields are `set_<name>`, advice is `advise_<name>`."""
    if isinstance(answer, Refuse):
        return encode({"verdict": "refuse", "message": answer.sentence, "code": answer.code})
    if isinstance(answer, Pass):
        return encode({"verdict": "pass", "message": answer.message})
    changes = {f"set_{name}": value for name, value in answer.changes.items()}
    advice = {f"advise_{name}": str(value) for name, value in answer.advice.items()}
    return encode({"verdict": "accept", "message": answer.message, **changes, **advice})


def decode_answer(message: bytes) -> Answer:
    """Return the answer in a message.

    Raises RequestError if the service reported one or the message is invalid.
    """
    fields = decode(message)
    verdict, text = fields.get("verdict"), fields.get("message", "")
    if verdict == "refuse":
        return Refuse(text, fields.get("code", ""))
    if verdict == "pass":
        return Pass(text)
    if verdict == "accept":
        changes = {key[4:]: value for key, value in fields.items() if key.startswith("set_")}
        advice = {key[7:]: int(value) for key, value in fields.items() if key.startswith("advise_")}
        return Accept(changes, text, advice=advice)
    raise RequestError(text or "the answer has no verdict")
