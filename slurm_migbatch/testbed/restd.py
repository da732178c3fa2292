"""Run slurmrestd of a test bed: Slurm's REST API on a unix socket, for holders of SlurmUser's token.

slurmrestd runs neither as root nor as SlurmUser, so it runs as nobody, and a token (auth/jwt) tells slurmctld whose
request it forwards.
"""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path
from typing import Final

from .ports import answers
from .running_cluster import RunningCluster, write_private

NAME: Final = "slurmrestd"
_USER: Final = "nobody"
_DAY_S: Final = 86400


def key(directory: Path) -> Path:
    """Return the file of the key that tokens are signed with."""
    return directory / "etc/jwt.key"


def token_file(directory: Path) -> Path:
    """Return the file that holds SlurmUser's token."""
    return directory / "etc/rest-token"


def address(directory: Path) -> str:
    """Return slurmrestd's address in the form of migbatch.toml."""
    return f"unix:{directory}/rest/socket"


def options(directory: Path) -> dict[str, str]:
    """Return the lines of slurm.conf that let slurmctld make and accept tokens."""
    return {"AuthAltTypes": "auth/jwt", "AuthAltParameters": f"jwt_key={key(directory)}"}


def offered(root: Path | None) -> bool:
    """Return whether the Slurm in `root` (None: the machine's) has slurmrestd, tokens, and a supported API."""
    plugins = ("auth_jwt.so", "data_parser_v0_0_42.so")
    has_plugins = all(any(Path(f"{root or ''}/usr/lib").glob(f"*/slurm*/{plugin}")) for plugin in plugins)
    return has_plugins and Path(f"{root or ''}/usr/sbin/{NAME}").exists()


def start(cluster: RunningCluster) -> None:
    """Start slurmrestd, wait until it listens, and write SlurmUser's token; also after an earlier one was killed."""
    entry = pwd.getpwnam(_USER)
    sock = Path(address(cluster.directory).removeprefix("unix:"))
    sock.parent.mkdir(mode=0o755, exist_ok=True)
    sock.unlink(missing_ok=True)
    os.chown(sock.parent, entry.pw_uid, entry.pw_gid)
    user = ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups", "--"]
    program = [cluster.root.locate(NAME), "-s", "openapi/slurmctld", "-a", "rest_auth/jwt", f"unix:{sock}"]
    env = {"SLURM_JWT": "daemon", "SLURM_BITSTR_LEN": "0"}  # require tokens; print lists of array tasks in full
    cluster.spawn(NAME, [*user, *program], env, in_root=True)
    cluster.wait(NAME, lambda: answers(sock))
    output = cluster.run(["scontrol", "token", f"username={cluster.spec.slurm_user}", f"lifespan={_DAY_S}"]).stdout
    write_private(token_file(cluster.directory), output.partition("=")[2].strip().encode())
    shutil.chown(token_file(cluster.directory), cluster.spec.daemon_user)
