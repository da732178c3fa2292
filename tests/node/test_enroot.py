"""What Enroot's hook gives to containers."""

import ctypes
import os
from pathlib import Path

import pytest

from slurm_migbatch.node import enroot, handoff
from slurm_migbatch.node.task_prolog import NoSlice, exports
from tests.support.directories import open_to_users
from tests.support.environments import exported
from tests.support.namespaces import need_user_namespaces
from tests.support.nodes import ALICE, BOB

DEVICES = "NVIDIA_VISIBLE_DEVICES"


def passed_on(job, **more):
    """What pyxis passes on to Enroot for a step on one node."""
    values = {"SLURM_JOB_ID": str(job), "SLURM_JOB_UID": str(ALICE), "SLURM_STEP_ID": "0"}
    values |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1"} | more
    return {key.encode(): value.encode() for key, value in values.items()}


def with_devices(variables):
    """The variables of a task that has a container."""
    return variables | {DEVICES: variables["MIGBATCH_DEVICES"]}


def test_container_gets_what_a_task_gets(node):
    node.prolog(1, "[mig:1g.10gb:2]")
    values, progress = enroot.given(str(node.etc), passed_on(1), 0)
    assert values == with_devices(exported(node, 1))
    assert progress == values["MIGBATCH_PROGRESS"]


@pytest.mark.parametrize("others", [0, 1])
def test_container_gets_the_form_that_a_task_gets(node, others):
    """Root, who runs the tests, can open every slice."""
    node.prolog(1, "", SLURM_JOB_COMMENT="migbatch: cuda=index [mig:1g.10gb:1]")
    for job in range(others):
        node.prolog(2 + job, "[mig:1g.10gb:1]")
    values, _ = enroot.given(str(node.etc), passed_on(1), 0)
    expected = with_devices(dict(line.split("=", 1) for line in lines_of_a_task(node)))
    assert values == expected and (values["CUDA_VISIBLE_DEVICES"] == "0") is not bool(others)


def lines_of_a_task(node):
    """What TaskProlog exports, without the lines that it prints."""
    lines = exports(str(node.etc), passed_on(1) | {b"SLURMD_NODENAME": b"n1"}, ALICE).splitlines()
    return [line.removeprefix("export ") for line in lines if line.startswith("export ")]


@pytest.mark.parametrize(
    ("tasks", "number"),
    [(b"1", 1), (b"2", 2), (b"3(x2)", 3), (b"1,2(x3),1", 2), (b"", 1), (b"x", 1), (b"9" * 5000, 4096)],
)
def test_tasks_of_a_step_on_a_node(tasks, number):
    ranks = enroot.as_task({b"SLURM_STEP_TASKS_PER_NODE": tasks})[b"SLURM_GTIDS"]
    assert ranks.count(b",") + 1 == number


def test_container_is_of_the_task_that_has_started_it():
    assert enroot.as_task({b"ENROOT_PID": b"%d" % os.getpid()})[b"SLURM_TASK_PID"] == b"%d" % os.getppid()
    assert enroot.parent(b"") == enroot.parent(b"x") == enroot.parent(b"999999999") == b""


def test_container_of_a_step_gets_what_the_step_requested(node, tmp_path):
    node.prolog(1, "[mig:1g.10gb:2]")
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho StepId=$3 TresPerNode=gres:mig:1\n")
    program.chmod(0o755)
    node.configure(ScontrolPath=program)
    values, _ = enroot.given(str(node.etc), passed_on(1), 0)
    assert (values["MIGBATCH_SLICES"], values["MIGBATCH_JOB_SLICES"], values["SLURM_GPUS_ON_NODE"]) == ("1", "2", "1")
    assert values["CUDA_VISIBLE_DEVICES"] == exported(node, 1)["CUDA_VISIBLE_DEVICES"].split(",")[0]


def test_container_without_slices_gets_nothing(node):
    node.prolog(1, "[mig:1g.10gb:1]", uid=BOB)
    assert enroot.given(str(node.etc), passed_on(2), 0) == ({}, "")
    assert enroot.given(str(node.etc), passed_on(1), 0) == ({}, ""), "of another user"
    assert enroot.given(str(node.etc), {}, 0) == ({}, ""), "outside of jobs"
    (node.etc / "node.conf").write_text("what?\n")
    assert enroot.given(str(node.etc), passed_on(3), 0) == ({}, ""), "TaskProlog ignores it too"


def test_container_of_a_refused_run_does_not_start(node):
    handoff.write(node.executor.paths.job, handoff.Handoff(1, 0, ALICE, (), "no free placement"))
    with pytest.raises(NoSlice, match="no free placement"):
        enroot.given(str(node.etc), passed_on(1), 0)


@pytest.mark.parametrize("chosen", ["void", "none", "", "MIG-a"])
def test_devices_that_the_user_chose_are_kept(node, chosen):
    node.prolog(1, "[mig:1g.10gb:1]")
    values, progress = enroot.given(str(node.etc), passed_on(1, NVIDIA_VISIBLE_DEVICES=chosen), 0)
    assert values == {} and progress


def test_container_that_may_see_all_devices_is_told_which_are_the_jobs(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    values, _ = enroot.given(str(node.etc), passed_on(1, NVIDIA_VISIBLE_DEVICES="all"), 0)
    assert values["CUDA_VISIBLE_DEVICES"].startswith("MIG-") and DEVICES not in values


def test_container_that_a_task_starts_gets_its_variables(node):
    task = {b"MIGBATCH_DEVICES": b"MIG-a", b"CUDA_VISIBLE_DEVICES": b"0", b"MIGBATCH_PROGRESS": b"/p/1.0", b"X": b"y"}
    task[b"MIGBATCH_BATCH"] = b"64"
    values, progress = enroot.given(str(node.etc), task, 0)
    expected = {key.decode(): value.decode() for key, value in task.items() if key != b"X"}
    assert (values, progress) == (with_devices(expected), "/p/1.0")
    values, _ = enroot.given(str(node.etc), task | {DEVICES.encode(): b"all"}, 0)
    assert values == expected, "98-nvidia.sh sees the user's choice"


def test_container_that_a_task_without_slices_starts_gets_none(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    values, progress = enroot.given(str(node.etc), passed_on(1, CUDA_VISIBLE_DEVICES=""), 0)
    assert values == {"CUDA_VISIBLE_DEVICES": ""} and progress


def test_image_and_user_may_set_all_but_the_devices_that_images_set_to_all():
    text = "PATH=/bin\nCUDA_VISIBLE_DEVICES=MIG-b\nNVIDIA_VISIBLE_DEVICES=all\n"
    values = {"CUDA_VISIBLE_DEVICES": "MIG-a", "MIGBATCH_SLICES": "1", DEVICES: "MIG-a"}
    assert enroot.absent(values, text) == "MIGBATCH_SLICES=1\nNVIDIA_VISIBLE_DEVICES=MIG-a\n"


CLONE_NEWUSER, PR_SET_DUMPABLE = 0x10000000, 4


def run(node, environ, before=lambda: None):
    """Run the hook in a process of its own; return its exit code and error output."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.dup2(write, 2)
            before()
            os.environb.clear()
            os.environb.update(environ)
            enroot.main(str(node.etc))
        finally:
            os._exit(99)
    os.close(write)
    with os.fdopen(read) as errors:
        text = errors.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def in_user_namespace():
    """Become ALICE, and root in a user namespace of hers, as with `enroot start --root`."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.setgroups([])
    os.setresgid(ALICE, ALICE, ALICE)
    os.setresuid(ALICE, ALICE, ALICE)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # or its files in /proc are root's
    assert libc.unshare(CLONE_NEWUSER) == 0, os.strerror(ctypes.get_errno())
    Path("/proc/self/uid_map").write_text(f"0 {ALICE} 1")


def test_hook_appends_to_the_files_of_enroot_in_a_user_namespace(node, tmp_path):
    """Root's files belong to the overflow uid there."""
    need_user_namespaces()
    open_to_users(node.root)
    open_to_users(tmp_path)
    node.prolog(1, "[mig:1g.10gb:1]")
    environment, mounts = tmp_path / "environment", tmp_path / "fstab"
    environment.write_text("NVIDIA_VISIBLE_DEVICES=all\n")
    for path in (environment, tmp_path):
        os.chown(path, ALICE, ALICE)
    files = {b"ENROOT_ENVIRON": bytes(environment), b"ENROOT_MOUNTS": bytes(mounts)}
    assert run(node, passed_on(1) | files, in_user_namespace) == (0, "")
    values = with_devices(exported(node, 1))
    assert dict(line.split("=", 1) for line in environment.read_text().splitlines()) == values
    progress = values["MIGBATCH_PROGRESS"]
    assert mounts.read_text() == f"{progress} {progress} {enroot.OPTIONS}\n"


def test_hook_mounts_by_a_program_of_older_releases(node, tmp_path):
    node.prolog(1, "[mig:1g.10gb:1]")
    (tmp_path / "environment").touch()
    program = tmp_path / "enroot-mount"
    program.write_text(f"#!/bin/sh\necho $* > {tmp_path}/words; cat > {tmp_path}/line\n")
    program.chmod(0o755)
    files = {b"ENROOT_ENVIRON": bytes(tmp_path / "environment"), b"ENROOT_ROOTFS": b"/the/rootfs"}
    path = {b"PATH": os.fsencode(f"{tmp_path}:{os.environ['PATH']}")}
    assert run(node, passed_on(1) | files | path) == (0, "")
    assert (tmp_path / "words").read_text() == "--root /the/rootfs -\n"
    assert (tmp_path / "line").read_text().startswith(exported(node, 1)["MIGBATCH_PROGRESS"])


def test_container_starts_without_the_file_for_reports(node, tmp_path):
    node.prolog(1, "[mig:1g.10gb:1]")
    (tmp_path / "environment").touch()
    files = {b"ENROOT_ENVIRON": bytes(tmp_path / "environment"), b"PATH": b"/nonexistent"}
    code, text = run(node, passed_on(1) | files)
    assert code == 0 and "is not in the container" in text
    assert "MIGBATCH_SLICES=1\n" in (tmp_path / "environment").read_text()


def test_hook_fails_for_a_refused_run(node, tmp_path):
    handoff.write(node.executor.paths.job, handoff.Handoff(1, 0, ALICE, (), "no free placement"))
    code, text = run(node, passed_on(1))
    assert code == 15 and "no free placement" in text
