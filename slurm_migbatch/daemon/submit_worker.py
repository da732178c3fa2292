"""Answer submissions in a process of its own, so that nothing else in migbatchd delays sbatch.

It is a child of migbatchd. It reads lines of JSON from stdin, first `{"config": "<migbatch.toml>", "level": ...,
"catalog": {...}}`, then `{"catalog": {...}}` whenever the site changes, `{"model": <version>}` when another learned
model becomes current, which is read from its file, and `{"recurring": {key: [run, ...]}}` when runs of recurring jobs
have ended (`predict.recurring.PastRun`); the process exits at the end of stdin. It writes lines to stdout:
`{"decision": {...}}` for the record, `{"statistics": {...}}` about every second while there are answers.

One thread answers and, between answers, does small parts of other work, because a second busy thread would hold the
interpreter lock. None of this work can block.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.config import loads
from slurm_migbatch.daemon import log as logs
from slurm_migbatch.daemon.facts import chooser_of, policy_of, slurm_uids
from slurm_migbatch.daemon.garbage import collect_when_idle, collect_young
from slurm_migbatch.daemon.records import record_of
from slurm_migbatch.predict.recurring import PastRun
from slurm_migbatch.submit.decision import SubmitDecision, as_bytes, as_utf8
from slurm_migbatch.submit.server import SubmitServer
from slurm_migbatch.submit.service import SubmitService
from slurm_migbatch.workload.catalog import SiteCatalog

_STATISTICS_S: Final = 1.0
#: how soon to retry if migbatchd does not read
_FULL_S: Final = 0.05
#: bytes that may wait for migbatchd; further decisions wait as objects, and are counted if there are too many
_BACKLOG: Final = 1 << 20
#: seconds that the process waits for names of users before it exits
_STOP_S: Final = 2.0
#: high, because every sbatch waits for this process, which needs a fraction of a millisecond each time; the unit has to
#: permit it (LimitNICE=)
NICE: Final = -10


class Output:
    """Lines to migbatchd, from any thread; unread data waits here."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._lock = threading.Lock()
        os.set_blocking(descriptor, False)

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one line, now or later."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._waiting += line
            self._flush()

    def flush(self) -> int:
        """Write what is possible; return the remaining bytes."""
        with self._lock:
            self._flush()
            return len(self._waiting)

    def close(self) -> None:
        """Write everything, however long it takes."""
        os.set_blocking(self._descriptor, True)
        while self.flush():
            pass

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # migbatchd has ended, and stdin will end too
            self._waiting.clear()


class DecisionRecorder:
    """Converts decisions to rows of the record, with the name of the user.

    User names are looked up in a separate thread, once per user, because a directory service may be slow.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._names: dict[int, str] = {}
        self._unnamed: queue.SimpleQueue[SubmitDecision | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._look_up, name="user-names", daemon=True)
        self._thread.start()

    def take(self, decision: SubmitDecision) -> None:
        """Record a decision, with what was granted."""
        name = decision.user or self._names.get(decision.uid)
        if name is None:
            self._unnamed.put(decision)
        else:
            self._write(decision, name)

    def close(self, patience_s: float) -> None:
        """Record decisions that still wait for a name."""
        self._unnamed.put(None)
        self._thread.join(patience_s)

    def _write(self, decision: SubmitDecision, name: str) -> None:
        complete = decision if decision.user else replace(decision, user=name)
        partition = as_utf8(decision.partition)
        self._output.send({"decision": {**record_of(complete), "partition": partition, "granted": decision.granted}})

    def _look_up(self) -> None:
        while (decision := self._unnamed.get()) is not None:
            name = self._names.get(decision.uid)
            if name is None:
                try:
                    name = pwd.getpwuid(decision.uid).pw_name
                except (KeyError, OSError):
                    name = str(decision.uid)
                self._names[decision.uid] = name
            self._write(decision, name)


class IdleTasks:
    """Background work in small parts: the record, metrics, memory."""

    def __init__(self, service: SubmitService, output: Output) -> None:
        self._service, self._output = service, output
        self._reported = 0.0

    def __call__(self) -> float | None:
        """Do one part; return the seconds until there is more to do."""
        if self._output.flush() > _BACKLOG:
            return _FULL_S
        if self._service.record():
            return 0.0
        collect_young()
        wait = self._reported + _STATISTICS_S - time.monotonic()
        if wait > 0:
            return wait
        self._report()
        return _FULL_S if self._output.flush() else None

    def _report(self) -> None:
        self._reported = time.monotonic()
        statistics = self._service.statistics
        figures = {
            "answers": dict(statistics.answers),
            "p50": statistics.quantile(0.5),
            "p99": statistics.quantile(0.99),
            "dropped": statistics.dropped_records,
        }
        self._output.send({"statistics": figures})


def main() -> None:
    """Serve until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_IGN
        )  # migbatchd gets them too, and closes this process's stdin for an orderly exit
    first = sys.stdin.buffer.readline()
    if not first:
        return
    start = json.loads(first)
    logs.setup(start["level"])
    config = loads(start["config"])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    output = Output(sys.stdout.fileno())
    recorder = DecisionRecorder(output)
    service = SubmitService(
        SiteCatalog.from_dict(as_bytes(start["catalog"])),
        chooser_of(config),
        recorder.take,
        policy=policy_of(config),
        slurm_uids=slurm_uids(config),
    )
    server = SubmitServer(Path(config.submit.socket), service, IdleTasks(service, output))
    collect_when_idle()
    sys.setswitchinterval(0.0001)  # other work (a new catalog, a new user's name) must not delay an answer
    server.start()
    output.send({"serving": True})
    for line in sys.stdin.buffer:
        news = json.loads(line)
        if "model" in news:
            service.use(chooser=chooser_of(config))
        elif "recurring" in news:
            service.learn({key: [PastRun(*run) for run in runs] for key, runs in news["recurring"].items()})
        else:
            service.use(catalog=SiteCatalog.from_dict(as_bytes(news["catalog"])))
    server.stop()
    service.close()
    recorder.close(_STOP_S)
    output.close()


if __name__ == "__main__":
    main()
