"""What a node and the database say to each other of how far the node's journal is recorded."""

from __future__ import annotations

from typing import NamedTuple


class NodeReceipt(NamedTuple):
    """What a node believes: its events up to `acked` are in the database of this id. Empty: it has sent none yet.

    With `incomplete` something that it said of what it holds could not be taken.
    """

    database: str = ""
    acked: int = 0
    incomplete: bool = False


#: the claim of a node that has sent nothing yet
NOTHING = NodeReceipt()


class Receipt(NamedTuple):
    """`acked`: the highest number up to which nothing is missing, which the node may forget. `database`: its id.

    Without `complete` the database does not know what the node holds, and the node has to send all of it (`state`).
    """

    acked: int
    database: str
    complete: bool
