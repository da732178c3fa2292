"""Pass its slices to a task (TaskProlog). Runs as the job's user, before the batch script and every task.

Reads the hand-off that root's Prolog left (`handoff.py` has the form) and prints the `export` lines that slurmstepd
puts into the task's environment. This is convenience, not protection: the owner of the capability devices decides what
the user may open. Imports only built-in modules, because it runs once for each task.

Two jobs of one user may share a slice; the driver then time-slices between them. If MpsPartitions= of node.conf
names the job's partition, CUDA gets the directory of an MPS control daemon instead: a directory of the user's
own, one for each slice. The user or the site must start the daemon, outside of both jobs so that it does not end with
either; without one, CUDA time-slices as before (tested on an H100 with MIG off, driver 580).
"""

from __future__ import annotations

import posix
import time

from slurm_migbatch.node import conf, exits

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm's ids of the batch, extern and interactive steps start here (slurm.h, SLURM_BATCH_SCRIPT and others)."""

MAX_BYTES = 65536

MPS = "CUDA_MPS_PIPE_DIRECTORY"
MPS_NAME = "migbatch-mps-"

PER_GPU = ("SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_GPU", "SLURM_NTASKS_PER_GPU")
"""sbatch leaves these of options that the submit filter has converted. srun in the script would request gres/gpu, which
the job does not have.
"""

GPUS = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET")
"""The submit filter, which cannot unset them, writes 0 where slices are granted for GPUs. srun --gpus=0 in the script
means none.
"""

MAX_COMPONENTS = 128
"""Slurm's own limit for heterogeneous jobs (MAX_HET_JOB_COMPS)."""

CPUS, SRUN_CPUS = "MIGBATCH_CPUS", "SRUN_CPUS_PER_TASK"
"""The submit filter sets both to one number where it converts --cpus-per-gpu; TaskProlog adds the job to the first."""

STEP_GRES = "MIGBATCH_STEP_GRES"
"""Set to `none` by the cli_filter for srun --gres=none, which Slurm does not pass to a task."""

KEYS = (
    "CUDA_VISIBLE_DEVICES",
    "MIGBATCH_DEVICES",
    "MIGBATCH_SLICES",
    "MIGBATCH_PROFILE",
    "MIGBATCH_MEMORY_MIB",
    "MIGBATCH_JOB_SLICES",
    "MIGBATCH_PROGRESS",
    "MIGBATCH_CUDA",
)

CONTAINERS = "NVIDIA_VISIBLE_DEVICES"
"""The devices that NVIDIA's container tools (nvidia-container-runtime, Enroot's hook) give a container."""

ON_NODE = "SLURM_GPUS_ON_NODE"
"""Set by Slurm in jobs with gres/gpu; scripts for GPUs start as many processes (`torchrun --nproc_per_node`)."""

SCONTROL_S = 10.0
"""ScontrolTimeout= of node.conf, unless the node has its own."""

SIGKILL = 9

CAP = "nvidia-cap"
"""Prefix of the names of capability devices."""


class NoSlice(Exception):
    """The task must not run; the message is for the job's user."""


def main(etc: str) -> None:
    """Print the task's exports and end the process. For a job without a hand-off, print nothing and exit with 0."""
    code, out, err = exits.OK, "", ""
    environ = dict(posix.environ)
    try:
        out = exports(etc, environ, posix.getuid()) + cpus(environ)
    except NoSlice as refusal:
        lines = [str(refusal)]
        if problem := send_back(etc, environ):
            lines.append(f"the job was not requeued: {problem}")
        out, err = ("".join(f"{head}migbatch: {text}\n" for text in lines) for head in ("print ", ""))
        code = exits.NO_SLICE
    except Exception as error:
        code, err = exits.NO_SLICE, f"migbatch: TaskProlog failed: {type(error).__name__}: {error}\n"
    for stream, text in ((1, out), (2, err)):
        if text:
            posix.write(stream, text.encode("utf-8", "backslashreplace"))
    posix._exit(code)


def exports(etc: str, environ: dict[bytes, bytes], uid: int) -> str:
    """Return the lines for slurmstepd; empty for a job without slices. Raises NoSlice."""
    node = conf.node_name(environ)
    settings, problem = read_settings(etc, node)
    directory = conf.run_dir(settings, node) + "/job"
    name = next((name for job in jobs(environ) if (name := newest(directory, job))), "")
    if not name:
        if problem and b"MIGBATCH_DEVICES" in environ:  # perhaps its own: the hand-off may be in another RunDir
            raise NoSlice(problem)
        return inherited(environ)
    try:
        fields, slices = parse(load(f"{directory}/{name}"))
    except PermissionError:
        return inherited(environ)  # a hand-off of another user, whose job had this id
    if fields.get("uid") != str(uid):
        return inherited(environ)
    if fields.get("state") != "ready":
        raise NoSlice(f"no GPU slice for this job: {fields.get('reason', 'it is being requeued')}")
    if environ.get(STEP_GRES.encode()) == b"none" and in_step(environ):
        return without(environ)
    step_slices, notice = of_step(settings, environ, fields.get("progress", ""), slices)
    task_slices = share(step_slices, environ)
    devices = visible = joined(task_slices)
    if fields.get("cuda") == "index":
        why = not_alone(fields, slices, device_dir(settings, node))
        visible, notice = (devices, notice + uuid_notice(why, environ)) if why else ("0", notice)
    form = "index" if visible != devices else ""
    values = variables(task_slices, len(slices), fields.get("progress", ""), visible, form)
    lines = "".join(f"export {key}={value}\n" for key, value in values.items())
    lines += f"export {ON_NODE}={len(step_slices)}\n" + containers(environ, devices)
    if not form and b"MIGBATCH_CUDA" in environ:
        lines += "unset MIGBATCH_CUDA\n"
    stale = [name for name in (*PER_GPU, STEP_GRES) if name.encode() in environ]
    stale += [name for name in GPUS if environ.get(name.encode()) == b"0"]
    lines += "".join(f"unset {name}\n" for name in stale)
    return notice + lines + mps(settings, environ, uid, slices)


def joined(slices: list[list[str]]) -> str:
    """Return the UUIDs of slices, separated by commas."""
    return ",".join(mig_slice[0] for mig_slice in slices)


def variables(slices: list[list[str]], total: int, progress: str, visible: str, form: str = "") -> dict[str, str]:
    """Return the variables of KEYS, those without a value left out, for a task or container that has these slices.

    Args:
        total: number of slices of the job on this node.
        progress: file for its own reports; may be empty.
        visible: CUDA_VISIBLE_DEVICES.
        form: MIGBATCH_CUDA.
    """
    profiles = ",".join(mig_slice[1] for mig_slice in slices)
    memory = str(min(int(mig_slice[2]) for mig_slice in slices))
    values = (visible, joined(slices), str(len(slices)), profiles, memory, str(total), progress, form)
    return {key: value for key, value in zip(KEYS, values, strict=True) if value}


def read_settings(etc: str, node: str, owner: int = 0) -> tuple[dict[str, str], str]:
    """Return the settings of node.conf; none, and why, if it is invalid. `owner`: root as this process sees it.

    Prolog and Epilog refuse it and so drain the node; tasks of the running jobs, most of them without slices, go on.
    """
    try:
        settings = conf.read(f"{etc}/{conf.NAME}", node, owner)
        conf.run_dir(settings, node)
    except conf.ConfError as error:
        return {}, str(error)
    return settings, ""


def device_dir(settings: dict[str, str], node: str) -> str:
    """Return the directory of the devices."""
    return settings.get("DevRoot", "/dev").replace("%n", node)


def not_alone(fields: dict[str, str], slices: list[list[str]], dev: str) -> str:
    """Return why index 0 may be another device than the job's slice, as a sentence; empty if it is unambiguous.

    CUDA counts the devices that it may open: GPUs without MIG, and the first slice of a GPU whose capability devices it
    may open. So the job must have one slice on this node, and be excluded (by the owner of the devices, or by the
    cgroup) from every other slice; another job of the same user on this node has one too. This is checked when a task
    starts: if such a job starts later, programs that this one starts from then on may get the other slice.
    """
    if len(slices) > 1:
        return f"the job has {len(slices)} slices on this node, and every task would use the first"
    own = fields.get("caps", "").split()
    if len(own) != 2:
        return "the node does not know the capability devices of the slice"
    if any(can_open(f"{dev}/nvidia{minor}") for minor in fields.get("whole", "").split()):
        return "the job can also open a GPU with MIG disabled on this node"
    for name in posix.listdir(f"{dev}/nvidia-caps"):
        minor = name.removeprefix(CAP)
        # other names are not capabilities of slices; the first two control and monitor MIG (NVIDIA MIG user guide,
        # device nodes)
        if name == minor or minor in own or minor in ("1", "2"):
            continue
        if can_open(f"{dev}/nvidia-caps/{name}"):
            return "the job can also open another slice of this node, for example that of another job of yours"
    return ""


def can_open(path: str) -> bool:
    """Return whether this process may open a device, with or without a driver; limits by a cgroup only show on open."""
    try:
        posix.close(posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK))
    except (PermissionError, FileNotFoundError):
        return False
    except OSError:
        return True
    return True


def uuid_notice(why: str, environ: dict[bytes, bytes]) -> str:
    """Return the line that tells the user, once for each step, why UUIDs are used."""
    if _number(environ, b"SLURM_PROCID", 0):
        return ""
    return f"print migbatch: cuda=index cannot be used, CUDA_VISIBLE_DEVICES has UUIDs: {why}\n"


def jobs(environ: dict[bytes, bytes]) -> list[str]:
    """Return the job ids under which the task's hand-off may be found, the most likely first.

    In steps of a heterogeneous job SLURM_JOB_ID is the leader's on every node (seen on 22.05). A step runs in the
    component whose nodes are the step's; in a step over several components the ranks are numbered through all of them.
    srun that allocates such a job itself names its components by the older PACK_GROUP (seen on 24.11). A job
    that was submitted from one inherits all these variables, and is none of the components.
    """
    own = environ.get(b"SLURM_JOB_ID", b"")
    size = min(_number(environ, b"SLURM_HET_SIZE", 0), MAX_COMPONENTS)
    for group in (b"HET_GROUP", b"PACK_GROUP"):
        ids = [environ.get(b"SLURM_JOB_ID_%s_%d" % (group, i), b"") for i in range(size)]
        if own in ids:
            break
    else:
        size, ids = 0, []
    nodes = [environ.get(b"SLURM_JOB_NODELIST_%s_%d" % (group, i)) for i in range(size)]
    candidates = [
        job for job, job_nodes in zip(ids, nodes, strict=True) if job_nodes == environ.get(b"SLURM_JOB_NODELIST")
    ]
    if size and not candidates:
        rank = _number(environ, b"SLURM_PROCID", 0)
        for i, job in enumerate(ids):
            rank -= _number(environ, b"SLURM_NTASKS_%s_%d" % (group, i), 1)
            if rank < 0:
                candidates.append(job)
                break
        candidates += ids
    return [job.decode("ascii") for job in candidates or [own] if job.isdigit()]


def inherited(environ: dict[bytes, bytes]) -> str:
    """Return lines that unset another job's slices, because sbatch and srun pass on their environment, and srun's own
    --gres=none, which a job that is submitted from this step would inherit.
    """
    lines = [f"unset {STEP_GRES}\n"] if STEP_GRES.encode() in environ else []
    devices = environ.get(b"MIGBATCH_DEVICES")
    if devices is None:
        return "".join(lines)
    lines += [f"unset {key}\n" for key in KEYS if key != "CUDA_VISIBLE_DEVICES"]
    lines += [f"unset {CONTAINERS}\n"] if environ.get(CONTAINERS.encode()) == devices else []
    own_value = b"0" if environ.get(b"MIGBATCH_CUDA") == b"index" else devices
    if environ.get(b"CUDA_VISIBLE_DEVICES") == own_value:
        lines.append("unset CUDA_VISIBLE_DEVICES\n")
    has_gpus = b"SLURM_JOB_GPUS" in environ or b"SLURM_STEP_GPUS" in environ
    if not has_gpus and 0 < _number(environ, ON_NODE.encode(), 0) <= _number(environ, b"MIGBATCH_JOB_SLICES", 0):
        lines.append(f"unset {ON_NODE}\n")
    return "".join(lines)


def cpus(environ: dict[bytes, bytes]) -> str:
    """Return the lines by which a job claims the CPUs per task that the submit filter wrote for its steps, or loses
    those that it inherits from the job that submitted it: srun of 22.05 would use them for every step.
    """
    own = environ.get(b"SLURM_JOB_ID", b"")
    number, _, job = environ.get(CPUS.encode(), b"").partition(b":")
    if not number.isdigit() or not own.isdigit() or job == own:
        return ""
    if not job:
        return f"export {CPUS}={number.decode()}:{own.decode()}\n"
    stale = environ.get(SRUN_CPUS.encode()) == number
    return "".join(f"unset {name}\n" for name in ([CPUS, SRUN_CPUS] if stale else [CPUS]))


def containers(environ: dict[bytes, bytes], devices: str) -> str:
    """Return the line that gives the container of a task (`srun --container`) its slices, unless the user or the site
    chose others of its devices. Most images choose all, and Slurm adds the environment of the image before TaskProlog.

    Other tasks do not get it: jobs that they submit would inherit it, and on nodes without migbatch containers with
    unknown devices do not start. Enroot's containers get it from a hook (`enroot.py`).
    """
    chosen = environ.get(CONTAINERS.encode())
    if b"SLURM_CONTAINER" not in environ or chosen not in (None, b"all", environ.get(b"MIGBATCH_DEVICES")):
        return ""
    return f"export {CONTAINERS}={devices}\n"


def without(environ: dict[bytes, bytes]) -> str:
    """Return the lines for a step that requested no slice; it may still report progress and start steps with slices."""
    unset = [key for key in KEYS if key not in ("CUDA_VISIBLE_DEVICES", "MIGBATCH_PROGRESS")]
    if b"MIGBATCH_DEVICES" in environ and environ.get(CONTAINERS.encode()) == environ[b"MIGBATCH_DEVICES"]:
        unset.append(CONTAINERS)
    return "export CUDA_VISIBLE_DEVICES=\n" + "".join(f"unset {key}\n" for key in (*unset, ON_NODE, STEP_GRES))


def mps(settings: dict[str, str], environ: dict[bytes, bytes], uid: int, slices: list[list[str]]) -> str:
    """Return the MPS lines for a job that may share its only slice; unset those of an earlier job's environment."""
    above = (settings.get("MpsDir") or "/tmp").rstrip("/")  # noqa: S108
    partitions = [name.strip() for name in settings.get("MpsPartitions", "").split(",") if name.strip()]
    if len(slices) == 1 and environ.get(b"SLURM_JOB_PARTITION", b"").decode("ascii", "replace") in partitions:
        path = f"{above}/{MPS_NAME}{uid}-{slices[0][0]}"
        if is_private(path, uid):
            percent = settings.get("MpsPercent", "0")
            lines = f"export {MPS}={path}\nexport CUDA_MPS_LOG_DIRECTORY={path}\n"
            if percent.isdigit() and 0 < int(percent) <= 100:
                lines += f"export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percent}\n"
            return lines
    stale = environ.get(MPS.encode(), b"").startswith(f"{above}/{MPS_NAME}".encode())
    return f"unset {MPS}\nunset CUDA_MPS_LOG_DIRECTORY\n" if stale else ""


def is_private(path: str, uid: int) -> bool:
    """Create a directory at `path` if needed; return whether it belongs to the user and nobody else can enter.

    In a directory that all may write another user may have created it before.
    """
    try:
        try:  # noqa: SIM105  (contextlib is slow to import)
            posix.mkdir(path, 0o700)
        except FileExistsError:
            pass
        status = posix.lstat(path)
    except OSError:
        return False
    return status.st_mode & 0o170000 == 0o040000 and status.st_uid == uid and not status.st_mode & 0o077


def send_back(etc: str, environ: dict[bytes, bytes]) -> str:
    """Requeue the job whose batch script must not run; as the user, who may requeue a batch job.

    The array task that started last has the array's own id, by which all tasks would be requeued. Returns why scontrol
    could not be run, or that it did not end: then the task fails, which is acceptable too.
    """
    if in_step(environ):
        return ""
    job, task = environ.get(b"SLURM_JOB_ID", b""), environ.get(b"SLURM_ARRAY_TASK_ID", b"")
    if not job.isdigit():
        return ""
    if environ.get(b"SLURM_ARRAY_JOB_ID") == job and task.isdigit():
        job += b"_" + task
    settings, _ = read_settings(etc, conf.node_name(environ))
    return scontrol(settings, environ, ["requeue", "incomplete", job.decode("ascii")])[1]


def scontrol(settings: dict[str, str], environ: dict[bytes, bytes], arguments: list[str]) -> tuple[str, str]:
    """Run scontrol as the user. Return its output, and why it could not be run, failed or did not end: then none."""
    program = settings.get("ScontrolPath") or "/usr/bin/scontrol"
    child_environ = {key: value for key, value in environ.items() if key == b"SLURM_CONF"}
    if settings.get("SlurmConf"):
        child_environ[b"SLURM_CONF"] = settings["SlurmConf"].encode()
    child_environ |= {b"PATH": b"/usr/bin:/bin", b"SCONTROL_LOCAL": b"1"}  # without a query for the federation
    reader, writer = posix.pipe()
    try:
        child = posix.posix_spawn(
            program, [program, *arguments], child_environ, file_actions=[(posix.POSIX_SPAWN_DUP2, writer, 1)]
        )
    except OSError as error:
        posix.close(reader)
        return "", f"{program}: {error.strerror}"
    finally:
        posix.close(writer)
    posix.set_blocking(reader, False)
    limit = seconds(settings.get("ScontrolTimeout", ""))
    end, pause, output = time.monotonic() + limit, 0.001, b""
    while not (ended := posix.waitpid(child, posix.WNOHANG))[0]:
        output += _available(reader)
        if time.monotonic() >= end:
            posix.kill(child, SIGKILL)  # not waited for: init does that
            posix.close(reader)
            return (
                "",
                f"{program} {arguments[0]} did not end within {limit:g} s; is slurmctld running and not overloaded?",
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    output += _available(reader)
    posix.close(reader)
    if ended[1]:
        return "", f"{program} {arguments[0]} failed"
    return output.decode("utf-8", "replace"), ""


def _available(reader: int) -> bytes:
    """Return what can be read from a pipe without waiting."""
    try:
        return posix.read(reader, MAX_BYTES)
    except BlockingIOError:
        return b""


def seconds(text: str) -> float:
    """Parse a time of node.conf; SCONTROL_S if it is invalid, which the agent and the other hooks refuse."""
    try:
        value = float(text)
    except ValueError:
        return SCONTROL_S
    return value if 0 <= value <= 86400 else SCONTROL_S


def newest(directory: str, job: str) -> str:
    """Return the path of the hand-off of the job's latest run; a task's own restart count is not reliable."""
    best_restart, best_name = -1, ""
    try:
        names = posix.listdir(directory)
    except FileNotFoundError:
        return ""
    for name in names:
        head, dot, tail = name.partition(".")
        if head == job and dot and tail.isdigit() and int(tail) > best_restart:
            best_restart, best_name = int(tail), name
    return best_name


def load(path: str, owner: int = 0) -> str:
    """Read a hand-off's text; only a file that root owns is trusted. `owner`: root as this process sees it."""
    handle = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NOFOLLOW)
    try:
        status = posix.fstat(handle)
        if status.st_uid != owner or status.st_mode & 0o022:
            raise NoSlice(f"{path} was not written by root; inform the administrators")
        return posix.read(handle, MAX_BYTES).decode("utf-8", "replace")
    finally:
        posix.close(handle)


def parse(text: str) -> tuple[dict[str, str], list[list[str]]]:
    """Parse fields and slices (`[MIG UUID, profile, MiB, GPU UUID]` each) of a hand-off. Raises NoSlice."""
    fields: dict[str, str] = {}
    slices: list[list[str]] = []
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "slice":
            slices.append(value.split())
        else:
            fields[key] = value
    if fields.get("version") != "1" or any(len(mig_slice) != 4 for mig_slice in slices):
        raise NoSlice("the node's hand-off has an unsupported format; install the same release everywhere")
    if fields.get("state") == "ready" and not slices:
        raise NoSlice("the node's hand-off has no slice")
    return fields, slices


def share(slices: list[list[str]], environ: dict[bytes, bytes]) -> list[list[str]]:
    """Return those of the slices of the job on this node, or of its step, that this task sees.

    The batch script and an interactive shell see all. Of t tasks of a step on this node and n slices, task i sees its
    equal, contiguous share if t <= n, and slice i modulo n if there are more tasks than slices. The tasks of this node
    are in SLURM_GTIDS; in a step over several components SLURM_NODEID is no index of SLURM_STEP_TASKS_PER_NODE.
    """
    if not in_step(environ):
        return slices
    total = len(slices)
    local, tasks = _number(environ, b"SLURM_LOCALID", 0), _tasks(environ)
    if tasks >= total:
        return [slices[local % total]]
    return slices[local * total // tasks : (local + 1) * total // tasks]


def of_step(
    settings: dict[str, str], environ: dict[bytes, bytes], progress: str, slices: list[list[str]]
) -> tuple[list[list[str]], str]:
    """Return the slices of the task's step among those of its job on this node, and a line for the user.

    The batch script has all, and so has a step of a heterogeneous job: scontrol knows it by the id of a component.
    """
    if len(slices) < 2 or not in_step(environ) or b"SLURM_HET_SIZE" in environ:
        return slices, ""
    from slurm_migbatch.node import step_slices

    job, pid = (environ.get(key, b"").decode("ascii", "replace") for key in (b"SLURM_JOB_ID", b"SLURM_TASK_PID"))
    step = _number(environ, b"SLURM_STEP_ID", 0)
    path = progress + step_slices.SUFFIX if progress and pid.isdigit() else ""
    problem = ""

    def request() -> list[tuple[str, int]]:
        nonlocal problem
        text, problem = scontrol(settings, environ, ["show", "step", f"{job}.{step}"])
        return step_slices.requested(text, step, _tasks(environ))

    limit = seconds(settings.get("ScontrolTimeout", ""))
    chosen = step_slices.of_step(path, step, pid, slices, request, limit)
    if len(chosen) < len(slices) and not (path and posix.access(path, posix.R_OK | posix.W_OK)):
        notice = "this node cannot tell which slices other steps of the job have, so steps that run at once may get "
        notice += "the same: run them one after the other, or ask the administrator to run migbatch node init there"
        return chosen, f"print migbatch: {notice}\n"
    if not problem:
        return chosen, ""
    return chosen, f"print migbatch: this step sees all slices of its job, what it requested is not known: {problem}\n"


def in_step(environ: dict[bytes, bytes]) -> bool:
    """Return whether the task is one of srun's, not the batch script or an interactive shell."""
    return _number(environ, b"SLURM_STEP_ID", FIRST_SPECIAL_STEP) < FIRST_SPECIAL_STEP


def _tasks(environ: dict[bytes, bytes]) -> int:
    """Return the number of the step's tasks on this node."""
    return max(environ.get(b"SLURM_GTIDS", b"").count(b",") + 1, _number(environ, b"SLURM_LOCALID", 0) + 1)


def _number(environ: dict[bytes, bytes], key: bytes, default: int) -> int:
    text = environ.get(key, b"")
    return int(text) if text.isdigit() and len(text) <= 10 else default
