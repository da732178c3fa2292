"""Answer to a query: lines for stdout, remarks for stderr and an exit code, or a sentence why there is none."""

from __future__ import annotations

from slurm_migbatch.values import TYPE_CHECKING, Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Unanswerable(Exception):
    """A query without an answer; the message is a sentence for the user.

    Attributes:
        code: exit code of the command: 1 failed, 2 wrong usage.
        detail: for the log of the service, never for the user.
    """

    def __init__(self, sentence: str, code: int = 1, detail: str = "") -> None:
        super().__init__(sentence)
        self.code = code
        self.detail = detail


class Reply(Value):
    """An answer. `lines` may be generated while they are read; they have no line ends."""

    lines: Iterable[str] | Iterator[str]
    remarks: tuple[str, ...] = ()
    code: int = 0
