"""What is planned on the controller's host, in which order, and what is not while something must be resolved first."""

from __future__ import annotations

import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_migbatch.cli import common, installcontroller
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.cli.install import install
from slurm_migbatch.cli.installcontroller import Choices
from slurm_migbatch.doctor.health import DaemonState
from slurm_migbatch.install import files, hosts
from slurm_migbatch.install.files import InstallRecord
from slurm_migbatch.install.slurmconf import load
from slurm_migbatch.node.install import InstallError
from slurm_migbatch.slurm.client import JobRow
from tests.support.slurm_files import NODES, SITE


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(installcontroller, "reported_site", lambda config: SITE)
    monkeypatch.setattr(installcontroller, "this_one", lambda config: DaemonState())
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


def test_slurm_conf_is_written_when_what_it_names_is_there(place):
    """Whoever kills this, or a full disk, must not leave a slurm.conf that names files that do not exist."""
    (place / "slurm/job_submit.lua").write_text("return 0\n")
    _, changes, record = planned(place, NODES, "AutoDetect=nvml\n")
    assert [Path(change.path).name for change in changes][-3:] == ["job_submit.lua", "gres.conf", "slurm.conf"]
    files.apply(changes, record)
    back = [Path(change.path).name for change in files.leaving(record) if change.kind != "directory"]
    assert back[0] == "slurm.conf" and set(back[1:3]) == {"gres.conf", "job_submit.lua"}


def test_slurms_files_are_left_alone_while_something_must_be_resolved(place):
    """Without the lines of gres.conf for whole GPUs, which a plan with problems lacks, Slurm drains the nodes."""
    plan, changes, _ = planned(place, f"SelectType=select/linear\n{NODES}", "AutoDetect=nvml\n")
    assert "SelectType=select/linear does not support GRES" in " ".join(plan.problems)
    assert not [change.path for change in changes if Path(change.path).parent.name == "slurm"]


def test_root_runs_no_program_that_others_may_change(place):
    (place / "opt/bin").mkdir(parents=True)
    program = place / "opt/bin/migbatchd"
    program.touch()
    program.chmod(0o755)
    planned(place, NODES)
    program.chmod(0o777)
    with pytest.raises(InstallError, match=f"root is to run migbatchd, but {program} is writable by others"):
        planned(place, NODES)
    planned(place, NODES, user="slurm")


def test_slurm_user_by_number_is_the_same_user(place):
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


def test_a_user_that_does_not_exist_is_a_problem_before_anything_is_written(place):
    plan, _, _ = planned(place, NODES, user="nosuchuser")
    assert [problem for problem in plan.problems if "no user 'nosuchuser'" in problem]


def test_the_user_of_migbatchd_stays_unless_another_is_given(place):
    """The second run, once the nodes have reported, must not make it root again."""
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
def test_slurms_files_are_restored_only_if_no_job_needs_a_slice(place, monkeypatch, role):
    """A host that has both roles has one record of both."""
    _, changes, record = planned(place, NODES)
    files.apply(changes, record)
    job = JobRow(job_id=7, user="a", state="RUNNING", gres="gres:mig:1g.10gb:1")
    monkeypatch.setattr(common, "slurm_client", lambda config: SimpleNamespace(jobs=lambda: [job]))
    words = ["--role", role, "--uninstall", "--apply", "--record", str(record.directory), "-c", str(place / "x.toml")]
    with pytest.raises(Failure, match="jobs hold slices: 7"):
        install.main(words, standalone_mode=False)
    assert (place / "slurm/migbatch.conf").exists()


@pytest.mark.parametrize(
    "text", ["-- Written by migbatch from x\nreturn 0\n", "-- Written by migbatch from y\nreturn 0\n"]
)
def test_a_script_of_ours_is_not_taken_for_the_sites_where_the_record_is_lost(place, monkeypatch, text):
    """On another controller, or after /etc/slurm came from a backup, it would load itself once more."""
    mine = "-- Written by migbatch from x\nreturn 0\n"
    monkeypatch.setattr(installcontroller, "lua", lambda config, name, module=False: mine)
    (place / "slurm/job_submit.lua").write_text(text)
    _, changes, _ = planned(place, NODES)
    found = {Path(change.path).name: change.conflict for change in changes}
    assert "migbatch_submit.lua" not in found
    assert ("move it away" in found.get("job_submit.lua", "")) is (text != mine)
