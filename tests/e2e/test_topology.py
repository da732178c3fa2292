"""A cluster whose slurm.conf names switches or blocks: requests for profiles not on offer wait there, too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.install.topology import SHORT_BLOCKS, SWITCH
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.slurmroot import SlurmRoot
from tests.support.commands import invoke
from tests.support.end_to_end import cancel, on_offer, sbatch, shown, until

pytestmark = pytest.mark.slurm
TREE = "SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n3\nSwitchName=s0 Switches=s[1-2] # the spine\n"
BLOCKS = "BlockName=b1 Nodes=n[1-3]\nBlockSizes=3\n"
YAML = """\
- topology: fabric
  cluster_default: true
  tree:
    switches:
      - switch: s0
        children: s[1-2]{below}
      - switch: s1
        nodes: n[1-2]
      - switch: s2
        nodes: n3
{own}"""
SHAPES = "dims: {x: %d, y: 1, z: 1}, placements: [{dims: {x: 1, y: 1, z: 1}}, {dims: {x: 2, y: 1, z: 1}}]"
TORUS = f"- topology: fabric\n  torus3d:\n    toruses:\n      - {{name: t1, nodes: 'n[1-3]', {SHAPES % 3}}}\n"
RING = "- topology: fabric\n  ring:\n    rings:\n      - {ring: r1, nodes: 'n[1-3]'}\n"
#: the first releases with blocks, with topology.yaml, and with toruses and rings
HAS_BLOCKS = (24, 11)
HAS_YAML = (25, 5)
HAS_TORUSES = (26, 5)


@pytest.fixture(scope="module")
def tree(slurm_root: str) -> Iterator[Cluster]:
    options = {"TopologyPlugin": "topology/tree"}
    with Cluster(nodes=3, gpus=1, migbatch="all", options=options, topology=TREE, slurm_root=slurm_root) as bed:
        yield bed


@pytest.fixture
def bed(tree: Cluster) -> Iterator[Cluster]:
    yield tree
    cancel(tree)


def nodes_of(bed: Cluster, job: int) -> str:
    found = re.search(r" NodeList=(\S+)", shown(bed, job))
    return found[1] if found else ""


def started(bed: Cluster, *options: str) -> str:
    """Run a job with these options; return its nodes."""
    job, message = sbatch(bed, *options, wrap="true")
    assert job, message
    bed.wait_job(job, "COMPLETED")
    return nodes_of(bed, job)


def doctor(bed: Cluster) -> list[str]:
    """What doctor says of topologies."""
    found = json.loads(invoke(bed, "doctor", "--json", "-c", str(bed.product.config)).stdout)["findings"]
    return [
        "{level} {subject}: {text}".format(**finding) for finding in found if finding["subject"].startswith("topology")
    ]


def is_refused(bed: Cluster, node: str) -> bool:
    """Whether a job is refused for a profile that a node does not offer at that moment."""
    profile = "1g.10gb:7" if "7g.80gb" in on_offer(bed, node) else "7g.80gb"
    job, message = sbatch(bed, f"--gres=mig:{profile}", "-w", node, wrap="true")
    if job:  # a slurmctld that was restarted has other offers for a moment
        cancel(bed)
        return False
    return "configuration is not available" in message


def replace_topology(bed: Cluster, text: str) -> None:
    path = bed.slurm_conf.with_name("topology.conf")
    path.write_text(text)
    bed.restart("slurmctld")
    until("the nodes", lambda: set(bed.node_states().values()) == {"idle"})


def test_catalog_node_has_its_own_switch_below_the_top_one(bed: Cluster) -> None:
    text = bed.slurm_conf.with_name("topology.conf").read_text()
    own = f"SwitchName={SWITCH} Nodes=no-mig-slice-free[1-2]\n"
    assert text == TREE.replace("Switches=s[1-2]", f"Switches=s[1-2],{SWITCH}") + own
    assert doctor(bed) == ["ok topology: no-mig-slice-free[1-2] is in a switch"]


@pytest.mark.parametrize("switches", [(), ("--switches=1",)])
def test_jobs_wait_for_profiles_that_are_not_on_offer(bed: Cluster, switches: tuple[str, ...]) -> None:
    assert started(bed, "--gres=mig:7g.80gb", *switches)
    assert started(bed, "--gres=mig:1g.10gb:7", *switches)
    assert started(bed, "--gres=mig:7g.80gb", "-w", "n3", *switches) == "n3"
    assert started(bed, "--gres=mig:3g.40gb:2", "-w", "n1,n2", "-N2", *switches) == "n[1-2]"


def test_a_job_spans_switches(bed: Cluster) -> None:
    assert started(bed, "--gres=mig:7g.80gb", "-w", "n1,n3", "-N2") == "n[1,3]"


def test_doctor_reports_a_catalog_node_that_is_in_no_switch(bed: Cluster) -> None:
    present = bed.slurm_conf.with_name("topology.conf").read_text()
    replace_topology(bed, TREE)
    (line,) = doctor(bed)
    assert line.startswith("FAIL topology: no-mig-slice-free[1-2] is in no switch: jobs are refused unless")
    until("a refusal", lambda: is_refused(bed, "n1"))
    replace_topology(bed, present)
    assert doctor(bed)[0].startswith("ok")


def test_jobs_wait_in_a_topology_of_blocks(slurm_root: str) -> None:
    """A release that accepts no small block still lets jobs on one node wait."""
    version = SlurmRoot(Path(slurm_root) if slurm_root else None).version()
    if version < HAS_BLOCKS:
        return
    options = {"TopologyPlugin": "topology/block"}
    for catalog in (2, 3):
        spec = {"nodes": 3, "gpus": 1, "migbatch": "all", "options": options, "topology": BLOCKS}
        with Cluster(catalog_nodes=catalog, slurm_root=slurm_root, **spec) as bed:
            fits = catalog == 3 or version >= SHORT_BLOCKS
            (line,) = doctor(bed)
            assert line.startswith("ok" if fits else "warn topology: no-mig-slice-free[1-2] is in no block"), line
            assert started(bed, "--gres=mig:7g.80gb")
            assert started(bed, "--gres=mig:1g.10gb:7", "--switches=1")
            if fits:
                assert started(bed, "--gres=mig:7g.80gb", "-N2") and started(bed, "--gres=mig:3g.40gb:2", "-N2")


def test_jobs_wait_with_topology_yaml(slurm_root: str) -> None:
    """The administrator changes it as `migbatch install` says, else doctor reports it. Older releases ignore it."""
    reads = SlurmRoot(Path(slurm_root) if slurm_root else None).version() >= HAS_YAML
    with Cluster(nodes=3, gpus=1, migbatch="all", slurm_root=slurm_root) as bed:
        path = bed.slurm_conf.with_name("topology.yaml")
        own = f"      - switch: {SWITCH}\n        nodes: no-mig-slice-free[1-2]\n"
        for below, more, found in (("", "", "FAIL"), (f",{SWITCH}", own, "ok")):
            path.write_text(YAML.format(below=below, own=more))
            bed.restart("slurmctld")
            until("the nodes", lambda: set(bed.node_states().values()) == {"idle"})
            assert [line.split()[0] for line in doctor(bed)] == ([found] if reads else [])
        # supply is not planned by switch: on n2 and n3 Slurm would let the second wait for minutes
        pair = ("-N2", "-w", "n1,n2", "--switches=1")
        assert started(bed, "--gres=mig:7g.80gb") and started(bed, "--gres=mig:3g.40gb:2", *pair)


def test_jobs_wait_in_toruses_and_rings(slurm_root: str) -> None:
    if SlurmRoot(Path(slurm_root) if slurm_root else None).version() < HAS_TORUSES:
        return
    nodes = f"{SWITCH}, nodes: 'no-mig-slice-free[1-2]'"
    torus, ring = f"      - {{name: {nodes}, {SHAPES % 2}}}\n", f"      - {{ring: {nodes}}}\n"
    with Cluster(nodes=3, gpus=1, migbatch="all", slurm_root=slurm_root) as bed:
        for text, found in ((TORUS, "warn"), (TORUS + torus, "ok"), (RING, "warn"), (RING + ring, "ok")):
            bed.slurm_conf.with_name("topology.yaml").write_text(text)
            bed.restart("slurmctld")
            until("the nodes", lambda: set(bed.node_states().values()) == {"idle"})
            assert [line.split()[0] for line in doctor(bed)] == [found], text
            assert started(bed, "--gres=mig:7g.80gb") and started(bed, "--gres=mig:3g.40gb:2")
            if found == "ok":
                assert started(bed, "--gres=mig:7g.80gb", "-N2") and started(bed, "--gres=mig:3g.40gb:2", "-N2")
