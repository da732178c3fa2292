"""Create ordinary users to submit as, shared by all test beds of the machine."""

from __future__ import annotations

import pwd
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import TestbedError

# In the comment field of the passwd entry: shows, also after a crash, that the account may be removed.
GECOS = "migbatch test bed"
NAMES = ("mbalice", "mbbob", "mbcarol", "mbdave", "mberin", "mbfrank", "mbgrace", "mbheidi")


@dataclass(frozen=True)
class User:
    """A test user."""

    name: str
    uid: int
    gid: int


def lookup(name: str) -> User | None:
    """Return the account `name`, None if there is none."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid)


def ensure(count: int) -> tuple[User, ...]:
    """Return the first `count` test users, created if missing."""
    if count > len(NAMES):
        raise TestbedError(f"at most {len(NAMES)} test users are supported, not {count}")
    users = []
    for name in NAMES[:count]:
        user = lookup(name)
        if user is None:
            _run(["useradd", "-M", "-U", "-d", "/nonexistent", "-s", "/bin/sh", "-c", GECOS, name])
            user = lookup(name)
            if user is None:
                raise TestbedError(f"useradd made no account {name!r} that getpwnam finds; check /etc/nsswitch.conf")
        users.append(user)
    return tuple(users)


def remove(names: Iterable[str]) -> None:
    """Remove those of the accounts `names` that test beds created; leave others."""
    for name in names:
        for attempt in range(600):
            try:
                if pwd.getpwnam(name).pw_gecos != GECOS:
                    break
            except KeyError:
                break
            done = subprocess.run(["userdel", name], check=False, capture_output=True, text=True)
            if done.returncode == 0:
                break
            if done.returncode != 8 or attempt == 599:  # 8: a process of the user is still exiting
                raise TestbedError(f"userdel {name}: {done.stderr.strip()}")
            time.sleep(0.1)


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(argv)}: {done.stderr.strip()}")
