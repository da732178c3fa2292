"""An installation that was killed, or could not write: the next one goes on, and removal restores everything."""

from __future__ import annotations

import os
import secrets
import struct
from pathlib import Path

import pytest

from slurm_migbatch.install import files
from slurm_migbatch.install.files import InstallRecord, Wanted
from tests.support.installing import install, leave


@pytest.fixture
def record(tmp_path):
    return InstallRecord(tmp_path / "record")


def again(record):
    return InstallRecord(record.directory)


def full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", ["own", "site"])
def test_an_upgrade_that_could_not_write_is_repeated_and_removed(record, tmp_path, monkeypatch, kind):
    path = tmp_path / "file"
    if kind == "site":
        path.write_text("A\nB\n")
    install(record, Wanted(str(path), "A,mig\nB\n", kind))
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)  # the record is written with it, too
        with pytest.raises(OSError, match="No space"):
            install(again(record), Wanted(str(path), "A,mig,more\nB\nC\n", kind))
    with monkeypatch.context() as patched:
        patched.setattr(files, "_write", full)
        with pytest.raises(OSError, match="No space"):
            install(again(record), Wanted(str(path), "A,mig,more\nB\nC\n", kind))
    assert path.read_text() == "A,mig\nB\n"
    assert [change.conflict for change in install(again(record), Wanted(str(path), "A,mig,most\nB\nC\n", kind))] == [""]
    assert leave(again(record)) == []
    assert (path.read_text() if kind == "site" else not path.exists()) in (True, "A\nB\n")
    assert not record.directory.exists()


def test_an_installation_that_was_killed_after_the_file_was_written(record, tmp_path, monkeypatch):
    path = tmp_path / "slurm.conf"
    path.write_text("A\n")
    install(record, Wanted(str(path), "A,mig\n", "site"))
    real = record.save

    def killed(*given):
        if path.read_text() == "A,mig,more\n":
            raise KeyboardInterrupt
        real(*given)

    monkeypatch.setattr(record, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        install(record, Wanted(str(path), "A,mig,more\n", "site"))
    assert leave(again(record)) == [] and path.read_text() == "A\n"


def test_a_removal_is_complete_where_files_are_gone_already(record, tmp_path):
    ours, gone, conf = (tmp_path / name for name in ("prolog", "script", "slurm.conf"))
    gone.write_text("S\n")
    conf.write_text("A\n")
    install(
        record,
        Wanted(str(ours), "x\n"),
        Wanted(str(gone), "S,mig\n", "site"),
        Wanted(str(conf), "A,mig\n", "site"),
    )
    ours.unlink()
    gone.unlink()
    conf.write_text("A\n")  # the backup
    assert leave(record) == []
    assert conf.read_text() == "A\n" and not gone.exists() and not record.directory.exists()


def test_settings_that_the_site_has_changed_do_not_keep_the_record(record, tmp_path):
    """A package is not removed while there is a record."""
    path = tmp_path / "etc/node.conf"
    install(record, Wanted(str(path), "default\n", "once"))
    path.write_text("set\n")
    assert len(leave(record)) == 1
    assert path.read_text() == "set\n" and not record.directory.exists()


def test_what_a_file_of_the_site_still_names_is_not_removed(record, tmp_path):
    """Every command of Slurm fails if a file that slurm.conf includes is missing."""
    conf, included, node_conf = (tmp_path / name for name in ("slurm.conf", "migbatch.conf", "node.conf"))
    conf.write_text("Nodes=a\n")
    install(
        record,
        Wanted(str(included), "x\n"),
        Wanted(str(node_conf), "x\n", "once"),
        Wanted(str(conf), "Nodes=a,cat\nInclude migbatch.conf\n", "site"),
    )
    conf.write_text("Nodes=a,b,cat\nInclude migbatch.conf\n")
    (said,) = leave(record)
    assert "remove them by hand" in said and included.exists()
    conf.write_text("Nodes=a,b\n")
    assert leave(again(record)) == [] and not included.exists() and conf.read_text() == "Nodes=a,b\n"
    assert not record.directory.exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "open"])
def test_a_new_file_is_not_written_into_one_that_is_there(record, tmp_path, monkeypatch, kind):
    """Whoever may change the directory could have root overwrite another file, wait, or write into his own."""
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    path, victim, there = tmp_path / "hook", tmp_path / "victim", tmp_path / ".hook.migbatch-guessed"
    victim.write_text("root's\n")
    if kind == "link":
        there.hardlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(there)
    else:
        there.touch()
    with pytest.raises(FileExistsError):
        install(record, Wanted(str(path), "x\n", mode=0o755))
    assert victim.read_text() == "root's\n" and not path.exists()


def test_two_hosts_that_share_a_directory_write_the_same_file(tmp_path, monkeypatch):
    path = tmp_path / "task_prolog.sh"
    real = os.fsync

    def meanwhile(handle):
        monkeypatch.setattr(os, "fsync", real)
        files.write(str(path), "x\n", 0o755, None)
        real(handle)

    monkeypatch.setattr(os, "fsync", meanwhile)
    files.write(str(path), "x\n", 0o755, None)
    assert path.read_text() == "x\n" and len(list(tmp_path.iterdir())) == 1


def test_nothing_is_left_of_a_file_that_could_not_be_written(record, tmp_path, monkeypatch):
    folder = tmp_path / "etc"
    folder.mkdir()
    monkeypatch.setattr(os, "fchown", full)
    with pytest.raises(OSError, match="No space"):
        install(record, Wanted(str(folder / "hook"), "x\n"))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["user.site", "system.posix_acl_access"])
def test_a_sites_file_keeps_its_attributes(record, tmp_path, name):
    """The label of SELinux is one."""
    acl = struct.pack(
        "<I" + "HHI" * 5, 2, 1, 6, 2**32 - 1, 2, 6, 1, 4, 4, 2**32 - 1, 16, 6, 2**32 - 1, 32, 0, 2**32 - 1
    )
    path = tmp_path / "slurm.conf"
    path.write_text("A\n")
    os.setxattr(path, name, acl if "acl" in name else b"1")
    before = os.getxattr(path, name)
    install(record, Wanted(str(path), "A,mig\n", "site"))
    assert path.read_text() == "A,mig\n" and os.getxattr(path, name) == before


def test_edits_of_migbatch_do_not_become_the_sites_by_the_next_installation(record, tmp_path):
    """The site adds a node to a partition that names the catalog, and migbatch is run again for the node."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("Types=gpu\nNodes=a\n")
    install(record, Wanted(str(conf), "Types=gpu,mig\nNodes=a,cat\nInclude migbatch.conf\n", "site"))
    conf.write_text("Types=gpu,mig\nNodes=a,b,cat\nInclude migbatch.conf\nName=b\n")
    for last in ("Name=b Gres=mig\n", "Name=b Gres=mig # b\n"):
        text = f"Types=gpu,mig\nNodes=a,b,cat\nInclude migbatch.conf\n{last}"
        assert [change.conflict for change in install(again(record), Wanted(str(conf), text, "site"))] == [""]
    (said,) = leave(again(record))
    assert "remove them by hand" in said and conf.read_text() == text
    assert Path(said.rpartition(" ")[2]).read_text() == "Types=gpu\nNodes=a\n"
    conf.write_text("Types=gpu\nNodes=a,b\nName=b\n")
    assert leave(again(record)) == [] and not record.directory.exists()


def test_users_reach_hooks_whatever_the_umask_of_root_is(record, tmp_path):
    """TaskProlog is run by users."""
    before = os.umask(0o077)
    try:
        install(record, Wanted(str(tmp_path / "etc/hooks/task_prolog"), "x\n", mode=0o755))
        install(record, Wanted(str(tmp_path / "lib/state"), kind="directory", mode=0o755))
    finally:
        os.umask(before)
    for name in ("etc", "etc/hooks", "lib", "lib/state"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o755
