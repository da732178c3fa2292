"""Log to stderr, one line per record: `level logger message key=value ...`, for the systemd journal."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable

from slurm_migbatch.mig.text import escaped

LIMITED_LOG_S = 60.0
_PLAIN = re.compile(r"[^\s\"'=\\]+")
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
#: attributes of a record that are not the caller's `extra`
_KNOWN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """`extra={"node": "n1"}` becomes ` node=n1`; line ends inside values are escaped, so a record is one line."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line; a traceback follows as an escaped `trace` value."""
        message = escaped(record.getMessage())  # job names and comments come from users
        fields = {k: v for k, v in vars(record).items() if k not in _KNOWN}
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        tail = "".join(f" {key}={_value(value)}" for key, value in fields.items())
        noun = record.name.removeprefix("slurm_migbatch.")
        if self._journal:
            return f"<{_PRIORITY.get(record.levelno, 6)}>{noun}: {message}{tail}"
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        return f"{stamp} {record.levelname.lower()} {noun}: {message}{tail}"


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.isprintable() else escaped(json.dumps(text, ensure_ascii=False))


def setup(level: str) -> None:
    """Send everything of `level` and above to stderr; with priorities for systemd."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(journal="JOURNAL_STREAM" in os.environ))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("slurm_migbatch").setLevel(level.upper())


class FaultReporter:
    """Logs failures of a retried operation: the first one, each change of the cause, and the recovery.

    The caller retries; `failed` returns how long to wait before that (seconds, doubling up to `longest`).
    """

    def __init__(
        self,
        subject: str,
        advice: str,
        log: logging.Logger,
        *,
        first: float = 0.5,
        longest: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.subject = subject
        self.advice = advice
        self.error = ""
        self.tries = 0
        self._log = log
        self._first, self._longest, self._clock = first, longest, clock
        self._since = 0.0

    @property
    def open(self) -> bool:
        """Whether the last try failed."""
        return bool(self.tries)

    def failed(self, error: BaseException | str) -> float:
        """Note a failure; return the seconds to wait before the next try."""
        text = (str(error) or type(error).__name__).strip().replace("\n", " ")[:500]
        if not self.tries:
            self._since = self._clock()
        # set the reason before the count: /healthz reads both from another thread
        before, self.error = self.error, text
        self.tries += 1
        if _cause(text) != _cause(before):
            self._log.warning("%s: %s; %s", self.subject, text, self.advice)
        return float(min(self._longest, self._first * 2 ** min(self.tries - 1, 30)))

    def succeeded(self) -> None:
        """Note a success; after failures this logs their duration."""
        if self.tries:
            took = self._clock() - self._since
            self._log.info("%s: recovered after %.0f s and %d failures", self.subject, took, self.tries)
        self.error = ""
        self.tries = 0


class RateLimitedLog:
    """Warnings that clients can cause: one for each source and minute, so that no log is filled.

    Each source may write one line in LIMITED_LOG_S seconds, all together `most`. The next written line gives the number
    of suppressed ones.
    """

    def __init__(
        self,
        log: logging.Logger,
        *,
        most: int = 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._most, self._clock = log, most, clock
        self._sources: set[str] = set()
        self._begun = clock()
        #: warnings suppressed since the last written one
        self.kept_back = 0

    def warning(self, source: str, text: str) -> bool:
        """Write `text`, unless `source` or all together have exceeded their rate; return whether it was written."""
        now = self._clock()
        if now - self._begun >= LIMITED_LOG_S:
            self._sources.clear()
            self._begun = now
        if source in self._sources or len(self._sources) >= self._most:
            self.kept_back += 1
            return False
        self._sources.add(source)
        suppressed = f" ({self.kept_back} similar warnings suppressed)" if self.kept_back else ""
        self.kept_back = 0
        self._log.warning("%s%s", text[:500], suppressed)
        return True


def _cause(text: str) -> str:
    """Return the message without numbers: messages that differ only in numbers count as the same cause."""
    return re.sub(r"\d+", "#", text)
