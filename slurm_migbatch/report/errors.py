"""Errors of a requested report."""

from __future__ import annotations


class ReportError(ValueError):
    """An option has an invalid value; the message says what to write instead."""
