"""Errors of the store, as sentences for the administrator."""

from __future__ import annotations


class StoreError(RuntimeError):
    """The database cannot be used; the message says why and what to do."""


class MissingDatabaseError(StoreError):
    """There is no SQLite file at `path`."""

    def __init__(self, path: object) -> None:
        super().__init__(str(path))
        self.path = str(path)

    def __str__(self) -> str:
        return (
            f"no database at {self.path}; migbatchd creates it at its first start, where [store] url of migbatch.toml "
            "says (MIGBATCH_CONFIG selects another file)"
        )


class NetworkFilesystemError(StoreError):
    """An SQLite file on a filesystem that several hosts share."""


class NewerDatabaseError(StoreError):
    """The database was created by a later version of this package."""


class ReadError(StoreError):
    """Reading failed half-way; the message is the database's."""


class OlderDatabaseError(StoreError):
    """The database needs a migration, which a reader must not do."""
