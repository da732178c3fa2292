"""What the units of systemd allow the services, by systemd's own measure."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_migbatch import site
from slurm_migbatch.node.install import unit

#: CI has it; elsewhere these tests are left out where it is not installed
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
def test_exposure(tmp_path: Path, text: str, most: float) -> None:
    """0 is none and 10 all; the units say why they have more than they could have without their work."""
    assert ANALYZE is not None
    path = tmp_path / "migbatch-tested.service"
    path.write_text(text)
    line = [ANALYZE, "security", "--offline=true", "--no-pager", str(path)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, env={"LC_ALL": "C.UTF-8"})
    assert "nknown key" not in done.stderr and "gnoring" not in done.stderr, done.stderr
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= most, done.stdout


def test_a_start_of_migbatchd_takes_nothing_of_others_over(tmp_path: Path) -> None:
    """systemd gives StateDirectory= and RuntimeDirectory= with all below them to User= where owner or group differ.

    There lie root's record of the installation and, on a host that is a node too, journal and hand-offs.
    """
    text = controller("nobody")
    assert not re.search(r"^(State|Runtime|Cache|Logs)Directory=", text, re.MULTILINE)
    (line,) = re.findall(r"^ExecStartPre=\+(.*)$", text, re.MULTILINE)
    place = tmp_path / "migbatch"
    for _ in range(2):
        subprocess.run(line.replace("/run/migbatch", str(place)).split(), check=True)
        assert (place.stat().st_uid, place.stat().st_mode & 0o777) == (pwd.getpwnam("nobody").pw_uid, 0o755)
        (place / "n1").mkdir(exist_ok=True)
        assert (place / "n1").stat().st_uid == 0


@pytest.mark.parametrize("text", [controller("root"), unit()], ids=["migbatchd", "migbatch-node"])
def test_a_unit_gives_the_reason_for_what_it_leaves_out(text: str) -> None:
    said = " ".join(line for line in text.splitlines() if line.startswith("#"))
    keys = set(re.findall(r"^(\w+)=", text, re.MULTILINE))
    for key in ("User", "MemoryDenyWriteExecute", "PrivateNetwork", "PrivateUsers", "IPAddressDeny"):
        assert f"{key}=" in said and (key == "User" or key not in keys)
