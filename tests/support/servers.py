"""Private database servers for tests, each on a unix socket in a directory of the test."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import text

from slurm_migbatch.store.engines import make_engine
from slurm_migbatch.testbed.database import make_data

#: a site's server may compare text case-insensitively by default; the tables must override that
_MARIADB: Final = "CREATE DATABASE migbatch CHARACTER SET latin1 COLLATE latin1_swedish_ci"


@contextmanager
def mariadb(directory: Path) -> Iterator[str]:
    """Run a MariaDB server; yield the URL of an empty database."""
    data, socket = directory / "data", directory / "s"
    make_data(data)
    command = [
        "mariadbd",
        "--no-defaults",
        f"--datadir={data}",
        f"--socket={socket}",
        f"--tmpdir={directory}",  # a starting server removes other servers' files in a common one
        "--skip-networking",
        "--user=root",
        "--innodb-flush-log-at-trx-commit=0",  # no test cuts the power
        "--skip-innodb-doublewrite",
    ]
    admin = ["mariadb", "--no-defaults", f"--socket={socket}", "-uroot", "-e"]

    def answers() -> bool:
        return subprocess.run([*admin, "SELECT 1"], capture_output=True).returncode == 0

    with _one_tls_context(), running(command, answers):
        subprocess.run([*admin, _MARIADB], check=True)
        yield f"mariadb://root@localhost/migbatch?unix_socket={socket}"


@contextmanager
def postgresql(directory: Path) -> Iterator[str]:
    """Run a PostgreSQL server; yield the URL of an empty database."""
    (tools,) = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1:]
    directory.chmod(0o755)
    data = directory / "data"
    data.mkdir()
    shutil.chown(data, "postgres", "postgres")
    as_postgres = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    subprocess.run(
        [*as_postgres, tools / "initdb", "-D", data, "-A", "trust", "-U", "migbatch", "-E", "UTF8", "--no-sync"],
        check=True, capture_output=True, cwd="/",
    )  # fmt: skip
    command = [*as_postgres, str(tools / "postgres"), "-D", str(data), "-k", str(data), "-h", "", "-c", "fsync=off"]
    probe = [str(tools / "pg_isready"), "-q", "-h", str(data)]
    with running(
        command, lambda: subprocess.run(probe).returncode == 0, signal.SIGINT
    ):  # SIGINT: it does not wait for clients
        yield f"postgresql://migbatch@/postgres?host={data}"


@contextmanager
def running(command: list[str], ready: Callable[[], bool], end: int = signal.SIGTERM) -> Iterator[None]:
    """Run a server and wait until it answers; end it with the signal `end`."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
    try:
        deadline = time.monotonic() + 180
        while not ready():
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(end)
        process.wait(180)


@contextmanager
def _one_tls_context() -> Iterator[None]:
    """Let all connections share one TLS context: PyMySQL reads the certificates of all authorities for each of them,
    even if none is checked.
    """
    from pymysql.connections import Connection  # type: ignore[import-untyped]

    made: list[Any] = []
    make = Connection._create_ssl_ctx

    def shared(connection: Any, options: dict[str, Any]) -> Any:
        if options:
            return make(connection, options)
        if not made:
            made.append(make(connection, options))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "_create_ssl_ctx", shared)
        yield


def empty(server: str) -> None:
    """Drop every table of a database on a server."""
    engine = make_engine(server, readonly=False)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        else:
            connection.execute(text("DROP DATABASE migbatch"))
            connection.execute(text(_MARIADB))
    engine.dispose()


START = {"mariadb": mariadb, "postgresql": postgresql}
#: MariaDB's driver belongs to the development packages, PostgreSQL's is optional
KINDS = ["mariadb"] + (["postgresql"] if importlib.util.find_spec("psycopg") else [])
