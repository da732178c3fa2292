"""Convert CPUs and memory for each GPU, which Slurm gives to jobs with gres/gpu only, to those of jobs with slices.

A job requests CPUs for each task and memory for each node instead: what --cpus-per-gpu and --mem-per-gpu request for
each slice, or else its share of the partition's DefCpuPerGPU and DefMemPerGPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.gpu_defaults import NO_DEFAULTS
from slurm_migbatch.submit.gres_request import GresRequest, names_several, nodes_and_tasks, number_per_gpu
from slurm_migbatch.submit.request import JobRequest
from slurm_migbatch.workload.catalog import Partition
from slurm_migbatch.workload.refusal import Refusal

MOST_CPUS: Final = 65533
"""Slurm's largest --cpus-per-task."""
UNSET: Final = 65534
"""Slurm's "not given" for numbers of 16 bits (NO_VAL16)."""


def with_tasks(asking: GresRequest, request: JobRequest, slices: int) -> tuple[JobRequest, dict[str, str]]:
    """Return the request with the tasks of a new batch job that states them by --ntasks-per-gpu alone, `slices` on each
    node, and the fields to set for them; the request itself if they are stated otherwise or its nodes are not known.
    """
    on_node, (nodes, _) = (request.ntasks_per_tres or 0) * slices, nodes_and_tasks(asking, request)
    if nodes is None and request.num_tasks == on_node and (request.min_nodes or 1) == 1 and not names_several(request):
        nodes = 1  # sbatch has counted the tasks of `--gres=gpu:2 --ntasks-per-gpu=1`
    elif request.num_tasks:
        return request, {}
    if on_node * (nodes or 0) <= 1 or request.ntasks_per_node not in (None, 0, on_node):
        return request, {}
    nodes = nodes or 1
    stated = replace(request, num_tasks=on_node * nodes, min_nodes=nodes, max_nodes=nodes, ntasks_per_node=on_node)
    changes = {name: str(getattr(stated, name)) for name in ("num_tasks", "min_nodes", "max_nodes", "ntasks_per_node")}
    return stated, {**changes, "min_cpus": str(on_node * nodes * (request.cpus_per_task or 1))}


def requested(asking: GresRequest, request: JobRequest, slices: int) -> dict[str, str]:
    """Return the fields to set for --cpus-per-gpu, --mem-per-gpu and --ntasks-per-gpu of a new batch job, `slices` on
    each node.

    Raises Refusal if the request does not determine the tasks on each node, or has other tasks than --ntasks-per-gpu.
    """
    changes: dict[str, str] = {}
    if tasks_each := request.ntasks_per_tres:
        nodes, _ = nodes_and_tasks(asking, request)
        if tasks_each * slices * (nodes or 0) != (request.num_tasks or 1):
            raise Refusal("per_gpu", "--ntasks-per-gpu", "--ntasks-per-node")
        changes["ntasks_per_tres"] = str(UNSET)
        if nodes and nodes > 1 and not request.ntasks_per_node:  # Slurm would put most of them on the first node
            changes["ntasks_per_node"] = str(tasks_each * slices)
    if cpus := number_per_gpu(request.cpus_per_tres):
        nodes, tasks = nodes_and_tasks(asking, request)
        per_task = -(-cpus * slices // tasks) if nodes and tasks else 0
        if not nodes or not tasks or per_task > MOST_CPUS:
            raise Refusal("per_gpu", "--cpus-per-gpu", "--cpus-per-task")
        changes |= {"cpus_per_tres": "", **_cpus(request, per_task, nodes * tasks)}
    if memory := number_per_gpu(request.mem_per_tres):
        changes |= {"mem_per_tres": "", "pn_min_memory": str(memory * slices)}
    return changes


def by_default(
    asking: GresRequest,
    request: JobRequest,
    changes: Mapping[str, str],
    partition: Partition,
    slices: Mapping[Profile, int],
) -> dict[str, str]:
    """Return the fields to set for the partition's defaults, if a new job requests neither CPUs nor memory.

    `changes`: those made so far; `slices`: on each node.
    """
    more: dict[str, str] = {}
    if request.now is not None or partition.gpu_defaults == NO_DEFAULTS:
        return more
    shares = [(count, partition.defaults_of(partition.offers[item.gres_type])) for item, count in slices.items()]
    cpus = sum(count * share.cpus for count, share in shares)
    memory = sum(count * share.memory_mib for count, share in shares)
    nodes, tasks = nodes_and_tasks(asking, request)
    if cpus and nodes and tasks and request.cpus_per_task is None and "cpus_per_task" not in changes:
        more |= _cpus(request, min(max(cpus // tasks, 1), MOST_CPUS), nodes * tasks)
    if memory and not request.memory_given and "pn_min_memory" not in changes:
        more["pn_min_memory"] = str(memory)
    return more


def _cpus(request: JobRequest, per_task: int, tasks: int) -> dict[str, str]:
    return {"cpus_per_task": str(per_task), "min_cpus": str(per_task * (request.num_tasks or tasks))}
