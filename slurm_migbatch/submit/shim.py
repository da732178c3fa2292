"""Render the Lua shims for slurmctld (job_submit.lua) and for the user commands (cli_filter.lua)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from slurm_migbatch.mig.grant import CHANGED
from slurm_migbatch.mig.profile import SUFFIXES
from slurm_migbatch.predict.candidate import FAR_TOO_LARGE
from slurm_migbatch.predict.rightsize import NEARLY
from slurm_migbatch.predict.selection import PREDICTED, REASONS, USUAL
from slurm_migbatch.site import template_loader
from slurm_migbatch.submit.comment import DECISION_BYTES
from slurm_migbatch.submit.gres_request import MOST_IN_TOTAL
from slurm_migbatch.submit.nodes import MOST_NAMED, READ
from slurm_migbatch.submit.notes import MESSAGES
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import OPTIONS, TEXTS
from slurm_migbatch.submit.script import MOST_BYTES
from slurm_migbatch.submit.table import (
    BASE,
    MIDDLE,
    NEED_DIGITS,
    ROLES,
    TABLE_VERSION,
    TIME_DIGITS,
    ZERO,
    quote,
    site_source,
)
from slurm_migbatch.workload.buckets import R20
from slurm_migbatch.workload.catalog import NODE_FEATURE, SiteCatalog
from slurm_migbatch.workload.excluded import LONGEST, OPEN, SPARE
from slurm_migbatch.workload.hints import FORMS, MAX_BYTES
from slurm_migbatch.workload.holding import STEPS
from slurm_migbatch.workload.llmhints import CHOICES, OF_SERVING, OF_TRAINING, SPELLINGS
from slurm_migbatch.workload.loans import LONGEST_MARK
from slurm_migbatch.workload.modelfile import ENDINGS
from slurm_migbatch.workload.nearmiss import LONGEST_KEY, OTHER_WORDS, SEVERAL_DEVICES
from slurm_migbatch.workload.refusal import SENTENCES

JOB_SUBMIT: Final = "job_submit.lua"
CLI_FILTER: Final = "cli_filter.lua"
DESCRIBE_SECONDS: Final = 3
"""Longest wait of a submission for the description of a model."""
_SHARED: Final[Mapping[str, Any]] = {
    "table_version": TABLE_VERSION,
    "base": BASE,
    "zero": ZERO,
    "middle": MIDDLE,
    "time_digits": TIME_DIGITS,
    "need_digits": NEED_DIGITS,
    "roles": {role: number for number, role in enumerate(ROLES)},
    "sentences": dict(SENTENCES),
    "messages": MESSAGES,
    "reasons": REASONS,
    "predicted": PREDICTED,
    "usual": USUAL,
    "nearly": NEARLY,
    "far_too_large": FAR_TOO_LARGE,
    "hint_forms": FORMS,
    "hint_order": list(FORMS),
    "of_serving": OF_SERVING,
    "of_training": OF_TRAINING,
    "choices": {
        name: [*words, *(other for other, word in SPELLINGS.items() if word in words)]
        for name, words in CHOICES.items()
    },
    "options": dict(OPTIONS),
    "texts": list(TEXTS.items()),
    "decision_bytes": DECISION_BYTES,
    "max_hint": MAX_BYTES,
    "longest_mark": LONGEST_MARK,
    "changed": CHANGED,
    "other_words": OTHER_WORDS,
    "several_devices": dict.fromkeys(sorted(SEVERAL_DEVICES), True),
    "endings": dict.fromkeys(sorted(ENDINGS), True),
    "suffix_forms": [suffix.replace(".", "%.").replace("-", "%-").replace("+", "[.+]") for suffix in SUFFIXES],
    "longest_suffix": max(map(len, SUFFIXES)),
    "longest_key": LONGEST_KEY,
    "node_feature": NODE_FEATURE,
    "node_bytes": READ,
    "most_named": MOST_NAMED,
    "exclude_open": OPEN,
    "exclude_longest": LONGEST,
    "exclude_spare": SPARE,
    "room_steps": STEPS,
    "most_in_total": MOST_IN_TOTAL,
    "script_bytes": MOST_BYTES,
    "r20": R20,
    "describe_seconds": DESCRIBE_SECONDS,
}
"""What the shims have in common with the service, at every site."""


def render(  # noqa: PLR0913 - one keyword for each thing that goes into the text
    name: str,
    *,
    socket: str,
    table: str,
    catalog: SiteCatalog,
    policy: SubmitPolicy,
    deadline_ms: int = 100,
    default_partition: str = "",
    cluster: str = "",
    module: bool = False,
) -> str:
    """Return one shim (`JOB_SUBMIT` or `CLI_FILTER`) as Lua source.

    `socket` and `table` are the paths as slurmctld sees them. `catalog` is put into the file in case neither service
    nor table is available. `default_partition` is for the user commands, which do not know it. `cluster`: ClusterName,
    to which jobs with slices are restricted in a federation; empty if unknown. `module`: render a file that a site's
    own script loads, instead of the script itself.
    """
    environment = Environment(
        loader=template_loader(),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  (Lua, not HTML: values go through the lua filter)
    )
    environment.filters["lua"] = quote
    environment.filters["commented"] = _commented
    return environment.get_template(f"{name}.j2").render(
        _SHARED,
        socket_path=socket,
        table_path=table,
        deadline_ms=int(deadline_ms),
        cluster=cluster,
        hints_in_extra=policy.hints_in_extra,
        trusted=dict.fromkeys(sorted(policy.trusted_uids), True),
        default_partition=default_partition,
        describe=policy.describe,
        module=module,
        # without models and nodes: it must not grow with the site, nor change with the current state of its nodes
        built_in=site_source(replace(catalog, nodes={})),
    )


def _commented(source: str) -> str:
    """Return Lua source as comments, from which cli_filter.lua compiles it when needed."""
    return "".join(f"--:{line}\n" for line in source.split("\n"))
