"""Columns of run reports: width, description, required stored fields, and rendering of a cell.

A query fetches exactly the fields that the shown columns declare (`run`, `slice`).
"""

from __future__ import annotations

from slurm_migbatch.report.units import figure, joules
from slurm_migbatch.slurm.nodelist import fold
from slurm_migbatch.slurm.times import format_duration
from slurm_migbatch.values import TYPE_CHECKING, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    #: a row of a query, with the requested fields as attributes
    Fields = Any
    RunCell = Callable[[Fields, Sequence[Fields], "Context"], str]
    SliceCell = Callable[[Fields, int, "Context"], str]


class Context(Value):
    """Inputs of cells besides their row: the current time and the user's formats.

    Attributes:
        wholes: compute and memory slices of the whole GPU, by UUID; GPUs not listed have the usual numbers.
        cluster: Slurm's name of the cluster.
        group: returns the name of a group by its number.
    """

    now: float
    moment: Callable[[float | None], str]
    size: Callable[[float | None], str]
    wholes: Mapping[str, tuple[int, int]] = {}
    cluster: str = ""
    group: Callable[[int], str] = str


class Column(Value):
    """One column. A negative width means left-justified, as in `%-20`.

    Attributes:
        run: fields of the run that `cell` and `slice_cell` read (store.queries.RUN_FIELDS).
        slice: fields of its slices likewise (SLICE_FIELDS), which rows have as slice_<name>.
        slice_cell: the cell in the line of one slice, from its row and number; blank if None.
    """

    name: str
    width: int
    doc: str
    run: tuple[str, ...]
    cell: RunCell
    slice: tuple[str, ...] = ()
    slice_cell: SliceCell | None = None


def _text(name: str) -> RunCell:
    def cell(run: Fields, _slices: Sequence[Fields], _context: Context) -> str:
        value = getattr(run, name)
        return "" if value is None else str(value)

    return cell


def _slice_text(name: str) -> SliceCell:
    def cell(mig_slice: Fields, _number: int, _context: Context) -> str:
        value = getattr(mig_slice, f"slice_{name}")
        return "" if value is None else str(value)

    return cell


def _all_slices(cell_of: SliceCell) -> RunCell:
    """Return a cell with the field of every slice, separated by commas, without duplicates."""

    def cell(_run: Fields, slices: Sequence[Fields], context: Context) -> str:
        if len(slices) == 1:
            return cell_of(slices[0], 0, context)
        return ",".join(dict.fromkeys(cell_of(mig_slice, number, context) for number, mig_slice in enumerate(slices)))

    return cell


def _figure(name: str, unit: str) -> RunCell:
    return lambda run, slices, context: figure(getattr(run, name), unit)


def _memory(name: str) -> RunCell:
    return lambda run, slices, context: context.size(getattr(run, name))


def _figures(kind: str) -> RunCell:
    def cell(run: Fields, _slices: Sequence[Fields], context: Context) -> str:
        figures = (
            figure(getattr(run, f"{kind}_latency_ms"), "ms"),
            figure(getattr(run, f"{kind}_throughput_per_s"), "/s"),
            context.size(getattr(run, f"{kind}_memory_mib")),
        )
        return ",".join(filter(None, figures))

    return cell


def _busy(name: str) -> RunCell:
    return lambda run, slices, context: "" if (share := busy(run, name)) is None else f"{share:.0%}"


def busy(run: Fields, name: str) -> float | None:
    """Return the average share of "sm", "tensor" or "dram" in use, 0 to 1; None if unknown."""
    share = run.measured_facts.get(name) if isinstance(run.measured_facts, dict) else None
    return share if isinstance(share, float) else None


def energy_j(run: Fields) -> float | None:
    """Return the joules of a run's GPUs; None if unknown."""
    joules = run.measured_facts.get("energy_j") if isinstance(run.measured_facts, dict) else None
    return float(joules) if isinstance(joules, int | float) else None


def _moment(name: str) -> RunCell:
    return lambda run, slices, context: context.moment(getattr(run, name))


def job_id(run: Fields) -> str:
    """Return a run's job id as Slurm writes it: 12, 12_3, 12_[4-9], 12+1."""
    if run.array_job is not None and run.array_task:
        task = run.array_task
        return f"{run.array_job}_{task}" if task.isdigit() else f"{run.array_job}_[{task}]"
    if run.het_job is not None and run.het_offset is not None:
        return f"{run.het_job}+{run.het_offset}"
    return str(run.job_id)


def elapsed_s(run: Fields, now: float) -> float:
    """Return the seconds from start to end, or to now."""
    if run.started is None:
        return 0.0
    return max(0.0, float((now if run.ended is None else run.ended) - run.started))


def queue_wait_s(run: Fields, now: float) -> float | None:
    """Return the seconds from submission to start, or to the end of a run that never started, or to now.

    None if the submission is unknown.
    """
    if run.submitted is None:
        return None
    until = next((moment for moment in (run.started, run.ended) if moment is not None), now)
    return max(0.0, float(until - run.submitted))


def held_until(mig_slice: Fields) -> float | None:
    """Return when a slice was released; None while it is held.

    A node that died reports no release, and a loss only once it boots again: such a slice was held until its run ended.
    """
    until, ended = mig_slice.slice_until, mig_slice.ended
    if ended is None or (until is not None and mig_slice.slice_outcome != "lost"):
        return None if until is None else float(until)
    return float(ended if until is None else min(until, ended))


def _slice_elapsed_s(mig_slice: Fields, now: float) -> float | None:
    if mig_slice.slice_since is None:
        return None
    until = held_until(mig_slice)
    return max(0.0, float((now if until is None else until) - mig_slice.slice_since))


def slice_hours(mig_slice: Fields, now: float) -> float | None:
    """Return the hours for which a slice was held, until now if it still is; None if it was never allocated."""
    seconds = _slice_elapsed_s(mig_slice, now)
    return None if seconds is None else seconds / 3600


def gpu_hours(mig_slice: Fields, now: float, wholes: Mapping[str, tuple[int, int]]) -> float | None:
    """Return the hours for which a slice was held, in whole GPUs; see `equivalents.gpu_equivalent`."""
    from slurm_migbatch.report.equivalents import WHOLE, gpu_equivalent

    hours = slice_hours(mig_slice, now)
    whole = wholes.get(mig_slice.slice_gpu, WHOLE)
    return None if hours is None else hours * gpu_equivalent(mig_slice.slice_profile, mig_slice.slice_slot_size, whole)


def hours_of(slices: Sequence[Fields], hours: Callable[[Fields], float | None]) -> float | None:
    """Return the sum of the slices' hours; None if there are none."""
    known = [value for value in map(hours, slices) if value is not None]
    return sum(known) if known else None


def retyped(run: Fields) -> str:
    """Format how a pending job's profile changed, `1g.10gb>2g.20gb`; empty if it did not."""
    before, after = run.retyped_before, run.retyped_after
    return f"{before}>{after}" if before and after and before != after else ""


def exit_code(run: Fields) -> str:
    """Format `code:signal` as sacct does; 0:0 if unknown."""
    return f"{run.exit_code or 0}:{run.signal or 0}"


def place(mig_slice: Fields) -> str:
    """Format a slice's position as `node:gpu@start:size`; a GPU of unknown index is named by its UUID."""
    gpu = mig_slice.slice_gpu if mig_slice.slice_gpu_index is None else mig_slice.slice_gpu_index
    return f"{mig_slice.slice_node}:{gpu}@{mig_slice.slice_slot_start}:{mig_slice.slice_slot_size}"


def asked(run: Fields) -> str:
    """Return the requested slices, without other options: `mig:auto`, `--gpus=2`."""
    first = (run.asked or "").split(" ", 1)[0].removeprefix("--gres=")
    return first.removeprefix("gres:").removeprefix("gres/")


def prediction_error(run: Fields) -> float | None:
    """Return measured over predicted throughput, minus 1; None if one of them is unknown.

    Predicted is per slice, measured for the whole run.
    """
    predicted = (run.predicted_throughput_per_s or 0.0) * (run.slice_count or 0)
    if run.measured_throughput_per_s is None or predicted <= 0:
        return None
    return float(run.measured_throughput_per_s / predicted - 1)


def percentage(share: float | None) -> str:
    """Format a share as `+12%`, `-3.5%`."""
    return "" if share is None else f"{share:+.0%}" if abs(share) >= 0.0995 else f"{share:+.1%}"


def measured_by(facts: Any) -> list[str]:
    """Return the sources of measured figures, from `Run.measured_facts`."""
    sources = facts.get("by") if isinstance(facts, dict) else None
    return sorted({str(who) for who in sources.values()}) if isinstance(sources, dict) else []


def _limit(run: Fields, text: Callable[[int], str]) -> str:
    """Return a run's time limit; empty before its start, when Slurm may not have set it, or if Slurm reported none."""
    if run.time_limit_s is None:
        return "UNLIMITED" if run.submitted is not None and run.started is not None else ""
    return text(run.time_limit_s)


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


def _hours(hours: float | None) -> str:
    return "" if hours is None else f"{hours:.2f}"


def _whole(seconds: float | None) -> str:
    return "" if seconds is None else str(int(seconds))


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


_ID = ("job_id", "array_job", "array_task", "het_job", "het_offset")
_SPAN = ("started", "ended")
#: of a slice, with "ended" of its run
_HELD = ("since", "until", "outcome")
_WAIT = ("submitted", "started", "ended")
_LIMIT = ("time_limit_s", "submitted", "started")
_PLACE = ("node", "gpu", "gpu_index", "slot_start", "slot_size")


def _place_cell(mig_slice: Fields, _number: int, _context: Context) -> str:
    return place(mig_slice)


RETYPED = ("retyped_before", "retyped_after")
_SPEED = ("predicted_throughput_per_s", "measured_throughput_per_s", "slice_count")

COLUMNS: tuple[Column, ...] = (
    Column(
        "JobID", -12, "Job id: 12, 12_3 (array task), 12+1 (component); 12.s0 is its first slice.", _ID,
        lambda run, slices, context: job_id(run),
        slice_cell=lambda mig_slice, number, context: f"{job_id(mig_slice)}.s{number}",
    ),
    Column(
        "JobIDRaw", -12, "Job id as a plain number.", ("job_id",), _text("job_id"),
        slice_cell=lambda mig_slice, number, context: f"{mig_slice.job_id}.s{number}",
    ),
    Column("JobName", 10, "Name of the job.", ("name",), _text("name")),
    Column("User", 8, "User who submitted it.", ("user", "uid"), lambda run, slices, context: _user(run)),
    Column("UID", 6, "Numeric id of the user.", ("uid",), _text("uid")),
    Column("Account", 10, "Slurm account it is charged to.", ("account",), _text("account")),
    Column("Partition", 9, "Partition it ran in, or can run in while pending.", ("partition",), _text("partition")),
    Column("QOS", 10, "Quality of service of the job.", ("qos",), _text("qos")),
    Column("GID", 6, "Numeric id of its group.", ("gid",), _text("gid")),
    Column("Group", 9, "Its group.", ("gid",), lambda run, slices, context: _group(run, context)),
    Column("WCKey", 10, "Its wckey; a star marks the user's default.", ("wckey",), _text("wckey")),
    Column("Cluster", 10, "Slurm's name of the cluster.", (), lambda run, slices, context: context.cluster,
           slice_cell=lambda mig_slice, number, context: context.cluster),
    Column("Comment", 14, "Comment set by the user.", ("comment",), _text("comment")),
    Column("Asked", 13, "Requested slices (--gres, --gpus).", ("asked",),
           lambda run, slices, context: asked(run)),
    Column("Request", -40, "The request with its hints, as the options were given.", ("asked",), _text("asked")),
    Column("Bucket", 18, "Bucket assigned by the submit filter.", ("bucket",), _text("bucket")),
    Column(
        "Profile", 9, "Allocated MIG profile; profile:n for n of them.", ("profile",), _text("profile"),
        ("profile",), _slice_text("profile"),
    ),
    Column(
        "Retyped", -24, "Profiles before and after a re-type: 1g.10gb>2g.20gb.",
        RETYPED, lambda run, slices, context: retyped(run),
    ),
    Column("RetypedWhy", -60, "Reason of the re-type.", (*RETYPED, "retyped_why"),
           lambda run, slices, context: run.retyped_why or "" if retyped(run) else ""),
    Column("Slices", 6, "Number of allocated slices.", ("slice_count",), _text("slice_count")),
    Column(
        "Placement", 14, "Placements of its slices: node:gpu@start:size, start and size in memory slices.", (),
        _all_slices(_place_cell), _PLACE, _place_cell,
    ),
    Column(
        "NodeList", 12, "Nodes it ran on: n[1-4].", ("nodes",),
        lambda run, slices, context: fold((run.nodes or "").split(",")), ("node",), _slice_text("node"),
    ),
    Column("GPU", -40, "UUIDs of its GPUs.", (), _all_slices(_slice_text("gpu")), ("gpu",), _slice_text("gpu")),
    Column(
        "MigUUID", -40, "UUIDs of its slices, as in CUDA_VISIBLE_DEVICES.", (),
        _all_slices(_slice_text("mig_uuid")), ("mig_uuid",), _slice_text("mig_uuid"),
    ),
    Column("State", 10, "State of the job.", ("state",), _text("state"),
           slice_cell=lambda mig_slice, number, context: mig_slice.state),
    Column(
        "ExitCode", 8, "Exit code and signal.", ("exit_code", "signal"),
        lambda run, slices, context: exit_code(run), slice_cell=lambda mig_slice, number, context: exit_code(mig_slice),
    ),
    Column(
        "Elapsed", 10, "Run time of the job, or time a slice was held: [D-]HH:MM:SS.", _SPAN,
        lambda run, slices, context: format_duration(elapsed_s(run, context.now)),
        _HELD, lambda mig_slice, number, context: _duration(_slice_elapsed_s(mig_slice, context.now)),
    ),
    Column(
        "ElapsedRaw", 10, "The same in seconds.", _SPAN,
        lambda run, slices, context: str(int(elapsed_s(run, context.now))),
        _HELD, lambda mig_slice, number, context: _whole(_slice_elapsed_s(mig_slice, context.now)),
    ),
    Column("Submit", 19, "Submission time.", ("submitted",), _moment("submitted")),
    Column(
        "Start", 19, "Start time, or time a slice was allocated.", ("started",), _moment("started"),
        ("since",), lambda mig_slice, number, context: context.moment(mig_slice.slice_since),
    ),
    Column(
        "End", 19, "End time, or time a slice was released.", ("ended",), _moment("ended"),
        ("until", "outcome"), lambda mig_slice, number, context: context.moment(held_until(mig_slice)),
    ),
    Column(
        "QueueWait", 10, "Time from submission to start: [D-]HH:MM:SS.", _WAIT,
        lambda run, slices, context: _duration(queue_wait_s(run, context.now)),
    ),
    Column(
        "QueueWaitRaw", 12, "The same in seconds.", _WAIT,
        lambda run, slices, context: _whole(queue_wait_s(run, context.now)),
    ),
    Column(
        "Timelimit", 10, "Its time limit, or UNLIMITED.", _LIMIT,
        lambda run, slices, context: _limit(run, _duration),
    ),
    Column(
        "TimelimitRaw", 12, "The same in minutes.", _LIMIT,
        lambda run, slices, context: _limit(run, lambda seconds: str(seconds // 60)),
    ),
    Column(
        "SliceHours", 10, "Hours for which slices were held, summed over slices.", ("ended",),
        lambda run, slices, context: _hours(hours_of(slices, lambda row: slice_hours(row, context.now))),
        _HELD, lambda mig_slice, number, context: _hours(slice_hours(mig_slice, context.now)),
    ),
    Column(
        "GPUHours", 8, "SliceHours in whole GPUs: a slice counts as the larger of its shares of compute slices and of "
        "memory slices.", ("ended",),
        lambda run, slices, context: _hours(
            hours_of(slices, lambda row: gpu_hours(row, context.now, context.wholes))
        ),
        (*_HELD, "gpu", "profile", "slot_size"),
        lambda mig_slice, number, context: _hours(gpu_hours(mig_slice, context.now, context.wholes)),
    ),
    Column("Restarts", 8, "Number of requeues before this run.", ("restart",), _text("restart")),
    Column("Warm", 4, "Whether its slices were warm (yes) or created for it (no).", ("warm",),
           lambda run, slices, context: _yes(run.warm)),
    Column("Setup", 8, "Time the node took to prepare its slices.", ("setup_ms",), _figure("setup_ms", "ms")),
    Column("Decision", 16, "Id of the submit filter's decision.", ("decision",), _text("decision")),
    Column("Source", 8, "Source of the decision: submit service or compiled table.", ("source",), _text("source")),
    Column("Reason", 20, "Reason for waiting or not fitting.", ("reason",), _text("reason")),
    Column(
        "Predicted", 22, "Predicted latency, throughput and memory in the chosen profile.",
        ("predicted_latency_ms", "predicted_throughput_per_s", "predicted_memory_mib"), _figures("predicted"),
    ),
    Column(
        "Measured", 22, "Measured latency, throughput and memory.",
        ("measured_latency_ms", "measured_throughput_per_s", "measured_memory_mib"), _figures("measured"),
    ),
    Column("PredLatency", 11, "Predicted latency of one batch.", ("predicted_latency_ms",),
           _figure("predicted_latency_ms", "ms")),
    Column("PredRate", 10, "Predicted throughput in items per second.", ("predicted_throughput_per_s",),
           _figure("predicted_throughput_per_s", "/s")),
    Column("PredMemory", 10, "Predicted memory.", ("predicted_memory_mib",), _memory("predicted_memory_mib")),
    Column("MeasLatency", 11, "Measured latency of one batch.", ("measured_latency_ms",),
           _figure("measured_latency_ms", "ms")),
    Column("MeasRate", 10, "Measured throughput in items per second.", ("measured_throughput_per_s",),
           _figure("measured_throughput_per_s", "/s")),
    Column("MeasMemory", 10, "Measured memory.", ("measured_memory_mib",), _memory("measured_memory_mib")),
    Column("MaxGPUMem", 10, "Peak memory of one of its slices.", ("measured_memory_mib",),
           _memory("measured_memory_mib")),
    Column("SMActive", 8, "Average share of its slices' SMs in use.", ("measured_facts",), _busy("sm")),
    Column("TensorActive", 12, "Average share of tensor cores in use.", ("measured_facts",), _busy("tensor")),
    Column("DRAMActive", 10, "Average share of memory bandwidth in use.", ("measured_facts",), _busy("dram")),
    Column("ConsumedEnergy", 14, "Energy of its GPUs in joules, for whole GPUs.", ("measured_facts",),
           lambda run, slices, context: joules(energy_j(run))),
    Column("ConsumedEnergyRaw", 17, "ConsumedEnergy without a unit letter.", ("measured_facts",),
           lambda run, slices, context: _whole(energy_j(run))),
    Column("MeasItems", 10, "Items reported by the job.", ("measured_items",),
           lambda run, slices, context: "" if run.measured_items is None else f"{run.measured_items:.0f}"),
    Column("PredErr", 8, "Measured relative to predicted throughput: +10% is faster than predicted.", _SPEED,
           lambda run, slices, context: percentage(prediction_error(run))),
    Column("MeasBy", 10, "Source of the measured figures: the job, the driver, or both.",
           ("measured_facts",), lambda run, slices, context: ",".join(measured_by(run.measured_facts))),
)  # fmt: skip


def _group(run: Fields, context: Context) -> str:
    return "" if run.gid is None else context.group(run.gid)


def _user(run: Fields) -> str:
    return run.user or ("" if run.uid is None else str(run.uid))


BRIEF = "jobid,state,exitcode"
DEFAULT = "jobid,user,partition,asked,bucket,profile,placement,state,exitcode,elapsed"
LONG = (
    "jobid,jobidraw,jobname,user,account,partition,asked,bucket,decision,source,profile,retyped,slices,placement,nodelist,"
    "miguuid,warm,setup,predicted,measured,prederr,submit,start,end,queuewait,elapsed,timelimit,restarts,state,exitcode,reason"
)
