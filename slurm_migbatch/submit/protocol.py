"""The line protocol between the Lua shim and the service: `key=value`, one a line, ended by an empty line.

In values `%` and the line feed are percent-encoded, and nothing else: encoding costs time for each byte that it
changes, under slurmctld's locks. Any byte may be, and is decoded. Values are bytes decoded with latin-1. The socket
is of type SOCK_SEQPACKET: one packet is one request, one packet its answer. Lua can speak it in a few lines, a peer
that has gone gives EPIPE instead of a SIGPIPE (slurmctld is a big threaded process whose signals are not ours), and
nobody can send half a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote_to_bytes

from slurm_migbatch.submit.request import Accept, Answer, Pass, Refuse, RequestError

MAX_REQUEST: Final = 65536
"""Bytes. A change tells eighteen strings, which have at most 1024 each; the encoding triples them at worst."""
_END: Final = "\n"
_KEY = re.compile(r"[a-z_0-9]{1,40}")


def encode(fields: Mapping[str, str]) -> bytes:
    """Return the keys and latin-1 values as a message."""
    lines = [f"{key}={value.replace('%', '%25').replace(_END, '%0A')}" for key, value in fields.items()]
    return f"{_END.join(lines)}\n\n".encode("latin-1")


def decode(message: bytes) -> dict[str, str]:
    """Return a message's keys and latin-1 values; raises RequestError."""
    if len(message) > MAX_REQUEST:
        raise RequestError("the message is too long")
    if not message.endswith(b"\n\n"):
        raise RequestError("the message is not complete")
    fields: dict[str, str] = {}
    for line in message[:-2].split(b"\n"):
        key, equals, value = line.partition(b"=")
        name = key.decode("latin-1")
        if not equals or _KEY.fullmatch(name) is None or name in fields:
            raise RequestError("a line is not key=value, or a key comes twice")
        fields[name] = (unquote_to_bytes(value) if b"%" in value else value).decode("latin-1")
    return fields


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
