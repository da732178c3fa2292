"""Opening the store: where the file may be, who may read it, and who may use it at the same time."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from slurm_migbatch.store import sqlitefile
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.errors import NetworkFilesystemError, StoreError
from slurm_migbatch.store.filesystem import filesystem_type, is_network
from slurm_migbatch.store.reader import open_reader
from tests.support.store_events import Node, job, slice_entry, states
from tests.support.stores import prepared

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 27 0:40 / /home rw,relatime shared:1 - nfs4 server:/home rw
41 27 0:41 / /home/local rw,relatime - xfs /dev/sdb rw
42 27 0:42 / /scratch rw - lustre mds@tcp:/scratch rw
43 27 0:43 / /mnt/with\\040space rw - fuse.sshfs host: rw
44 27 0:44 / /over rw - ext4 /dev/sdc rw
45 44 0:45 / /over rw - cifs //server/share rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/var/lib/migbatch/migbatch.db", "ext4", False),
        ("/home/x/migbatch.db", "nfs4", True),
        ("/home/local/migbatch.db", "xfs", False),
        ("/homes/migbatch.db", "ext4", False),
        ("/scratch/a/b/c", "lustre", True),
        ("/mnt/with space/db", "fuse.sshfs", True),
        ("/over/db", "cifs", True),
    ],
)
def test_filesystem_of_a_path_is_found_in_the_mount_table(path: str, kind: str, network: bool) -> None:
    assert filesystem_type(Path(path), MOUNTS) == kind
    assert is_network(kind) == network


def test_filesystem_of_a_path_on_this_machine_is_found(tmp_path: Path) -> None:
    assert filesystem_type(tmp_path / "not" / "there") not in ("", "proc", "sysfs")


@pytest.mark.sqlite
def test_network_filesystem_is_refused_with_advice(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlitefile, "filesystem_type", lambda path: "lustre")
    for readonly in (False, True):
        with pytest.raises(NetworkFilesystemError, match=r"lustre.*local disk of the controller.*MariaDB"):
            open_store(url, readonly=readonly)
    assert not Path(url.removeprefix("sqlite:///")).exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "not a database URL"),
        ("sqlite://", "is not an absolute path"),
        ("sqlite:///relative.db", "four slashes"),
        ("sqlite:////proc/nope/x.db", "cannot make|proc"),
        ("oracle://x", "use sqlite, mariadb or postgresql|needs the Python package"),
        ("frobnicate://x", "use sqlite, mariadb or postgresql"),
    ],
)
def test_url_that_cannot_be_opened_is_an_error_with_its_reason(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "mariadb://migbatch:s3cret@127.0.0.1:1/x",
        "mariadb://migbatch@127.0.0.1:1/x?password=s3cret",
        "mariadb://migbatch:s@s:3cret@127.0.0.1/x",
        "mariadb:/migbatch:s3cret@127.0.0.1/x",
    ],
)
def test_error_does_not_show_the_password(url: str) -> None:
    with pytest.raises(StoreError, match=r"cannot use the database|not a database URL") as raised:
        open_store(url)
    assert "3cret" not in str(raised.value)


def test_errors_do_not_repeat_texts_of_users(database: str) -> None:
    insert = text("INSERT INTO missing VALUES (:comment)")
    with open_store(database) as store, pytest.raises(SQLAlchemyError) as caught, store.engine.connect() as connection:
        connection.execute(insert, {"comment": "secret words"})
    assert "missing" in str(caught.value) and "secret" not in str(caught.value)


def test_file_that_is_not_a_database_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x.db"
    file.write_text("This is a letter to my aunt, of some length, and no database. " * 50)
    for readonly in (False, True):
        with pytest.raises(StoreError, match="not a database"):
            open_store(f"sqlite:///{file}", readonly=readonly)
    with pytest.raises(StoreError, match="not a file"):
        open_store(f"sqlite:///{tmp_path}")


@pytest.mark.sqlite
def test_reader_of_a_damaged_file_is_told_to_restore_a_backup(url: str, tmp_path: Path) -> None:
    prepared(url)
    whole, damaged = Path(url.removeprefix("sqlite:///")), tmp_path / "damaged.db"
    damaged.write_bytes(whole.read_bytes()[:8192])
    with pytest.raises(StoreError, match=r"malformed; restore a backup \(migbatch db restore\)"):
        open_reader(f"sqlite:///{damaged}")


@pytest.mark.sqlite
def test_file_and_directory_are_closed_to_other_users(url: str) -> None:
    open_store(url).close()
    file = Path(url.removeprefix("sqlite:///"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o750


@pytest.mark.sqlite
def test_permissions_do_not_depend_on_the_umask(url: str) -> None:
    code = f"import os; os.umask(0o077); from slurm_migbatch.store.db import open_store; open_store({url!r}).close()"
    subprocess.run([sys.executable, "-c", code], check=True)
    file = Path(url.removeprefix("sqlite:///"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o750


def test_existing_directory_keeps_its_permissions(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    open_store(f"sqlite:///{tmp_path}/x.db").close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o711


@pytest.mark.sqlite
def test_sqlite_settings_are_applied(store: Store) -> None:
    with store.engine.connect() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout")
        }
    assert settings == {"journal_mode": "wal", "foreign_keys": 1, "synchronous": 2, "busy_timeout": 30000}


def test_a_reader_cannot_write(store: Store, url: str) -> None:
    Node(store).send(Node(store).start(100, 7))
    with open_store(url, readonly=True) as reader:
        assert states(reader) == [(7, 0, "RUNNING")]
        with pytest.raises(StoreError, match="reading only"):
            Node(reader).send(Node(reader).start(101, 8))
        with pytest.raises(DBAPIError, match=r"(?i)read.?only"), reader.engine.connect() as connection:
            connection.exec_driver_sql("DELETE FROM runs")


def test_reader_sees_new_rows_of_a_running_writer(store: Store, url: str) -> None:
    node = Node(store)
    with open_store(url, readonly=True) as reader:
        for number in range(1, 4):
            node.send(node.start(100 + number, number, slice_entry(number)))
            assert len(reader.runs()) == number


@pytest.mark.sqlite
def test_reader_does_not_create_a_missing_database(url: str) -> None:
    with pytest.raises(StoreError, match=r"no database at .*migbatchd creates it .*\[store\] url of migbatch\.toml"):
        open_store(url, readonly=True)
    assert not Path(url.removeprefix("sqlite:///")).exists()


WRITER = """
import sys
from slurm_migbatch.store.db import open_store
store = open_store(sys.argv[1])
store.upsert_jobs([{"job_id": 1}])
print("ready", flush=True)
sys.stdin.read(1)
store.close()
"""
# everything is imported before privileges are dropped: the interpreter may be root's own
READER = """
import os, sys, tempfile
from slurm_migbatch.store.db import open_store
with tempfile.TemporaryDirectory() as directory:
    open_store(f"sqlite:///{directory}/x.db").close()
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(65534)
print(len(open_store(sys.argv[1], readonly=True).runs()))
"""


def read_as_somebody(url: str, group: int) -> subprocess.CompletedProcess[str]:
    """Count the runs as a user who may at most read the file."""
    command = [sys.executable, "-c", READER, url, str(group)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slurm
@pytest.mark.parametrize("writer", ["runs", "stopped", "killed"])
def test_user_with_read_permission_only_can_read(writer: str) -> None:
    """With migbatchd running, stopped (its log merged into the file) and killed (log and shared memory left behind)."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)
        file = Path(directory, "store", "migbatch.db")
        url, log = f"sqlite:///{file}", file.with_name("migbatch.db-wal")
        command = [sys.executable, "-c", WRITER, url]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            for path in (file.parent, *file.parent.iterdir()):
                os.chown(path, 0, 12345)
            if writer == "stopped":
                process.communicate("x")
                assert not log.exists()
            elif writer == "killed":
                process.kill()
                process.wait()
                assert log.stat().st_size > 0
            done = read_as_somebody(url, 12345)
            assert (done.stdout, done.stderr) == ("1\n", "")
            refused = read_as_somebody(url, 54321)
            assert refused.returncode == 1
            assert "cannot read the database" in refused.stderr
        finally:
            process.kill()
            process.communicate()


def test_two_concurrent_writers_lose_no_events(url: str) -> None:
    with open_store(url) as first, open_store(url) as second:

        def send(store: Store, name: str) -> None:
            node = Node(store, name, "aa")
            for number in range(25):
                node.send(node.start(100 + number, number + (1000 if name == "n2" else 1), slice_entry(number % 7)))

        threads = [threading.Thread(target=send, args=pair) for pair in ((first, "n1"), (second, "n2"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(first.runs()) == 50


def test_the_same_event_from_two_controllers_counts_once(url: str) -> None:
    with open_store(url) as first, open_store(url) as second:
        node = Node(first)
        event = node.start(100, 7)
        results: list[int] = []
        threads = [
            threading.Thread(target=lambda s=store: results.append(s.ingest("n1", "aa", "b", [event]).acked))
            for store in (first, second) * 4
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [1] * 8
        assert states(second) == [(7, 0, "RUNNING")]


def test_failed_write_is_rolled_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from slurm_migbatch.store import slurmjobs

    monkeypatch.setattr(slurmjobs, "_left", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.upsert_jobs([job(7)], live=set())
    monkeypatch.undo()
    assert states(store) == []


@pytest.mark.sqlite
def test_file_is_intact_after_a_kill(url: str) -> None:
    """Everything that was acknowledged is in it; SQLite's own check finds nothing wrong."""
    code = (
        "import sys, os; from slurm_migbatch.store.db import open_store; s = open_store(sys.argv[1])\n"
        "for n in range(1, 10**6):\n"
        "    ack = s.ingest('n1', 'aa', 'b', [{'seq': n, 'ts': 1.0 * n, 'kind': 'start', 'job': n, 'slices': []}])\n"
        "    print(ack.acked, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(30)][-1]
    process.kill()
    process.communicate()
    with open_store(url) as store:
        assert len(store.runs()) >= acknowledged
        assert store.ingest("n1", "aa", "b", []).acked >= acknowledged
    with sqlite3.connect(url.removeprefix("sqlite:///")) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    raw.close()
