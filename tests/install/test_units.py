"""What the systemd units allow the services, by systemd's own measure."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_migbatch import site
from slurm_migbatch.daemon.submit_worker import NICE
from slurm_migbatch.node.install import unit

#: CI has it; elsewhere these tests are skipped if it is not installed
ANALYZE = shutil.which("systemd-analyze")
pytestmark = pytest.mark.skipif(ANALYZE is None and "CI" not in os.environ, reason="systemd-analyze is not here")


def controller(user: str) -> str:
    names = {"program": "/opt/slurm-migbatch/bin/migbatchd", "config": "/etc/migbatch/migbatch.toml", "user": user}
    return site.render("migbatchd.service.j2", **names)


@pytest.mark.parametrize(
    ("text", "most"),
    [(controller("root"), 4.0), (controller("slurm"), 4.0), (unit(), 6.0)],
    ids=["migbatchd of root", "migbatchd of SlurmUser", "migbatch-node, whose mounts jobs must see"],
)
def test_systemd_security_exposure_is_below_the_limit(tmp_path: Path, text: str, most: float) -> None:
    """0 is no exposure and 10 is full exposure; the units explain why their work needs more than the minimum."""
    assert ANALYZE is not None
    path = tmp_path / "migbatch-tested.service"
    path.write_text(text)
    line = [ANALYZE, "security", "--offline=true", "--no-pager", str(path)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, env={"LC_ALL": "C.UTF-8"})
    assert "nknown key" not in done.stderr and "gnoring" not in done.stderr, done.stderr
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= most, done.stdout


def test_start_of_a_service_does_not_change_ownership_below_its_directories(tmp_path: Path) -> None:
    """systemd changes the owner of StateDirectory= and RuntimeDirectory= recursively to User=, or root, if it differs.

    They hold root's record of the installation and, on a host that is also a node, journal and hand-offs, beside the
    record of jobs, which may be SlurmUser's.
    """
    text = controller("nobody")
    for unit_text in (text, unit()):
        assert not re.search(r"^(State|Runtime|Cache|Logs)Directory=", unit_text, re.MULTILINE)
    (line,) = re.findall(r"^ExecStartPre=\+(.*)$", text, re.MULTILINE)
    place = tmp_path / "migbatch"
    for _ in range(2):
        subprocess.run(line.replace("/run/migbatch", str(place)).split(), check=True)
        assert (place.stat().st_uid, place.stat().st_mode & 0o777) == (pwd.getpwnam("nobody").pw_uid, 0o755)
        (place / "n1").mkdir(exist_ok=True)
        assert (place / "n1").stat().st_uid == 0


@pytest.mark.parametrize("text", [controller("root"), unit()], ids=["migbatchd", "migbatch-node"])
def test_unit_explains_the_hardening_options_that_it_leaves_out(text: str) -> None:
    comments = " ".join(line for line in text.splitlines() if line.startswith("#"))
    keys = set(re.findall(r"^(\w+)=", text, re.MULTILINE))
    for key in ("User", "MemoryDenyWriteExecute", "PrivateNetwork", "PrivateUsers", "IPAddressDeny"):
        assert f"{key}=" in comments and (key == "User" or key not in keys)


@pytest.mark.parametrize("text", [controller("slurm"), unit()], ids=["migbatchd", "migbatch-node"])
def test_systemd_restarts_services_however_often_their_start_has_failed(text: str) -> None:
    """A start fails at once if a disk is full or the user or the program is not there yet; systemd's default is to give
    up after five.
    """
    head = text.partition("[Service]")[0]
    assert "\nStartLimitIntervalSec=0\n" in head and "\nRestart=always\n" in text


@pytest.mark.parametrize("text", [controller("slurm"), unit()], ids=["migbatchd", "migbatch-node"])
def test_services_start_after_what_slurms_own_units_wait_for(text: str) -> None:
    """slurm.conf or the program may be on NFS, and SlurmUser in a directory service."""
    (after,) = re.findall(r"^After=(.*)$", text, re.MULTILINE)
    assert {"network-online.target", "remote-fs.target", "munge.service", "sssd.service"} <= set(after.split())


@pytest.mark.parametrize("user", ["root", "slurm"])
def test_unit_of_migbatchd_lets_the_submit_service_raise_its_priority(user: str) -> None:
    """Neither SlurmUser nor root without CAP_SYS_NICE may do so beyond the limit, and the process goes on without."""
    (limit,) = re.findall(r"^LimitNICE=(.*)$", controller(user), re.MULTILINE)
    assert limit.startswith("-") and int(limit) <= NICE


def test_killed_child_for_a_query_does_not_stop_migbatchd() -> None:
    """systemd's default is to stop a service of which the kernel has killed any process for its memory."""
    assert "\nOOMPolicy=continue\n" in controller("slurm")
