"""`migbatch db`, and the messages of commands about a database that is read-only, full, damaged, older or newer."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import text

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.daemon.lock import InstanceLock
from slurm_migbatch.store.backup import back_up
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.engines import make_engine
from slurm_migbatch.store.history import HISTORY
from tests.support.old_schemas import make_old
from tests.support.store_events import Node, states


class Site:
    """A configuration with a record in a directory of its own."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str], run_dir: Path | None = None) -> None:
        self.directory, self._capsys = directory, capsys
        self.file = directory / "state" / "migbatch.db"
        self.url = f"sqlite:///{self.file}"
        self.run_dir = run_dir or directory / "run"
        self.config = directory / "migbatch.toml"
        self.config.write_text(
            f"[store]\nurl = '{self.url}'\n[daemon]\nrun_dir = '{self.run_dir}'\n[cluster]\nslurm_bin = '{directory}'\n"
        )

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Exit code, output and errors of a command."""
        code = run(cli, "migbatch", [*words, "-c", str(self.config)])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def levels(self, *words: str) -> tuple[int, dict[str, str]]:
        """Exit code and the level of each finding of `db check`."""
        code, out, _ = self("db", "check", "--json", *words)
        found = json.loads(out)
        assert found["version"] == 1
        assert all(finding["advice"] for finding in found["findings"] if finding["level"] != "ok")
        return code, {finding["subject"]: finding["level"] for finding in found["findings"]}


@pytest.fixture
def site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Site:
    return Site(tmp_path, capsys)


def test_backup_is_made_with_stderr_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `2>&-`, in a script of cron."""
    open_store(site.url).close()
    monkeypatch.setattr(sys, "stderr", None)
    assert run(cli, "migbatch", ["db", "backup", str(site.directory / "b.db"), "-c", str(site.config)]) == 0
    sys.stderr.close()
    assert (site.directory / "b.db").exists()


def test_backup_and_restore_bring_back_the_record(site: Site) -> None:
    with open_store(site.url) as store:
        node = Node(store)
        node.send(node.start(100, 7))
        lock = InstanceLock(site.run_dir)
        lock.acquire()  # a backup is taken while migbatchd runs
        code, out, _ = site("db", "backup", str(site.directory / "b.db"))
        assert (code, out.count("\n")) == (0, 1) and f"schema '{HISTORY[-1].name[:4]}" in out
        assert site("db", "backup", str(site.directory / "b.db"))[0] == 1
        node.send(node.start(101, 8))
    code, _, err = site("db", "restore", "--replace", str(site.directory / "b.db"))
    assert code == 1 and err.startswith(f"migbatch: error: migbatchd is already running as process {os.getpid()}")
    lock.release()
    code, _, err = site("db", "restore", str(site.directory / "b.db"))
    assert code == 1 and "is not empty" in err and err.count("\n") == 1
    code, out, err = site("db", "restore", "--replace", str(site.directory / "b.db"))
    assert (code, err) == (0, "") and "the previous database is" in out
    with open_store(site.url) as store:
        assert [job for job, _, _ in states(store)] == [7]
    assert "no such backup" in site("db", "restore", str(site.directory / "nope.db"))[2]


def test_db_commands_run_as_root_leave_the_run_directory_unchanged(site: Site) -> None:
    """migbatchd may run as SlurmUser, and could not use files that root has created."""
    back = site.directory / "b.db"
    open_store(site.url).close()
    back_up(site.url, back, HISTORY)
    assert site("db", "restore", "--replace", str(back))[0] == 0
    assert not site.run_dir.exists()
    site.run_dir.mkdir()
    lock = InstanceLock(site.run_dir)
    lock.acquire()
    lock.release()
    assert site("db", "upgrade")[0] == 0
    assert [path.name for path in site.run_dir.iterdir()] == ["migbatchd.pid"]


def test_db_check_of_an_intact_database(site: Site) -> None:
    make_old(site.url, len(HISTORY))
    code, found = site.levels()
    assert code == 0
    assert found == {"integrity": "ok", "schema": "ok", "tables": "ok", "age": "warn", "disk space": "ok"}
    back_up(site.url, site.directory / "b.db", HISTORY)
    code, found = site.levels(str(site.directory / "b.db"))
    assert (code, found) == (0, {"integrity": "ok", "schema": "ok", "tables": "ok", "age": "ok"})
    code, out, _ = site("db", "check", "-q")
    assert code == 0 and "age: goes back" in out and "integrity" not in out


def test_db_check_of_older_newer_and_changed_schemas(site: Site) -> None:
    assert site.levels() == (1, {"database": "FAIL"})
    make_old(site.url, 4)
    assert site.levels() == (0, {"integrity": "ok", "schema": "warn", "disk space": "ok"})
    assert site("db", "upgrade")[1] == f"schema {HISTORY[-1].name!r}\n"
    assert site.levels()[1]["schema"] == "ok"
    assert [path.name for path in site.file.parent.glob("*.schema-*")] == ["migbatch.db.schema-0004"]
    engine = make_engine(site.url, readonly=False)
    with engine.begin() as connection:
        connection.execute(text("DROP INDEX ix_runs_lesson"))
        connection.execute(text("ALTER TABLE runs DROP COLUMN warm"))
    assert site.levels()[1]["tables"] == "FAIL"
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO schema_migrations VALUES ('0999 tomorrow', 1.0)"))
    engine.dispose()
    assert site.levels() == (1, {"integrity": "ok", "schema": "FAIL", "disk space": "ok"})
    for words in (("show", "12"), ("db", "upgrade"), ("model", "show")):
        code, _, err = site(*words)
        assert code == 1 and err.count("\n") == 1 and "'0999 tomorrow'" in err, words


def test_db_check_of_a_damaged_database(site: Site) -> None:
    make_old(site.url, len(HISTORY))
    with closing(sqlite3.connect(site.file)) as raw, raw:
        raw.execute("DELETE FROM runs WHERE id = 5")
    assert site.levels() == (1, {"integrity": "ok", "schema": "ok", "tables": "FAIL", "disk space": "ok"})
    data = bytearray(site.file.read_bytes())
    page = int.from_bytes(data[16:18], "big")
    for at in range(4, len(data) // page):
        data[at * page : at * page + 64] = os.urandom(64)
    site.file.write_bytes(data)
    code, found = site.levels()
    assert code == 1 and "FAIL" in (found.get("integrity"), found.get("database"))
    code, _, err = site("show", "41")
    assert code == 1 and err.count("\n") == 1 and "malformed" in err


@pytest.mark.parametrize("kind", ["text", "another database"])
def test_advice_for_a_file_that_is_no_backup_is_about_the_file(site: Site, kind: str) -> None:
    file = site.directory / "b.db"
    if kind == "text":
        file.write_text("no database")
    else:
        with closing(sqlite3.connect(file)) as raw, raw:
            raw.execute("CREATE TABLE other (id INTEGER)")
    code, out, _ = site("db", "check", "-q", str(file))
    assert code == 1
    assert "-> give a file that `migbatch db backup` wrote" in out and "[store]" not in out


def test_unreachable_database_server_is_one_finding(site: Site, tmp_path: Path) -> None:
    """Only that an unreachable server is one finding; tests/store tests what else differs with servers."""
    site.config.write_text("[store]\nurl = 'mariadb://x@127.0.0.1:1/x'\n")
    assert site.levels() == (1, {"database": "FAIL"})
    code, _, err = site("db", "backup", str(tmp_path / "b.db"))
    assert code == 1 and err.count("\n") == 1


@contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of four megabytes."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", directory], check=True)
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "-l", directory], check=True)


def fill(directory: Path) -> None:
    with (directory / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass


READING = (("show", "41"), ("loans",), ("db", "check"), ("model", "show"))


@pytest.mark.slurm
def test_full_or_read_only_disk_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reads still work if the database on disk is complete; commands that must write report the error in one line."""
    with small_disk() as disk:
        site = Site(disk, capsys, tmp_path / "run")
        make_old(site.url, len(HISTORY))
        back_up(site.url, tmp_path / "b.db", HISTORY)
        fill(disk)
        for words in READING:
            code, _, err = site(*words)
            assert code in (0, 1) and err.count("\n") <= 1, (words, err)
            assert "Traceback" not in err
        code, _, err = site("db", "backup", str(disk / "b.db"))
        assert code == 1 and err.count("\n") == 1 and "MiB left" in err
        code, _, err = site("db", "restore", "--replace", str(tmp_path / "b.db"))
        assert code == 1 and err.count("\n") == 1, err
        left = {path.name for path in site.file.parent.iterdir()}
        assert left <= {"migbatch.db", "migbatch.db-wal", "migbatch.db-shm"}
        (disk / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for words in READING:
            code, _, err = site(*words)
            assert code in (0, 1) and err.count("\n") <= 1, (words, err)
        assert site("db", "backup", str(tmp_path / "c.db"))[0] == 0
        writing = (("backup", str(disk / "b.db")), ("restore", "--replace", str(tmp_path / "b.db")))
        for words in (("db", *line) for line in writing):
            code, _, err = site(*words)
            assert code == 1 and err.count("\n") == 1 and "ead-only" in err, (words, err)


@pytest.mark.slurm
def test_log_left_by_a_killed_migbatchd_on_a_read_only_disk_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of the log are not in the file yet, and a reader that may not write cannot copy them there."""
    with small_disk() as disk:
        site = Site(disk, capsys, tmp_path / "run")
        with open_store(site.url) as store:
            node = Node(store)
            node.send(node.start(100, 7))
            shutil.copytree(site.file.parent, tmp_path / "killed")
        shutil.copytree(tmp_path / "killed", site.file.parent, dirs_exist_ok=True)
        (site.file.parent / "migbatch.db-shm").unlink(missing_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        code, _, err = site("show", "7")
        assert code == 1 and err.count("\n") == 1 and "cannot read the database" in err
