"""The runs of the record that a query selects."""

from __future__ import annotations

from slurm_migbatch.query.redact import allowed
from slurm_migbatch.query.reply import Unanswerable
from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.report.selection import Selection, is_number, limits, parse_jobs, window
from slurm_migbatch.report.states import parse_states
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.store.runquery import RunFilter
from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from slurm_migbatch.query.questions import SelectedRuns
    from slurm_migbatch.query.site import QuerySite
    from slurm_migbatch.slurm.rights import Rights


def selection(
    question: SelectedRuns,
    now: float,
    uid: int,
    *,
    allusers: bool,
    jobs: str = "",
    states: str = "",
    limit: tuple[str, str] = ("", ""),
    **more: Any,
) -> Selection:
    """Return the selection of a query.

    Args:
        question: with the user's texts; "" or () if not given.
        now: the current time, unix seconds.
        uid: the user; others than root see their own jobs unless they name users, jobs or nodes, or ask for all.
        allusers: show everybody's runs, whoever is named.
        jobs, states, limit: as text; the least and the greatest time limit.
        more: further fields of the `RunFilter`; duplicates are left out unless it says otherwise.

    Raises:
        ReportError: a value is invalid.
    """
    named_jobs, named_states = parse_jobs(jobs), parse_states(states)
    since, until, remark = window(now, bool(named_jobs), bool(named_states), question.start, question.end)
    try:
        nodes = expand(question.nodes)
    except NodeListError as error:
        raise ReportError(f"-N: {error}") from None
    users = question.users
    uids: tuple[int, ...] = ()
    if not (allusers or users or named_jobs or nodes) and uid != 0:
        uids = (uid,)
    if not allusers:
        uids += tuple(int(user) for user in users if _is_uid(user))
    wanted = RunFilter(
        jobs=named_jobs,
        users=() if allusers else tuple(user for user in users if not _is_uid(user)),
        uids=uids,
        accounts=question.accounts,
        partitions=question.partitions,
        nodes=nodes,
        states=named_states,
        limits_s=limits(*limit),
        start=since,
        end=until,
        **{"duplicates": False, **more},
    )
    return Selection(wanted, remark)


def _is_uid(user: str) -> bool:
    """Return whether a user is given by number. As in Slurm, names come first: those of students may be numbers."""
    if not is_number(user):
        return False
    import pwd

    try:
        pwd.getpwnam(user)
    except KeyError:
        return True
    return False


def check_users(users: Iterable[str], rights: Rights, has_run: Callable[[RunFilter], bool]) -> None:
    """Raise Unanswerable for a user unknown to both this host and the record: a removed user still has runs."""
    import pwd

    for user in users:
        try:
            pwd.getpwuid(int(user)) if _is_uid(user) else pwd.getpwnam(user)
        except (KeyError, OverflowError):
            of_user = RunFilter(uids=(int(user),)) if is_number(user) and len(user) < 19 else RunFilter(users=(user,))
            if not has_run(allowed(rights, of_user)):
                raise Unanswerable(f"Invalid user id: {user}") from None


def failed(cause: object, site: QuerySite) -> Unanswerable:
    """Return the message for the user when the database failed."""
    return Unanswerable(f"reading the database failed{site.detail(cause)}", detail=str(cause))
