"""The environment that TaskProlog gives to tasks."""

import ast
import errno
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.node import conf, cudaform, handoff, task_prolog, tmpfs
from slurm_migbatch.node.task_prolog import NoSlice, exports, not_alone, parse, share
from tests.support.directories import open_to_users
from tests.support.environments import exported
from tests.support.nodes import ALICE, BOB


def step(local, tasks):
    """The environment of a task on the second node of its step."""
    numbers = ",".join(str(number) for number in range(7, 7 + tasks))
    return {b"SLURM_STEP_ID": b"0", b"SLURM_LOCALID": str(local).encode(), b"SLURM_GTIDS": numbers.encode()}


def named(count):
    return [[f"MIG-{i}", "1g.10gb", "9728", "GPU-0"] for i in range(count)]


BATCH = [{}, {b"SLURM_STEP_ID": b"-5"}, {b"SLURM_STEP_ID": b"4294967291"}, {b"SLURM_STEP_ID": b"4294967290"}]


@pytest.mark.parametrize("environ", BATCH)
def test_batch_scripts_and_shells_see_all_slices(environ):
    assert share(named(3), environ | {b"SLURM_LOCALID": b"0", b"SLURM_TASKS_PER_NODE": b"3"}) == named(3)


@given(st.integers(1, 64), st.integers(1, 130))
def test_every_task_has_a_share_and_every_slice_is_used(slices, tasks):
    shares = [share(named(slices), step(i, tasks)) for i in range(tasks)]
    assert all(shares)
    used = [slice_row[0] for part in shares for slice_row in part]
    if tasks <= slices:
        assert used == [slice_row[0] for slice_row in named(slices)], "contiguous, each slice once"
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        counts = {slice_row[0]: used.count(slice_row[0]) for slice_row in named(slices)}
        assert max(counts.values()) - min(counts.values()) <= 1
    if tasks == slices:
        assert [part[0][0] for part in shares] == [f"MIG-{i}" for i in range(slices)]


@pytest.mark.parametrize(
    ("comment", "form"),
    [
        (b"migbatch: cuda=index", "index"),
        (b"migbatch: model=x CUDA=INDEX [mig:1g.10gb:1]", "index"),
        (b"migbatch: engine=vllm", "index"),
        (b"migbatch: engine=vllm cuda=uuid", "uuid"),
        (b"migbatch: engine=tgi", "uuid"),
        (b"cuda=index", "uuid"),
        (b"\xff" * 2000 + b" migbatch: cuda=index", "uuid"),
        (b"migbatch: " + b"=" * 2000, "uuid"),
    ],
)
def test_comment_selects_the_form_of_cuda_visible_devices(comment, form):
    assert cudaform.wanted(comment) == form


@pytest.fixture
def devices(tmp_path):
    """The devices of a node; those with minors 5 and 6 belong to the slice."""
    caps = tmp_path / "nvidia-caps"
    caps.mkdir()
    for number in (1, 2, 5, 6):
        (caps / f"nvidia-cap{number}").touch()
    (caps / "something").touch()
    (tmp_path / "nvidia0").touch()
    return tmp_path


def test_cuda_index_needs_a_view_of_only_one_slice(devices):
    def why(slices=1, caps="5 6", whole=""):
        return not_alone({"caps": caps, "whole": whole}, named(slices), str(devices))

    assert why() == "" and why(whole="7") == ""
    assert "2 slices" in why(slices=2)
    assert "does not know" in why(caps="5")
    assert "MIG disabled" in why(whole="0")
    (devices / "nvidia-caps/nvidia-cap7").symlink_to("nvidia-cap7")
    assert "another slice" in why(), "every failure except for permissions may be temporary"


@given(st.binary(max_size=40), st.binary(max_size=10), st.binary(max_size=10))
def test_share_accepts_any_environment_values(tasks, local, number):
    environ = {b"SLURM_STEP_ID": number, b"SLURM_LOCALID": local, b"SLURM_GTIDS": tasks}
    assert share(named(3), environ)


def test_mps_variables_need_a_listed_partition_and_the_users_own_directory(node, tmp_path):
    node.prolog(1, "[mig:2g.20gb:1]")
    node.prolog(2, "[mig:1g.10gb:2]")
    assert not [key for key in exported(node, 1, SLURM_JOB_PARTITION="train") if "MPS" in key]
    node.configure(MpsPartitions="train, other", MpsDir=tmp_path, MpsPercent=60)
    tmp_path.chmod(0o1777)
    variables = as_user(node, 1, SLURM_JOB_PARTITION="train")
    (uuid,) = variables["CUDA_VISIBLE_DEVICES"].split(",")
    path = tmp_path / f"migbatch-mps-{ALICE}-{uuid}"
    assert variables["CUDA_MPS_PIPE_DIRECTORY"] == variables["CUDA_MPS_LOG_DIRECTORY"] == str(path)
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (ALICE, 0o700)
    assert as_user(node, 1, SLURM_JOB_PARTITION="train") == variables, "a second task finds it there"
    assert not [key for key in as_user(node, 1, SLURM_JOB_PARTITION="gpu") if "MPS" in key]
    assert not [key for key in as_user(node, 2, SLURM_JOB_PARTITION="train") if "MPS" in key], "two slices, no sharing"
    values = {b"SLURM_JOB_ID": b"1", b"SLURMD_NODENAME": b"n1", b"CUDA_MPS_PIPE_DIRECTORY": str(path).encode()}
    assert "unset CUDA_MPS_PIPE_DIRECTORY" in exports(str(node.etc), values, ALICE), "another slice's"
    values[b"CUDA_MPS_PIPE_DIRECTORY"] = b"/home/alice/mine"
    assert "MPS" not in exports(str(node.etc), values, ALICE)


@pytest.mark.parametrize("squatter", ["another's", "open", "link", "file"])
def test_unsafe_mps_directory_is_not_used(node, tmp_path, squatter):
    node.prolog(1, "[mig:2g.20gb:1]")
    node.configure(MpsPartitions="train", MpsDir=tmp_path)
    tmp_path.chmod(0o1777)
    path = tmp_path / f"migbatch-mps-{ALICE}-{exported(node, 1)['CUDA_VISIBLE_DEVICES']}"
    if squatter == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        os.chown(tmp_path / "real", ALICE, 0)
        path.symlink_to(tmp_path / "real")
    elif squatter == "file":
        path.touch()
        os.chown(path, ALICE, 0)
    else:
        path.mkdir()
        path.chmod(0o700 if squatter == "another's" else 0o755)
        os.chown(path, BOB if squatter == "another's" else ALICE, 0)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in as_user(node, 1, SLURM_JOB_PARTITION="train")


def as_user(node, job, **environ):
    """Like `exported`, but run with ALICE's uid: what it creates belongs to her."""
    open_to_users(node.root)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(ALICE, ALICE, ALICE)
            os.write(write, repr(exported(node, job, **environ)).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        return ast.literal_eval(pipe.read())


def test_batch_script_gets_all_slices_in_its_environment(node):
    node.prolog(1, "[mig:2g.20gb:1,1g.10gb:2]")
    held = sorted(node.slices("held"), key=lambda row: row.ordinal)
    values = exported(node, 1)
    assert values["CUDA_VISIBLE_DEVICES"] == ",".join(row.mig_uuid for row in held)
    assert values["MIGBATCH_PROFILE"] == "2g.20gb,1g.10gb,1g.10gb"
    memory = node.executor.gpus.geometry(node.executor.gpus.listed()[0]).info(held[1].slot.profile).memory_mib
    assert values["MIGBATCH_MEMORY_MIB"] == str(memory)
    assert (values["MIGBATCH_SLICES"], values["MIGBATCH_JOB_SLICES"]) == ("3", "3")
    assert values["SLURM_GPUS_ON_NODE"] == "3", "for scripts that start a process for each GPU"


CONTAINERS = "NVIDIA_VISIBLE_DEVICES"
BUNDLE = {"SLURM_CONTAINER": "/bundle"}


def test_containers_of_slurm_get_the_slices_of_the_task(node):
    node.prolog(1, "[mig:1g.10gb:2]")
    batch = exported(node, 1, **BUNDLE)
    assert batch[CONTAINERS] == batch["MIGBATCH_DEVICES"]
    inherits = batch | BUNDLE | {"SLURM_STEP_ID": "0", "SLURM_GTIDS": "0,1"}
    tasks = [exported(node, 1, **inherits, SLURM_LOCALID=str(i)) for i in range(2)]
    assert [values[CONTAINERS] for values in tasks] == batch["MIGBATCH_DEVICES"].split(",")
    assert exported(node, 1, **BUNDLE, NVIDIA_VISIBLE_DEVICES="all") == batch, "as in images of CUDA"


def test_other_tasks_have_no_variable_for_containers_that_jobs_they_submit_would_inherit(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    assert CONTAINERS not in exported(node, 1)
    assert CONTAINERS not in exported(node, 1, SLURM_STEP_ID="0")


@pytest.mark.parametrize("chosen", ["void", "", "MIG-2"])
def test_devices_that_the_user_chose_for_containers_are_kept(node, chosen):
    node.prolog(1, "[mig:1g.10gb:2]")
    assert CONTAINERS not in exported(node, 1, **BUNDLE, NVIDIA_VISIBLE_DEVICES=chosen)
    batch = exported(node, 1) | {CONTAINERS: chosen}
    assert CONTAINERS not in exported(node, 1, **batch, **BUNDLE, SLURM_STEP_ID="0")


def test_devices_for_containers_are_inherited_by_no_other_job_and_by_no_step_without_slices(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    batch = {key.encode(): value.encode() for key, value in exported(node, 1, **BUNDLE).items()}
    other = batch | {b"SLURM_JOB_ID": b"2", b"SLURMD_NODENAME": b"n1"}
    assert f"unset {CONTAINERS}" in exports(str(node.etc), other, ALICE).splitlines()
    kept = other | {CONTAINERS.encode(): b"all"}
    assert CONTAINERS not in exports(str(node.etc), kept, ALICE)
    none = batch | {b"SLURM_JOB_ID": b"1", b"SLURMD_NODENAME": b"n1", b"SLURM_STEP_ID": b"0"}
    lines = exports(str(node.etc), none | {b"MIGBATCH_STEP_GRES": b"none"}, ALICE).splitlines()
    assert f"unset {CONTAINERS}" in lines


def test_variables_of_options_for_each_gpu_are_unset_in_jobs_with_slices(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    environ = {b"SLURM_JOB_ID": b"1", b"SLURM_CPUS_PER_GPU": b"3", b"SLURM_CPUS_PER_TASK": b"3"}
    environ |= {b"SLURM_NTASKS_PER_GPU": b"1"}
    out = exports(str(node.etc), environ, ALICE)
    unset = ["unset SLURM_CPUS_PER_GPU", "unset SLURM_NTASKS_PER_GPU"]
    assert [line for line in out.splitlines() if line.startswith("unset")] == unset
    assert exports(str(node.etc), environ | {b"SLURM_JOB_ID": b"2"}, ALICE) == ""


def test_zeros_that_the_submit_filter_leaves_of_gpus_are_unset_in_jobs_with_slices(node):
    """srun --gpus=0 could not be told from them."""
    node.prolog(1, "[mig:1g.10gb:1]")
    environ = {b"SLURM_JOB_ID": b"1", b"SLURM_GPUS": b"0", b"SLURM_GPUS_PER_NODE": b"2", b"SLURM_GPUS_PER_TASK": b"0"}
    out = exports(str(node.etc), environ, ALICE)
    assert [line for line in out.splitlines() if line.startswith("unset")] == [
        "unset SLURM_GPUS",
        "unset SLURM_GPUS_PER_TASK",
    ]
    assert exports(str(node.etc), environ | {b"SLURM_JOB_ID": b"2"}, ALICE) == ""


def test_each_task_of_a_step_gets_its_own_slice(node):
    node.prolog(1, "[mig:1g.10gb:3]")
    seen = [exported(node, 1, SLURM_STEP_ID="0", SLURM_LOCALID=str(i), SLURM_GTIDS="0,1,2") for i in range(3)]
    assert len({values["CUDA_VISIBLE_DEVICES"] for values in seen}) == 3


def test_jobs_without_a_slice_and_other_users_get_no_variables(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    assert exported(node, 2) == {}
    assert exported(node, 1, uid=BOB) == {}
    assert exports(str(node.etc), {b"SLURM_JOB_ID": b"../1", b"SLURMD_NODENAME": b"n1"}, ALICE) == ""


def test_invalid_configuration_stops_no_task_of_a_job_without_slices(node, monkeypatch):
    node.prolog(1, "[mig:1g.10gb:1]")
    given = exported(node, 1)
    with (node.etc / "node.conf").open("a") as file:
        file.write("Gpus\n")
    assert exported(node, 2) == {}
    with pytest.raises(NoSlice, match="write Key=Value"):
        exported(node, 1, MIGBATCH_DEVICES=given["MIGBATCH_DEVICES"])
    monkeypatch.setattr(conf, "run_dir", lambda settings, _: settings.get("RunDir", f"{node.root}/run"))  # the default
    assert exported(node, 1) == given


def test_handoff_of_the_latest_run_counts_and_a_refused_run_may_not_run(node):
    node.prolog(1, "[mig:1g.10gb:1]", restart=9)
    jobs = node.executor.paths.job
    handoff.write(jobs, handoff.Handoff(1, 10, ALICE, (), "no free placement"))
    with pytest.raises(NoSlice, match="no free placement"):
        exported(node, 1)
    handoff.remove(jobs, 1, 10)
    assert exported(node, 1)


def test_handoff_not_written_by_root_is_rejected(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    path = node.root / "run" / "job" / "1.0"
    os.chown(path, ALICE, 0)
    with pytest.raises(NoSlice, match="not written by root"):
        exported(node, 1)


@pytest.mark.parametrize("text", ["", "version 2\nstate ready\n", "version 1\nstate ready\n", "version 1\nslice a b\n"])
def test_malformed_handoff_is_rejected(text):
    with pytest.raises(NoSlice):
        parse(text)


def test_handoff_is_read_back_as_written(node):
    given_slices = (
        handoff.HandoffSlice("MIG-a", "1g.10gb", 1, "GPU-1"),
        handoff.HandoffSlice("MIG-b", "2g.20gb", 2, "GPU-1"),
    )
    written = handoff.Handoff(5, 6, 7, given_slices)
    handoff.write(node.executor.paths.job, written)
    assert handoff.load(node.executor.paths.job, 5, 6) == written
    status = os.stat(node.root / "run" / "job" / "5.6")
    assert status.st_uid == 0 and not status.st_mode & 0o027
    assert [p.name for p in (node.root / "run" / "job").iterdir()] == ["5.6"]


def test_handoff_is_readable_only_by_the_jobs_user(many_nodes):
    """It describes the user's job and slices; and only root can write it, as it is trusted when the journal is lost."""
    node = many_nodes()
    open_to_users(node.root)
    node.prolog(1, "[mig:1g.10gb:1]")
    path = node.root / "run" / "job" / "1.0"

    def tries(uid, groups=()):
        found = []
        for work in (path.read_text, lambda: path.open("a").close(), lambda: path.chmod(0o666), path.unlink):
            os.setgroups(groups)
            os.seteuid(uid)
            try:
                work()
                found.append("done")
            except OSError as error:
                found.append(errno.errorcode[error.errno])
            finally:
                os.seteuid(0)
                os.setgroups([])
        return found

    assert tries(ALICE) == ["done", "EACCES", "EPERM", "EACCES"]
    assert tries(BOB, [ALICE, 0, 100]) == ["EACCES", "EACCES", "EPERM", "EACCES"]
    assert as_user(node, 1)["MIGBATCH_SLICES"] == "1"
    handoff.write(node.executor.paths.job, handoff.Handoff(1, 0, BOB, (), "no free placement"))
    assert tries(ALICE)[0] == "EACCES" and tries(BOB)[0] == "done"


def test_handoff_of_another_user_is_ignored(many_nodes):
    """TaskProlog continues if the hand-off with its job id is another user's (for example of an earlier cluster)."""
    node = many_nodes()
    open_to_users(node.root)
    node.prolog(1, "[mig:1g.10gb:1]", uid=BOB)
    assert as_user(node, 1) == {}


def test_step_with_gres_none_gets_no_slice(node):
    node.prolog(1, "[mig:1g.10gb:2]")
    wants_none = {b"SLURM_JOB_ID": b"1", b"SLURMD_NODENAME": b"n1", b"MIGBATCH_STEP_GRES": b"none"}
    batch = {key.encode(): value.encode() for key, value in exported(node, 1).items()}
    lines = exports(str(node.etc), wants_none | batch | {b"SLURM_STEP_ID": b"3"}, ALICE).splitlines()
    assert "export CUDA_VISIBLE_DEVICES=" in lines
    assert {"unset MIGBATCH_DEVICES", "unset MIGBATCH_SLICES", "unset MIGBATCH_STEP_GRES"} <= set(lines)
    assert "unset SLURM_GPUS_ON_NODE" in lines
    assert not [line for line in lines if "MIG-" in line]
    assert "unset MIGBATCH_PROGRESS" not in lines, "it may report for the job"
    in_batch = exports(str(node.etc), wants_none, ALICE)
    assert "export MIGBATCH_SLICES=2" in in_batch, "only steps are started with --gres=none"
    handoff.write(node.executor.paths.job, handoff.Handoff(1, 0, ALICE, (), "no free placement"))
    with pytest.raises(NoSlice):
        exports(str(node.etc), wants_none | {b"SLURM_STEP_ID": b"3"}, ALICE)


def test_steps_of_a_job_that_was_submitted_from_a_step_without_gres_get_their_slices(node):
    """sbatch passes on its environment: neither that step nor the batch script may leave --gres=none in it."""
    step = {b"SLURM_JOB_ID": b"5", b"SLURMD_NODENAME": b"n1", b"SLURM_STEP_ID": b"0", b"MIGBATCH_STEP_GRES": b"none"}
    assert exports(str(node.etc), step, ALICE) == "unset MIGBATCH_STEP_GRES\n"
    node.prolog(1, "[mig:1g.10gb:1]")
    batch = {b"SLURM_JOB_ID": b"1", b"SLURMD_NODENAME": b"n1", b"MIGBATCH_STEP_GRES": b"none"}
    assert "unset MIGBATCH_STEP_GRES" in exports(str(node.etc), batch, ALICE).splitlines()


def scontrol_that(node, tmp_path, body):
    """Configure the node with a program in place of scontrol."""
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    node.configure(ScontrolPath=program, ScontrolTimeout=5)


def test_tasks_of_a_step_share_the_slices_that_it_requested(node, tmp_path):
    tmp_path.chmod(0o1777)
    node.prolog(1, "[mig:1g.10gb:3]")
    asked = tmp_path / "asked"
    asked.touch()
    asked.chmod(0o666)
    scontrol_that(node, tmp_path, f'echo "$@" $SCONTROL_LOCAL >> {asked}; echo "   TresPerNode=gres:mig:1g.10gb:2"')
    batch = as_user(node, 1)
    environ = {"SLURM_TASK_PID": str(os.getpid()), "SLURM_GTIDS": "0,1"}

    def task(number, step):
        return as_user(node, 1, SLURM_STEP_ID=step, SLURM_LOCALID=str(number), **environ)

    first, second, third = batch["CUDA_VISIBLE_DEVICES"].split(",")
    tasks = [task(0, "0"), task(1, "0")]
    assert [values["CUDA_VISIBLE_DEVICES"] for values in tasks] == [first, second]
    assert {(values["SLURM_GPUS_ON_NODE"], values["MIGBATCH_JOB_SLICES"]) for values in tasks} == {("2", "3")}
    other = task(0, "1")["CUDA_VISIBLE_DEVICES"], task(1, "1")["CUDA_VISIBLE_DEVICES"]
    assert third in other, "the free slice, and one more"
    assert asked.read_text() == "show step 1.0 1\nshow step 1.1 1\n", "one query for each step, none of the federation"
    values = {b"SLURM_JOB_ID": b"9", b"SLURMD_NODENAME": b"n1", b"SLURM_GPUS_ON_NODE": b"2"}
    values |= {b"MIGBATCH_DEVICES": first.encode(), b"MIGBATCH_JOB_SLICES": b"3"}
    assert "unset SLURM_GPUS_ON_NODE" in exports(str(node.etc), values, ALICE), "inherited from the step"


def test_steps_need_no_directory_that_others_can_write(node, tmp_path):
    """Others could take their file's name there, or all space, and the steps would all get the first slice."""
    tmp_path.chmod(0o1777)
    node.prolog(1, "[mig:1g.10gb:2]")
    scontrol_that(node, tmp_path, 'echo "   TresPerNode=gres:mig:1"')
    environ = {"SLURM_TASK_PID": str(os.getpid()), "SLURM_GTIDS": "0", "SLURM_LOCALID": "0"}
    slices = {as_user(node, 1, SLURM_STEP_ID=step, **environ)["CUDA_VISIBLE_DEVICES"] for step in "01"}
    assert slices == set(exported(node, 1)["CUDA_VISIBLE_DEVICES"].split(","))
    directory = Path(exported(node, 1)["MIGBATCH_PROGRESS"]).parent
    assert (directory.stat().st_uid, directory.stat().st_mode & 0o777) == (0, 0o711)
    files = {file.name: (file.stat().st_uid, file.stat().st_mode & 0o777) for file in directory.iterdir()}
    assert files == {"1.0": (ALICE, 0o600), "1.0.steps": (ALICE, 0o600)}
    node.epilog(1)
    assert not list(directory.iterdir())


def test_user_is_told_that_steps_may_share_slices_on_a_node_that_cannot_separate_them(new_node, tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(tmpfs, "mount", refused)
    node = new_node()
    node.prolog(1, "[mig:1g.10gb:2]")
    scontrol_that(node, tmp_path, 'echo "   TresPerNode=gres:mig:$(cat %s)"' % (tmp_path / "count"))
    values = {b"SLURM_JOB_ID": b"1", b"SLURMD_NODENAME": b"n1", b"SLURM_STEP_ID": b"0", b"SLURM_TASK_PID": b"1"}
    for count, told in (("1", True), ("2", False)):
        (tmp_path / "count").write_text(count)
        lines = exports(str(node.etc), values, ALICE).splitlines()
        assert f"export MIGBATCH_SLICES={count}" in lines
        assert any("may get the same:" in line for line in lines if line.startswith("print ")) is told


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("exit 1", "show failed"),
        ("echo TresPerNode=gres:mig:1; exit 1", "show failed"),
        ("echo 'TresPerNode=(null)'", ""),
        ("sleep 60", "did not end within 0.3 s"),
        ("yes", "did not end within 0.3 s"),
    ],
)
def test_step_whose_request_is_not_known_gets_all_slices(node, tmp_path, body, problem):
    node.prolog(1, "[mig:1g.10gb:2]")
    scontrol_that(node, tmp_path, body)
    node.configure(ScontrolPath=tmp_path / "scontrol", ScontrolTimeout=0.3)
    values = {b"SLURM_JOB_ID": b"1", b"SLURMD_NODENAME": b"n1", b"SLURM_STEP_ID": b"0", b"SLURM_TASK_PID": b"1"}
    lines = exports(str(node.etc), values, ALICE).splitlines()
    assert "export MIGBATCH_SLICES=2" in lines
    notices = [line for line in lines if line.startswith("print ")]
    assert [problem in line for line in notices] == ([True] if problem else [])


def components(group: str) -> dict[str, str]:
    """The variables by which Slurm describes jobs 7 on n0 and 8 on n1 as components of one job."""
    return {
        "SLURM_HET_SIZE": "2",
        f"SLURM_JOB_ID_{group}_0": "7",
        f"SLURM_JOB_ID_{group}_1": "8",
        f"SLURM_JOB_NODELIST_{group}_0": "n0",
        f"SLURM_JOB_NODELIST_{group}_1": "n1",
    }


def test_step_of_a_heterogeneous_job_gets_its_components_slices(node):
    """slurmstepd sets the leader's job id in the steps of all components; the node list shows which one it is."""
    node.prolog(8, "[mig:1g.10gb:1]")
    groups = components("HET_GROUP")
    variables = exported(node, 7, SLURM_STEP_ID="1", SLURM_JOB_NODELIST="n1", **groups)
    assert variables["CUDA_VISIBLE_DEVICES"] == node.slices("held")[0].mig_uuid
    assert exported(node, 7, SLURM_STEP_ID="0", SLURM_JOB_NODELIST="n0", **groups) == {}


def test_component_of_a_job_that_srun_allocated_gets_its_slices(node):
    """srun itself names the components in another way, and their nodes together."""
    node.prolog(8, "[mig:1g.10gb:1]")
    groups = components("PACK_GROUP")
    variables = exported(node, 7, SLURM_STEP_ID="0", SLURM_JOB_NODELIST="n[0-1]", SLURM_PROCID="1", **groups)
    assert variables["CUDA_VISIBLE_DEVICES"] == node.slices("held")[0].mig_uuid


@pytest.mark.parametrize("group", ["HET_GROUP", "PACK_GROUP"])
def test_job_that_was_submitted_from_a_heterogeneous_one_gets_its_own_slice(node, group):
    node.prolog(8, "[mig:1g.10gb:1]")
    node.prolog(9, "[mig:2g.20gb:1]")
    assert exported(node, 9, SLURM_JOB_NODELIST="n1", **components(group))["MIGBATCH_PROFILE"] == "2g.20gb"


def test_job_does_not_inherit_the_cpus_of_the_steps_of_the_job_that_submitted_it():
    outer = {b"SLURM_JOB_ID": b"7", b"MIGBATCH_CPUS": b"4", b"SRUN_CPUS_PER_TASK": b"4"}
    assert task_prolog.cpus(outer) == "export MIGBATCH_CPUS=4:7\n"
    step = outer | {b"MIGBATCH_CPUS": b"4:7"}
    assert task_prolog.cpus(step) == ""
    inner = step | {b"SLURM_JOB_ID": b"8"}
    assert task_prolog.cpus(inner).splitlines() == ["unset MIGBATCH_CPUS", "unset SRUN_CPUS_PER_TASK"]
    assert task_prolog.cpus(inner | {b"SRUN_CPUS_PER_TASK": b"8"}) == "unset MIGBATCH_CPUS\n", "the user's own"
    assert task_prolog.cpus({b"SLURM_JOB_ID": b"8", b"SRUN_CPUS_PER_TASK": b"4"}) == ""


def test_variables_inherited_from_another_job_are_unset(node):
    lines = task_prolog.inherited({b"MIGBATCH_DEVICES": b"MIG-a", b"CUDA_VISIBLE_DEVICES": b"MIG-a"})
    assert lines.splitlines() == [f"unset {key}" for key in (*task_prolog.KEYS[1:], "CUDA_VISIBLE_DEVICES")]
    mine = task_prolog.inherited({b"MIGBATCH_DEVICES": b"MIG-a", b"CUDA_VISIBLE_DEVICES": b"0"})
    assert "unset CUDA_VISIBLE_DEVICES" not in mine
    assert task_prolog.inherited({b"CUDA_VISIBLE_DEVICES": b"0"}) == ""
    count = {b"MIGBATCH_DEVICES": b"MIG-a", b"MIGBATCH_JOB_SLICES": b"1", b"SLURM_GPUS_ON_NODE": b"1"}
    assert "unset SLURM_GPUS_ON_NODE" in task_prolog.inherited(count)
    assert "unset SLURM_GPUS_ON_NODE" not in task_prolog.inherited(count | {b"SLURM_JOB_GPUS": b"0"}), "of whole GPUs"


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, ["requeue incomplete 17"]),
        ({"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}, ["requeue incomplete 17_3"]),
        # inherited from the array task that submitted the job
        ({"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}, ["requeue incomplete 17"]),
        ({"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "x"}, ["requeue incomplete 17"]),
        ({"SLURM_JOB_ID": "--help"}, []),
        ({"SLURM_STEP_ID": "0"}, []),
    ],
)
def test_batch_script_without_a_slice_requeues_only_its_own_job(node, environ, asked):
    values = {"SLURM_JOB_ID": "17", "SLURMD_NODENAME": node.name} | environ
    task_prolog.send_back(str(node.etc), {key.encode(): value.encode() for key, value in values.items()})
    assert node.scontrol_calls() == asked


def test_a_task_does_not_wait_for_a_scontrol_that_hangs(node, monkeypatch):
    """scontrol waits as long as slurmctld accepts connections without answering."""
    started = []

    def spawn(*given, **options):
        started.append(os.posix_spawn(*given, **options))
        return started[-1]

    monkeypatch.setattr("posix.posix_spawn", spawn)
    (node.root / "bin/scontrol").write_text("#!/bin/sh\nexec sleep 600\n")
    node.configure(ScontrolTimeout=0.2)
    values = {b"SLURM_JOB_ID": b"17", b"SLURMD_NODENAME": node.name.encode()}
    problem = task_prolog.send_back(str(node.etc), values)
    assert problem.endswith("requeue did not end within 0.2 s; is slurmctld running and not overloaded?")
    (child,) = started
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_missing_scontrol_is_named_in_the_error(node):
    node.configure(ScontrolPath="/nonexistent/scontrol")
    values = {b"SLURM_JOB_ID": b"17", b"SLURMD_NODENAME": node.name.encode()}
    assert task_prolog.send_back(str(node.etc), values) == "/nonexistent/scontrol: No such file or directory"


@pytest.mark.parametrize(("text", "limit"), [("", 10), ("2.5", 2.5), ("0", 0), ("x", 10), ("nan", 10), ("-1", 10)])
def test_invalid_time_limit_is_replaced_by_the_default(text, limit):
    assert task_prolog.seconds(text) == limit
