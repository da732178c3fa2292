"""docs/install.md on a site whose GPU node is dynamic (`slurmd -Z`): slurm.conf has no line for it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

import pytest

from tests.support.configless_site import ConfiglessSite

pytestmark = pytest.mark.slurm
USER = "mbalice"
MIGBATCH = "/opt/slurm-migbatch/bin/migbatch"
SIZE = "Sockets=2 CoresPerSocket=8 RealMemory=200000"


class DynamicSite(ConfiglessSite):
    """A site with one node that is on, a dynamic one with GPUs."""

    edits: Mapping[str, str] = {
        **ConfiglessSite.edits,
        "NodeName=h[1-2] NodeAddr": "# NodeName=h[1-2] NodeAddr",
        "PartitionName=gpu Nodes=h[1-2]": "NodeSet=dynamic Feature=h100\nPartitionName=gpu Nodes=dynamic",
        "GresTypes=gpu\n": "GresTypes=gpu\nMaxNodeCount=8\n",
    }
    options = f"{SIZE} Gres=gpu:h100:2 Feature=h100"

    def start_slurmd_with(self, options: str) -> None:
        """Delete the node in Slurm, and start its slurmd with other options."""
        self.stop("slurmd-h1")
        self._forget("slurmd-h1")
        self.on("ctl", "scontrol delete NodeName=h1")
        self.options = options
        self._spawn_on("h1", "slurmd", self._slurmd())
        self.wait("h1", lambda: self._answers("h1", "slurmd"))

    def _slurmd(self) -> list[str]:
        shell, option, script = super()._slurmd()
        return [shell, option, f"{script.strip()} -Z --conf {shlex.quote(self.options)}"]


@pytest.fixture(scope="module")
def site(slurm_root: str) -> Iterator[DynamicSite]:
    """The site with everything installed by the document's commands, and the options that these print."""
    running = DynamicSite(slurm_root)
    with running:
        running.follow("On the controller", "ctl")
        running.follow("On each GPU node", "h1")
        running.wait("the node's report", lambda: "h1" in running.on("ctl", f"{MIGBATCH} nodes", codes=(0, 1)))
        shown = running.follow("On the controller, once the nodes have reported", "ctl")
        found = re.search(r"dynamic nodes h1 need (Gres=\S+) and (Feature=\S+) ", shown)
        assert found, shown
        running.bring_programs("h1")
        running.start_slurmd_with(f"{SIZE} {found[1]} {found[2].replace('NAME', 'h1')}")
        running.follow("On a login node", "login")
        running.wait("an offer", lambda: "mig:none:" in running.on("ctl", "sinfo -h -N -p gpu -n h1 -o %G"))
        yield running


def run(site: DynamicSite, *options: str) -> str:
    """The output of a job that has ended."""
    line = ["sbatch", "--parsable", "-p", "gpu", "-t", "5", "-J", "work", *options, "--wrap", "env"]
    job = site.on("login", line, USER).split()[-1]
    site.wait("its end", lambda: "JobState=COMPLETED" in site.on("login", f"scontrol -o show job {job}"))
    return (site.home(USER) / f"slurm-{job}.out").read_text()


@pytest.mark.parametrize("options", [["--gres=mig:2g.20gb"], ["--gres=mig:3g.40gb", "-w", "h1", "-c", "16"]])
def test_jobs_get_their_slices_on_a_dynamic_node(site: DynamicSite, options: list[str]) -> None:
    found = run(site, *options)
    assert re.search(r"(?m)^CUDA_VISIBLE_DEVICES=MIG-", found) and "SLURMD_NODENAME=h1\n" in found


def test_installation_and_doctor_have_nothing_left_to_do(site: DynamicSite) -> None:
    assert "dynamic node" not in site.on("ctl", f"{MIGBATCH} install --role controller --edit")
    site.wait("no problems", lambda: "0 failed" in site.on("ctl", f"{MIGBATCH} doctor --nodes", codes=(0, 1, 2)))


def test_node_that_is_deleted_and_comes_back_is_used_again(site: DynamicSite) -> None:
    site.start_slurmd_with(site.options)
    site.carry_out("ctl", "systemctl restart slurmctld")
    site.wait("the node", lambda: site.on("ctl", "sinfo -h -n h1 -o %T", codes=(0, 1)).strip() == "idle")
    assert "MIGBATCH_PROFILE=4g.40gb\n" in run(site, "--gres=mig:4g.40gb")


def test_node_without_the_options_is_reported(site: DynamicSite) -> None:
    """Nothing is offered there; the installer prints the options again."""
    options = site.options
    site.start_slurmd_with(f"{SIZE} Gres=gpu:h100:2 Feature=h100")
    try:
        problems = site.on("ctl", f"{MIGBATCH} doctor", codes=(0, 1, 2))
        assert "dynamic node h1 reports GPUs for 14 slices, but registered with none" in problems
        shown = site.on("ctl", f"{MIGBATCH} install --role controller --edit", codes=(0, 1))
        assert re.search(r"dynamic nodes h1 need Gres=\S+ and Feature=h100,mig_node_NAME ", shown)
    finally:
        site.start_slurmd_with(options)
