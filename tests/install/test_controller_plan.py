"""What is planned on the controller's host, in which order, and what is held back until problems are resolved."""

from __future__ import annotations

import pwd
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli import common, installcontroller
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.cli.install import install
from slurm_migbatch.cli.installcontroller import Choices, NothingReported
from slurm_migbatch.config import Config, loads
from slurm_migbatch.config import load as load_config
from slurm_migbatch.doctor.health import DaemonState
from slurm_migbatch.install import files, hosts
from slurm_migbatch.install.files import InstallRecord
from slurm_migbatch.install.hosts import HostPlan
from slurm_migbatch.install.slurmconf import Conf, load
from slurm_migbatch.node.install import InstallError
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.store.errors import OlderDatabaseError
from tests.support.slurm_files import NODES, SITE


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(installcontroller, "reported_site", lambda config, conf: (SITE, conf))
    monkeypatch.setattr(installcontroller, "ask_local", lambda config: DaemonState())
    monkeypatch.setattr(installcontroller, "plugin_dirs", lambda config: [])
    monkeypatch.setattr(installcontroller, "lua", lambda config, name, module=False: f"-- {name}\n")
    monkeypatch.setattr(installcontroller, "STATE", str(tmp_path / "state"))
    (tmp_path / "slurm").mkdir()
    return tmp_path


def planned(place, slurm, gres="", **choices):
    for name, text in (("slurm.conf", slurm), ("gres.conf", gres)):
        if text:
            (place / "slurm" / name).write_text(text)
    where = hosts.Places(prefix=place / "opt", etc=place / "etc", systemd=place / "systemd", packaged_units=place)
    conf = load(str(place / "slurm/slurm.conf"), files.read)
    config = Choices(config=str(place / "etc/migbatch.toml"), edit=True, **choices)
    record = InstallRecord(place / "record")
    plan = installcontroller.controller(where, conf, config, record)
    return plan, files.differing(plan.wanted, record), record


def test_slurm_conf_is_written_after_the_files_that_it_names(place):
    """A kill or a full disk must not leave a slurm.conf that names files that do not exist."""
    (place / "slurm/job_submit.lua").write_text("return 0\n")
    _, changes, record = planned(place, NODES, "AutoDetect=nvml\n")
    assert [Path(change.path).name for change in changes][-3:] == ["job_submit.lua", "gres.conf", "slurm.conf"]
    files.apply(changes, record)
    back = [Path(change.path).name for change in files.leaving(record) if change.kind != "directory"]
    assert back[0] == "slurm.conf" and set(back[1:3]) == {"gres.conf", "job_submit.lua"}


def test_cli_filter_of_the_site_that_remains_is_named_where_none_is_wanted(place):
    slurm = f"{NODES}CliFilterPlugins=syslog,lua\n"
    expected = "slurm.conf:4: CliFilterPlugins=syslog,lua remains; remove lua if only migbatch needs it"
    assert any(note.endswith(expected) for note in planned(place, slurm, cli_filter=False)[0].notes)
    assert not any("CliFilterPlugins" in note for note in planned(place, slurm)[0].notes)


def test_script_of_the_site_that_was_not_loaded_so_far_is_named(place):
    (place / "slurm/job_submit.lua").write_text("return 0\n")
    (place / "slurm/cli_filter.lua").write_text("return 0\n")
    (note,) = planned(place, NODES)[0].notes
    assert f"{place}/slurm/job_submit.lua was there, but slurm.conf did not load it (JobSubmitPlugins)" in note
    assert planned(place, f"JobSubmitPlugins=lua\n{NODES}")[0].notes == []


@pytest.mark.parametrize(("version", "libraries"), [((23, 11), False), ((24, 11), True)])
def test_containers_in_which_tasks_would_fail_are_named_before_task_prolog_is_set(
    place, monkeypatch, version, libraries
):
    monkeypatch.setattr(installcontroller, "reported_site", lambda config, conf: (replace(SITE, version=version), conf))
    program = str(place / "slurm/migbatch-task_prolog")

    def notes(slurm=NODES):
        return [note for note in planned(place, slurm)[0].notes if "pyxis" in note]

    assert notes() == []
    (place / "slurm/plugstack.conf").write_text("required spank_pyxis.so\n")
    (note,) = notes()
    assert program in note and "50-migbatch.fstab" in note and ("libraries" in note) is libraries
    assert notes(f"TaskProlog={program}\n{NODES}") == [], "doctor names what is wrong now"
    (place / "slurm/site.sh").write_text("#!/bin/sh\n")
    assert notes(f"TaskProlog={place}/slurm/site.sh\n{NODES}") == [], "the site's own has to be there already"


def test_slurm_files_are_not_edited_while_the_plan_has_problems(place):
    """A plan with problems lacks the gres.conf lines for whole GPUs; without these Slurm drains the nodes."""
    plan, changes, _ = planned(place, f"SelectType=select/linear\n{NODES}", "AutoDetect=nvml\n")
    assert "SelectType=select/linear does not support GRES" in " ".join(plan.problems)
    assert not [change.path for change in changes if Path(change.path).parent.name == "slurm"]


def test_slurm_conf_names_no_plugin_that_slurm_lacks(place, monkeypatch):
    """slurmctld does not start then, as where Slurm was built without Lua."""
    folders = [str(place / "lib"), str(place / "more")]
    monkeypatch.setattr(installcontroller, "plugin_dirs", lambda config: folders)
    plan, _, _ = planned(place, NODES)
    (problem,) = [text for text in plan.problems if "no job_submit_lua.so" in text]
    assert problem.startswith(
        f"{':'.join(folders)} has no job_submit_lua.so, which JobSubmitPlugins=lua needs, so slurm"
    )
    assert not [target for target in plan.wanted if target.path.endswith((".lua", "slurm.conf"))]
    assert not planned(place, f"JobSubmitPlugins=lua\n{NODES}")[0].problems
    (problem,) = planned(place, f"JobSubmitPlugins=lua\n{NODES}", cli_filter=True)[0].problems
    assert "no cli_filter_lua.so, which CliFilterPlugins=lua needs, so srun" in problem
    (place / "more").mkdir()
    for name in ("job_submit_lua.so", "cli_filter_lua.so"):
        (place / "more" / name).touch()
    assert not planned(place, NODES, cli_filter=True)[0].problems


def test_program_writable_by_others_is_refused_for_root(place):
    (place / "opt/bin").mkdir(parents=True)
    program = place / "opt/bin/migbatchd"
    program.touch()
    program.chmod(0o755)
    planned(place, NODES)
    program.chmod(0o777)
    with pytest.raises(InstallError, match=f"root is to run migbatchd, but {program} is writable by others"):
        planned(place, NODES)
    planned(place, NODES, user="slurm")


def test_numeric_slurm_user_is_the_same_user(place):
    number = pwd.getpwnam("daemon").pw_uid
    plan, changes, record = planned(place, f"SlurmUser={number}\n{NODES}")
    (text,) = [target.text for target in plan.wanted if target.path.endswith("migbatch.toml")]
    assert 'slurm_user = "daemon"' in text
    files.apply(changes, record)
    for user in ("daemon", number):
        plan, _, _ = planned(place, f"SlurmUser={user}\n{NODES}")
        assert not [problem for problem in plan.problems if "slurm_user" in problem]
    plan, _, _ = planned(place, f"SlurmUser=bin\n{NODES}")
    assert [problem for problem in plan.problems if "slurm_user is 'daemon'" in problem]


@pytest.mark.parametrize("folder", ["opt/slurm/bin", ""])
def test_commands_that_only_a_shell_of_the_administrator_finds_are_named(place, monkeypatch, folder):
    """systemd does not give migbatchd the PATH of that shell."""
    bin_dir = place / folder if folder else Path("/usr/bin")
    if folder:
        bin_dir.mkdir(parents=True)
        (bin_dir / "scontrol").write_text("#!/bin/sh\n")
        (bin_dir / "scontrol").chmod(0o755)
    found = str(bin_dir / "scontrol")
    monkeypatch.setattr(shutil, "which", {"scontrol": found}.get)
    plan, _, _ = planned(place, NODES)
    (text,) = [target.text for target in plan.wanted if target.path.endswith("migbatch.toml")]
    assert loads(text).cluster.slurm_bin == (str(bin_dir) if folder else "")


@pytest.mark.parametrize(
    "url",
    ["mariadb://u:secret@db/x", "postgresql://db/x?user=u&password=secret"]
    + [f"mariadb://u:s{char}cret@db/x" for char in "#/?["],
)
def test_settings_with_a_password_are_readable_by_their_owner_only(place, url):
    _, changes, record = planned(place, NODES, store=url)
    files.apply(changes, record)
    assert (place / "etc/migbatch.toml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "url",
    [
        'mariadb://u:s3c"r:et@db/x',
        'postgresql://db/x?user=u&password=s3c"r:et',
        "mysql+pymysql://:s3c r:et@db/x?ssl_key_password=s3c",
    ],
)
def test_shown_settings_lack_the_password(place, url):
    """They are shown on terminals, where --store - has no echo, and in logs of programs that configure hosts."""
    _, changes, record = planned(place, NODES, store=url)
    shown = "\n".join(files.diff(changes, full=True))
    assert "***" in shown and "s3c" not in shown and "r:et" not in shown
    files.apply(changes, record)
    removed = "\n".join(files.diff(files.leaving(record), full=True))
    assert "***" in removed and "s3c" not in removed and "r:et" not in removed
    assert load_config(str(place / "etc/migbatch.toml")).store.url == url


def test_url_with_a_password_need_not_be_an_argument(place, monkeypatch):
    """Every user of the host can read the arguments of a process."""
    (place / "slurm/slurm.conf").write_text(NODES)
    options = {"slurm-conf": "slurm/slurm.conf", "config": "migbatch.toml", "record": "record", "prefix": "opt"}
    line = [
        "--role",
        "controller",
        *(word for name, path in options.items() for word in (f"--{name}", str(place / path))),
    ]
    stored = []
    monkeypatch.setattr(
        installcontroller, "controller", lambda *arguments: stored.append(arguments[2].store) or HostPlan()
    )
    for text in ("mariadb://u:secret@db/x\n", "mariadb://u:secret@db/x"):
        CliRunner().invoke(install, [*line, "--store", "-"], input=text, catch_exceptions=False)
    assert stored == ["mariadb://u:secret@db/x"] * 2
    refused = CliRunner().invoke(install, [*line, "--store", "-"], input="\n")
    assert refused.exit_code == 2 and "standard input has no URL" in refused.output and len(stored) == 2


def test_new_user_must_get_the_files_with_secrets_too(place):
    """Otherwise migbatchd cannot read its own settings."""
    secret = "mariadb://u:secret@db/x"
    settings, token = place / "etc/migbatch.toml", place / "etc/token"
    settings.parent.mkdir()
    settings.touch(0o600)
    settings.write_text(f"cluster.slurm_user = 'root'\nstore.url = '{secret}'\nnode_api.token_file = '{token}'\n")
    token.touch(0o600)

    def foreign(**choices):
        notes = planned(place, NODES, store=secret, **choices)[0].notes
        return [note for note in notes if "belong to another user" in note and str(place) in note]

    assert foreign() == []
    (note,) = foreign(user="daemon")
    assert "chown -R daemon " in note and f"{settings} {token}" in note
    token.chmod(0o644)
    settings.chmod(0o644)
    assert foreign(user="daemon") == []


def test_nonexistent_user_is_a_problem_of_the_plan(place):
    plan, _, _ = planned(place, NODES, user="nosuchuser")
    assert [problem for problem in plan.problems if "no user 'nosuchuser'" in problem]


def test_files_that_migbatchd_wrote_as_another_user_are_named(place):
    """It would not start, or could not write the record; a chown of the whole directory would include root's record of
    the installation.
    """
    for folder in ("etc", "run", "state/models", "state/install"):
        (place / folder).mkdir(parents=True)
    (place / "etc/migbatch.toml").write_text(
        f'[cluster]\nslurm_user = "root"\n[daemon]\nrun_dir = "{place}/run"\n'
        f'[store]\nurl = "sqlite:///{place}/state/migbatch.db"\n[learning]\nmodels = "{place}/state/models"\n'
        f'[submit]\ntable = "{place}/state/table.lua"\ncatalog = "{place}/state/catalog.json"\n'
    )
    for name in ("run/migbatchd.pid", "state/migbatch.db", "state/migbatch.db-wal"):
        (place / name).touch()
    (note,) = [note for note in planned(place, NODES, user="daemon")[0].notes if "chown" in note]
    assert f"chown -R daemon {place}/run/migbatchd.pid {place}/state/migbatch.db* {place}/state/models" in note
    assert "table.lua" not in note and "install" not in note
    assert not [note for note in planned(place, NODES, user="root")[0].notes if "chown" in note]


def test_user_of_migbatchd_is_kept_unless_another_is_given(place):
    """The second run, after the nodes have reported, must not change it back to root."""
    (place / "systemd").mkdir()

    def unit(**choices):
        plan, _, _ = planned(place, NODES, **choices)
        (text,) = [target.text for target in plan.wanted if target.path.endswith(".service")]
        (owner,) = {target.owner for target in plan.wanted if target.kind == "directory"}
        (place / "systemd/migbatchd.service").write_text(text)
        return owner, [line for line in text.splitlines() if line.startswith("User=")]

    assert unit() == ("root", ["User=root"])
    assert unit(user="daemon") == ("daemon", ["User=daemon"])
    assert unit() == ("daemon", ["User=daemon"])
    assert unit(user="root") == ("root", ["User=root"])


@pytest.mark.parametrize("role", ["controller", "node"])
def test_uninstall_is_refused_while_jobs_hold_slices(place, monkeypatch, role):
    """A host with both roles has one record for both."""
    _, changes, record = planned(place, NODES)
    files.apply(changes, record)
    job = JobRow(job_id=7, user="a", state="RUNNING", gres="gres:mig:1g.10gb:1")
    monkeypatch.setattr(common, "slurm_client", lambda config: SimpleNamespace(jobs=lambda: [job]))
    words = ["--role", role, "--uninstall", "--apply", "--record", str(record.directory), "-c", str(place / "x.toml")]
    with pytest.raises(Failure, match="jobs hold slices: 7"):
        install.main(words, standalone_mode=False)
    assert (place / "slurm/migbatch.conf").exists()


@pytest.mark.parametrize("how", ["changed by hand", "moved"])
def test_uninstall_is_refused_while_lines_need_what_it_removes(place, monkeypatch, capsys, how):
    """No command of Slurm works if slurm.conf includes a missing file, and slurmctld does not start if a partition
    names a missing node.
    """
    monkeypatch.setattr(common, "slurm_client", lambda config: SimpleNamespace(jobs=list))
    folder = place / "slurm"
    (folder / "nodes.conf").write_text(NODES)
    (folder / "job_submit.lua").write_text("return slurm.SUCCESS\n")
    _, changes, record = planned(place, "Include nodes.conf\n")
    by_hand = [change for change in changes if change.kind == "site"] if how == "changed by hand" else []
    files.apply([change for change in changes if change not in by_hand], record)
    for change in by_hand:
        Path(change.path).write_text(change.after)
    (folder / "nodes.conf").rename(folder / "more.conf")
    main = folder / "slurm.conf"
    main.write_text(main.read_text().replace("nodes.conf", "more.conf"))
    words = ["--role", "controller", "--uninstall", "--apply", "--record", str(record.directory)]

    def uninstall():
        capsys.readouterr()
        status = install.main([*words, "-c", str(place / "x.toml")], standalone_mode=False) or 0
        return status, capsys.readouterr().out

    before = {path: path.read_bytes() for path in folder.iterdir()}
    status, output = uninstall()
    assert status == 1 and {path: path.read_bytes() for path in folder.iterdir()} == before
    assert f"{folder}/more.conf:1 needs mig, which would be removed: change this line by hand first" in output
    assert f"{folder}/more.conf:4 needs migcatalog" in output
    for line in ("slurm.conf:2 needs migbatch.conf", "gres.conf:1 needs migbatch-gres.conf", "job_submit.lua needs"):
        assert (f"{folder}/{line}" in output) is bool(by_hand)
    (folder / "more.conf").write_text(NODES)
    if by_hand:
        main.write_text("Include more.conf\n")
        (folder / "gres.conf").unlink()
        (folder / "job_submit.lua").write_text("return slurm.SUCCESS\n")
    status, output = uninstall()
    assert status == 0 and {path.name for path in folder.iterdir()} == {"slurm.conf", "more.conf", "job_submit.lua"}


@pytest.mark.parametrize(
    "text", ["-- Written by migbatch from x\nreturn 0\n", "-- Written by migbatch from y\nreturn 0\n"]
)
def test_generated_script_is_not_taken_for_the_sites_when_the_record_is_lost(place, monkeypatch, text):
    """On another controller, or after /etc/slurm was restored from a backup, the script would load itself again."""
    mine = "-- Written by migbatch from x\nreturn 0\n"
    monkeypatch.setattr(installcontroller, "lua", lambda config, name, module=False: mine)
    (place / "slurm/job_submit.lua").write_text(text)
    _, changes, _ = planned(place, NODES)
    found = {Path(change.path).name: change.conflict for change in changes}
    assert "migbatch_submit.lua" not in found
    assert ("move it away" in found.get("job_submit.lua", "")) is (text != mine)


def test_record_of_an_older_release_is_to_be_migrated_first(place, monkeypatch):
    """As when `pip install` has replaced the package and migbatchd still runs the older release."""

    def older(config):
        raise OlderDatabaseError("the database lacks '0012 x'")

    monkeypatch.undo()
    monkeypatch.setattr(installcontroller, "open_record", older)
    monkeypatch.setattr(installcontroller, "ask_local", lambda config: DaemonState())
    monkeypatch.setattr(installcontroller, "STATE", str(place / "state"))
    plan, _, _ = planned(place, NODES)
    assert plan.notes == [
        "run this command again to configure Slurm: the record is of an older release, and migbatchd migrates it when "
        "it restarts"
    ]
    assert plan.next == [
        "systemctl daemon-reload && systemctl enable migbatchd.service && systemctl restart migbatchd.service"
    ]


def test_changed_unit_is_to_be_restarted(place):
    """`enable --now` would leave a running migbatchd as it is."""
    plan, changes, record = planned(place, NODES)
    assert plan.next[0].endswith("systemctl restart migbatchd.service")
    files.apply(changes, record)
    assert not any("systemctl" in step for step in planned(place, NODES)[0].next)


def test_changed_lua_script_needs_no_restart_of_slurm(place, monkeypatch):
    """As after most upgrades, or when a partition was renamed: slurmctld and srun read the scripts anew."""
    plan, changes, record = planned(place, NODES)
    assert plan.next[-1].endswith("then restart slurmctld, and slurmd on every node")
    files.apply(changes, record)
    monkeypatch.setattr(installcontroller, "lua", lambda config, name, module=False: f"-- {name} of today\n")
    plan, changes, _ = planned(place, "")
    assert {Path(change.path).name for change in changes} == {"job_submit.lua", "cli_filter.lua"}
    assert plan.next == [f"bring {place}/slurm to every host as usual"]


def test_nodes_that_report_under_another_name_are_named(monkeypatch):
    monkeypatch.setattr(
        installcontroller, "open_record", lambda config: nullcontext(SimpleNamespace(inventory=lambda: {"dgx01": []}))
    )
    slurm = SimpleNamespace(version=lambda: (24, 11), nodes=lambda: [NodeRow("gpu1", frozenset({"IDLE"}))])
    monkeypatch.setattr(installcontroller, "slurm_client", lambda config: slurm)
    with pytest.raises(NothingReported, match=r"dgx01 reported, but Slurm has no such node: .*NodeHostname="):
        installcontroller.reported_site(Config(), Conf("", {}, ()))
