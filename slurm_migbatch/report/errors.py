"""What can be wrong with a report that was asked for."""

from __future__ import annotations


class ReportError(ValueError):
    """An option has a value that means nothing; the message says what to write instead."""
