"""Give an Enroot container the slices of its job, and the job's file for progress reports (a hook of Enroot).

pyxis, Slurm's plugin for Enroot, starts the container before Slurm runs TaskProlog, and TaskProlog runs inside the
container, without this package. It passes on to Enroot, of the environment that srun has sent, only SLURM_JOB_*,
SLURM_STEP_*, NVIDIA_VISIBLE_DEVICES and a few others; the container's environment becomes that of the step's tasks. So
the hand-off is read here. All tasks of a step on a node share the container, which has all slices of the step there;
the program that slurm.conf names as TaskProlog gives each task its share (`install/scripts.py`, `stub`).

Enroot's hooks run as the user in the user namespace of the container, before it has its own root. They append to the
files that ENROOT_ENVIRON and ENROOT_MOUNTS name; in older releases without the latter they call enroot-mount
(doc/configuration.md and conf/hooks of github.com/NVIDIA/enroot). 98-nvidia.sh, which runs later, takes
NVIDIA_VISIBLE_DEVICES from its own environment, or else the last one in ENROOT_ENVIRON.

Imports only built-in modules, as TaskProlog.
"""

from __future__ import annotations

import posix

from slurm_migbatch.node import conf, exits
from slurm_migbatch.node.task_prolog import (
    CONTAINERS,
    KEYS,
    ON_NODE,
    NoSlice,
    device_dir,
    jobs,
    joined,
    load,
    newest,
    not_alone,
    of_step,
    parse,
    read_settings,
    variables,
)

OF_TASK = (*KEYS, ON_NODE, "MIGBATCH_BATCH", "MIGBATCH_COPIES")
"""Variables of a task that a container gets which it starts; the last two are of the submit filter."""

MAX_BYTES = 1 << 20
MAX_TASKS = 4096

NO_GPU = (b"void", b"none", b"")
"""Values of NVIDIA_VISIBLE_DEVICES by which a user wants no device in the container."""

OPTIONS = "none x-create=file,bind,rw,nosuid,nodev,noexec,nofail,silent"
"""Rest of an fstab line of Enroot that mounts a file."""


def main(etc: str) -> None:
    """Write what the container gets, and end the process; not with 0, by which the container does not start, if the job
    has lost its slices or the variables cannot be written.
    """
    environ = dict(posix.environ)
    code, problem = exits.OK, ""
    try:
        values, progress = given(etc, environ, root())
        written = environ.get(b"ENROOT_ENVIRON", b"")
        if values and written:
            append(written, absent(values, content(written)))
        if progress:
            problem = mount(environ, f"{progress} {progress} {OPTIONS}\n")
    except (NoSlice, conf.ConfError, OSError) as error:
        code, problem = exits.NO_SLICE, str(error)
    if problem:
        posix.write(2, f"migbatch: {problem}\n".encode("utf-8", "backslashreplace"))
    posix._exit(code)


def root() -> int:
    """Return the uid of root as this process sees it: in a user namespace without root it is the overflow uid."""
    return posix.stat("/").st_uid


def given(etc: str, environ: dict[bytes, bytes], owner: int) -> tuple[dict[str, str], str]:
    """Return the variables of the container and the job's file for progress reports; both may be empty.

    Args:
        owner: see `root`.

    Raises:
        NoSlice: the job is being requeued.
        conf.ConfError: the host's name is invalid.
    """
    chosen = environ.get(CONTAINERS.encode())
    if b"MIGBATCH_DEVICES" in environ:  # started by a task
        values = {key: environ[key.encode()].decode("utf-8", "replace") for key in OF_TASK if key.encode() in environ}
        if chosen is None:
            values[CONTAINERS] = values["MIGBATCH_DEVICES"]
        return values, values.get("MIGBATCH_PROGRESS", "")
    if not any(job.isdigit() for job in jobs(environ)):
        return {}, ""
    node = conf.node_name(environ | step_node(environ))
    settings = read_settings(etc, node, owner)[0]
    directory = conf.run_dir(settings, node) + "/job"
    name = next((name for job in jobs(environ) if (name := newest(directory, job))), "")
    if not name:
        return {}, ""
    try:
        fields, slices = parse(load(f"{directory}/{name}", owner))
    except PermissionError:
        return {}, ""  # of another user, whose job had this id
    if fields.get("uid") != environ.get(b"SLURM_JOB_UID", b"").decode("ascii", "replace"):
        return {}, ""
    if fields.get("state") != "ready":
        raise NoSlice(f"no GPU slice for this job: {fields.get('reason', 'it is being requeued')}")
    progress = fields.get("progress", "")
    if chosen in NO_GPU or (chosen is not None and chosen.startswith(b"MIG-")):
        return {}, progress
    if environ.get(b"CUDA_VISIBLE_DEVICES") == b"":
        return {KEYS[0]: ""}, progress  # started by a task of a step that requested none
    own, _ = of_step(settings, environ | as_task(environ), progress, slices)
    devices = joined(own)
    by_index = fields.get("cuda") == "index" and not not_alone(fields, slices, device_dir(settings, node))
    visible, form = ("0", "index") if by_index else (devices, "")
    values = variables(own, len(slices), progress, visible, form) | {ON_NODE: str(len(own))}
    return (values if chosen is not None else values | {CONTAINERS: devices}), progress


def step_node(environ: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return SLURMD_NODENAME for a step on one node: pyxis does not pass it on, and the host may have another name."""
    if b"SLURMD_NODENAME" in environ or environ.get(b"SLURM_STEP_NUM_NODES") != b"1":
        return {}
    return {b"SLURMD_NODENAME": environ.get(b"SLURM_STEP_NODELIST", b"")}


def as_task(environ: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return what `of_step` reads of a task's environment and pyxis does not pass on: the process of the first task,
    which has started the container (its first process is ENROOT_PID), and as many ranks as the step has tasks on one of
    its nodes at most (SLURM_STEP_TASKS_PER_NODE, such as `2(x3),1`).
    """
    numbers = [part.partition(b"(")[0] for part in environ.get(b"SLURM_STEP_TASKS_PER_NODE", b"").split(b",")]
    number = max([min(int(tasks[:9]), MAX_TASKS) for tasks in numbers if tasks.isdigit()], default=1)
    return {b"SLURM_TASK_PID": parent(environ.get(b"ENROOT_PID", b"")), b"SLURM_GTIDS": b",".join([b"0"] * number)}


def parent(pid: bytes) -> bytes:
    """Return the parent of a process; empty if it is not known."""
    if not pid.isdigit():
        return b""
    try:
        fields = content(b"/proc/%s/stat" % pid).rpartition(")")[2].split()  # the name before may contain anything
    except OSError:
        return b""
    return fields[1].encode()


def absent(values: dict[str, str], text: str) -> str:
    """Return the lines for ENROOT_ENVIRON; the image and the user (`enroot start --env`) may set all but the devices of
    NVIDIA's tools, which most images set to all.
    """
    names = {line.partition("=")[0] for line in text.splitlines()} - {CONTAINERS}
    return "".join(f"{key}={value}\n" for key, value in values.items() if key not in names)


def content(path: bytes) -> str:
    """Return the beginning of a file as text."""
    handle = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return posix.read(handle, MAX_BYTES).decode("utf-8", "replace")
    finally:
        posix.close(handle)


def append(path: bytes, lines: str) -> None:
    """Append lines to a file of Enroot's."""
    handle = posix.open(path, posix.O_WRONLY | posix.O_APPEND | posix.O_CREAT | posix.O_CLOEXEC, 0o600)
    try:
        posix.write(handle, lines.encode("utf-8", "replace"))
    finally:
        posix.close(handle)


def mount(environ: dict[bytes, bytes], line: str) -> str:
    """Have Enroot mount what an fstab line says, or mount it if this release cannot be told to; return what failed."""
    try:
        if mounts := environ.get(b"ENROOT_MOUNTS"):
            append(mounts, line)
            return ""
        reader, writer = posix.pipe()
        try:
            posix.write(writer, line.encode("utf-8", "replace"))
            posix.close(writer)
            words = [b"enroot-mount", b"--root", environ.get(b"ENROOT_ROOTFS", b"/"), b"-"]
            stdin = [(posix.POSIX_SPAWN_DUP2, reader, 0)]
            child = posix.posix_spawnp("enroot-mount", words, environ, file_actions=stdin)
        finally:
            posix.close(reader)
        posix.waitpid(child, 0)
    except OSError as error:
        return f"{line.partition(' ')[0]} is not in the container: {error}"
    return ""
