"""Errors of the library, and the exception that ends a run on request."""

from __future__ import annotations


class ElasticError(RuntimeError):
    """The training cannot go on as it was called; the message says why and what to do."""


class Superseded(ElasticError):
    """Another run has taken the checkpoint directory over; this one must write nothing more."""


class Leave(SystemExit):
    """The run was told to end (TERM) and has saved what it could. Passes through `except Exception`."""
