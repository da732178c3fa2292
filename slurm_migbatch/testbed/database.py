"""Run accounting of a test bed: MariaDB on its own socket, slurmdbd, one account with all test users."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_migbatch import site

from .errors import TestbedError
from .ports import answers

if TYPE_CHECKING:
    from .running_cluster import RunningCluster

ACCOUNT = "migbatch"
MARIADBD = "/usr/sbin/mariadbd"


def make_data(directory: Path) -> None:
    """Create the data directory of a MariaDB server, whose root needs no password; raises TestbedError."""
    options = ["--no-defaults", f"--datadir={directory}", "--user=root"]
    options += ["--auth-root-authentication-method=normal", "--skip-test-db"]
    # a starting server, such as this one, removes other servers' files in a common directory
    environment = {**os.environ, "TMPDIR": str(directory.parent)}
    done = subprocess.run(
        ["mariadb-install-db", *options], env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise TestbedError(f"mariadb-install-db: {(done.stderr or done.stdout).strip()[-500:]}")


def start(cluster: RunningCluster) -> None:
    """Start MariaDB and slurmdbd and wait until both answer (before slurmctld is started)."""
    folder = cluster.directory / "db"
    folder.mkdir(exist_ok=True)
    data, sock = folder / "data", folder / "mysql.sock"
    make_data(data)
    cluster.spawn(
        "mariadbd",
        [
            MARIADBD,
            "--no-defaults",
            f"--datadir={data}",
            f"--socket={sock}",
            f"--tmpdir={folder}",  # a starting server removes other servers' files in a common one
            "--skip-networking",
            "--user=root",
            f"--pid-file={folder}/mariadbd.pid",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900",
        ],
    )
    cluster.wait("mariadbd", lambda: answers(sock))
    conf = cluster.directory / "etc/slurmdbd.conf"
    conf.write_text(
        site.render(
            "slurmdbd.conf.j2",
            dbd={
                "host": socket.gethostname(),
                "port": cluster.ports["slurmdbd"],
                "user": cluster.spec.slurm_user,
                "munge_socket": cluster.munge_socket,
                "log": cluster.directory / "log/slurmdbd.log",
                "pid_file": cluster.directory / "run/slurmdbd.pid",
            },
        )
    )
    conf.chmod(0o600)
    shutil.chown(conf, cluster.spec.slurm_user)
    cluster.spawn("slurmdbd", [cluster.root.locate("slurmdbd"), "-D"], {"MYSQL_UNIX_PORT": str(sock)}, in_root=True)
    cluster.wait("slurmdbd", lambda: cluster.run(["sacctmgr", "-n", "list", "cluster"], check=False).returncode == 0)
    cluster.run(["sacctmgr", "-i", "add", "cluster", cluster.spec.name])
    cluster.run(["sacctmgr", "-i", "add", "account", ACCOUNT, f"Cluster={cluster.spec.name}"])
    names = ",".join(user.name for user in cluster.users)
    if names:
        cluster.run(["sacctmgr", "-i", "add", "user", names, f"Account={ACCOUNT}"])
