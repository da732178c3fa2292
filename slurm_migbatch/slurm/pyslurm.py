"""Implement SlurmClient over pyslurm if its results equal those of Slurm's commands, and over the commands otherwise.

Written for pyslurm 25.11 (its `Jobs` and `Partitions`). That can be built against Slurm 25.11 alone:
25.11.2, tried with the Slurm of Ubuntu 26.04, refuses other releases, and without that check two of its 33 modules
(`core/job/job`, `deprecated`) do not compile with the headers of 26.05.5, and nine not with those of 24.11.5. Slurm's
commands are used for what pyslurm lacks or does differently:

- nodes: pyslurm shows the used GRES only if accounting tracks that GRES type, and no counts without it;
- `gres` of jobs: pyslurm drops an entry with a type and no count (`mig:1g.10gb`). One squeue call adds the GRES of jobs
  that are new, or whose GRES changed in pyslurm's output; see `TRUST_S`;
- a job with a text that is not UTF-8: pyslurm fails. Then squeue lists all jobs in its place;
- all changes: a number means one record to pyslurm, but the whole array to Slurm's commands;
  `Node.modify` writes `gres:mig:...`, which slurmctld takes for the name of the GRES; `Job.requeue` starts a job again
  that has just completed; `Job.send_signal` reads an errno that may be from an earlier call.

pyslurm runs in a child process with a deadline (see `pyslurm_worker.py`), which is started on demand
and replaced after `ASKED_OFTEN` requests because it leaks memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import UNREAD, WHOLE, JobRow, SlurmError
from slurm_migbatch.slurm.dependencies import MOST, jobs_waited_for
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.slurm.order import NO_TASK, in_order
from slurm_migbatch.slurm.pyslurm_worker import JOB
from slurm_migbatch.slurm.states import WAITING, checked_reason, checked_state
from slurm_migbatch.slurm.taskexpr import count_tasks

#: seconds for which squeue's GRES of a pending job is used while pyslurm shows no change
TRUST_S = 30.0
#: requests after which the child is replaced
ASKED_OFTEN = 5000

# migbatch's directory is appended to that Python's own path: a Python that has pyslurm need not have migbatch, and
# packages next to migbatch may be built for another release of Python.
_PACKAGES = Path(__file__).parent.parent.parent
_RUN = "import runpy, sys; sys.path.append({!r}); runpy.run_module({!r}, run_name='__main__')"
#: resource_sharing of a job that shares its nodes with none, whichever release slurmctld has
_NOT_SHARED = "NO"
_WORKER = ("-c", _RUN.format(str(_PACKAGES), "slurm_migbatch.slurm.pyslurm_worker"))


class _NotShown(SlurmError):
    """pyslurm failed on a value from Slurm."""


class Worker:
    """The child process: a request, its answer, and termination at the deadline."""

    def __init__(self, python: Sequence[str], env: Mapping[str, str]) -> None:
        self._command = (*python, *_WORKER)
        self._env = dict(env)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._asked = 0

    def ask(self, method: str, timeout: float) -> Any:
        """Return the answer of pyslurm_worker's `method`.

        Raises:
            SlurmError: no answer in time, or slurmctld refused.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise SlurmError(f"pyslurm is still busy with another query after {timeout:g} s")
        try:
            if self._process is None or self._asked >= ASKED_OFTEN:
                self._restart()
            self._asked += 1
            reply = json.loads(self._exchange(json.dumps({"ask": method}).encode() + b"\n", deadline, timeout))
        except SlurmError:
            self._end()
            raise
        except ValueError as error:
            self._end()
            raise SlurmError(f"pyslurm's process sent an invalid answer: {error}") from None
        finally:
            self._lock.release()
        if "ok" in reply:
            return reply["ok"]
        kind = SlurmError if reply.get("slurm") else _NotShown
        raise kind(f"pyslurm: {reply.get('error')}")

    def close(self) -> None:
        """Terminate the child."""
        with self._lock:
            self._end()

    def __del__(self) -> None:
        self._end()

    def _restart(self) -> None:
        self._end()
        self._asked = 0
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 open as long as the child runs
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=self._env,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SlurmError(f"{self._command[0]} cannot be started for pyslurm ({error.strerror})") from None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _exchange(self, question: bytes, deadline: float, timeout: float) -> bytes:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # reported below, with the child's last output
            process.stdin.write(question)
            process.stdin.flush()
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([process.stdout], [], [], remaining_s)[0]:
                raise SlurmError(
                    f"pyslurm did not answer within {timeout:g} s; is slurmctld running and not overloaded?"
                )
            part = os.read(process.stdout.fileno(), 1 << 20)
            if not part:
                raise SlurmError(f"pyslurm's process ended{self._exit_text(process)}")
            parts.append(part)
        return b"".join(parts)

    def _exit_text(self, process: subprocess.Popen[bytes]) -> str:
        assert self._stderr is not None
        code = process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read()[-600:].decode("utf-8", "backslashreplace").strip().splitlines()
        cause = f" on signal {-code}" if code < 0 else f" with exit code {code}"
        return f"{cause}: {lines[-1]}" if lines else cause

    def _end(self) -> None:
        process, self._process = self._process, None
        files: list[IO[bytes] | None] = [self._stderr]
        self._stderr = None
        if process is not None:
            process.kill()
            process.wait()
            files += [process.stdin, process.stdout]
        for file in files:
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


class PyslurmClient(CliClient):
    """`SlurmClient` that observes through pyslurm and changes through Slurm's commands; see the module.

    Args:
        bin_dir, slurm_conf, timeout: as for `CliClient`; the time limit applies to pyslurm's answers too.
        python: the Python, and its first arguments, that has pyslurm.
    """

    def __init__(
        self,
        bin_dir: str | Path | None = None,
        slurm_conf: str | Path | None = None,
        timeout: float = 20.0,
        *,
        python: Sequence[str],
    ) -> None:
        super().__init__(bin_dir, slurm_conf, timeout)
        self.worker = Worker(python, self._env)
        #: requests to pyslurm so far, for reports and tests
        self.asked = 0
        self._gres: dict[int, tuple[tuple[Any, ...], str, float]] = {}

    def close(self) -> None:
        """Terminate the child process; the next request starts another."""
        self.worker.close()

    def probe(self) -> str:
        """Try pyslurm in the child; return why it cannot be used, or an empty string."""
        try:
            hello = self._question("hello")
        except SlurmError as error:
            return str(error)
        if hello["lacking"]:
            return f"pyslurm {hello['version']} does not provide {', '.join(hello['lacking'])} of jobs; 25.11 does"
        return ""

    def jobs(self) -> list[JobRow]:
        """List jobs by one call of pyslurm, and one squeue call if jobs are new; see SlurmClient."""
        try:
            answer = self._question("jobs")
        except _NotShown:
            return super().jobs()
        now = time.time()
        try:
            listed = [dict(zip(JOB, values, strict=True)) for values in answer["jobs"]]
            gres = self._gres_of(listed)
            rows = [
                _row_or_unread(job, answer["users"], gres[job["id"]], now).with_ending_run_count(now) for job in listed
            ]
        except (ValueError, TypeError, KeyError) as error:
            raise SlurmError(f"cannot parse the jobs of pyslurm: {error!r}") from error
        return self._in_reservations(self._known(in_order(rows, answer["tiers"])))

    def default_partition(self) -> str:
        """See SlurmClient."""
        return str(self._question("default_partition"))

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        """See CliClient."""
        try:
            super().update_jobs(updates)
        finally:
            self._gres.clear()

    def _question(self, method: str) -> Any:
        self.asked += 1
        return self.worker.ask(method, self._timeout)

    def _gres_of(self, jobs: Iterable[Mapping[str, Any]]) -> dict[int, str]:
        """Return the GRES of each job in squeue's form."""
        clock = time.monotonic()
        cache: dict[int, tuple[tuple[Any, ...], str, float]] = {}
        unknown: dict[int, tuple[Any, ...]] = {}
        for job in jobs:
            number, shown = job["id"], (job["requeue_count"], *sorted(job["gres_per_node"].items()))
            cached = self._gres.get(number)
            if cached is not None and cached[0] == shown and (job["state"] != "PENDING" or clock - cached[2] < TRUST_S):
                cache[number] = cached
            else:
                unknown[number] = shown
        if unknown:
            texts = self.gres_texts()
            # a job that squeue no longer lists has ended since: pyslurm's value is good enough
            cache |= {n: (shown, texts.get(n, _written(shown[1:])), clock) for n, shown in unknown.items()}
        self._gres = cache
        return {number: text for number, (_, text, _) in cache.items()}


def _row_or_unread(job: Mapping[str, Any], users: Mapping[str, str], gres: str, now: float) -> JobRow:
    try:
        return _row(job, users, gres, now)
    except (ValueError, TypeError, KeyError, NodeListError) as error:
        return JobRow(int(job["id"]), state=UNREAD, reason=repr(error))


def _row(job: Mapping[str, Any], users: Mapping[str, str], gres: str, now: float) -> JobRow:
    pending = job["state"] in WAITING
    task, throttle = _task(job)
    limit = job["time_limit"]
    end = job["end_time"]
    return JobRow(
        job_id=job["id"],
        array_job=job["array_id"] if task is not None else None,
        array_task=task,
        het_job=job["heterogeneous_id"] or None,
        uid=job["user_id"],
        user=users[str(job["user_id"])],
        account=job["account"] or "",
        partition=job["partition"] or "",
        name=job["name"] or "",
        state=checked_state(job["state"]),
        reason=checked_reason(job["state_reason"] or "", job["account"] or ""),
        priority=job["priority"] or 0,
        submit=float(job["submit_time"] or 0),
        start=_time(job["start_time"]),
        end=None if limit is None and end and end > now else _time(end),  # squeue writes NONE
        time_limit_s=None if limit is None else int(limit) * 60,
        nodes=expand(job["allocated_nodes"] or ""),
        num_nodes=max(1, job["num_nodes"] or 1),
        requested_nodes=job["required_nodes"] or "",
        gres=gres,
        comment=job["comment"] or "",
        restarts=job["requeue_count"] or 0,
        eligible=_time(job["eligible_time"]),
        features=",".join(job["constraints"] or ()),
        cpus=job["cpus"] or 0,
        tasks=count_tasks(task) if task is not None and pending else 1,
        throttle=throttle,
        gid=job["group_id"],
        qos=job["qos"] or "",
        wckey=job["wckey"] or "",
        after=_after(job["dependencies"]),
        # pyslurm has no value for the 0 of a job that is to have all memory
        memory_per_node=job["memory_per_node"] or (0 if job["memory_per_cpu"] or job["memory_per_gpu"] else WHOLE),
        memory_per_cpu=job["memory_per_cpu"] or 0,
        exclusive=job["resource_sharing"] == _NOT_SHARED,
    )


def _after(dependencies: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return the jobs in pyslurm's dependencies: by kind, lists of ids, or of texts if there is more than an id."""
    lists = (items for items in (dependencies or {}).values() if isinstance(items, list))
    return jobs_waited_for("".join(f":{job}," for job in islice(chain.from_iterable(lists), MOST + 1)))


def _task(job: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Return the task, or the tasks not yet started with their throttle, in squeue's form."""
    if job["array_tasks_waiting"]:
        throttle = job["array_tasks_parallel"] or None
        return job["array_tasks_waiting"] + (f"%{throttle}" if throttle else ""), throttle
    task = job["array_task_id"]
    if task is None and job["array_id"]:
        task = 0  # pyslurm treats task 0 as no task
    return (None, None) if task is None or task == NO_TASK else (str(task), None)


def _written(gres: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"{name}:{count}" for name, count in gres)


def _time(value: int | None) -> float | None:
    return float(value) if value else None
