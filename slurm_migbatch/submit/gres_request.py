"""Parse a job's request: MIG and GPU entries of its TRES fields, what they leave open, the count on each node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from slurm_migbatch.predict.limits import JobLimits
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.gres import profile_in
from slurm_migbatch.submit.request import OPTIONS, TRES_FIELDS, JobRequest
from slurm_migbatch.workload.catalog import Partition, ProfileOffer
from slurm_migbatch.workload.loans import GUEST, LOAN
from slurm_migbatch.workload.refusal import Refusal, lower, show

AUTO: Final = "auto"
FILLER: Final = "none"
MAX_COUNT: Final = 64
MOST_IN_TOTAL: Final = 1024
"""Most slices of a job for which a number of nodes is chosen out of a range: slurmctld waits for the search."""

_BY_MEANING: Final = ("tres_per_job", "tres_per_task", "tres_per_socket", "tres_per_node")
"""Of several fields that request the same the first one counts: only with the first two a job gets one node."""
_PREFIXES = re.compile(r"(?:gres[:/])*")
_BLANKS = re.compile(r"[\x00-\x20\x7f\"']")
_NAME = re.compile(r"[^:=]*")
_MIG_FORM = re.compile(r"mig(?:[:=][a-z0-9.:=+-]+)?")
_TYPE_FORM = re.compile(r"[A-Za-z0-9_.+-]+")
_NUMBER = re.compile(r"([0-9]{1,30})([kmgtpKMGTP]?)")
_NODE = re.compile(r"[A-Za-z0-9_.-]+")
_PER_GPU = re.compile(r"gres[:/]gpu[:=]([1-9][0-9]{0,6})")


@dataclass(frozen=True)
class GresEntry:
    """One MIG or GPU entry. `number` is the count as written, "" if missing; `type` may be None.

    `as_gpu`: it is a slice that the user wrote as a GPU of that type.
    """

    text: str
    prefix: str
    name: str
    type: str | None
    number: str
    as_gpu: bool = False

    @property
    def asked(self) -> str:
        """The entry as the user wrote it, without the prefix."""
        return self.text[len(self.prefix) :]


@dataclass(frozen=True)
class GresRequest:
    """The entries of the field that requests slices, in order; entries of other GRES stay text.

    `again`: other fields that request the same GPUs, in another way.
    """

    field: str
    entries: tuple[GresEntry | str, ...]
    again: tuple[GresRequest, ...] = ()

    @cached_property
    def parts(self) -> tuple[GresEntry, ...]:
        """The MIG and GPU entries."""
        return tuple(entry for entry in self.entries if isinstance(entry, GresEntry))

    @property
    def option(self) -> str:
        """The option that the user wrote."""
        return option_of(self.field, ",".join(e if isinstance(e, str) else e.text for e in self.entries))

    @cached_property
    def others(self) -> tuple[str, ...]:
        """The entries that stay as they are."""
        return tuple(entry for entry in self.entries if isinstance(entry, str))


def option_of(field: str, text: str) -> str:
    """Return the option that filled a field with this text: --gpus-per-task writes only GPUs into that of
    --tres-per-task.
    """
    if field == "tres_per_task" and not all(gres.prefix_of(e)[1].startswith("gpu") for e in text.split(",")):
        return "--tres-per-task"
    return OPTIONS[field]


def by_profile(asking: GresRequest, partition: Partition) -> GresRequest:
    """Return the request with slices that are written as GPUs (`gpu:a100_3g.39gb:1` of static MIG) as slices."""
    return replace(asking, entries=tuple(_as_slice(entry, partition) for entry in asking.entries))


def _as_slice(entry: GresEntry | str, partition: Partition) -> GresEntry | str:
    if isinstance(entry, str) or entry.name != "gpu" or entry.type is None or partition.kind_of(entry.type):
        return entry
    profile = partition.slice_of(entry.type)
    return entry if profile is None else replace(entry, name="mig", type=profile, as_gpu=True)


def mentions(texts: Iterable[str | None]) -> bool:
    """Return whether any text could request slices: a fast check, so that other jobs cost little."""
    return any("mig" in low or "gpu" in low for low in (lower(text) for text in texts if text))


def mentions_gpus(texts: Iterable[str | None]) -> bool:
    """Return whether any text could request whole GPUs."""
    return any("gpu" in lower(text) for text in texts if text)


def read(request: JobRequest, *, gpus: bool) -> GresRequest | None:
    """Return the MIG entries of a request (with `gpus` the GPU entries too); None if it has none. Raises Refusal."""
    requests: list[GresRequest] = []
    for name in TRES_FIELDS:
        text = getattr(request, name)
        if not text or not mentions((text,)):
            continue
        candidate = GresRequest(name, _effective([_entry(entry, gpus=gpus) for entry in text.split(",")]))
        if candidate.parts:
            requests.append(candidate)
    if len(requests) > 1 and (request.now is not None or not _are_same(requests, request)):
        raise Refusal("two_ways", " and ".join(candidate.option for candidate in requests))
    requests.sort(key=lambda candidate: _BY_MEANING.index(candidate.field))
    return replace(requests[0], again=tuple(requests[1:])) if requests else None


def _are_same(requests: Sequence[GresRequest], request: JobRequest) -> bool:
    """Return whether each of several fields alone requests the same GPUs of each node: Slurm takes such requests, like
    `--gpus=2 --gpus-per-node=1 -N2` (tried on 22.05, 24.11 and 26.05).
    """
    if any(part.name != "gpu" for asking in requests for part in asking.parts):
        return False
    try:
        gpus = [
            {part.type: per_node(asking, count_of(part, ""), request) for part in asking.parts} for asking in requests
        ]
    except Refusal:
        return False
    return all(other == gpus[0] for other in gpus)


def _effective(entries: Sequence[GresEntry | str]) -> tuple[GresEntry | str, ...]:
    """Leave out GPUs that a later entry of the same type replaces, as in Slurm (tried on 23.11 and 25.11).

    `--gres=gpu:1 --gpus-per-node=1` fills one field with `gpu:1,gpu:1`, which is one GPU.
    """
    last = {entry.type: entry for entry in entries if isinstance(entry, GresEntry) and entry.name == "gpu"}
    return tuple(
        entry for entry in entries if isinstance(entry, str) or entry.name != "gpu" or entry is last[entry.type]
    )


def _entry(text: str, *, gpus: bool) -> GresEntry | str:
    prefix, rest = gres.prefix_of(text)
    if prefix and (repeated := _PREFIXES.match(rest)) is not None:
        rest = rest[repeated.end() :]
    name = _NAME.match(lower(_BLANKS.sub("", rest)))
    if name is not None and name[0] == "mig":
        if _MIG_FORM.fullmatch(rest) is None:
            raise Refusal("spelling", show(rest))
        part = _split(text, prefix, rest)
        if part is None:
            raise Refusal("spelling", show(rest))
        return part
    if gpus and re.match(r"gpu(?:[:=]|\Z)", rest):
        part = _split(text, prefix, rest)
        return text if part is None or part.number.strip("0") == "" != part.number else part
    return text


def _split(text: str, prefix: str, rest: str) -> GresEntry | None:
    head, equals, number = rest.partition("=")
    tokens = head.split(":")
    if equals:
        if _NUMBER.fullmatch(number) is None:
            return None
    elif len(tokens) > 1 and _NUMBER.fullmatch(tokens[-1]):
        number = tokens.pop()
    if len(tokens) > 2 or (len(tokens) == 2 and _TYPE_FORM.fullmatch(tokens[1]) is None):
        return None
    return GresEntry(text, prefix, tokens[0], tokens[1] if len(tokens) == 2 else None, number)


def count_of(part: GresEntry, profiles: str) -> int:
    """Return the entry's count, at most 9999; raises Refusal, which lists `profiles` if it looks like a profile."""
    if not part.number:
        return 1
    match = _NUMBER.fullmatch(part.number)
    digits, unit = (match[1], match[2]) if match else ("", "")
    if part.name == "mig" and part.type is None and unit in ("g", "G"):
        raise Refusal("profile_short", show(part.number), profiles)
    if unit or len(digits) > 4 or int(digits) < 1:
        raise Refusal("count", show(part.number))
    return int(digits)


def per_node(asking: GresRequest, count: int, request: JobRequest) -> int:
    """Convert `count`, given per job, node, socket or task, to a count per node.

    Raises Refusal if the request does not determine it.
    """
    count_per_node: int | None = None
    if asking.field == "tres_per_node":
        count_per_node = count
    elif asking.field == "tres_per_job":
        count_per_node = _share_of_total(asking, count, request)
    elif asking.field == "tres_per_socket":
        if request.sockets_per_node:
            count_per_node = count * request.sockets_per_node
    elif (tasks := nodes_and_tasks(asking, request)[1]) is not None:
        count_per_node = count * tasks
    if count_per_node is None:
        raise Refusal("per_node", asking.option)
    if count_per_node > MAX_COUNT:
        raise Refusal("count", str(count_per_node))
    return count_per_node


def _tasks_per_node(request: JobRequest) -> int | None:
    """Return the most tasks that a node of the job gets; --ntasks-per-node is only a limit beside --ntasks."""
    nodes, tasks, most = nodes_of(request), request.num_tasks, request.ntasks_per_node
    if most and not tasks:
        return most
    if nodes and (tasks or nodes) % nodes == 0:
        return (tasks or nodes) // nodes
    others = (nodes or request.min_nodes or 1) - 1  # each has one task at least
    return min(most, max((tasks or 1) - others, 1)) if most else None


def even_tasks(asking: GresRequest, request: JobRequest, slices: int) -> int | None:
    """Return the tasks on each node of a new job on several, if it gets a slice for each, `slices` on each node.

    Slurm lets GPUs per task or job follow the tasks, most of which it puts on the first node (3 and 1 of 4 on two).
    Slices per node do not follow them, so each node must get its share of the tasks.
    """
    nodes, tasks = nodes_of(request) or 1, request.num_tasks or 1
    if asking.field == "tres_per_node" or request.now is not None or nodes == 1 or tasks % nodes:
        return None
    return tasks // nodes if tasks // nodes <= slices else None


def _share_of_total(asking: GresRequest, count: int, request: JobRequest) -> int | None:
    nodes, _ = nodes_and_tasks(asking, request)
    return count // nodes if nodes and count % nodes == 0 else None


def nodes_and_tasks(asking: GresRequest, request: JobRequest) -> tuple[int | None, int | None]:
    """Return the nodes of the job and the most tasks on one of them, None where the request does not determine it."""
    if takes_one_node(asking, request):
        return 1, request.num_tasks or 1
    return nodes_of_tasks(asking, request) or nodes_of(request), _tasks_per_node(request)


def names_several(request: JobRequest) -> bool:
    """Return whether the request may name several nodes, all of which the job would get."""
    return bool(request.req_nodes) and _NODE.fullmatch(request.req_nodes or "") is None


def takes_one_node(asking: GresRequest, request: JobRequest) -> bool:
    """Return whether a new job of several tasks gets one node because of the slices that it requests in total.

    With one slice (`-n 4 --gpus=1`) it can have only one, because each node of a job has at least one. With several
    (`-n 4 --gpus=4`, `-n 4 --gpus=2`, `-N 1-4 --gpus=4`, `-n 4 --gpus-per-task=1`) one node is enough, and Slurm takes
    no more where it has them and the CPUs (tried on 22.05); how it would spread them over several is not known here.
    """
    if (
        asking.field not in ("tres_per_job", "tres_per_task")
        or len(asking.parts) != 1
        or nodes_of(request) is not None
        or (request.min_nodes or 1) != 1
        or names_several(request)
        or request.now is not None
    ):
        return False
    total, tasks = _number(asking), request.num_tasks or 1
    if asking.field == "tres_per_task":
        return tasks > 1 and not request.ntasks_per_node and 1 <= total * tasks <= MAX_COUNT
    if total <= 1:
        return total == 1
    return tasks <= (request.ntasks_per_node or tasks)


def _number(asking: GresRequest) -> int:
    """Return the number of slices in the only entry of a request, 0 if it is too large or malformed."""
    number = asking.parts[0].number or "1"
    return int(number) if number.isdecimal() and len(number) <= 4 else 0


def of_range(asking: GresRequest, request: JobRequest) -> Iterator[int]:
    """Yield the numbers of nodes, fewest first, of a range (`-N 2-3 --gpus=4`) on which a new job can have equal shares
    of its slices and its tasks.

    Slurm allocates the fewest that have the GPUs (tried on 22.05), not always with equal shares.
    """
    low, high, tasks = request.min_nodes or 1, request.max_nodes or 0, request.num_tasks or 0
    if (
        not 1 < low < high
        or len(asking.parts) != 1
        or asking.field not in ("tres_per_job", "tres_per_task")
        or names_several(request)
        or request.now is not None
    ):
        return
    total = _number(asking) * (tasks if asking.field == "tres_per_task" else 1)
    if total > MOST_IN_TOTAL:
        return
    for nodes in range(max(low, -(-total // MAX_COUNT)), min(high, total) + 1):
        share, rest = divmod(tasks or nodes, nodes)
        if total % nodes == 0 and not rest and share <= (request.ntasks_per_node or share):
            yield nodes


def wider(asking: GresRequest, request: JobRequest, count: int) -> Iterator[int]:
    """Yield the numbers of nodes, fewest first, on which a new job can have equal shares of the `count` slices that it
    requests in total, with equal shares of its tasks, if it does not state the number and one node lacks them.

    Slurm allocates as many nodes as the GPUs need (`-n 8 --gpus-per-task=1` on nodes of two gets four).
    """
    of_slices = (
        asking.field == "tres_per_job"
        and len(asking.parts) == 1
        and not (request.num_tasks or request.max_nodes or request.req_nodes)
        and (request.min_nodes or 1) == 1
        and request.now is None
    )
    if not (of_slices or takes_one_node(asking, request)):
        return
    for nodes in range(2, min(count, request.max_nodes or count) + 1):
        if count % nodes == 0 and (request.num_tasks or nodes) % nodes == 0:
            yield nodes


def nodes_of_tasks(asking: GresRequest, request: JobRequest) -> int | None:
    """Return the nodes that the tasks of a new job fill, for slices in total: `-n 4 --ntasks-per-node=2 --gpus=2`.

    Slurm allocates as many (tried on 22.05), with GPUs on each.
    """
    tasks = request.num_tasks or 1
    on_node = request.ntasks_per_node or tasks
    if (
        asking.field != "tres_per_job"
        or tasks % on_node
        or tasks == on_node
        or not (request.min_nodes or 1) <= tasks // on_node
        or request.max_nodes
        or request.req_nodes
        or request.now is not None
    ):
        return None
    return tasks // on_node


def nodes_of(request: JobRequest) -> int | None:
    """Return the number of nodes of the job if the request determines it; by default, a job of one task has one."""
    low, high = request.min_nodes or None, request.max_nodes or None
    if low and low == high:
        return low
    if (low or 1) == 1 and high is None:
        return 1 if (request.num_tasks or 1) == 1 else None
    return None


def is_auto(part: GresEntry) -> bool:
    """Return whether the entry leaves the profile to migbatch."""
    return part.name == "mig" and part.type in (None, AUTO)


def is_open(part: GresEntry) -> bool:
    """Return whether the entry leaves both profile and GPU kind to migbatch."""
    return is_auto(part) or (part.name == "gpu" and part.type is None)


def auto_again(present: str) -> str:
    """Return a job's GRES with one `mig:auto` in place of its MIG entries."""
    entries: list[str] = []
    replaced = False
    for entry in present.split(","):
        prefix, rest = gres.prefix_of(entry)
        if not rest.startswith("mig:"):
            entries.append(entry)
        elif not replaced:
            replaced = True
            entries.append(f"{prefix}mig:{AUTO}")
    return ",".join(entries)


def named_offer(part: GresEntry, partition: Partition, limits: JobLimits) -> ProfileOffer:
    """Return the slice that an entry names; raises Refusal if the partition lacks it or the limits exclude it."""
    name = (part.type or "").replace("+", ".")
    if name == FILLER:
        raise Refusal("filler", partition.profile_list)
    if name in (LOAN, GUEST):
        raise Refusal("reserved", name, partition.profile_list)
    offer = partition.offers.get(name)
    if offer is None:
        raise Refusal("unknown_profile", partition.name, show(name), partition.profile_list)
    if limits.mem_mib is not None and limits.mem_mib > offer.memory_mib:
        raise Refusal("mem_over_profile", str(limits.mem_mib), name, str(offer.memory_mib))
    if not limits.within(offer):
        raise Refusal("profile_outside", name)
    return offer


def whole_gpu(part: GresEntry, partition: Partition) -> ProfileOffer:
    """Return the largest slice of the kind of GPU that an entry names; raises Refusal."""
    kind = partition.kind_of(part.type)
    if kind is None:
        if (profile := profile_in(part.type or "")) is not None:
            raise Refusal("unknown_profile", partition.name, show(profile), partition.profile_list)
        if part.type in partition.others:
            raise Refusal("gpu_elsewhere", show(part.type or ""))
        names = ", ".join(kind.name for kind in partition.kinds)
        raise Refusal("unknown_gpu", partition.name, show(part.type or ""), names)
    return partition.offers[kind.full.profile.gres_type]


def number_per_gpu(text: str | None) -> int:
    """Return what is requested for each GPU, without a type; 0 if nothing is, or in another form."""
    match = _PER_GPU.fullmatch(text or "")
    return int(match[1]) if match else 0


def check_options(asking: GresRequest, request: JobRequest) -> None:
    """Refuse options that apply to whole GPUs; raises Refusal.

    `per_gpu.requested` converts three of them for batch jobs, whose steps do not repeat the options.
    """
    batch = request.now is None and request.batch == 1
    if request.shared == 0 and request.now is None and asking.parts[0].prefix == "gres:":
        raise Refusal("exclusive")  # before 23.11 it includes the slices; from 23.11 on `Flags=explicit` excludes them
    for text, option, instead in (
        (request.cpus_per_tres, "--cpus-per-gpu", "--cpus-per-task"),
        (request.mem_per_tres, "--mem-per-gpu", "--mem"),
        (request.tres_freq, "--gpu-freq", "the default clock rate"),
    ):
        converted = batch and text is not request.tres_freq and number_per_gpu(text)
        if text and "gpu" in text and not converted:
            raise Refusal("per_gpu", option, instead)
    if request.ntasks_per_tres and not batch:
        raise Refusal("per_gpu", "--ntasks-per-gpu", "--ntasks-per-node")
