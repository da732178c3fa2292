"""Send many requests to one scontrol process, and match its answers to them.

scontrol without arguments reads requests line by line from its standard input. It reports refusals on stderr, but
not always which request was refused, and its exit status is that of the worst. So a separator that is not a request is
sent before, between and after the requests; scontrol answers `invalid keyword: WORD` at once, and any text on stderr
between two such answers belongs to the request between them (tested on 22.05, 24.11 and 26.05).

Debian's scontrol reads its input with readline, for which control characters are editing commands (a tab completes file
names), and then splits it at blanks. It keeps quotes as a part of the value, and knows no comments (`#`; tested on
22.05, 23.11, 24.11, 25.11 and 26.05). Only words of plain characters are sent this way; any other request is passed as
the arguments of a separate process.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

#: a request: the words after `scontrol`
Request = tuple[str, ...]

_PLAIN = re.compile(r"[A-Za-z0-9_.,:;+/%=@()\[\]*~^-][A-Za-z0-9_.,:;+/%=@()\[\]*~^#-]*")
#: the beginning of a record; scontrol may print its prompt and the request before it
_RECORD = re.compile(r"^(?:scontrol: )*(JobId=)", re.MULTILINE)
#: scontrol's line limit is 4095 bytes if it was built without readline
_LONGEST = 4000


def line(request: Request) -> str | None:
    """Return the request as a line for scontrol's standard input; None if that is not safe."""
    text = " ".join(request)
    return text if request and len(text) <= _LONGEST and all(map(_PLAIN.fullmatch, request)) else None


class Dialog:
    """The input for some lines, and the parser of scontrol's answers to it."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._count = len(lines)
        self._mark = f"after-{secrets.token_hex(6)}-"
        marks = [f"{self._mark}{number}" for number in range(self._count + 1)]
        self.stdin = "".join(f"{text}\n" for pair in zip(marks, [*lines, "exit"], strict=True) for text in pair)

    def outcomes(self, stderr: str) -> list[str | None]:
        """Return scontrol's result of each line: "" if it was done, the refusal, None if it is unknown."""
        answer = re.compile(rf"^.*{self._mark}(\d+).*$\n?", re.MULTILINE)
        ends = {int(match[1]): match.span() for match in answer.finditer(stderr)}
        return [
            " / ".join(stderr[ends[number][1] : ends[number + 1][0]].split("\n")).strip(" /")
            if number in ends and number + 1 in ends
            else None
            for number in range(self._count)
        ]


class Records:
    """The input that makes scontrol show some jobs, and the parser of its output for each of them.

    Random host names separate the records on stdout; scontrol is asked to show them in between.
    """

    def __init__(self, jobs: Sequence[str]) -> None:
        self._count = len(jobs)
        self._mark = f"after-{secrets.token_hex(6)}-"
        requests = [f"show hostnames {self._mark}{number}\nshow job {job}\n" for number, job in enumerate(jobs)]
        self.stdin = "".join([*requests, f"show hostnames {self._mark}{self._count}\nexit\n"])

    def by_job(self, stdout: str) -> list[str] | None:
        """Return the record of each job, from its beginning; "" for a job that scontrol did not show.

        None if scontrol stopped early.
        """
        answer = re.compile(rf"^(?:scontrol: )*{self._mark}(\d+)$\n?", re.MULTILINE)
        ends = {int(match[1]): match.span() for match in answer.finditer(stdout)}
        if len(ends) <= self._count:
            return None
        texts = (stdout[ends[number][1] : ends[number + 1][0]] for number in range(self._count))
        return [text[match.start(1) :] if (match := _RECORD.search(text)) else "" for text in texts]
