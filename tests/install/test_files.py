"""Writing files with backups, leaving edited ones alone, and restoring everything."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from slurm_migbatch.install import files, scripts
from slurm_migbatch.install.files import InstallConflict, InstallRecord, Wanted
from slurm_migbatch.node import exits
from tests.support.installing import install, leave


@pytest.fixture
def record(tmp_path):
    return InstallRecord(tmp_path / "record")


def test_everything_is_written_once_and_restored(record, tmp_path):
    theirs = tmp_path / "slurm.conf"
    theirs.write_bytes(b"A=1\r\nB=\xff\n")
    theirs.chmod(0o640)
    text = theirs.read_bytes().decode("utf-8", "surrogateescape")
    wanted = [
        Wanted(str(tmp_path / "etc/migbatch/hooks/prolog"), "hook\n", mode=0o755),
        Wanted(str(tmp_path / "var"), kind="directory", mode=0o750),
        Wanted(str(theirs), text + "C=3\n", "site"),
        Wanted(str(tmp_path / "gres.conf"), "Include ours\n", "site"),
    ]
    assert len(install(record, *wanted)) == 4
    assert (tmp_path / "etc/migbatch/hooks/prolog").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "var").stat().st_mode & 0o777 == 0o750
    assert theirs.read_bytes() == b"A=1\r\nB=\xff\nC=3\n" and theirs.stat().st_mode & 0o777 == 0o640
    assert install(InstallRecord(record.directory), *wanted) == []
    assert leave(InstallRecord(record.directory)) == []
    assert theirs.read_bytes() == b"A=1\r\nB=\xff\n" and theirs.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slurm.conf"]


def test_edited_file_of_ours_is_not_overwritten_or_removed(record, tmp_path):
    path = tmp_path / "migbatch.conf"
    install(record, Wanted(str(path), "one\n"))
    install(record, Wanted(str(path), "two\n"))
    assert path.read_text() == "two\n"
    path.write_text("mine\n")
    (change,) = install(record, Wanted(str(path), "three\n"))
    assert "was edited since migbatch wrote it" in change.conflict and path.read_text() == "mine\n"
    assert list(files.diff([change])) == []
    assert "was edited" in leave(record)[0] and path.read_text() == "mine\n"


@pytest.mark.parametrize(("mode", "uid"), [(0o644, 0), (0o777, 0), (0o755, 1)])
def test_program_that_cannot_run_or_others_can_change_is_put_in_order(record, tmp_path, mode, uid):
    """Root runs it, and slurmd drains a node whose Prolog cannot be run."""
    path = tmp_path / "prolog"
    wanted = Wanted(str(path), "hook\n", mode=0o755)
    install(record, wanted)
    path.chmod(mode)
    os.chown(path, uid, 0)
    assert list(files.diff(files.differing([wanted], record))) == [f"{path}: mode 0755, owner root"]
    install(record, wanted)
    assert (path.stat().st_uid, path.stat().st_mode & 0o777, path.read_text()) == (0, 0o755, "hook\n")
    assert install(record, wanted) == []


def test_text_of_ours_has_a_mode_of_the_sites_choice_unless_others_can_change_it(record, tmp_path):
    path = tmp_path / "migbatch.conf"
    install(record, Wanted(str(path), "one\n"))
    os.chown(path, 1, 1)
    path.chmod(0o640)
    assert install(record, Wanted(str(path), "one\n")) == []
    path.chmod(0o666)
    assert len(install(record, Wanted(str(path), "one\n"))) == 1
    assert path.stat().st_mode & 0o777 == 0o644


def test_file_not_written_by_migbatch_is_not_overwritten_or_removed(record, tmp_path):
    path = tmp_path / "migbatch.conf"
    path.write_text("theirs\n")
    (change,) = install(record, Wanted(str(path), "ours\n"))
    assert "was not written by" in change.conflict and path.read_text() == "theirs\n"
    assert leave(record) == [] and path.read_text() == "theirs\n"


def test_file_written_once_belongs_to_the_site_afterwards(record, tmp_path):
    path = tmp_path / "node.conf"
    install(record, Wanted(str(path), "default\n", "once"))
    path.write_text("set\n")
    assert install(record, Wanted(str(path), "other default\n", "once")) == []
    assert len(leave(record)) == 1 and path.read_text() == "set\n"


def test_site_file_edited_between_two_changes_is_restored(record, tmp_path):
    path = tmp_path / "slurm.conf"
    path.write_text("Nodes=1\nB\n")
    install(record, Wanted(str(path), "Nodes=1,cat\nB\nInclude x\n", "site"))
    path.write_text("Nodes=1,cat\nB\nInclude x\nD\n")
    install(record, Wanted(str(path), "Nodes=1,cat\nB,mig\nInclude x\nD\n", "site"))
    path.write_text("# top\n" + path.read_text())
    assert leave(record) == []
    assert path.read_text() == "# top\nNodes=1\nB\nD\n"


def test_line_added_below_a_file_without_final_line_end_stays_a_line(record, tmp_path):
    path = tmp_path / "slurm.conf"
    path.write_text("A\nNodes=1")
    install(record, Wanted(str(path), "A\nNodes=1\nInclude x\n", "site"))
    path.write_text(path.read_text() + "B\n")
    assert leave(record) == []
    assert path.read_text() == "A\nNodes=1\nB\n"


def test_edited_change_is_reported_with_its_backup(record, tmp_path):
    path = tmp_path / "slurm.conf"
    path.write_text("A\n")
    install(record, Wanted(str(path), "A,mig\n", "site"))
    path.write_text("A,mig,more\n")
    (message,) = leave(record)
    backup = message.rpartition(" ")[2]
    assert path.read_text() == "A,mig,more\n" and Path(backup).read_text() == "A\n"


def test_file_restored_by_hand_after_a_node_was_removed_is_kept(record, tmp_path):
    """Nodes of one line have a line each with us, so that their names are new words, but the site's."""
    path = tmp_path / "slurm.conf"
    path.write_text("NodeName=n[1-4,7] NodeAddr=10.0.0.[1-4,7]\nPartitionName=p Nodes=n[1-4,7]\n")
    ours = [f"NodeName=n{i} NodeAddr=10.0.0.{i} Gres=mig:1g:7 Features=mig_node_n{i}\n" for i in (1, 2)]
    ours += [
        "NodeName=n[3-4,7] NodeAddr=10.0.0.[3-4,7]\n",
        "PartitionName=p Nodes=n[1-4,7],migcat\nInclude migx.conf\n",
    ]
    install(record, Wanted(str(path), "".join(ours), "site"))
    path.write_text("".join([ours[0], *ours[2:]]))
    (message,) = leave(record)
    assert "remove them by hand (mig:1g:7, mig_node_n1, migcat, migx.conf); its previous version is " in message
    rest = "Include own.conf\nNodeName=n1 NodeAddr=10.0.0.1\nNodeName=n[3-4,7] NodeAddr=10.0.0.[3-4,7]\n"
    path.write_text(rest)
    assert leave(record) == [] and path.read_text() == rest and not record.directory.exists()


def planted(record, tmp_path):
    """A record that would make root replace the end of a root-owned file with another user's text."""
    victim = tmp_path / "sudoers"
    victim.write_text("root\n")
    entry = {"path": str(victim), "kind": "site", "digest": "", "written": "written", "backup": "backup"}
    record.directory.mkdir()
    (record.directory / "record.json").write_text(json.dumps({"version": 1, "entries": [entry]}))
    (record.directory / "written").write_text("root\n")
    (record.directory / "backup").write_text("root, and I\n")
    return victim


@pytest.mark.parametrize("name", ["record.json", "backup", "written"])
def test_record_not_owned_by_root_is_refused(record, tmp_path, name):
    """On migbatchd's host SlurmUser owns /var/lib/migbatch and can put another directory in the record's place."""
    victim = planted(record, tmp_path)
    os.chown(record.directory / name, 1, 1)
    with pytest.raises(InstallConflict, match="owned by root"):
        leave(InstallRecord(record.directory))
    assert victim.read_text() == "root\n"


def test_record_directory_replaced_by_a_link_is_not_emptied(record, tmp_path):
    """A link in the record's place would make root empty any directory."""
    install(record, Wanted(str(tmp_path / "hook"), "x\n"))
    theirs = tmp_path / "cron.d"
    theirs.mkdir()
    (theirs / "job").touch()
    record.directory.rename(tmp_path / "away")
    record.directory.symlink_to(theirs)
    with pytest.raises(InstallConflict, match="owned by root"):
        leave(record)
    assert (theirs / "job").exists()


@pytest.mark.parametrize("how", ["link", "theirs", "open"])
def test_record_is_written_only_to_a_directory_of_root(record, tmp_path, how):
    """The owner of the directory could put links in place of the files that root is about to write."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    if how == "link":
        record.directory.symlink_to(theirs)
    else:
        record.directory.mkdir(mode=0o777 if how == "open" else 0o755)
        record.directory.chmod(0o777 if how == "open" else 0o755)
        os.chown(record.directory, 1 if how == "theirs" else 0, -1)
    with pytest.raises(InstallConflict, match=r"must be a directory|owned by root"):
        install(InstallRecord(record.directory), Wanted(str(tmp_path / "hook"), "x\n"))
    assert not list(theirs.iterdir()) and not list(record.directory.iterdir())


def test_a_backup_is_never_written_through_a_link(record, tmp_path):
    path, victim = tmp_path / "slurm.conf", tmp_path / "victim"
    path.write_text("A\n")
    record.directory.mkdir(mode=0o700)
    name = f"{str(path).strip('/').replace('/', '%')}.{files.digest('A' + chr(10))[:12]}"
    (record.directory / name).symlink_to(victim)
    with pytest.raises(InstallConflict):
        install(record, Wanted(str(path), "A,mig\n", "site"))
        leave(record)
    assert not victim.exists()


@pytest.mark.parametrize("kind", ["site", "own"])
def test_file_changed_since_it_was_read_is_not_overwritten(record, tmp_path, kind):
    """A user who may change the directory of slurm.conf could redirect root to any file after it was read."""
    path, victim = tmp_path / "slurm.conf", tmp_path / "victim"
    if kind == "site":
        path.write_text("mine\n")
    victim.write_text("root's\n")
    changes = files.differing([Wanted(str(path), "mine,mig\n", kind)], record)
    path.unlink(missing_ok=True)
    path.symlink_to(victim if kind == "site" else tmp_path / "new")
    with pytest.raises(InstallConflict, match="has changed since it was read"):
        files.apply(changes, record)
    assert victim.read_text() == "root's\n" and not (tmp_path / "new").exists()


def test_unreadable_record_is_an_error(record):
    record.directory.mkdir()
    (record.directory / "record.json").write_text("{")
    with pytest.raises(InstallConflict, match="cannot be read"):
        InstallRecord(record.directory)


@pytest.mark.parametrize(
    ("theirs", "then"),
    [
        ("function a() end\nreturn slurm.SUCCESS\n", "function a() end\n{}return slurm.SUCCESS\n"),
        ("x()\nreturn slurm.SUCCESS\n-- end\n\n", "x()\n{}return slurm.SUCCESS\n-- end\n\n"),
        ("if a then\nreturn 1\nend\nx()", "if a then\nreturn 1\nend\nx()\n{}"),
        ("", "{}"),
        ("x()\n  return slurm.SUCCESS\n", "x()\n{}  return slurm.SUCCESS\n"),
        ("x()\r\nreturn 0\r\n\r\n", "x()\r\n{}return 0\r\n\r\n"),
        ("x()\nreturn 0 --[[ was\n1 ]]\n", "x()\n{}return 0 --[[ was\n1 ]]\n"),
        ("x()\nreturn 0\n--[==[\nreturn 1\nend\n]==]\n", "x()\n{}return 0\n--[==[\nreturn 1\nend\n]==]\n"),
        (f"if a then\n  return 1\n{'-' * 99}\nend\n", f"if a then\n  return 1\n{'-' * 99}\nend\n{{}}"),
        ("if a then\n  return 1\nend\n", "if a then\n  return 1\nend\n{}"),
        ("if a then\n  return 1 end\n", "if a then\n  return 1 end\n{}"),
        ("x()\nreturn (function() return 1 end)()\n", "x()\n{}return (function() return 1 end)()\n"),
        ("x()\nreturn\n  slurm.SUCCESS\n", "x()\n{}return\n  slurm.SUCCESS\n"),
        (
            "x()\nreturn f(\n  function() return 1 end,\n  2\n)\n",
            "x()\n{}return f(\n  function() return 1 end,\n  2\n)\n",
        ),
        ("function a() end return slurm.SUCCESS", "function a() end \n{}return slurm.SUCCESS"),
        ("x('\\'\" if', [=[do\n]]]=]) -- if\nreturn 0\n", "x('\\'\" if', [=[do\n]]]=]) -- if\n{}return 0\n"),
        (
            "repeat x() until y\nwhile y do if x then return end end\nreturn 0",
            "repeat x() until y\nwhile y do if x then return end end\n{}return 0",
        ),
    ],
)
def test_our_lua_module_is_loaded_at_the_end_of_the_site_script(theirs, then):
    ours = "/etc/slurm/migbatch_submit.lua"
    text = scripts.call_lua(theirs, ours)
    lines = text[len(then.partition("{}")[0]) :].splitlines()[:2]
    assert text == then.format("\n".join(lines) + "\n")
    assert lines[0].startswith('local migbatch = dofile("/etc/slurm/migbatch_submit.lua")')
    assert lines[1] == "slurm_job_submit, slurm_job_modify = migbatch.after(slurm_job_submit, slurm_job_modify)"
    assert scripts.call_lua(text, ours) == text
    assert not scripts.calls_lua(f"-- {lines[0]}\n", ours)


def test_cli_filter_of_the_site_works_on_a_host_without_our_module(tmp_path):
    """slurmctld sends cli_filter.lua to configless hosts, and not what it loads."""
    ours, script = tmp_path / "migbatch_cli_filter.lua", tmp_path / "cli_filter.lua"
    names = ("slurm_cli_setup_defaults", "slurm_cli_pre_submit", "slurm_cli_post_submit")
    theirs = "".join(f'function {name}() return "theirs" end\n' for name in names)
    script.write_text(scripts.call_lua(f"{theirs}return 0\n", str(ours)))
    assert scripts.loaded(script.read_text(), ours.name) == str(ours)

    def pre_submit():
        code = f'assert(dofile("{script}") == 0); print(slurm_cli_pre_submit())'
        return subprocess.run(["lua", "-e", code], capture_output=True, text=True, check=True).stdout.strip()

    assert pre_submit() == "theirs"
    ours.write_text('return { after = function(a, b, c) return a, function() return "ours" end, c end }\n')
    assert pre_submit() == "ours"


def test_site_shell_script_runs_our_hook_first():
    text = scripts.call_hook("#!/bin/bash -e\necho theirs\n", "/h/prolog")
    assert text.splitlines()[0] == "#!/bin/bash -e" and text.splitlines()[2] == "echo theirs"
    assert scripts.call_hook(text, "/h/prolog") == text
    assert not scripts.calls_hook("# /h/prolog\n/h/prolog-old\n", "/h/prolog")
    assert [scripts.is_shell(line) for line in ("#!/usr/bin/env bash\n", "#!/bin/csh\n", "#!/usr/bin/python3\n")] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("whole", [True, False], ids=["stub", "line"])
@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_missing_prolog_hook_fails_jobs_with_granted_slices(tmp_path, monkeypatch, hook, whole):
    ours, driver, script = tmp_path / hook, tmp_path / "nvidiactl", tmp_path / "script"
    monkeypatch.setattr(scripts, "DRIVER", str(driver))
    script.write_text(scripts.stub(str(ours)) if whole else scripts.call_hook("#!/bin/sh -eu\ntrue\n", str(ours)))

    def run(comment):
        environ = {"SLURM_JOB_COMMENT": comment}
        done = subprocess.run(["/bin/sh", "-eu", script], env=environ, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    granted = "mine [mig:1g.10gb:1]"
    assert run(granted) == run("") == (0, "")  # a node without GPUs
    driver.touch()
    assert run("") == run("mig: 1g") == (0, "")
    # written by an update, which Slurm may have refused: a job without slices on a node with other GPUs
    assert run("mine [mig:1g.10gb:1#chg7fq3k2ab]") == run("[mig:1g.10gb:1#chg]") == (0, "")
    assert run("#chg [mig:1g.10gb:1#7fq3k2ab]") == run(granted)
    code, errors = run(granted)
    assert (code, errors.count(f"{ours} is missing")) == ((exits.INSTALLATION, 1) if hook == "prolog" else (0, 0))
    ours.write_text("#!/bin/sh\nexit 7\n")
    ours.chmod(0o755)
    assert run(granted) == run("") == (7, "")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("/p.d/*", "/p.d/zz-migbatch"),
        ("/p.d/*.sh", "/p.d/zz-migbatch.sh"),
        ("/p.d/[0-9][0-9]-*", "/p.d/99-zz-migbatch"),
        ("/p.d/a?b", "/p.d/a9b"),
        ("/*/p", ""),
        ("/p.d/[a-c]*", ""),
    ],
)
def test_file_name_is_found_that_matches_the_pattern(pattern, name):
    assert scripts.name_in(pattern) == name
