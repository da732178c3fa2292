"""docs/install.md on a site whose nodes get their configuration from slurmctld."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.configless_site import ConfiglessSite

pytestmark = pytest.mark.slurm
USER = "mbalice"
MIGBATCH = "/opt/slurm-migbatch/bin/migbatch"


@pytest.fixture(scope="module")
def site(slurm_root: str) -> Iterator[ConfiglessSite]:
    """The site with everything installed by the document's commands."""
    running = ConfiglessSite(slurm_root)
    with running:
        running.follow("On the controller", "ctl")
        running.follow("On each GPU node", "h1")
        running.wait("the node's report", lambda: reported(running))
        running.follow("On the controller, once the nodes have reported", "ctl")
        running.bring_programs("h1")
        running.follow("On every node", "h1")
        running.follow("On a login node", "login")
        running.wait("an offer", lambda: "mig:none:" in running.on("ctl", "sinfo -h -N -p gpu -n h1 -o %G"))
        yield running


def reported(site: ConfiglessSite) -> bool:
    return re.search(r"(?m)^h1\b", site.on("ctl", f"{MIGBATCH} nodes", codes=(0, 1))) is not None


def test_the_first_slice(site: ConfiglessSite) -> None:
    assert "slurm.conf" not in site.on("h1", "ls /etc/slurm").split()
    line = ["sbatch", "--parsable", "-p", "gpu", "-t", "5", "-J", "work", "--gres=mig:2g.20gb", "--wrap", "env"]
    job = site.on("login", line, USER).split()[-1]
    site.wait("its end", lambda: "JobState=COMPLETED" in site.on("login", f"scontrol -o show job {job}"))
    found = (site.home(USER) / f"slurm-{job}.out").read_text()
    assert re.search(r"(?m)^CUDA_VISIBLE_DEVICES=MIG-", found) and "MIGBATCH_PROFILE=2g.20gb\n" in found


def test_nothing_is_to_correct(site: ConfiglessSite) -> None:
    site.wait("0 to correct", lambda: "0 to correct" in site.on("ctl", f"{MIGBATCH} doctor", codes=(0, 1)))
    said = site.on("h1", f"{MIGBATCH} doctor --role node", codes=(0, 1, 2))
    assert "0 to correct" in said, said
