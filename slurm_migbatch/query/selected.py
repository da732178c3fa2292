"""The runs of the record that a query selects."""

from __future__ import annotations

from slurm_migbatch.query.redact import allowed
from slurm_migbatch.query.reply import Unanswerable
from slurm_migbatch.report.selection import ReportOptions, Selection, is_number, make_selection
from slurm_migbatch.store.runquery import RunFilter
from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from slurm_migbatch.query.questions import SelectedRuns
    from slurm_migbatch.query.site import QuerySite
    from slurm_migbatch.slurm.rights import Rights


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


def check_users(users: Iterable[str], rights: Rights, has_run: Callable[[RunFilter], bool]) -> None:
    """Raise Unanswerable for a user unknown to both this host and the record: a removed user still has runs."""
    import pwd

    for user in users:
        try:
            pwd.getpwuid(int(user)) if is_number(user) else pwd.getpwnam(user)
        except (KeyError, OverflowError):
            known = RunFilter(uids=(int(user),)) if is_number(user) and len(user) < 19 else RunFilter(users=(user,))
            if not has_run(allowed(rights, known)):
                raise Unanswerable(f"Invalid user id: {user}") from None


def failed(cause: object, site: QuerySite) -> Unanswerable:
    """Return the message for the user when the database failed."""
    return Unanswerable(f"reading the database failed{site.detail(cause)}", detail=str(cause))
