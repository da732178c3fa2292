"""Which migbatchd is active: by slurmctld's primary, by its own programs, and by the term in the database."""

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


def test_the_one_beside_the_primary_is_active(keep):
    one, two = keep("ctl1.example.org"), keep("ctl2")
    for keeper in (two, one, two):
        keeper.refresh()
    assert (one.acts(), two.acts()) == (True, False)
    assert two.why == "slurmctld's primary is ctl1"
    with pytest.raises(SlurmError, match="no changes to Slurm by migbatchd on ctl2: slurmctld's primary is ctl1"):
        two.check()


def test_a_slurmctld_that_only_stands_ready_is_no_primary(keep, slurm):
    two = keep("ctl2")
    two.refresh()
    slurm.up = {"ctl2"}
    two.refresh()
    assert not two.active and "does not answer" in two.why
    slurm.primary = "ctl2"
    two.refresh()
    assert two.acts()


def test_a_term_is_not_taken_from_one_that_still_has_it(keep, slurm):
    one, two = keep("ctl1"), keep("ctl2")
    one.refresh()
    slurm.up, slurm.primary = {"ctl2"}, "ctl2"
    two.refresh()
    assert one.acts() and not two.active and two.why == "migbatchd on ctl1 is active"
    one.refresh()
    assert not one.acts(), "before anything else"
    two.refresh()
    assert not two.active, "the first may still be writing"
    one.resign()
    two.refresh()
    assert two.acts() and two.number == 2


def test_its_own_program_ends_it_at_once(keep):
    one = keep("ctl1")
    one.refresh()
    one.set_primary(False)
    assert not one.acts() and not one.active
    one.resign()
    one.refresh()
    assert not one.active, "scontrol ping does not know it yet"
    one.set_primary(True)
    one.refresh()
    assert one.acts()


def test_a_term_that_could_not_be_renewed_is_over(keep, clock, monkeypatch):
    one = keep("ctl1")
    one.refresh()

    def away(*_):
        raise OSError("the database is away")

    monkeypatch.setattr(one._store, "take_term", away)
    clock[0] += TERM_S - 0.1
    one.refresh()
    assert one.acts()
    clock[0] += 0.2
    assert not one.acts() and one.active, "it serves on, and changes nothing"
    monkeypatch.undo()
    one.refresh()
    assert one.acts() and one.number == 1


def test_who_was_away_too_long_finds_the_term_of_another(keep):
    one = keep("ctl1")
    one.refresh()
    other = one._open()
    other.give_term(1)
    assert other.take_term("ctl2", 600.0).number == 2
    other.close()
    one.refresh()
    assert not one.active and one.why == "migbatchd on ctl2 has taken over"


def test_a_ping_that_takes_too_long_changes_nothing(keep, slurm):
    one = keep("ctl1")
    one.refresh()
    slurm.silent = True
    one.refresh()
    assert one.acts()


def test_one_slurmctld_needs_no_term(keep, slurm):
    slurm.names = ("ctl1",)
    one = keep("anything")
    assert not one.active
    one.refresh()
    assert one.acts() and not one.number
    one.set_primary(False)
    assert one.acts()


@pytest.mark.parametrize(("host", "acts"), [("ctl1", True), ("ctl2", False), ("ctl3", False)])
def test_sqlite_serves_the_first_host_alone(keep, caplog, host, acts):
    keeper = keep(host, shared=False)
    assert keeper.active and not keeper.acts()
    keeper.refresh()
    assert (keeper.active, keeper.acts()) == (acts, acts)
    assert "SQLite supports one host" in caplog.text or "is not a SlurmctldHost" in caplog.text
