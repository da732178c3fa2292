"""Parse requests and encode replies of the hooks' wire form for the agent (`client.py` is the other side)."""

from __future__ import annotations

from slurm_migbatch.node.client import ALLOWED
from slurm_migbatch.node.hookenv import HookEnv, HookEnvError

MAX_REQUEST = 65536
END = b"\0\0"


class HookRequestError(HookEnvError):
    """A request in another form, perhaps of a hook that was installed since the agent started."""


def parse(request: bytes) -> HookEnv:
    """Parse the hook's environment from a request. Raises RequestError, and HookEnvError for invalid values."""
    if len(request) > MAX_REQUEST or not request.endswith(END):
        raise HookRequestError("the request is truncated or too long")
    head, *fields = request[: -len(END)].split(b"\0")
    environ: dict[bytes, bytes] = {}
    for field in fields:
        key, equals, value = field.partition(b"=")
        if not equals or key not in ALLOWED or key in environ:
            raise HookRequestError(f"the request has the unknown field {key[:40]!a}")
        environ[key] = value
    try:
        hook = head.decode("ascii")
    except UnicodeDecodeError:
        raise HookRequestError("the request has no hook") from None
    return HookEnv.read(hook, environ)


def reply(code: int, line: str) -> bytes:
    """Encode the reply to the hook."""
    return f"{code}\n{' '.join(line.split())[:2000]}".encode("utf-8", "backslashreplace")
