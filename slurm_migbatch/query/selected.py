"""Which runs of the record a question is about, and how these are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slurm_migbatch.query.questions import SelectedRuns
from slurm_migbatch.query.reply import Unanswerable
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report.selection import ReportOptions, Selection, make_selection

if TYPE_CHECKING:
    from sqlalchemy import Connection


def selection(question: SelectedRuns, now: float, uid: int, *, allusers: bool, **more: Any) -> Selection:
    """Return what a question selects; `more` are further fields of `ReportOptions`. Raises ReportError."""
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


@contextmanager
def reading(site: QuerySite) -> Iterator[Connection]:
    """Open a connection to the record for reading one state of it.

    Raises:
        Unanswerable: the database failed meanwhile.
        StoreError: the record cannot be opened.
    """
    from sqlalchemy.exc import SQLAlchemyError

    from slurm_migbatch.store.db import open_store

    try:
        with open_store(site.config.store.url, readonly=True) as store, store.reading() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise failed(getattr(error, "orig", error), site) from None


def failed(cause: object, site: QuerySite) -> Unanswerable:
    """Return what who asked is told where the database failed."""
    return Unanswerable(f"reading the database failed{site.detail(cause)}", detail=str(cause))
