"""Why a request is refused: one sentence for the user that says what to write instead.

The sentences live here once. The Lua shims get them rendered in, so that a user reads the same words whether the
service or the shim alone answered. Each takes only `%s`, which Python and Lua format alike.

Texts from the job are handled as bytes decoded with latin-1 (one character for each byte), because Slurm's strings are
bytes and Lua counts in bytes; `show` makes a piece of them fit to print.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        # the marker
        "forged": "the comment or extra text must not hold '[mig:': the submit filter writes that part itself. Leave "
        "it out (a comment copied from squeue or scontrol ends with it)",
        "comment_long": "the comment is %s bytes too long: Slurm takes 1024, and the filter adds a part of its own. "
        "Shorten it",
        "gres_long": "the list of GRES is too long for Slurm (1024 bytes): ask for fewer kinds",
        "running": "the slices of a job that has started cannot be changed: cancel it and submit it again, or change "
        "it while it is pending",
        # the request
        "text_long": "%s is %s bytes long, and Slurm takes 1024: shorten it",
        "spelling": "'%s' is not understood: write mig:<profile>[:count], mig:auto[:count] or mig[:count], in lower "
        "case and without blanks",
        "profile_short": "'%s' is no profile but a number to Slurm (1g is 1073741824): write the whole name of a "
        "profile, one of %s",
        "count": "'%s' is no possible number of slices: ask for 1 to 64 on each node",
        "filler": "mig:none is not for jobs: write mig:auto or a profile, one of %s",
        "reserved": "mig:%s is not for users to ask for: write mig:auto or a profile, one of %s",
        "unknown_profile": "no GPU in partition %s has a profile '%s': write mig:auto or one of %s",
        "no_partition": "partition %s has no MIG GPUs: choose one of %s with --partition",
        "no_site": "no MIG GPU of this cluster is known to the submit filter yet: try again in a few minutes, or "
        "tell your administrator that no node has reported its GPUs",
        "mixed_partitions": "of the partitions %s only some have MIG GPUs: name only those that have (%s)",
        "unknown_gpu": "no GPU in partition %s is a '%s': write gpu without a type or one of %s",
        "two_ways": "slices are asked for in more than one way (%s): write them once, for each node: "
        "--gres=mig:auto:<count>",
        "per_node": "%s does not say how many slices each node is to give: write -N <nodes> and "
        "--gres=mig:<profile>:<count> (the count is for each node)",
        "per_gpu": "%s is for whole GPUs: on slices write %s instead",
        "exclusive": "with --exclusive this release of Slurm gives the job every slice of the node: leave it out and "
        "ask for the slices that you need",
        "loan_one": "on partition %s a training job without a profile waits for one idle slice, on one node: write "
        "-N 1 and mig:auto, or name a profile if it needs more",
        "loan_kept": "this release of Slurm does not forget what a training job that waits for idle slices has asked "
        "for: cancel it and submit it again as you want it",
        "loan_requeue": "a training job on idle slices must be ready to be requeued: leave that as it is, or submit "
        "it with a profile of its own",
        "kinds": "a job can have at most 8 different profiles: ask for fewer",
        # hints
        "hint_long": "the hints are %s bytes long: write at most 999, for example migbatch: model=bert-large "
        "batch=32 slo=200ms",
        "hint_ascii": "the hints hold bytes that are not plain ASCII: write them with letters, digits and . _ - / + "
        ": only",
        "hint_char": "the hints hold the character %s: write key=value pairs separated by blanks, with letters, "
        "digits and . _ - / + : only",
        "hint_form": "'%s' is no hint: write key=value pairs separated by blanks, for example model=bert-large "
        "batch=32",
        "hint_key": "there is no hint '%s': write one of batch, deadline, input, items, max, mem, min, model, role, "
        "signal, slo",
        "hint_twice": "the hint '%s' is given twice: write it once",
        "hint_value": "%s=%s is not understood: write %s",
        "deadline_alone": "deadline= tells nothing without the amount of work: add items=, for example items=1m "
        "deadline=2h",
        "min_over_max": "min=%s is larger than max=%s: exchange them or leave one out",
        "input_unit": "model %s takes its input in %s: write %s",
        "mem_over_profile": "mem=%s MiB does not fit %s, which has %s MiB: ask for a larger profile, mig:auto, or "
        "less memory",
        "profile_outside": "profile %s is outside min= and max=: leave them out or write mig:auto",
        "mem_nowhere": "mem=%s MiB fits no slice that the job may have (the largest has %s MiB): ask for less, or "
        "for a larger max=",
        "range_empty": "no profile of partition %s lies between min= and max=: the profiles are %s",
        "too_slow": "no slice that the job may have is predicted to be fast enough (%s): ask for a larger slo= or "
        "deadline=, or a smaller batch=",
    }
)

_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
SHOWN = 40


class Refusal(ValueError):
    """The request cannot be taken; `str()` is the sentence for the user, `code` its key in SENTENCES."""

    def __init__(self, code: str, *details: str) -> None:
        super().__init__(SENTENCES[code] % details if details else SENTENCES[code])
        self.code = code


def show(text: str) -> str:
    """A piece of the user's own text for a message: printable ASCII, at most 40 characters."""
    cut = text if len(text) <= SHOWN else text[:SHOWN] + "..."
    return _UNPRINTABLE.sub("?", cut)


def lower(text: str) -> str:
    """ASCII letters in lower case, every other byte as it is (as Lua's string.lower in the C locale)."""
    return text.encode("latin-1", "replace").lower().decode("latin-1")
