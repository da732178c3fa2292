"""What a host needs besides Slurm's files."""

import shutil
from pathlib import Path

import pytest

from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.cli.install import install
from slurm_migbatch.install import hosts
from slurm_migbatch.install.files import InstallRecord, read
from slurm_migbatch.install.hosts import HostPlan, Places, add_unit
from slurm_migbatch.install.slurmconf import load
from slurm_migbatch.node import install as node_install
from slurm_migbatch.node.config import load as load_settings
from slurm_migbatch.node.install import InstallError
from tests.support.directories import open_to_users


def test_packaged_unit_is_used_unless_it_differs_or_the_host_has_its_own(tmp_path):
    places = Places(tmp_path, systemd=tmp_path / "own", packaged_units=tmp_path / "packaged")
    for folder in (places.systemd, places.packaged_units):
        folder.mkdir()

    def wanted(text="[Unit]\n"):
        plan = HostPlan()
        add_unit(plan, places, "x.service", text)
        return [target.path for target in plan.wanted]

    own = str(places.systemd / "x.service")
    assert wanted() == [own], "there is no package"
    (places.packaged_units / "x.service").write_text("[Unit]\n")
    assert wanted() == []
    assert wanted("[Unit]\nUser=slurm\n") == [own], "other choices than the package's"
    (places.systemd / "x.service").write_text("[Unit]\n# of last year\n")
    assert wanted() == [own], "it hides the package's, so it is kept up to date"


def test_script_without_directory_is_found_beside_slurm_conf(tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    (tmp_path / "cwd/site.sh").write_text("#!/bin/sh\n# of anybody\n")
    (tmp_path / "site.sh").write_text("#!/bin/sh\n")
    (tmp_path / "slurm.conf").write_text("SlurmctldHost=ctl\nProlog=site.sh\n")
    conf = load(str(tmp_path / "slurm.conf"), read)
    plan = hosts.node(Places(tmp_path), conf, python="/usr/bin/python3", edit=True, release=(22, 5))
    assert [target.path for target in plan.wanted if target.kind == "site"] == [str(tmp_path / "site.sh")]


@pytest.mark.parametrize("how", ["link", "call"])
@pytest.mark.parametrize("pattern", ["pro*/*.sh", "prolog.d/*"])
def test_hook_that_a_program_of_a_pattern_runs_already_is_not_added(tmp_path, pattern, how):
    """It would run twice; where no name of a file matches for certain, the command asks for a link."""
    hook, theirs = tmp_path / "hooks/prolog", tmp_path / "prolog.d/50.sh"
    (tmp_path / "slurm.conf").write_text(f"SlurmctldHost=ctl\nProlog={pattern}\n")
    theirs.parent.mkdir()

    def planned():
        places = Places(tmp_path, etc=tmp_path, hooks=hook.parent, systemd=tmp_path, packaged_units=tmp_path)
        conf = load(str(tmp_path / "slurm.conf"), read)
        plan = hosts.node(places, conf, python="/usr/bin/python3", release=(23, 11))
        return len(plan.problems) + sum(target.path.startswith(str(theirs.parent)) for target in plan.wanted)

    assert planned() == 1
    if how == "link":
        theirs.symlink_to(hook)
    else:
        theirs.write_text(f"#!/usr/bin/python3\nimport os\nos.system('{hook}')\n")
    assert planned() == 0


def test_hook_of_the_site_is_not_edited_while_the_release_is_unknown(tmp_path):
    """From 24.11 on slurm.conf names ours too: every job would run it twice. scontrol is often not in sudo's PATH."""
    (tmp_path / "site.sh").write_text("#!/bin/sh\n")
    (tmp_path / "slurm.conf").write_text(f"SlurmctldHost=ctl\nProlog={tmp_path}/site.sh\n")
    conf = load(str(tmp_path / "slurm.conf"), read)
    with pytest.raises(InstallError, match="add the directory of scontrol to PATH"):
        hosts.node(Places(tmp_path), conf, python="/usr/bin/python3", edit=True)
    (tmp_path / "slurm.conf").write_text(f"Prolog={tmp_path}/site.sh\nProlog={tmp_path}/migbatch-prolog\n")
    conf = load(str(tmp_path / "slurm.conf"), read)
    assert hosts.node(Places(tmp_path), conf, python="/usr/bin/python3", edit=True).wanted


@pytest.mark.parametrize("main", ["/cluster/etc/slurm.conf", "/etc/slurm/slurm.conf", hosts.CONFIGLESS])
def test_node_conf_names_a_slurm_conf_that_is_elsewhere(tmp_path, main):
    """The agent's checks and scontrol in hooks would look for it where it is not."""
    plan = hosts.node(Places(tmp_path), load(main, {main: "SlurmctldHost=ctl\n"}.get), python="/usr/bin/python3")
    (text,) = [target.text for target in plan.wanted if target.path.endswith("/node.conf")]
    named = [line for line in text.splitlines() if line.startswith("SlurmConf=")]
    assert named == ([f"SlurmConf={main}"] if main.startswith("/cluster") else [])


@pytest.mark.parametrize(
    "closed", ["site-packages", "site-packages/slurm_migbatch/node", "site-packages/slurm_migbatch/node/conf.py"]
)
def test_package_that_users_cannot_read_is_a_problem(tmp_path, monkeypatch, closed):
    """pip writes with the umask of its caller, also into a virtual environment that everyone can read."""
    package = tmp_path / "site-packages/slurm_migbatch"
    shutil.copytree(Path(node_install.__file__).parents[1], package, ignore=lambda *_: ["gres_templates"])
    for part in (tmp_path / "site-packages").rglob("*"):
        part.chmod(0o755)
    open_to_users(tmp_path / "site-packages")
    monkeypatch.setattr(node_install, "package_paths", lambda: [str(package.parent)])
    conf = load("/s", {"/s": "SlurmctldHost=ctl\n"}.get)
    assert not hosts.node(Places(tmp_path), conf, python="/usr/bin/python3").problems
    mode = 0o700 if (tmp_path / closed).is_dir() else 0o600
    (tmp_path / closed).chmod(mode)
    (problem,) = hosts.node(Places(tmp_path), conf, python="/usr/bin/python3").problems
    assert problem.startswith(
        f"users run TaskProlog, but {tmp_path / closed} (mode 0{mode:o}) is not accessible to them"
    )
    assert f"chmod -R a+rX {package.parent}" in problem


def test_directory_as_a_hook_is_a_problem(tmp_path):
    conf = load("/s", {"/s": f"SlurmctldHost=ctl\nProlog={tmp_path}\n"}.get)
    plan = hosts.node(Places(tmp_path), conf, python="/usr/bin/python3", release=(22, 5))
    assert [problem for problem in plan.problems if f"Prolog={tmp_path} is a directory" in problem]


def test_missing_scontrol_is_noted(tmp_path, monkeypatch):
    """It is often not in the PATH of sudo, and hooks would look for it in /usr/bin."""
    monkeypatch.setattr(shutil, "which", {}.get)
    conf = load("/s", {"/s": "SlurmctldHost=ctl\n"}.get)
    places = Places(tmp_path, etc=tmp_path)
    (note,) = hosts.node(places, conf, python="/usr/bin/python3").notes
    assert note.startswith("scontrol is not in PATH") and f"ScontrolPath= in {tmp_path}/node.conf" in note
    (tmp_path / "node.conf").write_text("ScontrolPath=/opt/slurm/bin/scontrol\n")
    assert not hosts.node(places, conf, python="/usr/bin/python3").notes


@pytest.mark.parametrize(("user", "uids"), [("daemon", (0, 1)), ("1", (0, 1)), ("root", (0,)), ("", (0,))])
def test_node_accepts_a_migbatchd_that_runs_as_slurm_user(tmp_path, user, uids):
    """`migbatch install --role controller --user` offers that, and munge says which user an answer is from."""
    line = f"SlurmUser={user}\n" if user else ""
    plan = hosts.node(Places(tmp_path), load("/s", {"/s": f"SlurmctldHost=ctl\n{line}"}.get), python="/usr/bin/python3")
    (text,) = [target.text for target in plan.wanted if target.path.endswith("/node.conf")]
    (tmp_path / "node.conf").write_text(text)
    assert load_settings(str(tmp_path), "n1").peer_uids == uids


def test_release_is_known_where_only_an_option_names_slurm_conf(tmp_path, monkeypatch):
    """scontrol prints its release only if it finds a slurm.conf."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\ngrep -q SlurmctldHost "$SLURM_CONF" && echo slurm-wlm 23.11.4\n')
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "slurm.conf").write_text("SlurmctldHost=ctl\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert hosts.slurm_release(load(str(tmp_path / "slurm.conf"), read)) == (23, 11)


def test_relative_path_of_slurm_conf_is_recorded_as_absolute(tmp_path, monkeypatch):
    """--uninstall would look for the files elsewhere, and Slurm for the programs that slurm.conf names."""
    (tmp_path / "slurm.conf").write_text("SlurmctldHost=ctl\nCliFilterPlugins=lua\n")
    monkeypatch.chdir(tmp_path)
    words = ["--role", "login", "--slurm-conf", "slurm.conf", "--apply", "--record", str(tmp_path / "record")]
    install.main(words, standalone_mode=False)
    assert list(InstallRecord(tmp_path / "record").entries) == [str(tmp_path / "cli_filter.lua")]


@pytest.mark.parametrize("role", ["login", "node"])
def test_uninstall_names_what_remains_on_a_host_of_that_role(tmp_path, capsys, role):
    """A login node has neither the agent nor a journal nor GPUs."""
    (tmp_path / "slurm.conf").write_text("CliFilterPlugins=lua\n")
    record = ["--record", str(tmp_path / "record")]
    conf = ["--slurm-conf", str(tmp_path / "slurm.conf")]
    install.main(["--role", "login", "--apply", *conf, *record], standalone_mode=False)
    assert (tmp_path / "cli_filter.lua").exists()
    capsys.readouterr()
    install.main(["--role", role, "--uninstall", "--apply", *record], standalone_mode=False)
    output = capsys.readouterr().out
    assert not (tmp_path / "cli_filter.lua").exists()
    assert ("migbatch-node" in output) is ("journal" in output) is ("MIG mode" in output) is (role == "node")


@pytest.mark.parametrize("role", ["login", "node"])
def test_configless_login_node_without_any_slurm_conf_needs_nothing(tmp_path, monkeypatch, capsys, role):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(hosts, "_USUAL", (str(tmp_path / "slurm.conf"),))
    words = ["--role", role, "--apply", "--record", str(tmp_path / "record")]
    if role == "node":
        with pytest.raises(Failure, match="use --slurm-conf"):
            install.main(words, standalone_mode=False)
        return
    assert not install.main(words, standalone_mode=False)
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["option", "environment"])
def test_missing_given_slurm_conf_is_reported(tmp_path, monkeypatch, how):
    path = str(tmp_path / "slrum.conf")
    words = ["--slurm-conf", path] if how == "option" else []
    monkeypatch.setenv("SLURM_CONF", path if how == "environment" else "")
    with pytest.raises(Failure, match=f"{path} does not exist"):
        install.main(["--role", "node", "--record", str(tmp_path / "record"), *words], standalone_mode=False)


@pytest.mark.parametrize("role", ["controller", "node"])
@pytest.mark.parametrize(
    ("option", "path"),
    [("--hooks", "/etc/my hooks"), ("--etc", "etc"), ("--prefix", "/opt/$(id)"), ("--hooks", "/x;y")],
)
def test_path_with_shell_characters_is_refused(tmp_path, role, option, path):
    """Otherwise the programs that call the hooks would not find them, and jobs would start without their slices."""
    (tmp_path / "slurm.conf").write_text("SlurmctldHost=ctl\n")
    words = ["--slurm-conf", str(tmp_path / "slurm.conf"), "--record", str(tmp_path / "record"), option, path]
    with pytest.raises(InstallError, match="use an absolute path of letters"):
        install.main(["--role", role, *words], standalone_mode=False)


def test_configless_script_is_not_edited_on_the_node(tmp_path, monkeypatch):
    """slurmd rewrites its directory at every start."""
    monkeypatch.setattr(hosts, "CONFIGLESS", str(tmp_path / "slurm.conf"))
    (tmp_path / "site.sh").write_text("#!/bin/sh\n")
    (tmp_path / "slurm.conf").write_text("SlurmctldHost=ctl\nProlog=site.sh\n")
    conf = load(str(tmp_path / "slurm.conf"), read)
    plan = hosts.node(Places(tmp_path), conf, python="/usr/bin/python3", edit=True, release=(22, 5))
    assert not [target.path for target in plan.wanted if target.kind == "site"]
    assert plan.problems == ["Prolog=site.sh comes from slurmctld: make it run /etc/migbatch/hooks/prolog there"]


@pytest.mark.parametrize(
    ("main", "line", "mounted"),
    [
        ("/cluster/slurm.conf", "", "/cluster/migbatch-task_prolog"),
        ("/cluster/slurm.conf", "TaskProlog=/shared/migbatch-task_prolog\n", "/shared/migbatch-task_prolog"),
        (hosts.CONFIGLESS, "", "/etc/slurm/migbatch-task_prolog"),
        ("/cluster/slurm.conf", "TaskProlog=/cluster/site.sh\n", ""),
    ],
)
def test_containers_of_enroot_get_slices_and_the_program_that_slurm_runs_in_them(tmp_path, main, line, mounted):
    conf = load(main, {main: f"SlurmctldHost=ctl\n{line}"}.get)
    places = Places(tmp_path, etc=tmp_path / "migbatch")

    def planned():
        plan = hosts.node(places, conf, python="/usr/bin/python3", release=(22, 5))
        ours = [target for target in plan.wanted if Path(target.path).is_relative_to(places.enroot)]
        return {Path(target.path).name: target for target in ours}

    assert not planned(), "the node has no Enroot"
    (tmp_path / "enroot").mkdir()
    hook = planned()["50-migbatch.sh"]
    assert hook.mode == 0o755 and f'main("{tmp_path}/migbatch")' in hook.text
    compile(hook.text, "hook", "exec")
    fstab = planned().get("50-migbatch.fstab")
    assert (fstab.text.split()[:2] if fstab else []) == ([mounted] * 2 if mounted else [])
