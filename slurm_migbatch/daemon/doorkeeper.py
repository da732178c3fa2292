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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from slurm_migbatch.config import loads
from slurm_migbatch.daemon import log as logs
from slurm_migbatch.daemon.doorman import Doorman
from slurm_migbatch.daemon.facts import chooser_of, policy_of, slurm_uids
from slurm_migbatch.daemon.records import record_of
from slurm_migbatch.submit.decision import Decision
from slurm_migbatch.submit.service import SubmitService
from slurm_migbatch.workload.catalog import SiteCatalog

_STATISTICS_S = 1.0
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
    service = SubmitService(
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
    for line in sys.stdin.buffer:
        service.use(catalog=SiteCatalog.from_dict(json.loads(line)["catalog"]))
    ended.set()
    doorman.stop()
    service.close()


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
