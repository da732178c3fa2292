"""An installation that was killed, or could not write: the next one continues, and removal restores everything."""

from __future__ import annotations

import os
import secrets
import struct
from pathlib import Path

import pytest

from slurm_migbatch.install import files
from slurm_migbatch.install.files import InstallRecord, Wanted
from slurm_migbatch.values import atomicfile
from tests.support.installing import install, leave


@pytest.fixture
def record(tmp_path):
    return InstallRecord(tmp_path / "record")


def again(record):
    return InstallRecord(record.directory)


def full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", ["own", "site"])
def test_failed_upgrade_can_be_repeated_and_uninstalled(record, tmp_path, monkeypatch, kind):
    path = tmp_path / "file"
    if kind == "site":
        path.write_text("A\nB\n")
    install(record, Wanted(str(path), "A,mig\nB\n", kind))
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)  # the record is written with os.replace, too
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


def test_uninstall_after_a_kill_between_file_and_record_restores_the_file(record, tmp_path, monkeypatch):
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


def test_uninstall_succeeds_when_files_are_already_missing(record, tmp_path):
    ours, removed, conf = (tmp_path / name for name in ("prolog", "script", "slurm.conf"))
    removed.write_text("S\n")
    conf.write_text("A\n")
    install(
        record,
        Wanted(str(ours), "x\n"),
        Wanted(str(removed), "S,mig\n", "site"),
        Wanted(str(conf), "A,mig\n", "site"),
    )
    ours.unlink()
    removed.unlink()
    conf.write_text("A\n")  # the backup
    assert leave(record) == []
    assert conf.read_text() == "A\n" and not removed.exists() and not record.directory.exists()


def test_settings_changed_by_the_site_do_not_keep_the_record(record, tmp_path):
    """A package cannot be removed while there is a record."""
    path = tmp_path / "etc/node.conf"
    install(record, Wanted(str(path), "default\n", "once"))
    path.write_text("set\n")
    assert len(leave(record)) == 1
    assert path.read_text() == "set\n" and not record.directory.exists()


def test_file_still_included_by_a_site_file_is_not_removed(record, tmp_path):
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
    (message,) = leave(record)
    assert "remove them by hand" in message and included.exists()
    conf.write_text("Nodes=a,b\n")
    assert leave(again(record)) == [] and not included.exists() and conf.read_text() == "Nodes=a,b\n"
    assert not record.directory.exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "open"])
def test_new_file_is_not_written_into_an_existing_temporary_file(record, tmp_path, monkeypatch, kind):
    """A user who may change the directory could make root overwrite another file, block, or write to a user's file."""
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    path, victim, temporary = tmp_path / "hook", tmp_path / "victim", tmp_path / ".hook.migbatch-guessed"
    victim.write_text("root's\n")
    if kind == "link":
        temporary.hardlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(temporary)
    else:
        temporary.touch()
    with pytest.raises(FileExistsError):
        install(record, Wanted(str(path), "x\n", mode=0o755))
    assert victim.read_text() == "root's\n" and not path.exists()


def test_two_hosts_that_share_a_directory_write_the_same_file(tmp_path, monkeypatch):
    path = tmp_path / "task_prolog.sh"
    real = os.fsync

    def meanwhile(handle):
        monkeypatch.setattr(os, "fsync", real)
        atomicfile.write(path, b"x\n", 0o755)
        real(handle)

    monkeypatch.setattr(os, "fsync", meanwhile)
    atomicfile.write(path, b"x\n", 0o755)
    assert path.read_text() == "x\n" and len(list(tmp_path.iterdir())) == 1


def test_failed_write_leaves_no_temporary_file(record, tmp_path, monkeypatch):
    folder = tmp_path / "etc"
    folder.mkdir()
    monkeypatch.setattr(os, "fchown", full)
    with pytest.raises(OSError, match="No space"):
        install(record, Wanted(str(folder / "hook"), "x\n"))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["user.site", "system.posix_acl_access"])
def test_site_file_keeps_its_extended_attributes(record, tmp_path, name):
    """The SELinux label is one of them."""
    acl = struct.pack(
        "<I" + "HHI" * 5, 2, 1, 6, 2**32 - 1, 2, 6, 1, 4, 4, 2**32 - 1, 16, 6, 2**32 - 1, 32, 0, 2**32 - 1
    )
    path = tmp_path / "slurm.conf"
    path.write_text("A\n")
    os.setxattr(path, name, acl if "acl" in name else b"1")
    before = os.getxattr(path, name)
    install(record, Wanted(str(path), "A,mig\n", "site"))
    assert path.read_text() == "A,mig\n" and os.getxattr(path, name) == before


def test_edits_of_migbatch_are_not_taken_for_the_sites_by_a_later_install(record, tmp_path):
    """The site adds a node to a partition that names the catalog, and migbatch install is run again for the node."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("Types=gpu\nNodes=a\n")
    install(record, Wanted(str(conf), "Types=gpu,mig\nNodes=a,cat\nInclude migbatch.conf\n", "site"))
    conf.write_text("Types=gpu,mig\nNodes=a,b,cat\nInclude migbatch.conf\nName=b\n")
    for last in ("Name=b Gres=mig\n", "Name=b Gres=mig # b\n"):
        text = f"Types=gpu,mig\nNodes=a,b,cat\nInclude migbatch.conf\n{last}"
        assert [change.conflict for change in install(again(record), Wanted(str(conf), text, "site"))] == [""]
    (message,) = leave(again(record))
    assert "remove them by hand" in message and conf.read_text() == text
    assert Path(message.rpartition(" ")[2]).read_text() == "Types=gpu\nNodes=a\n"
    conf.write_text("Types=gpu\nNodes=a,b\nName=b\n")
    assert leave(again(record)) == [] and not record.directory.exists()


def test_hook_directories_are_accessible_to_users_under_any_umask(record, tmp_path):
    """TaskProlog is run by users."""
    before = os.umask(0o077)
    try:
        install(record, Wanted(str(tmp_path / "etc/hooks/task_prolog"), "x\n", mode=0o755))
        install(record, Wanted(str(tmp_path / "lib/state"), kind="directory", mode=0o755))
    finally:
        os.umask(before)
    for name in ("etc", "etc/hooks", "lib", "lib/state"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o755
