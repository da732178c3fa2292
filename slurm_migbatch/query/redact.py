"""What others may see of a run: nothing that its user wrote.

A job's name and comment are written by its user. Fields derived from them (the request as given, the bucket from its
hints, the decision, doubts about its own figures) repeat them, so they are hidden too. The user, the slices, times,
states and figures are shown, as squeue and sacct show them.
"""

from __future__ import annotations

from slurm_migbatch.values import TYPE_CHECKING, Pattern, replace

if TYPE_CHECKING:
    from typing import Any

    from slurm_migbatch.slurm.rights import Rights
    from slurm_migbatch.store.runquery import RunFilter

#: fields of a run that its user wrote, or that repeat them
OWN_WORDS = frozenset({"name", "comment", "wckey", "bucket", "decision", "measured_facts", "retyped_why"})
_OPTION = Pattern(r"--(?:gres|gpus|gpus-per-node|gpus-per-task|gpus-per-socket)=[\w:,.+/]{1,256}", "ASCII")


def field_for(rights: Rights, run: Any, name: str, value: Any) -> Any:
    """Return a field of a run as the user may see it; `run` has the attributes job_id, uid and account."""
    if name == "reason" and value:  # from a node, may name other users of its slices
        return rights.sentence(str(value), {run.job_id})
    if rights.in_full(run.uid, run.account):
        return value
    if name in OWN_WORDS:
        return None
    if name == "asked":
        first = str(value or "").split(" ", 1)[0]
        return first if _OPTION.fullmatch(first) else None
    if name == "account" and not rights.accounts:
        return None
    return value


class RedactedRun:
    """A row of a run with the attributes that the user may see."""

    def __init__(self, rights: Rights, row: Any) -> None:
        self._rights, self._row = rights, row

    def __getattr__(self, name: str) -> Any:
        return field_for(self._rights, self._row, name, getattr(self._row, name))


def allowed(rights: Rights, wanted: RunFilter, *, accounts: bool = False) -> RunFilter:
    """Return the filter, restricted to what the user may see.

    Users who may not know others' accounts, or what they wrote, cannot find out by filtering by account or association,
    nor, with `accounts`, from an answer that names accounts.
    """
    filters_text = bool(wanted.names or wanted.wckeys) and not rights.everything
    if (
        rights.runs
        and not filters_text
        and (rights.accounts or not (accounts or wanted.accounts or wanted.associations is not None))
    ):
        return wanted
    return replace(wanted, only=(rights.uid, tuple(sorted(rights.coordinates))))
