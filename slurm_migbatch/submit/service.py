"""The submit service: answers the Lua shims over a unix socket, and hands decisions to the record afterwards."""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.decision import Decision
from slurm_migbatch.submit.request import Accept, JobRequest, Pass, Refuse, RequestError
from slurm_migbatch.submit.rewrite import Policy, rewrite
from slurm_migbatch.workload.catalog import SiteCatalog

log = logging.getLogger(__name__)

IDLE_S: Final = 2.0
"""Seconds that a client may take to send its request."""
PER_USER: Final = 8
"""Connections that one ordinary user may have open at a time."""
BACKLOG: Final = 1024
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_CREDENTIALS = struct.Struct("3i")


def new_id() -> str:
    """A decision's name: eight of 0-9a-z."""
    number, text = secrets.randbits(40), ""
    for _ in range(8):
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text


@dataclass(frozen=True)
class Site:
    """What the service answers from; replaced as a whole when the inventory or the model changes."""

    catalog: SiteCatalog
    chooser: Chooser
    policy: Policy


class Statistics:
    """Counts of answers and the last handling times, for the daemon's metrics."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.dropped_records = 0
        self._seconds: deque[float] = deque(maxlen=4096)

    def note(self, verdict: str, seconds: float) -> None:
        """One request was answered."""
        self.answers[verdict] += 1
        self._seconds.append(seconds)

    def quantile(self, share: float) -> float:
        """Handling time in seconds under which `share` of the last requests stayed; 0 before the first."""
        ordered = sorted(self._seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class SubmitService:
    """Answers requests. Thread-safe: `use` may be called while requests are answered.

    `recorder` gets each granted decision in a thread of its own, after the answer; a slow one never delays an answer,
    and where it falls 10,000 decisions behind further ones are dropped and counted.
    """

    def __init__(
        self,
        catalog: SiteCatalog,
        chooser: Chooser,
        recorder: Callable[[Decision], None] | None = None,
        *,
        policy: Policy | None = None,
        slurm_uids: Iterable[int] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`slurm_uids`: besides root, who may ask on behalf of others (the uid of SlurmUser)."""
        self._site = Site(catalog, chooser, policy or Policy())
        self._speakers = frozenset({0, *slurm_uids})
        self._clock = clock
        self._recorder = recorder
        self._waiting: queue.Queue[Decision | None] = queue.Queue(maxsize=10_000)
        self.statistics = Statistics()
        self._thread = threading.Thread(target=self._record, name="migbatch-decisions", daemon=True)
        self._thread.start()

    def use(
        self, *, catalog: SiteCatalog | None = None, chooser: Chooser | None = None, policy: Policy | None = None
    ) -> None:
        """Answer from other facts from now on."""
        site = self._site
        self._site = Site(catalog or site.catalog, chooser or site.chooser, policy or site.policy)

    def handle(self, request: bytes, peer_uid: int = 0) -> bytes:
        """The answer to one request of a process of `peer_uid`. Never raises.

        Root and SlurmUser get decisions, for anybody; everybody else gets advice about himself, which is not recorded.
        """
        began = time.perf_counter()
        try:
            job = JobRequest.from_fields(protocol.decode(request))
            speaker = peer_uid in self._speakers
            if not speaker and job.uid != peer_uid:
                raise RequestError(f"uid {peer_uid} may ask only for himself")
            site = self._site
            answer = rewrite(job, site.catalog, site.chooser, site.policy, decision_id=new_id(), ts=self._clock())
        except RequestError as error:
            self.statistics.note("error", time.perf_counter() - began)
            return protocol.encode({"verdict": "error", "message": str(error)})
        except Exception:  # the shim decides by its table then; a bug here must not stop submissions
            log.exception("a submit request could not be answered")
            self.statistics.note("error", time.perf_counter() - began)
            return protocol.encode({"verdict": "error", "message": "the submit service failed"})
        if speaker and isinstance(answer, Accept) and answer.decision is not None:
            self._remember(answer.decision)
        verdict = {Accept: "accept", Pass: "pass", Refuse: "refuse"}[type(answer)]
        self.statistics.note(verdict, time.perf_counter() - began)
        return protocol.encode_answer(answer)

    def close(self) -> None:
        """Record what waits, then stop."""
        self._waiting.put(None)
        self._thread.join()

    def _remember(self, decision: Decision) -> None:
        try:
            self._waiting.put_nowait(decision)
        except queue.Full:
            self.statistics.dropped_records += 1

    def _record(self) -> None:
        while (decision := self._waiting.get()) is not None:
            if self._recorder is None:
                continue
            try:
                self._recorder(decision)
            except Exception:
                log.exception("decision %s could not be recorded", decision.id)


def listen(path: Path, *, mode: int = 0o666) -> socket.socket:
    """A listening socket at `path`, a dead one there replaced. Raises OSError; the directory must be root's own.

    Everybody may connect (to ask for advice) unless `mode` says otherwise; who may ask what is settled by peer
    credentials.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def peer_uid(client: socket.socket) -> int:
    """The uid of the process at the other end, as the kernel knows it."""
    packed = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])
