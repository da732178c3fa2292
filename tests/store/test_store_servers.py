"""The same record on MariaDB and PostgreSQL, each a private server on a unix socket in a temporary directory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
from sqlalchemy import MetaData, make_url, text, update

from slurm_migbatch.daemon.ended import HistoryClient
from slurm_migbatch.daemon.term import TERM_S, TermKeeper
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.store import engines, windows
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.engines import make_engine
from slurm_migbatch.store.errors import NewerDatabaseError, StoreError
from slurm_migbatch.store.history import HISTORY
from slurm_migbatch.store.models import Base, Run
from slurm_migbatch.store.reader import open_reader
from slurm_migbatch.store.runquery import RETYPED_FIELDS, RUN_FIELDS, JobId, RunFilter
from tests.support.gpu_kinds import H100
from tests.support.processes import at_once
from tests.support.servers import KINDS, empty
from tests.support.store_events import Node, job, run_of, slice_entry, states

pytestmark = pytest.mark.slurm


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, server_of: Callable[[str], str]) -> str:
    """URL of an empty database on a running server."""
    return server_of(request.param)


@pytest.fixture
def store(server: str) -> Iterator[Store]:
    """A store that holds nothing."""
    with open_store(server) as opened:
        yield opened


def test_events_jobs_decisions_and_queries_work_on_a_server(store: Store, server: str) -> None:
    node = Node(store)
    gpu: dict[str, Any] = {
        "uuid": "GPU-a",
        "minor": 0,
        "index": 0,
        "name": "H100 \N{SNOWMAN}",
        "mig": True,
        "geometry": H100.geometry.to_dict(),
    }
    candidates = [{"profile": "1g.10gb", "latency_ms": 3.5}]
    store.record_decisions([{"id": "7fq3k", "bucket": "b", "asked": "--gres=mig:auto", "chosen": "mig:1g.10gb:1",
         "candidates": candidates, "message": "snowman \N{SNOWMAN} \U0001f600"}])  # fmt: skip
    store.upsert_jobs(
        [job(7, comment="[mig:1g.10gb:1#7fq3k]", name="übung \U0001f600"), job(8), job(9)], live={7, 8, 9}
    )
    assert node.send(
        node.event("inventory", 90, gpus=[gpu]),
        node.start(100, 7),
        node.start(101, 8, slice_entry(4, 2, "2g.20gb"), slice_entry(6)),
        node.event("odd", 102, text="a\0b\ud800c", number=float("inf")),
        node.stop(200, 7, exit_code=0),
    ) == 5  # fmt: skip
    assert node.send(node.event("boot", 300, boot_id="b2")) == 6
    store.upsert_jobs([], live={8}, now=400.0)
    store.record_supply("n1", 1.0, 1, {"1g.10gb": 1}, "why")
    assert states(store) == [(7, 0, "COMPLETED"), (8, 0, "NODE_FAIL"), (9, 0, "CANCELLED")]
    run = run_of(store, 7)
    assert (run.run["predicted_latency_ms"], run.run["name"]) == (3.5, "übung \U0001f600")
    assert run.slices[0]["gpu_index"] == 0
    assert store.inventory() == {"n1": [gpu]}
    assert store.decision("7fq3k")["message"] == "snowman \N{SNOWMAN} \U0001f600"  # type: ignore[index]
    with open_store(server, readonly=True) as reader:
        assert states(reader, RunFilter(start=150, end=160)) == states(store)
        assert states(reader, RunFilter(start=350, end=500)) == [(9, 0, "CANCELLED")]
        assert states(reader, RunFilter(nodes=("n1",), states=("COMPLETED",), start=0, end=999)) == [
            (7, 0, "COMPLETED")
        ]
        assert states(reader, RunFilter(jobs=(JobId(8),), users=("alice",))) == [(8, 0, "NODE_FAIL")]
        assert states(reader, RunFilter(users=("Alice",))) == [], "users are distinguished by case"
        rare = RunFilter(qos=("high",), wckeys=("k",), names=("x",), gids=(7,), limits_s=(60, 120), duplicates=False)
        assert states(reader, rare) == []
    with closing(open_reader(server)) as runs:
        found = {
            run.job_id: (run.user, run.retyped_after)
            for run, _ in runs.runs(RunFilter(), (*RUN_FIELDS, *RETYPED_FIELDS))
        }
        assert found[8] == ("alice", None)
        assert list(runs.wholes().values()) == [(7, 8)]
    with store.engine.begin() as connection:
        for number, facts in ((7, {"sm": 0.25}), (8, {"sm": 0.5, "shared": True})):
            connection.execute(update(Run).where(Run.job_id == number).values(measured_facts=facts))
    with closing(open_reader(server)) as runs:
        during = RunFilter(start=0.0, end=999.0)
        activity = {(since, sm) for *_, since, _until, _account, sm in windows.held_slices(runs, during)}
        assert activity == {(100, 0.25), (101, None)}, "on a shared slice it belongs to neither job"
        assert windows.waits(runs, during, [1.0, 1000.0]) is not None and windows.predictions(runs, during) is not None
        assert windows.loans(runs, during) == [] and len(windows.gpus(runs, during)) == 1


def test_tables_match_the_models(store: Store) -> None:
    found = MetaData()
    found.reflect(store.engine)
    for name, table in Base.metadata.tables.items():
        assert set(found.tables[name].columns.keys()) == set(table.columns.keys())
        for column in table.columns:
            assert found.tables[name].columns[column.name].nullable == column.nullable, (name, column.name)
        wanted = {index.name for index in table.indexes}
        assert wanted <= {index.name for index in found.tables[name].indexes}


def test_a_newer_database_is_refused(store: Store, server: str) -> None:
    with store.engine.begin() as connection:
        connection.execute(text("INSERT INTO schema_migrations VALUES ('0999 tomorrow', 1.0)"))
    with pytest.raises(NewerDatabaseError):
        open_store(server)


def test_concurrent_starts_and_writers_of_one_node_lose_nothing(store: Store, server: str) -> None:
    """Four processes find an empty database, and then send the same events, as two controllers do after a fail-over."""
    empty(server)
    code = (
        "from slurm_migbatch.store.db import open_store\n"
        "def work(number, url):\n"
        "    s = open_store(url)\n"
        "    for n in range(1, 21):\n"
        "        e = {'seq': n, 'ts': 100.0 + n, 'kind': 'start', 'job': n, 'restart': 0, 'slices': []}\n"
        "        assert s.ingest('n1', 'aa', 'b', [e]).acked >= n\n"
        "    s.close()\n"
    )
    at_once(4, code, server)
    assert [id for id, _, _ in states(store)] == list(range(1, 21))
    with store.reading() as connection:
        assert connection.execute(text("SELECT count(*) FROM schema_migrations")).scalar() == len(HISTORY)
        assert connection.execute(text("SELECT count(*) FROM node_events")).scalar() == 20


def relay(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


@contextmanager
def by_tcp(url: str) -> Iterator[str]:
    """Yield the URL of a server at a port that passes one connection on to its unix socket."""
    parts = make_url(url)
    path = parts.query.get("unix_socket") or f"{parts.query['host']}/.s.PGSQL.5432"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as threads:

        def serve() -> None:
            with listener.accept()[0] as client, socket.socket(socket.AF_UNIX) as behind:
                behind.connect(str(path))
                answers = threads.submit(relay, behind, client)
                relay(client, behind)
                answers.result()

        serving = threads.submit(serve)
        yield parts.set(host="127.0.0.1", port=listener.getsockname()[1], query={}).render_as_string(
            hide_password=False
        )
        serving.result()


def test_connection_to_a_host_that_has_lost_its_power_ends(server: str) -> None:
    """Without these options the kernel waits for two hours, and for longer if nothing is to be sent."""
    with by_tcp(server) as url:
        engine = make_engine(url, readonly=False)
        with closing(engine.raw_connection()) as connection:
            driver = connection.driver_connection
            with socket.socket(fileno=os.dup(getattr(driver, "_sock", driver).fileno())) as link:
                assert link.family == socket.AF_INET
                idle, interval, count, unanswered_ms = (
                    link.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (
                        socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT
                    )
                )  # fmt: skip
                assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert idle + interval * count <= 60 and 0 < unanswered_ms <= 60_000
        engine.dispose()


def demote(store: Store) -> None:
    """Have the server of the store's open connections become a standby, which only reads."""
    scope = "CHARACTERISTICS AS TRANSACTION" if store.engine.dialect.name == "postgresql" else "TRANSACTION"
    with closing(store.engine.raw_connection()) as connection:
        connection.cursor().execute(f"SET SESSION {scope} READ ONLY")
        connection.commit()


def test_writing_continues_with_the_next_primary(server: str) -> None:
    """Connections to the former one stay open; new ones lead to the next."""
    writer = StoreWriter(lambda: open_store(server), 10, first_wait=0.001)
    writer.start()
    try:
        writer.call(demote, "test").result(120)
        sending = writer.call(lambda store: store.ingest("n1", "aa", "b1", [Node(store).event("boot", 1.0)]), "test")
        assert sending.result(120).acked == 1
    finally:
        writer.stop(120)


def test_term_is_renewed_with_the_next_primary(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {f"slurmctldhost[{n}]": f"ctl{n + 1}" for n in range(2)}
    client, now = HistoryClient(), [1000.0]
    monkeypatch.setattr(client, "settings", lambda: hosts)
    monkeypatch.setattr(client, "ping", lambda timeout=None: dict.fromkeys(("ctl1", "ctl2"), True))
    keeper = TermKeeper(client, lambda: open_store(server), "ctl1", lambda: now[0])
    with closing(keeper):
        keeper.refresh()
        assert keeper.may_change_slurm() and keeper._store is not None
        demote(keeper._store)
        keeper.refresh()
        now[0] += TERM_S
        assert not keeper.may_change_slurm()
        keeper.refresh()
        assert keeper.may_change_slurm()


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "mysql"])
def test_server_that_accepts_connections_and_is_silent_is_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is frozen, or a proxy without one. Queries may take longer than its first message."""
    monkeypatch.setattr(engines, "CONNECT_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{kind}://migbatch@127.0.0.1:{silent.getsockname()[1]}/migbatch"
        with pytest.raises(StoreError, match=r"timeout|timed out"):
            open_store(url)


def test_query_may_take_longer_than_a_connection(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "CONNECT_S", 1)
    sleep = "SELECT pg_sleep(2)" if server.startswith("postgresql") else "SELECT sleep(2)"
    with open_store(server) as store, store.reading() as connection:
        connection.execute(text(sleep))
