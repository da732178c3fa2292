"""The node's name in Slurm, where it differs from the host's: commands and hooks use the same journal."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.node import node as command
from slurm_migbatch.node.conf import ConfError
from slurm_migbatch.node.own_name import load_own


@pytest.fixture(autouse=True)
def outside_of_hooks(monkeypatch):
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)


def test_reconcile_on_a_host_of_another_name_finds_the_slice_of_a_running_job(node):
    """The stand-in for scontrol answers `show aliases HOST` with what slurm.conf calls this host (NodeHostname=)."""
    (node.root / "scontrol.answer").write_text(f"{node.name}\n")
    node.configure(StateDir=node.root / "%n" / "state", RunDir=node.root / "%n" / "run")
    node.prolog(1, "[mig:1g.10gb:1]")
    (held,) = node.slices("held")
    node.forget_executor()
    done = CliRunner().invoke(command, ["reconcile", "--json", "--etc", str(node.etc)])
    assert json.loads(done.stdout)["changes"] == [], done.output
    assert [row.state for row in node.slices()] == ["held"]
    assert node.cap(held.cap_gi)[0] == held.uid


def test_host_with_several_nodes_needs_a_choice(node):
    (node.root / "scontrol.answer").write_text("n1 n2\n")
    with pytest.raises(ConfError, match=r"several nodes on this host \(n1, n2\): select one with --node"):
        load_own(str(node.etc))
    assert load_own(str(node.etc), "n2").node == "n2"


@pytest.mark.parametrize("answer", ["", "NodeName=n1 State=IDLE\n"])
def test_host_that_slurm_does_not_name_keeps_its_own_name(node, answer):
    (node.root / "scontrol.answer").write_text(answer)
    assert load_own(str(node.etc)).node not in ("n1", "")
