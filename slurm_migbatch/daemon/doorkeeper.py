"""The process that answers submissions, so that nothing else in migbatchd ever makes sbatch wait.

It is a child of migbatchd. Lines of JSON come in on stdin, first `{"config": "<migbatch.toml>", "level": ...,
"catalog": {...}}`, then `{"catalog": {...}}` whenever the site changes; the end of stdin is the end of the process.
Lines go out on stdout: `{"decision": {...}}` for the record, `{"statistics": {...}}` about every second.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from slurm_migbatch.config import loads
from slurm_migbatch.daemon import log as logs
from slurm_migbatch.daemon.facts import chooser_of, policy_of, slurm_uids
from slurm_migbatch.daemon.records import record_of
from slurm_migbatch.submit.decision import Decision
from slurm_migbatch.submit.doorman import Doorman
from slurm_migbatch.submit.service import SubmitService, new_id
from slurm_migbatch.workload.catalog import SiteCatalog

_STATISTICS_S = 1.0
_HAND_OVER_S = 0.1
_MOST_KEPT, _MOST_ANSWERS = 10_000, 4096
#: every sbatch waits for this process; it works for a fraction of a millisecond each time
_NICE = -10


class Output:
    """Lines to migbatchd, from several threads."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one line. Raises BrokenPipeError where migbatchd is gone."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._stream.write(line)
            self._stream.flush()

    def decision(self, decision: Decision) -> None:
        """What the record keeps of a decision, with what was granted."""
        with contextlib.suppress(BrokenPipeError):
            self.send({"decision": {**record_of(decision), "granted": decision.granted}})


class QuickService(SubmitService):
    """A `SubmitService` for one thread that does what can wait later.

    Decisions reach the recorder's thread some at a time, because waking it for each would cost the answer its turn.
    Users submit one script many times over, so an answer to the very same request is given again, under a new name
    for the decision, for as long as the site is the same.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._kept: deque[Decision] = deque(maxlen=_MOST_KEPT)
        self._answers: dict[tuple[bytes, int], tuple[bytes, Decision]] = {}
        self._last: Decision | None = None
        self._changes = 0
        super().__init__(*args, **kwargs)

    def use(self, **facts: Any) -> None:
        """See SubmitService; answers of before are forgotten."""
        super().use(**facts)
        self._changes += 1
        self._answers = {}

    def handle(self, request: bytes, peer_uid: int = 0) -> bytes:
        """See SubmitService."""
        known = self._answers.get((request, peer_uid))
        if known is not None:
            began, id = time.perf_counter(), new_id()
            answer, decision = known
            self._remember(replace(decision, id=id, ts=time.time()))
            self.statistics.note("accept", time.perf_counter() - began)
            return answer.replace(decision.id.encode(), id.encode())
        answers, changes = self._answers, self._changes
        self._last_taken()
        answer = super().handle(request, peer_uid)
        last = self._last_taken()
        if last is not None and changes == self._changes and answer.count(last.id.encode()) == 1:
            if len(answers) >= _MOST_ANSWERS:
                answers.clear()
            answers[request, peer_uid] = answer, last
        return answer

    def _last_taken(self) -> Decision | None:
        last, self._last = self._last, None
        return last

    def _remember(self, decision: Decision) -> None:
        self._last = decision
        if len(self._kept) == _MOST_KEPT:
            self.statistics.dropped_records += 1
        self._kept.append(decision)

    def hand_over(self) -> None:
        """Let the recorder have what was decided since the last time."""
        while self._kept:
            super()._remember(self._kept.popleft())

    def close(self) -> None:
        """Record what waits, then stop."""
        self.hand_over()
        super().close()


def main() -> None:
    """Serve until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # migbatchd gets them too, and closes our stdin in good order
    first = sys.stdin.buffer.readline()
    if not first:
        return
    start = json.loads(first)
    logs.setup(start["level"])
    config = loads(start["config"])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    output = Output(sys.stdout.buffer)
    service = QuickService(
        SiteCatalog.from_dict(start["catalog"]),
        chooser_of(config),
        output.decision,
        policy=policy_of(config),
        slurm_uids=slurm_uids(config),
    )
    doorman = Doorman(Path(config.submit.socket), service)
    doorman.start()
    gc.freeze()
    sys.setswitchinterval(0.0005)
    output.send({"serving": True})
    ended = threading.Event()
    threading.Thread(target=_tell, args=(service, output, ended), daemon=True).start()
    threading.Thread(target=_hand_over, args=(service, ended), daemon=True).start()
    for line in sys.stdin.buffer:
        service.use(catalog=SiteCatalog.from_dict(json.loads(line)["catalog"]))
    ended.set()
    doorman.stop()
    service.close()


def _hand_over(service: QuickService, ended: threading.Event) -> None:
    while not ended.wait(_HAND_OVER_S):
        service.hand_over()


def _tell(service: SubmitService, output: Output, ended: threading.Event) -> None:
    statistics = service.statistics
    while not ended.wait(_STATISTICS_S):
        figures = {
            "answers": dict(statistics.answers),
            "p50": statistics.quantile(0.5),
            "p99": statistics.quantile(0.99),
            "dropped": statistics.dropped_records,
        }
        with contextlib.suppress(BrokenPipeError):
            output.send({"statistics": figures})


if __name__ == "__main__":
    main()
