"""docs/install.md on a site with two controllers: both installed by its commands, and one of them killed.

The tests build on each other. tests/e2e/test_failover.py tests the same while slices are being created.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.paired_site import PairedSite

pytestmark = pytest.mark.slurm
MIGBATCH = "/opt/slurm-migbatch/bin/migbatch"
USER = "mbalice"
_PATIENCE_S = 180.0


@pytest.fixture(scope="module")
def site(slurm_root: str) -> Iterator[PairedSite]:
    """The site with everything installed by the document's commands."""
    running = PairedSite(slurm_root)
    with running:
        running.follow("Two controllers", "ctl", "ctl2")
        running.follow("On each GPU node", "h1")
        running.wait("the node's report", lambda: reported(running))
        running.follow("On the controller, once the nodes have reported", "ctl")
        running.follow("On every node", "h1")
        running.follow("On the second controller, once every slurmd was restarted", "ctl2")
        running.follow("On a login node", "login")
        running.wait("an offer", lambda: "mig:none:8" in running.on("ctl", "sinfo -h -a -n h1 -o %G"))
        yield running


def reported(site: PairedSite) -> bool:
    return "h1" in site.on("ctl", f"{MIGBATCH} nodes", codes=(0, 1))


def until(what: str, ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def slice_of(site: PairedSite, profile: str) -> str:
    """Run a job to its end; return its slice."""
    options = ("-p", "gpu", "-t", "5", "-J", "work", f"--gres=mig:{profile}")
    line = ["sbatch", "--parsable", *options, "--wrap", "echo $CUDA_VISIBLE_DEVICES"]
    job = site.on("login", line, USER).split()[-1]
    until(job, lambda: "JobState=COMPLETED" in site.on("login", f"scontrol -o show job {job}"))
    return (site.home(USER) / f"slurm-{job}.out").read_text()


def wrong(site: PairedSite, host: str) -> list[str]:
    """What doctor reports there as a failure or a warning, or could not find out.

    The hosts of this site have no cgroups, so that processes may outlive their jobs.
    """
    output = site.on(host, f"{MIGBATCH} doctor", codes=(0, 1, 2))
    found = [line for line in output.splitlines() if re.match("FAIL|unknown|warn", line)]
    return [line for line in found if "outlives the job" not in line]


def test_job_gets_its_slice_from_the_first_controller(site: PairedSite):
    assert slice_of(site, "1g.10gb").startswith("MIG-")


def test_install_has_nothing_more_to_do_on_either_controller(site: PairedSite):
    for host in site.controllers:
        assert site.on(host, f"{MIGBATCH} install --role controller --edit").endswith("nothing to do\n")


def test_doctor_knows_which_controller_is_active_and_which_is_standby(site: PairedSite):
    until("the node's report since its hooks are called", lambda: wrong(site, "ctl") == [])
    assert wrong(site, "ctl2") == []
    output = site.on("ctl2", f"{MIGBATCH} doctor")
    assert "migbatchd: standby: slurmctld's primary is ctl" in output
    assert "fail-over with ctl is configured" in output
    assert "ctl2" in site.on("ctl", f"{MIGBATCH} doctor | grep 'fail-over with'")
    output = site.on("login", f"{MIGBATCH} doctor --role login")
    assert "query service: 10.7.1.8 port 6831: that migbatchd is on standby" in output
    output = site.on("ctl2", f"{MIGBATCH} doctor --nodes", codes=(2,))
    found = re.findall("^(?:FAIL|unknown|warn).*", output, re.MULTILINE)
    assert [line for line in found if "outlives the job" not in line] == [
        "unknown nodes: nodes report to the active migbatchd"
    ]


def test_doctor_reports_different_settings_of_the_two_controllers(site: PairedSite):
    edit = "sed -i 's/^#{}/{}/' /etc/migbatch/migbatch.toml"
    site.on("ctl2", edit.format("retry = true", "retry = false"))
    site.restart("migbatchd-ctl2")
    until("the other settings", lambda: "[recurring]" in "".join(wrong(site, "ctl2")))
    (found,) = wrong(site, "ctl2")
    assert found.startswith("FAIL    controllers: migbatch.toml here and on ctl differ in [recurring]")
    assert len(wrong(site, "ctl")) == 1
    site.on("ctl2", "sed -i 's/^retry = false/#retry = true/' /etc/migbatch/migbatch.toml")
    site.restart("migbatchd-ctl2")
    until("the same settings", lambda: wrong(site, "ctl2") == [])


def test_second_controller_takes_over(site: PairedSite):
    """The profile is one that was not on offer when the first was killed."""
    site.crash("ctl", "slurmctld", "migbatchd")
    until("slurmctld's takeover", lambda: "at ctl2 is UP" in site.on("login", "scontrol ping", codes=(0, 1)))
    until("an answer", lambda: "h1" in site.on("login", "sinfo", codes=(0, 1)))
    assert slice_of(site, "7g.80gb").startswith("MIG-")
    (found,) = wrong(site, "ctl2")
    assert found.startswith("FAIL    controllers: migbatchd on ctl does not answer, so it would not take over")
    assert slice_of(site, "1g.10gb").startswith("MIG-")
