"""Refusals: one sentence for the user that says what to write instead.

The sentences are defined only here. They are rendered into the Lua shims, so that a user reads the same text whether
the service or the shim answered. Each uses only `%s`, which Python and Lua format alike.

Texts from the job are handled as bytes decoded with latin-1 (one character per byte), because Slurm's strings are bytes
and Lua counts bytes; `show` makes a part of them printable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from slurm_migbatch.mig.text import printable

SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        # the marker
        "forged": "the comment or extra field must not contain '[mig:', which the submit filter writes itself: "
        "remove it (a comment copied from squeue or scontrol ends with it)",
        "comment_long": "the comment is %s bytes too long: Slurm's limit is 1024, including the marker that the "
        "submit filter adds; shorten it",
        "gres_long": "the GRES list exceeds Slurm's limit of 1024 bytes: request fewer profiles",
        "running": "the slices of a job that has started cannot be changed: cancel and resubmit it",
        # the request
        "text_long": "%s is %s bytes long, Slurm's limit is 1024: shorten it",
        "spelling": "invalid GRES '%s': use mig:<profile>[:count], mig:auto[:count] or mig[:count], in lower case "
        "without blanks",
        "profile_short": "Slurm reads '%s' as a number, not as a profile (1g is 1073741824): use a full profile name, "
        "one of %s",
        "count": "invalid number of slices '%s': request 1 to 64 per node",
        "filler": "mig:none is reserved: use mig:auto or a profile, one of %s",
        "reserved": "mig:%s is reserved: use mig:auto or a profile, one of %s",
        "unknown_profile": "no GPU in partition %s has a profile '%s': use mig:auto or one of %s",
        "no_partition": "partition %s has no MIG GPUs: choose one of %s with --partition",
        "no_site": "the submit filter knows no MIG GPU of this cluster yet: retry in a few minutes, or tell your "
        "administrator that no node has reported its GPUs",
        "mixed_partitions": "of the partitions %s only some have MIG GPUs: name only those (%s) or only the others",
        "unknown_gpu": "no GPU in partition %s is of type '%s': use gpu without a type, one of %s, or "
        "mig:<profile> for a slice",
        "gpu_elsewhere": "nodes with slices have no gpu:%s: request the slices and these GPUs in two jobs, or in two "
        "components of a heterogeneous job",
        "two_ways": "slices are requested by more than one option (%s): use one, and unset SBATCH_GPUS and SBATCH_GRES "
        "(SALLOC_... for salloc, SLURM_... for srun), which count as --gpus and --gres",
        "per_node": "%s does not say how many slices each node provides: use -N <nodes> and "
        "--gres=mig:<profile>:<count> (the count is per node)",
        "per_gpu": "%s applies to whole GPUs: for slices use %s instead",
        "exclusive": "with --exclusive this release of Slurm allocates every slice of the node: omit it and "
        "request the slices that you need",
        "loan_one": "on partition %s a training job without a profile waits for one idle slice, on one node: use "
        "-N 1 and mig:auto, or name a profile if it needs more",
        "loan_kept": "this release of Slurm keeps the previous request of a training job that waits for idle "
        "slices: cancel and resubmit it",
        "loan_requeue": "a training job on idle slices must allow requeueing: keep it enabled, or name a profile",
        "retry_requeue": "retry=oom requeues the job, and --no-requeue excludes that: leave one of them out",
        "node_other": "--nodelist names %s, which is no node with MIG GPUs of partition %s that meets --constraint and "
        "--exclude: name others (migbatch nodes lists them), or leave the list out",
        "nodes_more": "the job asks for %s nodes and --nodelist names %s: ask for as many as are named, or leave the "
        "list out",
        "nodes_none": "no node with MIG GPUs of partition %s meets --constraint and --exclude: change them (scontrol "
        "show node lists features)",
        "nodes_later": "the node list of a job with slices is set when it is submitted: cancel and resubmit it, or ask "
        "for nodes by features: scontrol update JobId=... Features=%s",
        "room_none": "no node available to the job can ever hold %s at once: request fewer or smaller slices, or "
        "spread them over more nodes (-N) or jobs (migbatch nodes lists the GPUs)",
        "room_few": "only %s of the nodes available to the job can ever hold %s, and it asks for %s: request fewer "
        "nodes, or fewer or smaller slices on each",
        "kinds": "a job can have at most 8 different profiles: request fewer",
        # hints
        "hint_long": "the hints are %s bytes long, the limit is 999: shorten them, for example migbatch: "
        "model=bert-large batch=32 slo=200ms",
        "hint_ascii": "the hints contain bytes that are not plain ASCII: use letters, digits and . _ - / + : only",
        "hint_char": "the hints contain the character %s: use key=value pairs separated by blanks, with letters, "
        "digits and . _ - / + : only",
        "hint_form": "'%s' is not a hint: use key=value pairs separated by blanks, for example model=bert-large "
        "batch=32",
        "hint_key": "unknown hint '%s': use one of batch, cuda, deadline, input, items, max, mem, min, "
        "model, pipeline, retry, role, signal, slo, or of a language model an option of its engine such as dtype",
        "hint_typo": "unknown hint '%s' (did you mean %s=?): use that, or leave it out",
        "hint_devices": "unknown hint '%s': slices are separate devices, over which no program can be spread: leave it "
        "out, and use --gres=mig:auto:<count> for tasks that are independent, or whole GPUs outside MIG",
        "hint_near": "the comment mentions migbatch, but hints are read only where it begins with 'migbatch:' in lower "
        "case: write --comment='migbatch: %s'",
        "hint_twice": "hint '%s' is given twice: give it once",
        "hint_value": "invalid hint %s=%s: use %s",
        "model_path": "model=%s is a path, and is not read here: use the model's public name, or the hints that "
        "migbatch model describe prints for it",
        "deadline_alone": "deadline= requires the amount of work: add items=, for example items=1m deadline=2h",
        "min_over_max": "min=%s is larger than max=%s: swap them or remove one",
        "input_unit": "model %s takes its input in %s: use %s",
        "mem_over_profile": "mem=%s MiB does not fit %s, which has %s MiB: request a larger profile, mig:auto, or less "
        "memory",
        "profile_outside": "profile %s is outside min= and max=: remove them or use mig:auto",
        "mem_nowhere": "mem=%s MiB fits no slice available to the job (the largest has %s MiB): request less, remove "
        "max= if set, or use whole GPUs outside MIG",
        "need_far": "%s is predicted to need %s GiB, and the largest slice available to the job has %s GiB: use a "
        "smaller batch= or input=, remove max= if set, or add mem= if you know the need",
        "range_empty": "no profile of partition %s lies between min= and max=: the profiles are %s",
        # language models
        "model_away": "model %s cannot be sized while the submit service is down: add mem=, name a profile, or retry "
        "in a few minutes",
        "model_none": "the hints name no model: add model=, params= (for example params=8b) or mem=",
        "model_size": "the size of model %s is not known: add mem=, or params= if it is a language model (for example "
        "params=8b), or the hints that migbatch model describe prints",
        "hint_tokens": "model %s is no language model that migbatch knows: leave out %s (use batch=, input=, slo=, "
        "items= and deadline=), or add params= or mem=",
        "model_near": "unknown model %s: write model=%s if that is meant, or add params= or mem=",
        "model_quantization": "quantization=%s is not known: use awq, gptq, fp8, int8, bitsandbytes, mxfp4, nvfp4 or a "
        "level of GGUF such as q4_k_m",
        "model_cache": "kv_cache_dtype=%s is not known: use auto, bf16 or fp8",
        "model_arch": "invalid arch= (%s): use the output of migbatch model describe",
        "model_nowhere": "%s needs %s GiB (%s), the largest slice available to the job has %s GiB: use %s",
    }
)

_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
SHOWN = 40


class Refusal(ValueError):
    """The request is refused; `str()` is the sentence for the user, `code` its key in SENTENCES."""

    def __init__(self, code: str, *details: str) -> None:
        super().__init__(SENTENCES[code] % details if details else SENTENCES[code])
        self.code = code


def show(text: str) -> str:
    """Quote a part of the user's text for a message: printable ASCII, at most 40 characters."""
    cut = text if len(text) <= SHOWN else text[:SHOWN] + "..."
    return _UNPRINTABLE.sub("?", cut)


def show_name(text: str) -> str:
    """Quote the name of a job for a message that only the service gives: printable characters, at most 40.

    Lua, and so `show`, cannot tell which characters are printable.
    """
    name = text.encode("latin-1").decode("utf-8", "replace")
    cut = name if len(name) <= SHOWN else name[:SHOWN] + "..."
    return printable(cut).encode().decode("latin-1")


def lower(text: str) -> str:
    """Return the ASCII letters in lower case, every other byte unchanged (as Lua's string.lower in the C locale)."""
    return text.lower() if text.isascii() else text.encode("latin-1", "replace").lower().decode("latin-1")
