"""Define the error of a test bed."""

from __future__ import annotations


class TestbedError(Exception):
    """An operation of a test bed failed; the text says what happened and what to do."""

    __test__ = False  # not a test class, whatever pytest thinks of its name
