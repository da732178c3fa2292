"""Define the errors of the library, and the exception that ends a run on request."""

from __future__ import annotations


class ElasticError(RuntimeError):
    """The training cannot continue as it was called; the message says why and what to do."""


class Superseded(ElasticError):
    """Another run has taken over the checkpoint directory; this one must write nothing more."""


class Leave(SystemExit):
    """The run was requested to end (TERM) and has saved what it could. Not caught by `except Exception`."""
