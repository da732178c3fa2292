"""Read `node.conf`: `Key=Value` lines, `#` comments, `%n` for the node's name.

This module is imported by the fast path of every hook and by TaskProlog, so it imports only built-in modules.
"""

from __future__ import annotations

import posix

NAME = "node.conf"
MAX_BYTES = 65536
AGENT_WAIT_S = 15.0
"""How long a hook waits for the agent by default."""


class ConfError(ValueError):
    """The configuration is invalid; the message names the file, the line and the remedy."""


def insecure(path: str, owner: int = 0) -> str:
    """Return why others than root could change `path`, as a sentence; empty if they cannot.

    Checks the path and everything above it. A sticky directory (/tmp) above it is accepted: others cannot replace
    root's entries there.
    """
    first = True
    current = path
    while True:
        try:
            status = posix.stat(current)
        except OSError as error:
            return f"{current} cannot be examined: {error.strerror}"
        if status.st_uid not in (0, owner):
            return f"{current} belongs to uid {status.st_uid}; it must belong to root"
        if status.st_mode & 0o022 and (first or not status.st_mode & 0o1000):
            return f"{current} is writable by others (mode {status.st_mode & 0o7777:o}); run chmod go-w on it"
        if current in ("/", ""):
            return ""
        current = current.rstrip("/").rpartition("/")[0] or "/"
        first = False


def node_name(environ: dict[bytes, bytes]) -> str:
    """Return the Slurm node's name from SLURMD_NODENAME, or the host's short name.

    Raises ConfError if it is invalid.
    """
    name = environ.get(b"SLURMD_NODENAME", b"").decode("ascii", "replace") or posix.uname().nodename.partition(".")[0]
    if not 1 <= len(name) <= 64 or name.strip(".") != name:
        raise ConfError("the node name is empty, too long or invalid")
    for letter in name:
        if not ("a" <= letter <= "z" or "A" <= letter <= "Z" or "0" <= letter <= "9" or letter in "._-"):
            raise ConfError("the node name has invalid characters")
    return name


def read(path: str, node: str, owner: int = 0) -> dict[str, str]:
    """Read the settings of the file at `path` with `%n` filled in. Raises ConfError.

    The file must belong to root (`owner`: as this process sees it) and be writable by nobody else. An unknown key is
    reported by `config.load`; only the form of the lines is checked here.
    """
    try:
        raw = _latest(path, owner)
    except OSError as error:
        raise ConfError(
            f"{path} cannot be opened: {error.strerror}; run `migbatch install --role node --apply`"
        ) from None
    if len(raw) > MAX_BYTES:
        raise ConfError(f"{path} is larger than {MAX_BYTES} bytes, too large for a node.conf")
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise ConfError(f"{path} is not UTF-8 text") from None
    settings: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line[0] == "#":
            continue
        key, equals, value = line.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise ConfError(f"{path} line {number}: write Key=Value")
        if key in settings:
            raise ConfError(f"{path} line {number}: {key} is set twice")
        value = value.strip()
        if " #" in value:
            value = value.partition(" #")[0].rstrip()
        settings[key] = value.replace("%n", node)
    return settings


def _latest(path: str, owner: int) -> bytes:
    """Return `_content`, also if the file was replaced on its NFS server. Raises OSError, ConfError."""
    try:
        return _content(path, owner)
    except OSError as error:
        import errno

        if error.errno != errno.ESTALE:
            raise
        return _content(path, owner)


def _content(path: str, owner: int) -> bytes:
    """Return the content of a file that nobody but its owner can change. Raises OSError, ConfError."""
    handle = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NOFOLLOW)
    try:
        status = posix.fstat(handle)
        if status.st_uid != owner or status.st_mode & 0o022:
            raise ConfError(f"{path} must belong to root and be writable by nobody else; run chmod go-w on it")
        return posix.read(handle, MAX_BYTES + 1)
    finally:
        posix.close(handle)


def run_dir(settings: dict[str, str], node: str) -> str:
    """Return RunDir or its default as an absolute path. Raises ConfError."""
    path = settings.get("RunDir") or f"/run/migbatch/{node}"
    if path[0] != "/":
        raise ConfError(f"RunDir={path}: must be an absolute path")
    return path.rstrip("/") or "/"
