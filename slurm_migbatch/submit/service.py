"""Run the submit service: answer the Lua shims over a unix socket, and record decisions afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from slurm_migbatch.mig.grant import CHANGED
from slurm_migbatch.predict.recurring import SENTENCES, PastRun, may_have_run_out
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.alike import AlikeAnswers, KeyedRequest
from slurm_migbatch.submit.answer_cache import LONGEST, AnswerCache, CachedAnswer
from slurm_migbatch.submit.decision import Decide, SubmitDecision
from slurm_migbatch.submit.gres_request import mentions_gpus
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import TRES_FIELDS, Accept, Answer, JobRequest, Pass, Refuse, RequestError
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.submit.script import condense, recurring_key
from slurm_migbatch.values.quantiles import quantile
from slurm_migbatch.workload.catalog import SiteCatalog
from slurm_migbatch.workload.loans import LOAN

log = logging.getLogger(__name__)

IDLE_S: Final = 2.0
"""Seconds that a client may take to send its request."""
PER_USER: Final = 8
"""Most open connections of one ordinary user."""
BACKLOG: Final = 1024
MOST_UNRECORDED: Final = 10_000
"""Most decisions waiting for the record; further ones push out the oldest."""
EARLIER: Final = 3
"""Earlier catalogs whose answers are kept: a node whose reports alternate brings them back up to once a second."""
_VERDICTS: Final = {Accept: "accept", Pass: "pass", Refuse: "refuse"}
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


def new_id() -> str:
    """Return a decision's name: eight of 0-9a-z, with none of the reserved prefixes."""
    number, text = secrets.randbits(40), ""
    for _ in range(8):
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return new_id() if text.startswith((LOAN, CHANGED)) else text


@dataclass(frozen=True)
class SubmitState:
    """State that answers are made from; replaced as a whole when the inventory or the model changes."""

    catalog: SiteCatalog
    chooser: Chooser
    policy: SubmitPolicy
    answers: AnswerCache = field(default_factory=AnswerCache, compare=False)
    alike: AlikeAnswers = field(default_factory=AlikeAnswers, compare=False)

    def may_reuse(self, request: JobRequest, answer: Answer) -> bool:
        """Return whether the same request will get the same answer as long as the site is unchanged.

        False if the answer depends on runs of the same job, which change meanwhile; for a refusal that is unknown.
        """
        if isinstance(answer, Refuse):
            return request.digest is None or not self.policy.runs.runs
        decision = answer.decision if isinstance(answer, Accept) else None
        if decision is None or not decision.recurring:
            return True
        advised = self.policy.advise and mentions_gpus(decision.asked.get(name) for name in TRES_FIELDS)
        return decision.reason not in SENTENCES and not advised


class Statistics:
    """Number of answers and the last handling times, for the daemon's metrics."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.dropped_records = 0
        self._seconds: deque[float] = deque(maxlen=1024)

    def note(self, verdict: str, seconds: float) -> None:
        """Count an answered request."""
        self.answers[verdict] += 1
        self._seconds.append(seconds)

    def quantile(self, share: float) -> float:
        """Return the handling time in seconds that `share` of the last requests did not exceed; 0 before the first."""
        return quantile(self._seconds, share) if self._seconds else 0.0


class SubmitService:
    """Answer requests. `use` and `learn` may be called from another thread, all other methods from one at a time.

    A granted decision is kept until `record` is called, when no client waits for an answer.
    """

    def __init__(
        self,
        catalog: SiteCatalog,
        chooser: Chooser,
        recorder: Callable[[SubmitDecision], None] | None = None,
        *,
        policy: SubmitPolicy | None = None,
        slurm_uids: Iterable[int] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Set up. `slurm_uids`: users besides root who may submit for others (the uid of SlurmUser)."""
        self._site = SubmitState(catalog, chooser, policy or SubmitPolicy())
        #: earlier states with the same chooser, the latest first
        self._earlier: tuple[SubmitState, ...] = ()
        self._clock = clock
        self._past: dict[str, tuple[PastRun, ...]] = {}
        #: keys of recurring jobs of which a run may have run out of memory, so that similar requests get other answers
        self._short: frozenset[str] = frozenset()
        self._recorder = recorder
        #: unused names for future decisions
        self._ids: deque[str] = deque()
        self._unrecorded: deque[tuple[Decide, str, float]] = deque(maxlen=MOST_UNRECORDED)
        #: who may ask on behalf of others
        self.proxy_uids = frozenset({0, *slurm_uids})
        self.statistics = Statistics()

    def use(self, *, catalog: SiteCatalog | None = None, chooser: Chooser | None = None) -> None:
        """Use another site for answers from now on; if it was in use before, its cached answers are used again."""
        site = self._site
        new_state = SubmitState(catalog or site.catalog, chooser or site.chooser, site.policy)
        compatible = [state for state in (site, *self._earlier) if state.chooser is new_state.chooser]
        self._site = next((state for state in compatible if state.catalog == new_state.catalog), new_state)
        self._earlier = tuple([state for state in compatible if state is not self._site][:EARLIER])

    def learn(self, past: Mapping[str, Sequence[PastRun]]) -> None:
        """Replace the runs of these recurring jobs; without runs, the job is forgotten."""
        past_runs = {**self._past, **{key: tuple(runs) for key, runs in past.items()}}
        for key in [key for key, runs in past.items() if not runs]:
            del past_runs[key]
        self._past = past_runs  # replaced as a whole, because requests are answered meanwhile
        short = {key for key, runs in past.items() if any(map(may_have_run_out, runs))}
        if short - self._short:
            self._forget()
        self._short = frozenset(key for key in self._short | short if key in short or key not in past)

    def _forget(self) -> None:
        """Forget the answers to identical requests."""
        states = [replace(state, answers=AnswerCache()) for state in (self._site, *self._earlier)]
        self._site, self._earlier = states[0], tuple(states[1:])

    def handle(self, request: bytes, peer_uid: int = 0) -> bytes:
        """Return the answer to one request of a process of `peer_uid`. Never raises.

        Root and SlurmUser get decisions, for any user; others get advice for themselves, which is not recorded.
        """
        began = time.perf_counter()
        request = condense(request)
        site, is_proxy = self._site, peer_uid in self.proxy_uids
        cached = site.answers.get(request) if is_proxy else None
        try:
            if cached is not None:
                verdict, message = self._give(cached)
            else:
                verdict, message = self._answer(request, peer_uid, site, is_proxy=is_proxy)
        except RequestError as error:
            verdict, message = "error", protocol.encode({"verdict": "error", "message": str(error)})
        except Exception:  # the shim then decides by its table; a bug here must not stop submissions
            log.exception("a submit request failed")
            verdict, message = "error", protocol.encode({"verdict": "error", "message": "the submit service failed"})
        self.statistics.note(verdict, time.perf_counter() - began)
        return message

    def _answer(self, request: bytes, peer_uid: int, site: SubmitState, *, is_proxy: bool) -> tuple[str, bytes]:
        fields = protocol.decode(request)
        cached = is_proxy and not self._ran_out(fields)
        question = KeyedRequest.of(fields, site.chooser) if cached and len(request) <= LONGEST else None
        similar = None if question is None else site.alike.get(question)
        if similar is not None:
            site.answers.put(request, similar)
            return self._give(similar)
        job = JobRequest.from_fields(fields)
        if not is_proxy and job.uid != peer_uid:
            raise RequestError(f"uid {peer_uid} may only query his own requests")
        name, now = self._next_id(), self._clock()
        answer = rewrite(job, site.catalog, site.chooser, site.policy, decision_id=name, ts=now, past=self._past)
        verdict, message = _VERDICTS[type(answer)], protocol.encode_answer(answer)
        if is_proxy:
            decision = answer.decision if isinstance(answer, Accept) else None
            if cached and site.may_reuse(job, answer):
                site.answers.keep(request, verdict, message, decision, name)
                if question is not None and decision is not None:
                    site.alike.keep(question, message, decision, name)
            if decision is not None:
                self._remember(decision.again, decision.id, now)
        return verdict, message

    def _ran_out(self, fields: Mapping[str, str]) -> bool:
        """Return whether a run of the job that is submitted may have run out of memory."""
        uid, digest = fields.get("uid", ""), fields.get("digest")
        if not self._short or digest is None or not uid.isdecimal():
            return False
        identity = [fields.get(name, "") for name in ("account", "partition", "name")]
        return recurring_key(int(uid), identity[0], identity[1], identity[2], digest) in self._short

    def _give(self, given: CachedAnswer) -> tuple[str, bytes]:
        """Return a cached answer, with a new decision name."""
        name = ""
        if given.decide is not None:
            name = self._next_id()
            self._remember(given.decide, name, self._clock())
        return given.verdict, given.named(name)

    def prepare(self) -> None:
        """Prepare for the next request, after an answer has been sent."""
        if not self._ids:
            self._ids.append(new_id())

    def _next_id(self) -> str:
        return self._ids.popleft() if self._ids else new_id()

    def _remember(self, decide: Decide, name: str, ts: float) -> None:
        if self._recorder is None:
            return
        if len(self._unrecorded) == MOST_UNRECORDED:
            self.statistics.dropped_records += 1
        self._unrecorded.append((decide, name, ts))

    def record(self) -> bool:
        """Pass the oldest waiting decision to the recorder; return whether more wait."""
        if not self._unrecorded or self._recorder is None:
            return False
        decide, name, ts = self._unrecorded.popleft()
        try:
            self._recorder(decide(name, ts))
        except Exception:
            log.exception("cannot record decision %s", name)
        return bool(self._unrecorded)

    def close(self) -> None:
        """Record waiting decisions."""
        while self.record():
            pass


def reserved(path: Path) -> Path:
    """Return the path of slurmctld's own socket, which is separate so that users' requests cannot delay slurmctld."""
    return path.with_name(f"{path.stem}-slurmctld{path.suffix}")


def listen(path: Path, *, owners: Collection[int] = ()) -> socket.socket:
    """Return a listening socket at `path`. Raises OSError; the directory must be root's own.

    An existing socket is replaced atomically: there is always a socket at `path`, and the previous listener gets no
    more connections. Every user may connect (to ask for advice); what a caller may do depends on the peer credentials.
    With `owners` only root and this user may connect. If the owner cannot be set (there are several, or only root could
    set it), every user may connect.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    fresh = path.with_name(f"{path.name}~")
    try:
        fresh.unlink(missing_ok=True)
        listener.bind(str(fresh))
        fresh.chmod(0o600 if owners and _hand_over(fresh, owners) else 0o666)
        listener.listen(BACKLOG)
        fresh.replace(path)
    except BaseException:
        listener.close()
        raise
    return listener


def _hand_over(path: Path, owners: Collection[int]) -> bool:
    others = set(owners) - {0, os.geteuid()}
    if len(others) > 1:
        return False
    with contextlib.suppress(PermissionError):
        for owner in others:
            os.chown(path, owner, -1)
        return True
    return False
