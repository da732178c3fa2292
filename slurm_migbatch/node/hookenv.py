"""Validate the environment of a root hook.

Users control the comment and, in part, other fields; so each value is read by an allow-list, bounded, and either exact
or dropped. Dropped values have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from slurm_migbatch.node import conf
from slurm_migbatch.node.client import MAX_JOB, MAX_RESTART

_ID = re.compile(rb"[0-9]{1,10}")
_COUNT = re.compile(rb"[0-9]{1,5}")
_NAME = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9_.@+=-]{0,63}")
_EXIT = re.compile(rb"([0-9]{1,3}):([0-9]{1,3})")
_CONTEXTS = {"prolog": b"prolog_slurmd", "epilog": b"epilog_slurmd"}
MAX_UID = 0xFFFFFFFE


class HookEnvError(ValueError):
    """slurmd did not start this, or its values are invalid; the message says what is wrong."""


class HookEnv(NamedTuple):
    """A hook's data on its job. `restart` is None if slurmd did not pass it; `comment` is raw and unchecked."""

    hook: str
    node: str
    job: int
    uid: int
    restart: int | None
    user: str
    account: str
    partition: str
    comment: bytes
    exit_code: int | None

    @property
    def run(self) -> str:
        """The run's name in messages, `job 17 run 0`."""
        return f"job {self.job} run {self.restart or 0}"

    @classmethod
    def read(cls, hook: str, environ: Mapping[bytes, bytes]) -> HookEnv:
        """Check the environment of `hook` (`prolog` or `epilog`). Raises HookEnvError."""
        context = environ.get(b"SLURM_SCRIPT_CONTEXT")
        if hook not in _CONTEXTS:
            raise HookEnvError(f"unknown hook {hook[:20]!a}")
        if context is not None and context != _CONTEXTS[hook]:
            raise HookEnvError(f"this is slurmd's {hook}, but it was started as {context[:40]!a}")
        job = _number(environ, b"SLURM_JOB_ID", _ID, MAX_JOB)
        uid = _number(environ, b"SLURM_JOB_UID", _ID, MAX_UID)
        if not job or uid is None:
            raise HookEnvError("SLURM_JOB_ID and SLURM_JOB_UID must be set; only slurmd starts this hook")
        try:
            node = conf.node_name(dict(environ))
        except ValueError as error:
            raise HookEnvError(str(error)) from None
        ended = _EXIT.fullmatch(environ.get(b"SLURM_JOB_EXIT_CODE2", b""))
        exit_code = None if ended is None else int(ended[1]) if not int(ended[2]) else 128 + int(ended[2])
        return cls(
            hook=hook,
            node=node,
            job=job,
            uid=uid,
            restart=_number(environ, b"SLURM_JOB_RESTART_COUNT", _COUNT, MAX_RESTART),
            user=_name(environ, b"SLURM_JOB_USER"),
            account=_name(environ, b"SLURM_JOB_ACCOUNT"),
            partition=_name(environ, b"SLURM_JOB_PARTITION"),
            comment=environ.get(b"SLURM_JOB_COMMENT", b""),
            exit_code=exit_code,
        )


def _number(environ: Mapping[bytes, bytes], key: bytes, form: re.Pattern[bytes], most: int) -> int | None:
    text = environ.get(key)
    if text is None:
        return None
    if not form.fullmatch(text) or int(text) > most:
        raise HookEnvError(f"{key.decode()} is not a valid number: {text[:20]!a}")
    return int(text)


def _name(environ: Mapping[bytes, bytes], key: bytes) -> str:
    text = environ.get(key, b"")
    return text.decode("ascii") if _NAME.fullmatch(text) else ""
