"""Worker process of the query service: answers one query after the other.

It is a child of `server`, which kills it if a query takes too long and starts another. Lines of JSON come in on stdin,
first `{"config": "<migbatch.toml>", "level": ...}`, then `{"uid": ..., "question": "..."}` for each query; the process
exits at the end of stdin. Each answer is written to stdout as its length, eight hexadecimal digits, and itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from sqlalchemy.exc import OperationalError

from slurm_migbatch.config import Config, loads
from slurm_migbatch.daemon import log as logs
from slurm_migbatch.daemon.children import be_killed_first
from slurm_migbatch.daemon.log import RateLimitedLog
from slurm_migbatch.daemon.privacy import Privacy
from slurm_migbatch.query.answers import answer
from slurm_migbatch.query.protocol import Answer
from slurm_migbatch.query.questions import Question, QuestionError, read
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.slurm.users import uid_of
from slurm_migbatch.store.errors import StoreError

log = logging.getLogger(__name__)

#: memory limit of the process; a few hundred megabytes are usual
_MEMORY_BYTES: Final = 2 << 30
_NICE: Final = 5
_PR_SET_PDEATHSIG: Final = 1
_ZONES: Final = Path("/usr/share/zoneinfo")
#: a time zone given as a POSIX rule instead of a name, "CET-1CEST,M3.5.0,M10.5.0/3"
_RULE: Final = re.compile(r"(?:[A-Za-z]{3,}|<[A-Za-z0-9+-]{3,}>)[+-]?\d")


class Answerer:
    """Answers user queries with the configuration of this host."""

    def __init__(self, config: Config) -> None:
        self._site = QuerySite(config, quiet=True)
        self._limit = config.query.answer_mb << 20
        trusted = {0, os.geteuid(), *uid_of(config.cluster.slurm_user)}
        self._privacy = Privacy(self._site.slurm(), trusted)
        self._loop = asyncio.new_event_loop()
        self._limited_log = RateLimitedLog(log)

    def close(self) -> None:
        """Stop answering."""
        self._loop.close()

    def answer(self, uid: int, body: bytes) -> Answer:
        """Answer a query in wire format; every failure is an answer too."""
        try:
            question = read(body)
            rights = self._loop.run_until_complete(self._privacy.rights(uid))
            return self._answer(question, rights)
        except QuestionError as error:
            return Answer(1, error=str(error))
        except Unanswerable as error:
            if error.detail:
                self._limited_log.warning(f"{uid}", f"a query of uid {uid} failed: {error}: {error.detail}")
            return Answer(error.code, error=str(error))
        except (StoreError, OperationalError) as error:
            cause = error.orig if isinstance(error, OperationalError) else error
            self._limited_log.warning("store", f"cannot read the record for user queries: {cause}")
            return Answer(1, error="cannot read the record at the moment; see migbatchd's log")
        except SlurmError as error:
            self._limited_log.warning("slurm", f"no answer from Slurm for user queries: {error}")
            return Answer(1, error="no answer from Slurm at the moment")
        except MemoryError:
            return Answer(1, error="the query takes too much memory; request less data")
        except Exception as error:
            if self._limited_log.warning("internal", f"internal error in a response to uid {uid}: {error!r}"):
                log.exception("internal error in a response")
            return Answer(1, error="internal error of the query service; see migbatchd's log")

    def _answer(self, question: Question, rights: Rights) -> Answer:
        with _times_of(question.zone):
            reply = answer(question, rights, self._site)
            return Answer(reply.code, self._collected(reply), reply.remarks)

    def _collected(self, reply: Reply) -> str:
        lines, size = [], 0
        for line in reply.lines:
            size += len(line.encode("utf-8", "replace")) + 1
            if size > self._limit:
                raise Unanswerable(
                    f"the answer is longer than {self._limit >> 20} MB; request less data (a shorter time, fewer jobs "
                    "or columns)"
                )
            lines.append(line)
        return "".join(f"{line}\n" for line in lines)


@contextlib.contextmanager
def _times_of(zone: str) -> Iterator[None]:
    """Parse and format times in a time zone during the block; "" for this host's."""
    if not zone:
        yield
        return
    if not (_ZONES / zone).is_file() and not _RULE.match(zone):
        raise Unanswerable(f"TZ: the controller does not know the time zone {zone}")
    before = os.environ.get("TZ")
    _set_zone(zone)
    try:
        yield
    finally:
        _set_zone(before)


def _set_zone(zone: str | None) -> None:
    if zone is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = zone
    time.tzset()


def main() -> None:
    """Answer until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # migbatchd gets them too, for an orderly exit
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    be_killed_first()
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # accidental output must not look like an answer
    _serve(sys.stdin.buffer, out)


def _serve(questions: IO[bytes], out: IO[bytes]) -> None:
    first = questions.readline()
    if not first:
        return
    start = json.loads(first)
    logs.setup(start["level"])
    answerer = Answerer(loads(start["config"]))
    for line in questions:
        request = json.loads(line)
        answer = answerer.answer(int(request["uid"]), request["question"].encode()).write()
        out.write(b"%08x" % len(answer) + answer)
        out.flush()


if __name__ == "__main__":
    main()
