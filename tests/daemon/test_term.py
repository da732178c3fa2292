"""Which migbatchd is active: by slurmctld's primary, by its own programs, and by the term in the database."""

from threading import Event

import pytest

from slurm_migbatch.daemon.term import TERM_S, TermKeeper
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.store.db import open_store


class Cluster:
    """Two slurmctlds, of which some run; `primary`: the one that answers requests."""

    def __init__(self, *names):
        self.names, self.up, self.primary = names, set(names), names[0]
        self.silent = False

    def settings(self):
        if self.primary not in self.up:
            raise SlurmError("nobody answers")
        return {f"slurmctldhost[{n}]": f"{name}(10.0.0.{n})" for n, name in enumerate(self.names)}

    def ping(self, timeout=None):
        if self.silent:
            raise SlurmError("not within 3 s")
        return {name: name in self.up for name in self.names}


@pytest.fixture
def slurm():
    return Cluster("ctl1", "ctl2")


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def keep(slurm, clock, tmp_path):
    """Makes keepers that share a database and a clock."""
    url = f"sqlite:///{tmp_path}/db/migbatch.db"
    keepers = []

    def make(host, *, shared=True):
        keeper = TermKeeper(slurm, (lambda: open_store(url)) if shared else None, host, lambda: clock[0])
        keepers.append(keeper)
        return keeper

    yield make
    for keeper in keepers:
        keeper.close()


def test_migbatchd_on_the_host_of_the_primary_slurmctld_is_active(keep):
    ctl1, ctl2 = keep("ctl1.example.org"), keep("ctl2")
    for keeper in (ctl2, ctl1, ctl2):
        keeper.refresh()
    assert (ctl1.may_change_slurm(), ctl2.may_change_slurm()) == (True, False)
    assert ctl2.why == "slurmctld's primary is ctl1"
    with pytest.raises(SlurmError, match="no changes to Slurm by migbatchd on ctl2: slurmctld's primary is ctl1"):
        ctl2.check()


def test_migbatchd_beside_a_backup_slurmctld_is_not_active(keep, slurm):
    ctl2 = keep("ctl2")
    ctl2.refresh()
    slurm.up = {"ctl2"}
    ctl2.refresh()
    assert not ctl2.active and "does not answer" in ctl2.why
    slurm.primary = "ctl2"
    ctl2.refresh()
    assert ctl2.may_change_slurm()


def test_term_is_not_taken_from_a_migbatchd_that_still_has_it(keep, slurm):
    ctl1, ctl2 = keep("ctl1"), keep("ctl2")
    ctl1.refresh()
    slurm.up, slurm.primary = {"ctl2"}, "ctl2"
    ctl2.refresh()
    assert ctl1.may_change_slurm() and not ctl2.active and ctl2.why == "migbatchd on ctl1 is active"
    ctl1.refresh()
    assert not ctl1.may_change_slurm(), "before anything else"
    ctl2.refresh()
    assert not ctl2.active, "the first instance may still be writing"
    ctl1.resign()
    ctl2.refresh()
    assert ctl2.may_change_slurm() and ctl2.number == 2


def test_primary_off_program_ends_the_term_at_once(keep):
    ctl1 = keep("ctl1")
    ctl1.refresh()
    ctl1.set_primary(False)
    assert not ctl1.may_change_slurm() and not ctl1.active
    ctl1.resign()
    ctl1.refresh()
    assert not ctl1.active, "scontrol ping does not know it yet"
    ctl1.set_primary(True)
    ctl1.refresh()
    assert ctl1.may_change_slurm()


def test_term_that_is_released_during_a_check_is_not_taken_again(keep, slurm, monkeypatch):
    ctl1, ctl2 = keep("ctl1"), keep("ctl2")
    ctl1.refresh()
    asked, released = Event(), Event()

    def slow_ping(_timeout=None):
        asked.set()
        released.wait(0.3)
        return {"ctl1": True, "ctl2": True}

    with monkeypatch.context() as patched:
        patched.setattr(slurm, "ping", slow_ping)
        check = ctl1._thread.submit(ctl1.refresh)
        asked.wait()
        ctl1.resign()
        released.set()
        check.result()
    slurm.up, slurm.primary = {"ctl2"}, "ctl2"
    ctl2.refresh()
    assert ctl2.may_change_slurm(), ctl2.why


def test_term_that_could_not_be_renewed_expires(keep, clock, monkeypatch):
    ctl1 = keep("ctl1")
    ctl1.refresh()

    def away(*_):
        raise OSError("the database is away")

    monkeypatch.setattr(ctl1._store, "take_term", away)
    clock[0] += TERM_S - 0.1
    ctl1.refresh()
    assert ctl1.may_change_slurm()
    clock[0] += 0.2
    assert not ctl1.may_change_slurm() and ctl1.active, "it continues to answer, and changes nothing"
    monkeypatch.undo()
    ctl1.refresh()
    assert ctl1.may_change_slurm() and ctl1.number == 1


def test_migbatchd_that_was_away_too_long_is_no_longer_active(keep):
    ctl1 = keep("ctl1")
    ctl1.refresh()
    other = ctl1._open()
    other.give_term(1)
    assert other.take_term("ctl2", 600.0).number == 2
    other.close()
    ctl1.refresh()
    assert not ctl1.active and ctl1.why == "migbatchd on ctl2 has taken over"


def test_a_ping_that_takes_too_long_changes_nothing(keep, slurm):
    ctl1 = keep("ctl1")
    ctl1.refresh()
    slurm.silent = True
    ctl1.refresh()
    assert ctl1.may_change_slurm()


def test_one_slurmctld_needs_no_term(keep, slurm):
    slurm.names = ("ctl1",)
    keeper = keep("anything")
    assert not keeper.active
    keeper.refresh()
    assert keeper.may_change_slurm() and not keeper.number
    keeper.set_primary(False)
    assert keeper.may_change_slurm()


@pytest.mark.parametrize(("host", "acts"), [("ctl1", True), ("ctl2", False), ("ctl3", False)])
def test_with_sqlite_only_the_first_slurmctld_host_is_active(keep, caplog, host, acts):
    keeper = keep(host, shared=False)
    assert keeper.active and not keeper.may_change_slurm()
    keeper.refresh()
    assert (keeper.active, keeper.may_change_slurm()) == (acts, acts)
    assert "SQLite supports one host" in caplog.text or "is not a SlurmctldHost" in caplog.text
