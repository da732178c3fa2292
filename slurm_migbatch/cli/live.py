"""The running `migbatch top`: queries in a thread, redraws on changes, frames for a pipe."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, Final

import click

from slurm_migbatch.cli.ending import Failure, describe, is_expected
from slurm_migbatch.cli.terminal import Terminal
from slurm_migbatch.query.questions import Question, TopQuestion, checked
from slurm_migbatch.query.reply import Reply
from slurm_migbatch.report.page import Page
from slurm_migbatch.report.pagestate import PageState, press
from slurm_migbatch.report.pageview import Frame, frame

Ask = Callable[[Question], Reply]
#: a query is followed by a pause of this many times its duration: a slow site is not slowed down further
_REST: Final = 4.0
_BATCH_WIDTH: Final = 80
_IDLE_S: Final = 3600.0


@dataclass(frozen=True)
class QueryResult:
    """Result of a query: a page, or an error. `took`: seconds."""

    page: Page | None = None
    remarks: tuple[str, ...] = ()
    trouble: str = ""
    took: float = 0.0


def query_once(ask: Ask, question: TopQuestion) -> QueryResult:
    """Query once; expected errors become `trouble`."""
    began = time.monotonic()
    try:
        reply = ask(question)
        return QueryResult(Page.read("\n".join(reply.lines)), reply.remarks, took=time.monotonic() - began)
    except Exception as error:
        if not is_expected(error):
            raise
        sentence = describe(error)
    return QueryResult(trouble=sentence, took=time.monotonic() - began)


class QueryThread:
    """Queries in a thread, one at a time; the end of the process does not wait for it."""

    def __init__(self, ask: Ask, changed: Callable[[], None]) -> None:
        self._ask, self._changed = ask, changed
        self._results: SimpleQueue[QueryResult | BaseException] = SimpleQueue()
        self.busy = False

    def want(self, question: TopQuestion) -> None:
        """Begin a query; only if none is running."""
        self.busy = True
        threading.Thread(target=self._query, args=(question,), daemon=True, name="query").start()

    def _query(self, question: TopQuestion) -> None:
        try:
            self._results.put(query_once(self._ask, question))
        except BaseException as error:
            self._results.put(error)
        self._changed()

    def found(self) -> QueryResult | None:
        """Return the result of a query that has ended since the last call; raises unexpected errors."""
        if self._results.empty():
            return None
        found, self.busy = self._results.get(), False
        if isinstance(found, BaseException):
            raise found
        return found


def watch(ask: Ask, state: PageState, names: str | None, count: int | None, terminal: Terminal) -> None:
    """Show the page in a terminal, entered already, until its user quits or after `count` refreshes. `names`: only
    these nodes.
    """
    queries = QueryThread(ask, terminal.wake)
    last, due, left = QueryResult(), 0.0, count
    drawn = Frame(())
    while not state.over:
        if time.monotonic() >= due and not queries.busy:
            queries.want(_question(state, names))
            due = time.monotonic() + _IDLE_S
        drawn = frame(last.page, *terminal.size(), state, last.trouble, last.remarks)
        terminal.draw(drawn.lines, colour=state.colour)
        before = state
        for key in terminal.wait(max(0.0, due - time.monotonic()) if not queries.busy else _IDLE_S):
            state = press(state, key, drawn.extents)
        found = queries.found()
        if found is not None:
            last = found if found.page is not None else replace(last, trouble=f"stale, retrying: {found.trouble}")
            due = time.monotonic() + max(state.interval, _REST * found.took)
            left = left if left is None or found.page is None else left - 1
            if left == 0:
                return
        if state.refreshes != before.refreshes:
            due = 0.0
        elif state.interval != before.interval:
            due = min(due, time.monotonic() + state.interval)


def _question(state: PageState, names: str | None) -> TopQuestion:
    return TopQuestion(names, state.user, state.only)


def batch(ask: Ask, state: PageState, names: str | None, count: int | None) -> None:
    """Print one page after the other as plain text, with all rows.

    Raises:
        Failure: there is no page, and none will follow.
    """
    for text in frames(ask, state, names, count, time.sleep):
        sys.stdout.write(text)
        sys.stdout.flush()


def frames(
    ask: Ask, state: PageState, names: str | None, count: int | None, pause: Callable[[float], Any]
) -> Iterator[str]:
    """Yield the pages; a failed query is reported on stderr."""
    done = 0
    while count is None or done < count:
        if done:
            pause(state.interval)
        found = query_once(ask, _question(state, names))
        done += 1
        if found.page is None and done == count:
            raise Failure(found.trouble)
        for remark in (*found.remarks, *([found.trouble] if found.trouble else ())):
            click.echo(f"migbatch: {remark}", err=True)
        if found.page is not None:
            lines = frame(found.page, _batch_width(), None, state).lines
            yield "".join(f"{line.plain.rstrip()}\n" for line in lines) + ("" if done == count else "\n")


def _batch_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return min(max(int(columns), 40), 1000) if columns.isascii() and columns.isdigit() else _BATCH_WIDTH


def run(ask: Ask, state: PageState, names: str | None, *, count: int | None, plain: bool) -> None:
    """Show the page in the terminal, or print frames if there is none, or with `plain`.

    Raises:
        QuestionError: a setting is out of bounds.
    """
    checked(_question(state, names))
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")
    if plain or dumb or not (sys.stdin.isatty() and sys.stdout.isatty()):
        batch(ask, state, names, count)
        return
    with Terminal() as terminal:
        watch(ask, state, names, count, terminal)
