"""docs/install.md on a site whose nodes get their configuration from slurmctld."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from slurm_migbatch.testbed.errors import TestbedError
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


def test_first_job_gets_its_slice(site: ConfiglessSite) -> None:
    assert "slurm.conf" not in site.on("h1", "ls /etc/slurm").split()
    line = ["sbatch", "--parsable", "-p", "gpu", "-t", "5", "-J", "work", "--gres=mig:2g.20gb", "--wrap", "env"]
    job = site.on("login", line, USER).split()[-1]
    site.wait("its end", lambda: "JobState=COMPLETED" in site.on("login", f"scontrol -o show job {job}"))
    found = (site.home(USER) / f"slurm-{job}.out").read_text()
    assert re.search(r"(?m)^CUDA_VISIBLE_DEVICES=MIG-", found) and "MIGBATCH_PROFILE=2g.20gb\n" in found


def test_doctor_finds_nothing_to_correct(site: ConfiglessSite) -> None:
    in_order(site)
    output = site.on("h1", f"{MIGBATCH} doctor --role node", codes=(0, 1, 2))
    assert "0 failed" in output, output


def wrong(site: ConfiglessSite, host: str, options: str) -> list[str]:
    """What doctor reports there as failed, each with its advice in the line below."""
    output = site.on(host, f"{MIGBATCH} doctor {options}", codes=(0, 1, 2))
    return re.findall(r"(?m)^FAIL .*\n.*", output)


@pytest.mark.parametrize("key", ["Prolog", "TaskProlog", "Epilog"])
def test_doctor_reports_a_missing_hook_program_on_node_and_controller(site: ConfiglessSite, key: str) -> None:
    """Found on the node and shown on the controller before any job; before 24.11 the Epilog is the site's own."""
    shown = site.on("ctl", "scontrol show config")
    found = re.search(rf"(?m)^{key}(?:\[\d\])? .*?(/etc/slurm/migbatch-\w+)", shown)
    path = found[1] if found else "/etc/slurm/epilog.sh"
    site.on("h1", f"mv {path} {path}.away")
    try:
        effect = "every task fails" if key == "TaskProlog" else "slurmd drains the node at the next job"
        failures = wrong(site, "h1", "--role node")
        assert len(failures) == 1 and f"{key}: {path} is not on this host: {effect}" in failures[0], failures
        assert f"copy the controller's {path} here" in failures[0] or not found
        site.wait("the node's report", lambda: any(f"h1: {key}: {path} is" in problem for problem in problems(site)))
    finally:
        site.on("h1", f"mv {path}.away {path}")
    assert wrong(site, "h1", "--role node") == []
    in_order(site)


def in_order(site: ConfiglessSite) -> None:
    """Wait until doctor finds nothing to correct, by the node's report, too."""
    found: list[str] = []

    def nothing() -> bool:
        found[:] = problems(site)
        return not found

    try:
        site.wait("no problems", nothing)
    except TestbedError:
        raise AssertionError(found) from None


def problems(site: ConfiglessSite) -> list[str]:
    return wrong(site, "ctl", "--nodes")
