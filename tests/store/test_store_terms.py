"""Which migbatchd is active, on each kind of database: one at a time, and one whose term was taken writes nothing."""

import threading
from contextlib import closing, suppress

import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.terms import TermOverError, TermState, check_term
from tests.support.processes import at_once
from tests.support.servers import KINDS

pytestmark = pytest.mark.slurm

EVENT = {"seq": 1, "ts": 1.0, "kind": "fault"}


@pytest.fixture(params=["sqlite", *KINDS])
def server(request, tmp_path, server_of):
    """URL of an empty database."""
    return f"sqlite:///{tmp_path}/migbatch.db" if request.param == "sqlite" else server_of(request.param)


@pytest.fixture
def url(server):
    return server


@pytest.fixture
def store(url):
    with open_store(url) as opened:
        yield opened


def test_one_host_has_the_term_until_it_ends_or_is_given_back(store):
    assert store.take_term("ctl1", 600.0) == TermState(1, "ctl1", True)
    assert store.take_term("ctl2", 600.0) == TermState(1, "ctl1", False)
    assert store.take_term("ctl1", 600.0, 1) == TermState(1, "ctl1", True)
    store.give_term(1)
    assert store.take_term("ctl2", 0.0) == TermState(2, "ctl2", True)
    assert store.take_term("ctl1", 600.0, 1) == TermState(3, "ctl1", True), "over at once, and a new term"
    store.give_term(2)
    assert store.take_term("ctl2", 600.0) == TermState(3, "ctl1", False), "only the current term can be given back"


def test_killed_process_takes_a_new_term_at_once_after_its_restart(store):
    store.take_term("ctl1", 600.0)
    assert store.take_term("ctl1", 600.0) == TermState(2, "ctl1", True)


def test_process_whose_term_was_taken_writes_nothing(store, url):
    with open_store(url) as old:
        old.term = old.take_term("ctl1", 0.0).number
        assert old.ingest("n1", "j", "b", [EVENT]).acked == 1, "over, and not taken by another"
        store.term = store.take_term("ctl2", 600.0).number
        with pytest.raises(TermOverError, match="migbatchd on ctl2 is now active"):
            old.ingest("n1", "j", "b", [{**EVENT, "seq": 2}])
        with pytest.raises(TermOverError):
            old.record_supply("n1", 1.0, 1, {}, "why")
        assert store.ingest("n1", "j", "b", [{**EVENT, "seq": 2}]).acked == 2


def test_term_is_not_taken_while_its_holder_writes(store, url):
    """A transaction that began in a term ends in it: the next term waits for the transaction."""
    with open_store(url) as old:
        old.term = old.take_term("ctl1", 0.0).number
        order, inside, go = [], threading.Event(), threading.Event()

        def write(session):
            inside.set()
            go.wait(60.0)
            order.append("written")

        writing = threading.Thread(target=lambda: old._write(write))
        writing.start()
        assert inside.wait(60.0)
        taking = threading.Thread(target=lambda: (store.take_term("ctl2", 600.0), order.append("taken")))
        taking.start()
        go.set()
        writing.join(60.0)
        taking.join(60.0)
        assert order == ["written", "taken"]


def test_one_of_many_concurrent_processes_gets_the_term(store, url):
    code = (
        "from slurm_migbatch.store.db import open_store\n"
        "def work(n, url):\n"
        "    with open_store(url) as s: print(s.take_term(f'ctl{n}', 600.0).own)\n"
    )
    assert sorted(at_once(4, code, url)) == ["False", "False", "False", "True"]


@pytest.mark.parametrize("server", KINDS, indirect=True)
def test_process_frozen_in_a_transaction_does_not_block_the_next_term(url, monkeypatch):
    """Its host hangs, or has lost power while the server still considers it connected."""
    with open_store(url) as store:
        term = store.take_term("ctl1", 0.0).number
        with monkeypatch.context() as short:  # this store's timeout only: a busy machine pauses the others too
            short.setattr("slurm_migbatch.store.engines.IDLE_TRANSACTION_S", 3)
            frozen = open_store(url)
            connection = frozen.engine.connect()
        with closing(frozen):
            frozen.term = term
            transaction = connection.begin()
            with Session(connection) as session:
                check_term(session, term)
                assert store.take_term("ctl2", 600.0) == TermState(2, "ctl2", True)
            with suppress(DBAPIError):  # it wakes up: the server has ended its transaction
                transaction.rollback()
            with suppress(DBAPIError):
                connection.close()
            with pytest.raises(TermOverError, match="migbatchd on ctl2 is now active"):
                frozen.ingest("n1", "j", "b", [EVENT])
