"""Preparing a node, and the commands that administrators run."""

import json
import os

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.node import node as command
from slurm_migbatch.mig.driver import GpuLost
from slurm_migbatch.mig.nvml import NvmlGpu
from slurm_migbatch.node import tmpfs
from slurm_migbatch.node.boot import prepare
from tests.support.nodes import ALICE, in_child

SMI = """#!/bin/sh
echo "$@" >> {log}
exit {code}
"""


def cli(node, *arguments):
    node.forget_executor()
    args = [arguments[0], "--etc", str(node.etc), "--node", node.name, *arguments[1:]]
    return CliRunner().invoke(command, args)


def mig_modes(node):
    return [gpu["mig"] for gpu in node.machine.dump()["gpus"]]


def test_prepare_enables_mig_mode_on_hopper_only_once(new_node):
    node = new_node(gpus=["h100-80gb", "h200"], mig=False)
    steps = prepare(node.config, node.executor)
    assert all(step.ok for step in steps) and mig_modes(node) == [True, True]
    node.machine.calls(reset=True)
    prepare(node.config, node.executor)
    assert node.machine.calls()["nvmlDeviceSetMigMode"] == 0
    assert node.prolog(1, "[mig:1g.10gb:1]")[0] == 0


def test_init_reports_that_ampere_needs_a_gpu_reset_and_makes_none(new_node):
    node = new_node(gpus=["a100-40gb"], mig=False)
    result = cli(node, "init")
    assert result.exit_code == 1
    assert "reset" in result.output and "PROBLEM" in result.output and mig_modes(node) == [False]
    node.machine.reset_gpu(0)
    assert cli(node, "init").exit_code == 0 and mig_modes(node) == [True]


def test_gpu_that_is_not_ready_keeps_the_others_from_nothing(new_node):
    """The agent's unit runs this first: without the agent the whole node would be silent."""
    node = new_node(gpus=["a100-40gb", "h100-80gb"], mig=False)
    result = cli(node, "init")
    assert result.exit_code == 0 and "PROBLEM" in result.output and mig_modes(node) == [False, True]
    node.machine.set_lost(0)
    result = cli(node, "init")
    assert result.exit_code == 0 and "PROBLEM: GPU 0" in result.output
    node.machine.set_lost(1)
    assert cli(node, "init").exit_code == 1


def test_gpu_that_cannot_be_repaired_keeps_the_others_from_nothing(new_node, monkeypatch):
    node = new_node(gpus=["h100-80gb", "h100-80gb"], mig=False)
    instances = NvmlGpu.instances

    def fail(gpu):
        if gpu.index == 0:
            raise GpuLost(16, "the GPU needs a reset")
        return instances(gpu)

    monkeypatch.setattr(NvmlGpu, "instances", fail)
    result = cli(node, "init")
    assert result.exit_code == 0 and "PROBLEM: not repaired: the GPU needs a reset" in result.output, result.output


@pytest.mark.parametrize("code", [0, 1])
def test_ampere_is_reset_when_asked(new_node, code):
    node = new_node(gpus=["a100-40gb"], mig=False)
    smi, log = node.root / "nvidia-smi", node.root / "smi.log"
    smi.write_text(SMI.format(log=log, code=code))
    smi.chmod(0o755)
    steps = prepare(node.config, node.executor, reset=True, nvidia_smi=str(smi))
    uuid = node.machine.dump()["gpus"][0]["uuid"]
    assert log.read_text() == f"--gpu-reset -i {uuid}\n"
    assert steps[0].ok is (code == 0)


def test_mig_mode_is_changed_on_listed_gpus_only(new_node):
    node = new_node(gpus=["h100-80gb", "h100-80gb"], mig=False, Gpus="1")
    prepare(node.config, node.executor)
    assert mig_modes(node) == [False, True]


def test_prepare_reports_a_problem_when_no_gpu_matches(new_node):
    node = new_node(Gpus="77")
    assert not prepare(node.config, node.executor)[0].ok


def test_after_a_reboot_init_makes_the_node_ready(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.forget_executor()
    node.machine.reboot()
    assert cli(node, "init").exit_code == 0
    assert node.prolog(2, "[mig:7g.80gb:1]")[0] == 0
    node.check()


def test_reconcile_prints_its_changes_and_dry_run_makes_none(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.epilog(1)
    node.destroy_by_hand()
    dry = cli(node, "reconcile", "--dry-run")
    assert "forget 1g.10gb" in dry.output and len(node.slices()) == 1
    looked = json.loads(cli(node, "reconcile", "--dry-run", "--json").output)
    assert looked["dry_run"] is True and len(looked["changes"]) == 1 and len(node.slices()) == 1
    assert cli(node, "reconcile").output == dry.output
    assert node.slices() == []
    assert cli(node, "reconcile").output == "nothing to do\n"


def test_status_shows_which_job_holds_each_slice(node):
    node.prolog(17, "[mig:2g.20gb:1]")
    text = cli(node, "status").output
    assert "agent not running" in text
    assert any("2g.20gb" in line and "held" in line and "17" in line for line in text.splitlines())
    found = json.loads(cli(node, "status", "--json").output)
    assert found["agent"] is False and found["zombies"] == 0 and found["spool"] > 0
    (row,) = found["gpus"][0]["slices"]
    assert (row["job"], row["state"], row["uid"]) == (17, "held", ALICE)


def test_status_works_without_a_driver(node):
    node.prolog(17, "[mig:2g.20gb:1]")
    node.forget_executor()
    node.configure(NvmlLibrary="/nonexistent.so")
    found = json.loads(cli(node, "status", "--json").output)
    assert "nonexistent" in found["driver"] and found["runs"][0]["job"] == 17


def test_the_commands_need_root(node):
    def work():
        os.setresuid(ALICE, ALICE, ALICE)
        result = cli(node, "status")
        return 0 if result.exit_code == 1 and "root" in str(result.exception) else 1

    assert os.waitstatus_to_exitcode(in_child(work)[0]) == 0


def test_failed_progress_mount_is_reported_but_is_not_a_problem(new_node, monkeypatch):
    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(tmpfs, "mount", refused)
    node = new_node()
    (step,) = [step for step in prepare(node.config, node.executor) if "MIGBATCH_PROGRESS" in step.text]
    assert step.ok, "jobs may run nevertheless"
    assert "may get the same slices" in step.text


def test_init_says_what_may_use_a_gpu_whose_mode_cannot_be_changed(new_node):
    """NVML reports it by its return code or by the status of the activation."""
    node = new_node(gpus=["h100-80gb"], mig=False)
    node.machine.fail("nvmlDeviceSetMigMode", 19)
    result = cli(node, "init")
    assert result.exit_code == 1 and "in use (persistence daemon, DCGM, a display)" in result.output, result.output
