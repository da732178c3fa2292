"""Load a server with a fixed number of concurrent requests, each followed by another, and summarize the times.

Figures are those of the steady state: a request counts if it was sent after every connection had been busy, and the
load is kept up until the last counted one has ended. Prompts are random words, all different, so that
no prefix cache is hit; the number of words for a length is first measured on the server.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final, NamedTuple

from slurm_migbatch.profiling.completions import Answered, Cancelled, RunningServer, ServerConnection, ServerError
from slurm_migbatch.profiling.timing import P99_SAMPLE

SHARES: Final = (0.5, 0.9, 0.95, 0.99)
"""Percentiles to report."""
MOST_ERRORS: Final = 0.05
"""Share of failed requests from which a point is invalid."""
EXACT: Final = 0.1
"""Tolerance of measured lengths to the requested ones."""
PAUSE_S: Final = 0.2
"""Delay of a connection after a failed request."""
_TOLD: Final = 8
_LOOK_S: Final = 0.02
_LATER_S: Final = 10.0
_FEWEST: Final = 16
"""Words of the shortest calibration prompt; the others fit a server even if it counts bytes."""
_WORDS: Final = """
about above after again begin black board bring build carry cause check class clear close color could cross
drive early earth eight enter every field final first force found front given great green group heard heart
heavy horse house human known large learn leave level light might money month music never night north often
order other paper piece place plain plant point power press
""".split()  # noqa: SIM905
"""Common words of five letters: one token each for most tokenizers, and equal for those that count bytes."""


class LoadPoint(NamedTuple):
    """A load: concurrent requests, input tokens of each, output tokens of each."""

    concurrency: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.concurrency} at once, {self.inputs} tokens in, {self.outputs} out"

    @property
    def tokens(self) -> int:
        """The longest sequence."""
        return self.inputs + self.outputs


@dataclass(frozen=True)
class LoadEffort:
    """How long a point is measured: at least `warmup` requests before (and one on each connection); at least `repeats`
    that count and `min_seconds`; none that counts is sent after `max_seconds`; `timeout` ends everything.
    """

    warmup: int = 3
    repeats: int = 20
    min_seconds: float = 1.0
    max_seconds: float = 30.0
    timeout: float = 900.0


@dataclass(frozen=True)
class Percentiles:
    """Times in seconds: how many, their mean, and those of SHARES. The 99th is None if there are too few."""

    count: int
    mean: float
    at: Mapping[float, float]

    @classmethod
    def of(cls, times: Sequence[float]) -> Percentiles:
        """Summarize at least one time."""
        ordered = sorted(times)
        last = len(ordered) - 1
        percentiles = {}
        for share in SHARES:
            position = share * last
            low = int(position)
            percentiles[share] = ordered[low] + (ordered[min(low + 1, last)] - ordered[low]) * (position - low)
        return cls(len(ordered), fmean(ordered), percentiles)

    @property
    def p50(self) -> float:
        """The median."""
        return self.at[0.5]

    @property
    def p99(self) -> float | None:
        """The 99th percentile, if there are enough times."""
        return self.at[0.99] if self.count >= P99_SAMPLE else None


@dataclass(frozen=True)
class LoadResult:
    """Result of a point: `inputs` and `outputs` are the actual lengths (medians), `errors` maps errors to counts."""

    point: LoadPoint
    inputs: int
    outputs: int
    ttft: Percentiles
    tpot: Percentiles | None
    request: Percentiles
    requests_s: float
    tokens_s: float
    seconds: float
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Requests that failed."""
        return sum(self.errors.values())


class LoadRefused(Exception):
    """A point without figures; the message says why. `errors`: the errors and their counts."""

    def __init__(self, text: str, errors: Mapping[str, int] | None = None) -> None:
        super().__init__(text)
        self.errors = dict(errors or {})


@dataclass(frozen=True)
class Prompts:
    """Prompts of a length in tokens: `tokens` = `overhead` + `tokens_per_word` * words, as the server counts."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    def words(self, tokens: int) -> int:
        """Return the number of words for about this many tokens."""
        return max(round((tokens - self.overhead) / self.tokens_per_word), 1)

    def make(self, tokens: int, number: int, salt: str) -> str:
        """Return the prompt of a number, unique by number and salt."""
        drawn = hashlib.shake_256(f"{salt}/{number}".encode()).digest(self.words(tokens))
        return " ".join(_WORDS[byte % len(_WORDS)] for byte in drawn)

    @classmethod
    def asked(cls, served: RunningServer, line: ServerConnection, tokens: int, salt: str) -> Prompts:
        """Measure on the server how many tokens some words are; if it does not report them, a word is one token."""
        counts: list[tuple[int, int]] = []
        for number, words in enumerate((_FEWEST, max(tokens // 8, 2 * _FEWEST))):
            answered = served.ask(line, cls().make(words, number, f"{salt}/lengths"), 2)
            if answered.inputs is None:
                return cls()
            counts.append((words, answered.inputs))
        (few_words, few_tokens), (many_words, many_tokens) = counts
        tokens_per_word = (many_tokens - few_tokens) / (many_words - few_words)
        return cls(tokens_per_word, few_tokens - tokens_per_word * few_words) if tokens_per_word > 0 else cls()


class _Loop:
    """The connections of one point: each in a thread, which sends one request after the other."""

    def __init__(
        self, served: RunningServer, point: LoadPoint, prompts: Prompts, effort: LoadEffort, salt: str, end: float
    ) -> None:
        self._served, self._point, self._prompts, self._salt = served, point, prompts, salt
        self._effort = effort
        self._lock = threading.Lock()
        self._sent = self._warmed = 0
        self._began: float | None = None
        self._over = threading.Event()
        self._closed = False
        self._waiting = 0
        self.counted: list[Answered] = []
        self.errors: Counter[str] = Counter()
        self.early: Counter[str] = Counter()
        timeout = max(end - time.monotonic(), 0.0) + _LATER_S  # connections are cut at the end, before their timeout
        self._lines = [served.line(timeout) for _ in range(point.concurrency)]
        self._threads = [
            threading.Thread(target=self._place, args=(line,), name=f"request-{i}", daemon=True)
            for i, line in enumerate(self._lines)
        ]

    def run(self, end: float) -> float:
        """Load the server until all counted requests have ended, or `end` (monotonic clock); return the seconds."""
        for thread in self._threads:
            thread.start()
        try:
            while time.monotonic() < end and not self._is_enough():
                time.sleep(_LOOK_S)
        finally:
            self._over.set()
            for line in self._lines:
                line.cut()
            for thread in self._threads:
                thread.join()
            for line in self._lines:
                line.close()
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _is_enough(self) -> bool:
        with self._lock:
            if self._began is None:
                return self.early.total() >= max(self._point.concurrency, self._effort.warmup)
            spent = time.monotonic() - self._began
            done = len(self.counted) + self.errors.total()
            enough = done >= self._effort.repeats and spent >= self._effort.min_seconds
            if enough or spent >= self._effort.max_seconds:
                self._closed = True
            return self._closed and self._waiting == 0 and done > 0

    def _place(self, line: ServerConnection) -> None:
        first = True
        while not self._over.is_set():
            with self._lock:
                counts = self._began is not None and not self._closed
                number, self._sent = self._sent, self._sent + 1
                self._waiting += counts
            prompt = self._prompts.make(self._point.inputs, number, self._salt)
            try:
                answered = self._served.ask(line, prompt, self._point.outputs)
            except Cancelled:
                with self._lock:
                    self._waiting -= counts
                return
            except ServerError as error:
                self._note_error(str(error), counts)
                self._over.wait(PAUSE_S)
                continue
            with self._lock:
                self._waiting -= counts
                if counts:
                    self.counted.append(answered)
                self._warm(first)
            first = False

    def _note_error(self, text: str, counts: bool) -> None:
        with self._lock:
            self._waiting -= counts
            if self._began is not None and not counts:
                return
            # the server may still be finishing the previous point's requests
            errors = self.errors if counts else self.early
            errors[text if len(errors) < _TOLD or text in errors else "other errors"] += 1

    def _warm(self, first: bool) -> None:
        """Count requests ended before the measurement: one on each connection, and `warmup` in all."""
        if self._began is not None:
            return
        self._warmed += first or self._warmed >= self._point.concurrency
        if self._warmed >= max(self._point.concurrency, self._effort.warmup):
            self._began = time.monotonic()


def measure_load(
    served: RunningServer,
    point: LoadPoint,
    prompts: Prompts,
    effort: LoadEffort,
    salt: str,
) -> LoadResult:
    """Measure one point; raises LoadRefused if it gives no figures."""
    end = time.monotonic() + effort.timeout
    loop = _Loop(served, point, prompts, effort, salt, end)
    seconds = loop.run(end)
    answered = loop.counted
    errors = dict((loop.errors if answered else loop.errors or loop.early).most_common())
    failed = sum(errors.values())
    if failed and failed > MOST_ERRORS * (failed + len(answered)):
        worst = next(iter(errors))
        raise LoadRefused(f"{failed} of {failed + len(answered)} requests failed: {worst}", errors)
    if not answered:
        raise LoadRefused(f"no request ended within {effort.timeout:g} s", errors)
    requests = Percentiles.of([answer.whole for answer in answered])
    tpots = [answer.tpot for answer in answered if answer.tpot is not None and answer.tpot > 0]
    outputs = [answer.outputs for answer in answered]
    inputs = [answer.inputs for answer in answered if answer.inputs is not None]
    requests_s = point.concurrency / requests.mean  # Little's law: all connections are always busy
    return LoadResult(
        point,
        _rounded(point.inputs, median(inputs) if inputs else point.inputs),
        _rounded(point.outputs, median(outputs)),
        Percentiles.of([answer.ttft for answer in answered]),
        Percentiles.of(tpots) if tpots else None,
        requests,
        requests_s,
        requests_s * fmean(outputs),
        seconds,
        errors,
    )


def _rounded(asked: int, found: float) -> int:
    return asked if abs(found / asked - 1.0) <= EXACT else max(round(found), 1)
