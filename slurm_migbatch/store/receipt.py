"""Acknowledgement between a node and the database: how far the node's journal is recorded."""

from __future__ import annotations

from typing import NamedTuple


class NodeReceipt(NamedTuple):
    """The node's claim: its events up to `acked` are in the database with this id. Empty: it has sent none yet.

    With `incomplete` some of its state could not be stored.
    """

    database: str = ""
    acked: int = 0
    incomplete: bool = False


#: the claim of a node that has sent nothing yet
NOTHING = NodeReceipt()


class Receipt(NamedTuple):
    """`acked`: the highest number without gaps, which the node can discard. `database`: its id.

    Without `complete` the database does not know what the node holds, and the node has to send its whole `state`.
    """

    acked: int
    database: str
    complete: bool
