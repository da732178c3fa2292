"""Reading a consistent state of the record over SQLAlchemy, for queries that compute sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from slurm_migbatch.query.selected import failed
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.store.db import open_store


@contextmanager
def reading(site: QuerySite) -> Iterator[Connection]:
    """Open a connection to the record with one consistent state.

    Raises:
        Unanswerable: the database failed meanwhile.
        StoreError: the record cannot be opened.
    """
    try:
        with open_store(site.url, readonly=True) as store, store.reading() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise failed(getattr(error, "orig", error), site) from None
