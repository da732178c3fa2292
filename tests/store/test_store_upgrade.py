"""From the schema of every earlier step to today's and back, on every kind of database, with nothing lost."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from slurm_migbatch.store import backup
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.engines import file_url, make_engine
from slurm_migbatch.store.errors import NewerDatabaseError, StoreError
from slurm_migbatch.store.history import HISTORY
from slurm_migbatch.store.migrations import migrate, pending
from slurm_migbatch.store.restore import restore
from slurm_migbatch.store.soundness import damages, dangling, differences
from tests.support.old_schemas import all_rows, make_old
from tests.support.store_events import Node, run_of, slice_entry

Rows = dict[str, list[dict[str, Any]]]


def kept(before: Rows, after: Rows) -> None:
    """Check that every earlier row is present with every value that it had."""
    for name, rows in before.items():
        if name == "schema_migrations":
            assert [row["name"] for row in rows] == [row["name"] for row in after[name]][: len(rows)]
            continue
        assert len(after[name]) == len(rows), name
        for old, new in zip(rows, after[name], strict=True):
            assert {key: new[key] for key in old} == old, name


def beside(url: str) -> list[Path]:
    file = Path(url.removeprefix("sqlite:///"))
    return sorted(file.parent.glob(f"{file.name}.schema-*"))


@pytest.mark.slow
@pytest.mark.parametrize("steps", range(1, len(HISTORY)))
def test_every_earlier_schema_is_upgraded_with_its_rows(database: str, steps: int) -> None:
    before = make_old(database, steps)
    with pytest.raises(StoreError, match="start migbatchd"):
        open_store(database, readonly=True)
    with open_store(database) as store:
        kept(before, all_rows(database))
        with store.reading() as connection:
            assert [*damages(connection), *differences(connection), *dangling(connection)] == []
        # and work continues from there: the node's next event, a job that is known, a number that is free
        node = Node(store, journal="aa")
        node.seq = 3
        assert (
            node.send(node.stop(1_700_000_100.0, 42, slice_entry(2, 2, "2g.20gb")), node.start(1_700_000_101.0, 43))
            == 5
        )
        assert run_of(store, 42).run["state"] == "COMPLETED"
        assert run_of(store, 43).run["id"] > 9
        assert store.lessons()[0].memory_mib == 4000.0 and store.lessons()[-1].job == 42
    if database.startswith("sqlite"):
        (copy,) = beside(database)
        assert copy.name == f"migbatch.db.schema-{HISTORY[steps - 1].name[:4]}"
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        assert all_rows(file_url(copy)) == before


@pytest.mark.slow
@pytest.mark.sqlite
@pytest.mark.parametrize("steps", range(1, len(HISTORY)))
def test_downgrade_restores_the_backup_that_the_upgrade_made(url: str, steps: int) -> None:
    """The earlier release refuses the new schema in one line, restores its own backup, and continues with it."""
    before, old = make_old(url, steps), HISTORY[:steps]
    open_store(url).close()
    (copy,) = beside(url)
    engine = make_engine(url, readonly=False)
    with pytest.raises(NewerDatabaseError, match=r"newer migbatch .*upgrade slurm-migbatch on this host, or restore"):
        migrate(engine, old)
    engine.dispose()
    if steps < 7:  # what `migbatch db restore` would do in such a release: there the file is put back by hand
        for path in Path(copy.parent).glob("migbatch.db*"):
            if path != copy:
                path.unlink()
        copy.rename(url.removeprefix("sqlite:///"))
        assert all_rows(url) == before
    else:
        done = restore(copy, url, old, replace=True)
        assert done.schema == old[-1].name and done.before is not None
        after = all_rows(url)
        assert after["identity"] != before["identity"] and after["nodes"][0]["told"] is None
        assert {**after, **{n: before[n] for n in ("identity", "nodes", "terms")}} == before
    engine = make_engine(url, readonly=False)
    assert migrate(engine, old) == []
    engine.dispose()
    # then upgrade again: the first backup stays, a second one is made
    open_store(url).close()
    assert len(beside(url)) == (1 if steps < 7 else 2)


@pytest.mark.sqlite
def test_what_killed_upgrades_left_of_their_backups_is_removed(url: str) -> None:
    """Otherwise a host on which an upgrade is killed again and again has a full disk in the end."""
    make_old(url, len(HISTORY) - 1)
    folder = Path(url.removeprefix("sqlite:///")).parent
    left = [folder / f".migbatch.db.schema-0012.0a1b2c3d.part{end}" for end in ("", "-journal")]
    others = [folder / name for name in (".migbatch.db.0a1b2c3d.part", ".other.db.schema-0012.0a1b2c3d.part")]
    for path in (*left, *others):
        path.write_text("incomplete")
    open_store(url).close()
    assert [path.exists() for path in (*left, *others)] == [False, False, True, True]


KILLED = """
import os, signal, sys
from dataclasses import replace
from slurm_migbatch.store import db
def die(connection):
    connection.exec_driver_sql("CREATE TABLE unfinished AS SELECT * FROM runs")
    os.kill(os.getpid(), signal.SIGKILL)
db.HISTORY = (*db.HISTORY[:-1], replace(db.HISTORY[-1], apply=die))
db.open_store(sys.argv[1])
"""


@pytest.mark.sqlite
def test_upgrades_that_are_killed_again_and_again_keep_one_copy(url: str) -> None:
    """A record that is large enough for this to happen fills the disk with its copies."""
    before = make_old(url, len(HISTORY) - 1)
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", KILLED, url], check=False).returncode == -signal.SIGKILL
    (copy,) = beside(url)
    assert all_rows(file_url(copy)) == all_rows(url) == before
    open_store(url).close()
    assert beside(url) == [copy]


@pytest.mark.sqlite
def test_copy_of_an_earlier_upgrade_with_other_rows_is_kept(url: str) -> None:
    before = make_old(url, len(HISTORY) - 1)
    assert subprocess.run([sys.executable, "-c", KILLED, url], check=False).returncode == -signal.SIGKILL
    engine = make_engine(url, readonly=False)
    with engine.begin() as connection:
        connection.execute(text("UPDATE runs SET uid = uid + 1"))
    engine.dispose()
    changed = all_rows(url)
    open_store(url).close()
    assert [all_rows(file_url(copy)) for copy in beside(url)] == [before, changed]


def test_newer_schema_is_refused_in_one_line(database: str) -> None:
    open_store(database).close()
    engine = make_engine(database, readonly=False)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO schema_migrations VALUES ('0999 tomorrow', 1.0)"))
    engine.dispose()
    for readonly in (False, True):
        with pytest.raises(NewerDatabaseError, match=r"newer migbatch.*'0999 tomorrow'.*upgrade") as caught:
            open_store(database, readonly=readonly)
        assert str(caught.value).count("\n") == 0


@pytest.mark.sqlite
def test_an_upgrade_without_room_for_its_backup_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_old(url, 3)
    usage = os.statvfs("/").f_bavail
    monkeypatch.setattr(backup, "size_of", lambda file: (usage + 10**9) << 20)
    with pytest.raises(StoreError, match=r"older release.*MiB left.*free space, or .*migbatch db upgrade --no-backup"):
        open_store(url)
    assert beside(url) == []
    assert all_rows(url) == before
    monkeypatch.undo()
    open_store(url, backup=False).close()
    assert beside(url) == []
    with open_store(url) as store, store.reading() as connection:
        assert pending(connection, HISTORY) == []


def test_new_and_current_databases_need_no_backup(url: str) -> None:
    open_store(url).close()
    open_store(url).close()
    assert beside(url) == []
