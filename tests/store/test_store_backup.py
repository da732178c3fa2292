"""Backup under load and restore, between all kinds of databases; nothing is left incomplete or overwritten."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from slurm_migbatch.store import backup as backups
from slurm_migbatch.store.backup import back_up, schema_of
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.engines import file_url
from slurm_migbatch.store.errors import NewerDatabaseError, StoreError
from slurm_migbatch.store.history import HISTORY
from slurm_migbatch.store.models import DatabaseIdentity
from slurm_migbatch.store.receipt import NodeReceipt
from slurm_migbatch.store.restore import restore, unfinished
from tests.support.old_schemas import all_rows, make_old
from tests.support.servers import KINDS
from tests.support.store_events import Node, run_of, slice_entry, states

OTHERS = ["sqlite", *(pytest.param(kind, marks=pytest.mark.slurm) for kind in KINDS)]


def identity(url: str) -> str:
    with open_store(url, readonly=True) as store, store.reading() as connection:
        return str(connection.scalar(select(DatabaseIdentity.id)))


@pytest.mark.parametrize("steps", [1, 4, len(HISTORY)])
def test_backup_holds_every_row_unchanged(database: str, tmp_path: Path, steps: int) -> None:
    """Also of an older schema: that is what is needed before an upgrade."""
    before = make_old(database, steps)
    made = back_up(database, tmp_path / "b.db", HISTORY)
    assert made.schema == HISTORY[steps - 1].name and made.size == made.path.stat().st_size
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    after = all_rows(file_url(made.path))
    assert {**after, "schema_migrations": before["schema_migrations"]} == before
    assert [row["name"] for row in after["schema_migrations"]] == [step.name for step in HISTORY[:steps]]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "store") == ["b.db"]


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("steps", [2, len(HISTORY)])
def test_backup_can_be_restored_to_every_kind_of_database(
    tmp_path: Path, server_of: Callable[[str], str], kind: str, steps: int
) -> None:
    """From SQLite, of an older release or of this one, to each kind, and from there back to SQLite."""
    first = f"sqlite:///{tmp_path}/first/migbatch.db"
    before = make_old(first, steps)
    back_up(first, tmp_path / "one.db", HISTORY)
    target = f"sqlite:///{tmp_path}/second/migbatch.db" if kind == "sqlite" else server_of(kind)
    restore(tmp_path / "one.db", target, HISTORY, replace=False)
    own = {"identity", "terms", "schema_migrations", "nodes"}
    restored = all_rows(target)
    for name in set(before) - own:
        assert [
            {key: new[key] for key in old} for old, new in zip(before[name], restored[name], strict=True)
        ] == before[name], name
    assert restored["nodes"][0]["told"] is None
    back_up(target, tmp_path / "two.db", HISTORY)
    assert {**all_rows(file_url(tmp_path / "two.db")), "schema_migrations": []} == {**restored, "schema_migrations": []}
    with open_store(target) as store:
        node = Node(store, journal="aa")
        node.seq = 3
        assert node.send(node.start(1_700_000_101.0, 43)) == 4
        assert run_of(store, 43).run["id"] > 9


def test_restored_database_has_a_new_identity_and_asks_nodes_for_all_state(database: str, tmp_path: Path) -> None:
    with open_store(database) as store:
        node = Node(store)
        first = store.ingest("n1", "aa", "b", [node.event("state", 50.0, gpus=[], runs=[]), node.start(100, 7)])
        claim = NodeReceipt(first.database, first.acked)
        assert store.ingest("n1", "aa", "b", [], claim).complete
        back_up(database, tmp_path / "b.db", HISTORY)
        node.send(node.start(101, 8, slice_entry(3)))
    restore(tmp_path / "b.db", database, HISTORY, replace=True)
    assert identity(database) != first.database
    with open_store(database) as store:
        assert [id for id, _, _ in states(store)] == [7]
        # the node has dropped what was written since the backup; its whole state is requested
        later = store.ingest("n1", "aa", "b", [], NodeReceipt(first.database, 3))
        assert not later.complete and later.database == identity(database)


def test_non_empty_database_is_replaced_only_on_request(database: str, tmp_path: Path) -> None:
    make_old(database, len(HISTORY))
    back_up(database, tmp_path / "b.db", HISTORY)
    before = all_rows(database)
    with pytest.raises(StoreError, match=r"is not empty.*--replace"):
        restore(tmp_path / "b.db", database, HISTORY, replace=False)
    assert all_rows(database) == before
    done = restore(tmp_path / "b.db", database, HISTORY, replace=True)
    assert (done.before is not None) == database.startswith("sqlite")
    if done.before is not None:
        assert all_rows(file_url(done.before)) == before


@pytest.mark.slurm
def test_restore_is_refused_while_migbatchd_is_active_on_another_host(
    server_of: Callable[[str], str], tmp_path: Path, store: Store, url: str
) -> None:
    back_up(url, tmp_path / "b.db", HISTORY)
    for kind in KINDS:
        server = server_of(kind)
        with open_store(server) as shared:
            term = shared.take_term("ctl2", 60.0)
            before = all_rows(server)
            with pytest.raises(StoreError, match="migbatchd on ctl2 is active: stop migbatchd on every controller"):
                restore(tmp_path / "b.db", server, HISTORY, replace=True)
            assert all_rows(server) == before
            shared.give_term(term.number)
            restore(tmp_path / "b.db", server, HISTORY, replace=True)
            assert shared.take_term("ctl1", 60.0).number > term.number, (
                "the holder of an earlier term may never write again"
            )


def test_backup_under_load_is_consistent(database: str, tmp_path: Path) -> None:
    """Each start is one transaction on several tables: whenever the backup was taken, they agree."""
    stop = threading.Event()
    with open_store(database) as store:
        node = Node(store)
        node.send(node.start(1.0, 1))

        def write() -> None:
            number = 1
            while not stop.is_set():
                number += 1
                node.send(node.start(float(number), number, slice_entry(number % 7)))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for count in range(4):
                back_up(database, tmp_path / f"{count}.db", HISTORY)
        finally:
            stop.set()
            writer.join()
    seen = []
    for count in range(4):
        found = all_rows(file_url(tmp_path / f"{count}.db"))
        runs = [row["job_id"] for row in found["runs"]]
        assert runs == list(range(1, len(runs) + 1))
        assert len(found["leases"]) == len(found["node_events"]) == len(runs)
        assert found["journals"][0]["contiguous"] == len(runs)
        seen.append(len(runs))
    assert seen == sorted(seen)


def test_backup_does_not_overwrite_a_file_or_link(store: Store, url: str, tmp_path: Path) -> None:
    (tmp_path / "b.db").write_text("precious")
    (tmp_path / "link.db").symlink_to(tmp_path / "nowhere")
    for name in ("b.db", "link.db"):
        with pytest.raises(StoreError, match=r"already exists and is not overwritten"):
            back_up(url, tmp_path / name, HISTORY)
    assert (tmp_path / "b.db").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.sqlite
def test_one_of_two_concurrent_backups_to_one_name_fails(
    store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second runs while the first is being written: one of them gets the name, complete."""
    inner = backups.schema_of

    def slow(file: Path) -> str:
        monkeypatch.setattr(backups, "schema_of", inner)
        back_up(url, tmp_path / "b.db", HISTORY)
        return inner(file)

    monkeypatch.setattr(backups, "schema_of", slow)
    with pytest.raises(StoreError, match="already exists"):
        back_up(url, tmp_path / "b.db", HISTORY)
    assert schema_of(tmp_path / "b.db") == HISTORY[-1].name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.db", "store"]


KILLED = """
import os, signal, sys
from pathlib import Path
from slurm_migbatch.store import backup
from slurm_migbatch.store.history import HISTORY
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
setattr(backup, sys.argv[3], die)
backup.back_up(sys.argv[1], Path(sys.argv[2]), HISTORY)
"""


@pytest.mark.parametrize("where", ["schema_of", "sync", "_name"])
def test_killed_backup_leaves_no_file_with_its_name(store: Store, url: str, tmp_path: Path, where: str) -> None:
    target = tmp_path / "b.db"
    subprocess.run([sys.executable, "-c", KILLED, url, str(target), where], check=False)
    assert not target.exists()
    assert back_up(url, target, HISTORY).schema == HISTORY[-1].name


KILLED_RESTORE = """
import os, signal, sys
from pathlib import Path
from slurm_migbatch.store import restore
from slurm_migbatch.store.history import HISTORY
left = int(sys.argv[3])
def noted(real):
    def call(*given, **words):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **words)
    return call
for name in ("fchown", "fchmod", "fsync", "link", "replace", "unlink"):
    setattr(os, name, noted(getattr(os, name)))
restore.restore(Path(sys.argv[1]), sys.argv[2], HISTORY, replace=True)
"""


@pytest.mark.slow
@pytest.mark.sqlite
def test_record_is_complete_wherever_its_restore_is_killed(url: str, tmp_path: Path) -> None:
    file = Path(url.removeprefix("sqlite:///"))
    make_old(url, len(HISTORY))
    back_up(url, tmp_path / "b.db", HISTORY)
    with open_store(url) as store:
        node = Node(store, journal="aa")
        node.seq = 3
        node.send(node.start(1_700_000_101.0, 43))
    old, new, killed = all_rows(url)["runs"], all_rows(file_url(tmp_path / "b.db"))["runs"], 0
    states = []
    while subprocess.run(
        [sys.executable, "-c", KILLED_RESTORE, str(tmp_path / "b.db"), url, str(killed)], check=False
    ).returncode:
        states.append(all_rows(url)["runs"])
        assert len(unfinished(file)) <= 1, "each attempt leaves another copy"
        killed += 1
    assert killed > 4 and states[0] == old and all(state in (old, new) for state in states)
    assert all_rows(url)["runs"] == new and unfinished(file) == []


def test_damage_is_found_by_backup_and_restore(tmp_path: Path) -> None:
    url, file = f"sqlite:///{tmp_path}/m.db", tmp_path / "m.db"
    make_old(url, len(HISTORY))
    back_up(url, tmp_path / "good.db", HISTORY)
    for path in (file, tmp_path / "bad.db"):
        data = bytearray((tmp_path / "good.db").read_bytes())
        page = int.from_bytes(data[16:18], "big")
        for at in range(3, len(data) // page):
            data[at * page : at * page + 64] = os.urandom(64)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
    with pytest.raises(StoreError, match=r"damaged|failed|malformed"):
        back_up(url, tmp_path / "b.db", HISTORY)
    with pytest.raises(StoreError, match=r"bad\.db.* (is damaged|malformed)"):
        restore(tmp_path / "bad.db", url, HISTORY, replace=True)
    with pytest.raises(StoreError, match="is not empty"):
        restore(tmp_path / "good.db", url, HISTORY, replace=False)
    damaged = file.read_bytes()
    done = restore(tmp_path / "good.db", url, HISTORY, replace=True)
    assert done.before is not None and done.before.read_bytes() == damaged
    assert len(all_rows(url)["runs"]) == 2


def test_file_that_is_not_a_backup_is_refused(store: Store, url: str, tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("My dear aunt, " * 400)
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE aunts (name TEXT)")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("letter", "other.db", "empty"):
        with pytest.raises(StoreError, match=r"not a database|is not a migbatch record"):
            restore(tmp_path / name, url, HISTORY, replace=True)
    back_up(url, tmp_path / "b.db", HISTORY)
    with pytest.raises(NewerDatabaseError, match="newer migbatch"):
        restore(tmp_path / "b.db", url, HISTORY[:3], replace=True)


@pytest.mark.sqlite
def test_restore_keeps_the_owner_and_mode_of_the_file(url: str, tmp_path: Path) -> None:
    """A file owned by SlurmUser stays owned by SlurmUser, whoever restores it."""
    make_old(url, len(HISTORY))
    file = Path(url.removeprefix("sqlite:///"))
    back_up(url, tmp_path / "b.db", HISTORY)
    if os.geteuid() == 0:
        os.chown(file, 12345, 23456)
    before = file.stat()
    restore(tmp_path / "b.db", url, HISTORY, replace=True)
    after = file.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    assert after.st_ino != before.st_ino


@pytest.mark.parametrize("exists", [True, False])
def test_root_restores_in_another_users_directory_as_that_user(
    open_tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who may change the directory could put a link to any file where root is about to write."""
    state = open_tmp_path / "state"
    state.mkdir()
    url = f"sqlite:///{state}/migbatch.db"
    make_old(url, len(HISTORY))
    back_up(url, open_tmp_path / "b.db", HISTORY)
    for path in (state, *state.iterdir()):
        os.chown(path, 12345, 23456)
    if not exists:
        for path in state.iterdir():
            path.unlink()
    changes: list[tuple[str, int]] = []
    for name in ("link", "replace", "fchown", "unlink"):
        real = getattr(os, name)

        def noted(*given: Any, name: str = name, real: Any = real, **words: Any) -> Any:
            if any(str(word).startswith(f"{state}/") for word in given):
                changes.append((name, os.geteuid()))
            return real(*given, **words)

        monkeypatch.setattr(os, name, noted)
    restore(open_tmp_path / "b.db", url, HISTORY, replace=True)
    assert os.geteuid() == 0 and changes and {uid for _, uid in changes} == {12345}
    assert {(path.stat().st_uid, path.stat().st_gid) for path in state.iterdir()} == {(12345, 23456)}


def test_backup_is_not_written_where_another_user_could_replace_it(store: Store, url: str, open_tmp_path: Path) -> None:
    """He could read the record in a file of his own, or have root write to any other file."""
    for name, owner, mode, reason in (
        ("of-another", 12345, 0o755, "uid 12345 owns"),
        ("of-everybody", 0, 0o777, "every user may write to"),
    ):
        folder = open_tmp_path / name
        (folder / "below").mkdir(parents=True)
        folder.chmod(mode)
        os.chown(folder, owner, 0)
        for place in (folder, folder / "below"):
            with pytest.raises(StoreError, match=f"{reason} {folder}, and could get the record"):
                back_up(url, place / "b.db", HISTORY)
            assert not list(place.glob("*b.db*"))
    (open_tmp_path / "sticky").mkdir()
    (open_tmp_path / "sticky").chmod(0o1777)
    back_up(url, open_tmp_path / "sticky/b.db", HISTORY)


@pytest.mark.sqlite
def test_root_backs_up_beside_another_users_record_as_that_user(open_tmp_path: Path) -> None:
    url, target = f"sqlite:///{open_tmp_path}/state/migbatch.db", open_tmp_path / "state/b.db"
    (open_tmp_path / "state").mkdir()
    make_old(url, len(HISTORY))
    for path in (target.parent, *target.parent.iterdir()):
        os.chown(path, 12345, 23456)
    back_up(url, target, HISTORY)
    assert (target.stat().st_uid, target.stat().st_mode & 0o777) == (12345, 0o600) and os.geteuid() == 0


@pytest.mark.sqlite
def test_log_of_the_old_file_is_not_applied_to_the_restored_file(url: str, tmp_path: Path) -> None:
    """A killed migbatchd leaves a log beside its file: replayed onto another file, it would corrupt that file."""
    with open_store(url) as store:
        back_up(url, tmp_path / "b.db", HISTORY)
        node = Node(store)
        node.send(node.start(100, 7))
        file = Path(url.removeprefix("sqlite:///"))
        log = file.with_name(f"{file.name}-wal")
        copies = {path: path.read_bytes() for path in (file, log)}
    for path, data in copies.items():
        path.write_bytes(data)
    done = restore(tmp_path / "b.db", url, HISTORY, replace=True)
    assert all_rows(url)["runs"] == []
    assert done.before is not None
    assert [row["job_id"] for row in all_rows(file_url(done.before))["runs"]] == [7]
    with closing(sqlite3.connect(file)) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
