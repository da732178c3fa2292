"""The runs of the record that a query selects."""

from __future__ import annotations

from slurm_migbatch.query.reply import Unanswerable
from slurm_migbatch.report.selection import ReportOptions, Selection, make_selection
from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from slurm_migbatch.query.questions import SelectedRuns
    from slurm_migbatch.query.site import QuerySite


def selection(question: SelectedRuns, now: float, uid: int, *, allusers: bool, **more: Any) -> Selection:
    """Return the selection of a query; `more` are further fields of `ReportOptions`. Raises ReportError."""
    asked = ReportOptions(
        users=question.users,
        allusers=allusers,
        accounts=question.accounts,
        partitions=question.partitions,
        nodes=question.nodes,
        start=question.start,
        end=question.end,
        **more,
    )
    return make_selection(asked, now, uid)


def failed(cause: object, site: QuerySite) -> Unanswerable:
    """Return the message for the user when the database failed."""
    return Unanswerable(f"reading the database failed{site.detail(cause)}", detail=str(cause))
