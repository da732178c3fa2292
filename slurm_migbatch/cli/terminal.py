"""A terminal that shows one page: keys as they are typed, signals as bytes, and its old state restored at the end."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from rich.console import Console, ConsoleDimensions
from rich.text import Text

from slurm_migbatch.cli.keys import decode

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
#: seconds after which an ESC is not the beginning of another key
_ESC_S: Final = 0.1
_WATCHED: Final = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGTERM, signal.SIGHUP)
#: errors of a terminal that is gone
_GONE: Final = (OSError, termios.error)


class EndedBySignal(SystemExit):
    """A signal has ended the program; the exit code is the shell's for it."""


class Terminal:
    """The terminal of this process, as a context. Only the main thread may use it, except for `wake`."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=False)
        self.plain = self._console.no_color
        self._rest = b""
        self._signals: list[int] = []
        self._before: list[Any] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Terminal:
        self._wake_in, self._wake_out = os.pipe()
        for end in (self._wake_in, self._wake_out):
            fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_NONBLOCK)
        self._before = termios.tcgetattr(self._in)
        try:
            for number in _WATCHED:
                self._handlers[number] = signal.signal(number, self._note)
            self._begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for end in (self._wake_in, self._wake_out):
            os.close(end)

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        try:
            found = os.get_terminal_size(self._out)
        except OSError:
            return 80, 24
        return found.columns or 80, found.lines or 24

    def draw(self, lines: Sequence[Text], *, colour: bool) -> None:
        """Show these lines, each at most as wide as the terminal, from the top."""
        width, height = self.size()
        self._console.size = ConsoleDimensions(width + 1, height)  # do not wrap a full line
        self._console.no_color = self.plain or not colour
        with self._console.capture() as captured:
            for line in lines[:height]:
                self._console.print(line, end="\n", no_wrap=True)
        rows = captured.get().splitlines()
        # a full-width line leaves the cursor on the last column, where erasing would remove a character
        ends = ("" if line.cell_len >= width else "\x1b[K" for line in lines)
        self._write("\x1b[H" + "\r\n".join(f"{row}{end}" for row, end in zip(rows, ends, strict=False)))

    def wake(self) -> None:
        """End a `wait`; any thread may call this."""
        with suppress(OSError):  # it is full, or the terminal was left: nobody waits
            os.write(self._wake_out, b"\0")

    def wait(self, seconds: float) -> list[str]:
        """Return the typed keys, at the latest after so many seconds; none if something else happened.

        Raises:
            EndedBySignal: SIGTERM, or the terminal is gone.
            KeyboardInterrupt: Ctrl-C.
        """
        patience = max(0.0, min(seconds, _ESC_S) if self._rest else seconds)
        readable, _, _ = select.select([self._in, self._wake_in], [], [], patience)
        if self._wake_in in readable:
            os.read(self._wake_in, 4096)
        self._act()
        if self._in not in readable:
            keys, self._rest = decode(self._rest, ended=True) if not readable else ([], self._rest)
            return keys
        data = os.read(self._in, 4096)
        if not data:
            raise EndedBySignal(1)
        keys, self._rest = decode(self._rest + data)
        return keys

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        self.wake()

    def _act(self) -> None:
        """Handle pending signals."""
        while self._signals:
            number = self._signals.pop(0)
            if number in (signal.SIGTERM, signal.SIGHUP):
                raise EndedBySignal(128 + number)
            if number == signal.SIGTSTP:
                self._restore()
                os.kill(os.getpid(), signal.SIGSTOP)
                self._begin()

    def _begin(self) -> None:
        tty.setcbreak(self._in, termios.TCSADRAIN)
        self._write(_ENTER)

    def _restore(self) -> None:
        with suppress(*_GONE):
            self._write("\x1b[0m" + _LEAVE)
        with suppress(*_GONE):
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)

    def _end(self) -> None:
        self._restore()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(self._out, data) :]
