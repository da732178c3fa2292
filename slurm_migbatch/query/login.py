"""Addresses of the query service, for commands that cannot open the record: /etc/migbatch/login.conf, else from Slurm.

The standard library only: this runs on login nodes.
"""

from __future__ import annotations

import os

from slurm_migbatch.query.protocol import DEFAULT_PORT
from slurm_migbatch.slurm.settings import CONFIG_COMMAND, controllers, parse_settings
from slurm_migbatch.slurm.users import uid_of
from slurm_migbatch.values import TYPE_CHECKING, Pattern, Value

if TYPE_CHECKING:
    from collections.abc import Iterable

LOGIN_CONF = "/etc/migbatch/login.conf"
#: default paths of the controller's configuration and record (tests compare them with `config`)
CONFIG = "/etc/migbatch/migbatch.toml"
RECORD = "/var/lib/migbatch/migbatch.db"
_KEYS = ("Servers", "SlurmUser", "MungeSocket")
_URL = Pattern(r"https?://(?:[A-Za-z0-9_.-]{1,255}|\[[0-9A-Fa-f:.]{2,64}\])(?::\d{1,5})?")
_USER = Pattern(r".*\((\d{1,10})\)")
_SOCKET = Pattern(r"(?:^|,)socket=([^,]+)")
_PORT = Pattern(r":\d+$")
_SCONTROL_S = 20.0


class LoginError(RuntimeError):
    """The query service's address is unknown; the message says what to do."""


class Servers(Value):
    """Query services, in the order in which they are tried, and the users whose answers are accepted.

    Attributes:
        urls: such as http://ctl1:6831.
        uids: users whose signature an answer must have: root, and SlurmUser.
        munge_socket: munged's socket; "" for munge's default.
        source: where the services were configured, for messages.
    """

    urls: tuple[str, ...]
    uids: frozenset[int]
    munge_socket: str = ""
    source: str = LOGIN_CONF


def find_servers(path: str = "") -> Servers:
    """Return the servers in login.conf (or the file at `path`), else slurmctld's hosts. Raises LoginError."""
    path = path or os.environ.get("MIGBATCH_LOGIN_CONF") or LOGIN_CONF
    try:
        with open(path, encoding="utf-8-sig") as file:  # noqa: PTH123 keeps pathlib out of start-up
            return read_conf(file, path)
    except FileNotFoundError:
        if path != LOGIN_CONF:
            raise LoginError(f"no {path}") from None
        return of_slurm(show_config())
    except (OSError, UnicodeDecodeError) as error:
        raise LoginError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_conf(lines: Iterable[str], path: str) -> Servers:
    """Read `Key=value` lines: Servers (separated by commas), SlurmUser, MungeSocket. Raises LoginError."""
    values = {"Servers": "", "SlurmUser": "slurm", "MungeSocket": ""}
    for number, line in enumerate(lines, 1):
        line = line.partition("#")[0].strip()
        key, equals, value = (part.strip() for part in line.partition("="))
        if not line:
            continue
        if not equals or key not in _KEYS:
            raise LoginError(f"{path}:{number}: write one of {', '.join(f'{key}=' for key in _KEYS)}")
        values[key] = value
    urls = tuple(url for word in values["Servers"].split(",") if (url := word.strip().rstrip("/")))
    invalid = next((url for url in urls if not _URL.fullmatch(url)), None)
    if invalid is not None or not urls:
        raise LoginError(f"{path}: Servers={invalid or ''} must be URLs such as http://controller:{DEFAULT_PORT}")
    uids = frozenset({0, *uid_of(values["SlurmUser"])})
    return Servers(tuple(map(_with_port, urls)), uids, values["MungeSocket"], path)


def of_slurm(config: str) -> Servers:
    """Return the services on slurmctld's hosts, by the output of `scontrol show config`. Raises LoginError."""
    settings = parse_settings(config)
    hosts = dict.fromkeys(controllers(settings).values())
    urls = tuple(f"http://{f'[{host}]' if ':' in host else host}:{DEFAULT_PORT}" for host in hosts)
    if not urls or not all(map(_URL.fullmatch, urls)):
        raise LoginError(f"Slurm has no SlurmctldHost; ask the administrator for {LOGIN_CONF} (Servers=http://...)")
    user = _USER.fullmatch(settings.get("slurmuser", ""))
    info = _SOCKET.made.search(settings.get("authinfo", ""))
    uids = frozenset({0, int(user[1])} if user else {0})
    return Servers(urls, uids, info[1] if info else "", "SlurmctldHost of slurm.conf")


def show_config() -> str:
    """Return the output of `scontrol show config`. Raises LoginError."""
    import subprocess

    try:
        result = subprocess.run(CONFIG_COMMAND, capture_output=True, text=True, timeout=_SCONTROL_S, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        result = None
    if result is None or result.returncode:
        raise LoginError(
            f"no {LOGIN_CONF}, and `scontrol show config` does not name slurmctld's host; ask the administrator for "
            f"that file (Servers=http://<controller>:{DEFAULT_PORT})"
        )
    return result.stdout


def _with_port(url: str) -> str:
    return url if _PORT.made.search(url) else f"{url}:{DEFAULT_PORT}"
