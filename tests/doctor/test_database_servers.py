"""Database servers of the record that cannot be written are reported; no finding when all is well."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, text

from slurm_migbatch.doctor.database import check_server
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.engines import make_engine
from tests.support.servers import KINDS, START

pytestmark = pytest.mark.slurm
USER = {
    "mariadb": ("CREATE USER IF NOT EXISTS daemon@localhost", "GRANT ALL ON migbatch.* TO daemon@localhost"),
    "postgresql": ("CREATE USER daemon", "GRANT ALL ON ALL TABLES IN SCHEMA public TO daemon"),
}
READ_ONLY = {
    "mariadb": ("SET GLOBAL read_only = {}", "1", "0"),
    "postgresql": ("ALTER DATABASE postgres SET default_transaction_read_only = {}", "on", "off"),
}


def admin(server: str, *statements: str) -> None:
    engine = make_engine(server, readonly=False)
    # a session may write despite its database's default
    first = ["SET default_transaction_read_only = off"] if engine.dialect.name == "postgresql" else []
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in (*first, *statements):
                connection.execute(text(statement))
    finally:
        engine.dispose()


@pytest.fixture(scope="module", params=KINDS)
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A server with a record: the URLs for its administrator and for migbatchd."""
    with tempfile.TemporaryDirectory(prefix="migbatch-db-") as directory, START[request.param](Path(directory)) as url:
        open_store(url).close()
        admin(url, *USER[request.param])
        yield url, make_url(url).set(username="daemon").render_as_string(hide_password=False)


def found(url: str) -> tuple[str, str, str]:
    (finding,) = check_server(url)
    return finding.level, finding.text, finding.advice


def test_writable_server_is_ok(servers: tuple[str, str]) -> None:
    for url in servers:
        level, message, _ = found(url)
        assert (level, message.endswith(" is writable")) == (OK, True)


def test_read_only_server_is_reported(servers: tuple[str, str]) -> None:
    url, own = servers
    kind = make_url(url).get_backend_name()
    statement, on, off = READ_ONLY[kind]
    admin(url, statement.format(on))
    try:
        level, message, advice = found(own)
        assert level == FAIL and "is read-only: " in message and "events wait on the nodes" in message
        assert {"mariadb": "SET GLOBAL read_only", "postgresql": "default_transaction_read_only"}[kind] in advice
    finally:
        admin(url, statement.format(off))
    assert found(own)[0] == OK


def test_user_without_write_privileges_is_reported(servers: tuple[str, str]) -> None:
    url, own = servers
    grantee, where = (
        ("daemon@localhost", "migbatch.*") if url.startswith("mariadb") else ("daemon", "ALL TABLES IN SCHEMA public")
    )
    admin(url, f"REVOKE INSERT, UPDATE, DELETE ON {where} FROM {grantee}")
    try:
        level, message, advice = found(own)
        assert level == FAIL and "rejects writes of migbatchd: " in message and "GRANT" in advice
    finally:
        admin(url, f"GRANT ALL ON {where} TO {grantee}")
    assert found(own)[0] == OK


def test_server_without_a_record_gives_no_finding(servers: tuple[str, str]) -> None:
    url, _ = servers
    admin(url, "CREATE DATABASE other")
    other = make_url(url).set(database="other").render_as_string(hide_password=False)
    assert list(check_server(other)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_unreachable_server_is_unknown_and_hides_the_password(kind: str) -> None:
    level, message, advice = found(f"{kind}://daemon:secret@127.0.0.1:1/migbatch")
    assert level == UNKNOWN and "cannot check whether" in message and advice
    assert "secret" not in message
