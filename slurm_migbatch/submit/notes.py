"""Notes for the user of an accepted job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.limits import NO_LIMITS, JobLimits
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.gres_request import GresEntry, GresRequest, takes_one_node
from slurm_migbatch.submit.request import JobRequest
from slurm_migbatch.values.figures import gib
from slurm_migbatch.workload.catalog import Partition, ProfileOffer
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.refusal import show

MESSAGES: Final = {
    "chosen": "%s for mig:auto: %s",
    "whole": "%s for %s: on this partition a whole GPU is its largest slice",
    "whole_limits": "mem=, min= and max= do not change that: for the smallest slices that meet them use "
    "--gres=mig:auto:<count>",
    "whole_below": "mem=%s MiB does not change that, and each has only %s MiB",
    "several": "slices are separate devices, and NCCL does not connect them: start one task for each (srun -n), and "
    "use whole GPUs outside MIG for a program that needs several GPUs",
    "both": "the job gets GPUs beside slices: leave out --gpus-per-node, and unset SBATCH_GPUS_PER_NODE, "
    "SALLOC_GPUS_PER_NODE and SLURM_GPUS_PER_NODE, if only --gres=mig: is meant",
    "one_node": "all of them on one node, which needs the CPUs and memory of all tasks: for several nodes use "
    "-N <nodes> and --gres=mig:<profile>:<count> (the count is per node)",
    "wider_why": ", because no node has all of them",
    "wider": "they are on %s nodes, %s on each%s: for other shares use -N <nodes> and "
    "--gres=mig:<profile>:<count> (the count is per node)",
    "cpus_of_task": "--cpus-per-gpu is granted as --cpus-per-task=%s",
    "memory_of_node": "--mem-per-gpu is granted as --mem=%sM",
    "slice": "%s is granted as --gres=mig:%s, the name of this slice here%s",
    "slice_kinds": " (%s have it: --constraint chooses one)",
    "loan": "submitted as elastic training: waits for an idle slice between %s and %s, and may be requeued at "
    "any time, so it must continue from its checkpoints; for a dedicated slice use --gres=mig:%s",
    "loan_unknown": "nothing is known about %s, so any slice may be lent; add mem= to the hints",
    "loan_retry": "retry=oom does not apply to elastic training, which may get a slice of the same size again: add "
    "mem= or a larger min= to the hints",
    "tight": "%s as requested, but %s is predicted to need %s of its %s GiB",
    "mem_below": "mem=%s MiB as requested, but %s needs %s GiB for its weights alone",
    "whole_of": "%s for %s: on this partition a whole GPU is its largest slice; of its kinds (%s) the first is taken, "
    "ask for another by gpu:<kind>",
    "others": "%s is a GPU without MIG here: ask for it by its type",
    "nodes_left": "--nodelist is left to Slurm, which refuses the job unless these nodes offer its slices at this "
    "moment; features from sinfo and --constraint let it wait",
    "reserved": "the reservation has no catalog node (%s...): if Slurm refuses the job, submit it again later, or have "
    "the administrator add one (scontrol update ReservationName=... Nodes=...)",
    "catalog": "if Slurm refuses it (Requested node configuration is not available), fewer than %s nodes offer these "
    "slices at this moment: submit it again later or with fewer nodes (admins: [cluster] catalog_nodes)",
    "variable": "%s in the environment is not applied beside %s on the command line",
    "partitions": "it starts only in %s: no MIG GPUs in %s",
    "unread": "'%s' in the comment is not read: hints are read where the comment begins with 'migbatch:'",
    "ignored": "these hints are not applied, because the job %s: %s",
    "extra": "hints in --extra are not read here: put them into --comment",
    "retry_later": "this release of Slurm cannot give a job another slice (23.11 and later can), so retry=oom counts "
    "for the next submission only",
    "per_gpu_kept": "CPUs and memory stay those of the former slices, also by DefCpuPerGPU and DefMemPerGPU: scontrol "
    "update NumCPUs= and MinMemoryNode= change them",
    "tasks_alone": "--ntasks-per-gpu alone requests no slices: state their number too, --gpus=<number>",
    "idle": "the comment holds hints, but the job requests no slice: add --gres=mig:auto",
}
"""Messages about an accepted job; rendered into the Lua shims too."""


def message_of(notes: Collection[str]) -> str:
    """Return the message with these notes; empty if there are none."""
    return f"migbatch: {'; '.join(dict.fromkeys(notes))}" if notes else ""


def times(count: int, offer: ProfileOffer) -> str:
    """Return slices of one profile in words."""
    return offer.profile.gres_type if count == 1 else f"{count} x {offer.profile.gres_type}"


def whole(part: GresEntry, partition: Partition, granted: str) -> list[str]:
    """Return the notes for a job that gets the largest slice for a whole GPU."""
    text = show(part.asked)
    if part.type is not None:
        return [MESSAGES["whole"] % (granted, text)]
    others = [MESSAGES["others"] % show(f"gpu:{name}") for name in sorted(partition.others) if name]
    if len(partition.kinds) > 1:
        return [MESSAGES["whole_of"] % (granted, text, ", ".join(kind.name for kind in partition.kinds)), *others]
    return [MESSAGES["whole"] % (granted, text), *others]


def named_slice(part: GresEntry, partition: Partition) -> str:
    """Return the note for a slice that was requested as a GPU of its type."""
    profile = Profile.parse(part.type or "")
    kinds = [kind.name for kind in partition.kinds if profile in kind.geometry]
    of_kinds = MESSAGES["slice_kinds"] % ", ".join(kinds) if len(kinds) > 1 else ""
    return MESSAGES["slice"] % (show(part.asked), part.type, of_kinds)


def unapplied(whole_gpu: ProfileOffer, limits: JobLimits) -> list[str]:
    """Return the note on hints that do not change a request for whole GPUs."""
    if limits.mem_mib is not None and limits.mem_mib > whole_gpu.memory_mib:
        return [MESSAGES["whole_below"] % (limits.mem_mib, whole_gpu.memory_mib)]
    return [MESSAGES["whole_limits"]] if limits != NO_LIMITS else []


def several(asking: GresRequest, request: JobRequest, count: int) -> list[str]:
    """Return notes on a job with several slices, `count` on each node: one if some of them are whole GPUs, one if it
    gets one node only for their number, and one if it may be one program on all of them: with fewer tasks than slices,
    or with whole GPUs, among which such programs communicate.
    """
    names = {part.name for part in asking.parts}
    notes = [MESSAGES["both"]] if len(names) > 1 else []
    if count > 1 and takes_one_node(asking, request):
        notes.append(MESSAGES["one_node"])
    if "gpu" in names:
        shared = count > 1 or (request.min_nodes or 1) > 1
    else:
        shared = count > (request.ntasks_per_node or request.num_tasks or 1)
    return [*notes, MESSAGES["several"]] if shared else notes


def converted(changes: Mapping[str, str]) -> list[str]:
    """Return notes on the options for each GPU that became others (`per_gpu.requested`)."""
    cpus = [MESSAGES["cpus_of_task"] % changes["cpus_per_task"]] if "cpus_per_tres" in changes else []
    return cpus + ([MESSAGES["memory_of_node"] % changes["pn_min_memory"]] if "mem_per_tres" in changes else [])


def tight(chooser: Chooser, offer: ProfileOffer, partition: Partition, hints: Hints) -> list[str]:
    """Return the warning about a slice that is predicted to be too small, although the user named it."""
    bucket = chooser.bucket(hints)
    if hints.mem_mib is not None:
        return []
    need = chooser.need(hints, offer)
    if need is None and bucket is not None:
        figures = chooser.figures(bucket, partition).get(offer.profile.gres_type)
        need = None if figures is None else (bucket.cell, figures.need_mib)
    if need is None or need[1] <= offer.memory_mib:
        return []
    return [MESSAGES["tight"] % (offer.profile.gres_type, need[0], gib(need[1]), gib(offer.memory_mib))]


def unknown(chooser: Chooser, hints: Hints) -> list[str]:
    """Return the warning about a model of which nothing is known, without mem=."""
    if hints.model is None or hints.mem_mib is not None or chooser.has_curve(hints.model):
        return []
    return [] if chooser.workload(hints) else [MESSAGES["loan_unknown"] % show(hints.model)]


def below_weights(chooser: Chooser, hints: Hints, asking: GresRequest) -> list[str]:
    """Return the warning about a language model whose mem= does not hold its weights, if slices are requested."""
    if hints.mem_mib is None or not any(part.name == "mig" for part in asking.parts):
        return []
    weights = chooser.weights(hints)
    if weights is None or weights[1] <= hints.mem_mib:
        return []
    return [MESSAGES["mem_below"] % (hints.mem_mib, weights[0], gib(weights[1]))]
