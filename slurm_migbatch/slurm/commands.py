"""Run Slurm's commands: with a deadline, an environment of their own, and any number of changes in one process."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from slurm_migbatch.slurm.client import SlurmError, SlurmTimeout
from slurm_migbatch.slurm.dialog import Dialog, Request, line

_FIELD = re.compile(r"[A-Za-z]{1,40}")
_JOB = re.compile(r"[0-9]{1,10}(?:_(?:[0-9]{1,10}|\[[0-9,:%-]{1,3000}\])|\+[0-9]{1,6})?")
_SIGNAL = re.compile(r"[A-Z][A-Z0-9]{1,11}")
#: scontrol's messages if slurmctld did not answer
_NOBODY = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted")
#: where the mark in an argument begins, see `listing.new_mark`
_MARK = re.compile(r"\x1f.*", re.DOTALL)
#: most bytes in one argument of a command on Linux, with the NUL at its end
LONGEST_ARGUMENT = 1 << 17
LOCAL: Final = {"SQUEUE_LOCAL": "1", "SINFO_LOCAL": "1", "SCONTROL_LOCAL": "1"}
"""Variables that limit Slurm's commands to this cluster, even with FederationParameters=fed_display."""


class SlurmCommands:
    """Runs the commands of one installation of Slurm; see `CliClient`."""

    def __init__(self, bin_dir: str | Path | None, slurm_conf: str | Path | None, timeout: float) -> None:
        self._bin = str(bin_dir) if bin_dir else ""
        self._timeout = timeout
        conf = str(slurm_conf) if slurm_conf else os.environ.get("SLURM_CONF", "")
        self._env = {
            "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            "LC_ALL": "C.UTF-8",
            **LOCAL,
            "SLURM_TIME_FORMAT": "%s",
            "SLURM_BITSTR_LEN": "0",  # do not truncate array task lists
            "SQUEUE_ARRAY_UNIQUE": "1",  # see arrays.py
            **({"SLURM_CONF": conf} if conf else {}),
        }
        #: commands run so far, for reports and tests
        self.calls = 0
        #: called before every command that changes something; may raise SlurmError
        self.before_change: Callable[[], None] = lambda: None

    def _ask(self, requests: Sequence[Request]) -> dict[int, str]:
        """Send the requests to scontrol; return its message for each refused one, by position."""
        self.before_change()
        refused: dict[int, str] = {}
        alone = list(range(len(requests)))
        lines = {number: text for number, request in enumerate(requests) if (text := line(request)) is not None}
        if len(lines) > 1:
            dialog = Dialog(list(lines.values()))
            process = self._finish("scontrol", stdin=dialog.stdin, more_s=0.02 * len(lines))
            outcomes = dict(zip(lines, dialog.outcomes(decoded(process.stderr)), strict=True))
            refused = {number: _short(message) for number, message in outcomes.items() if message}
            if nobody := next(
                (message for message in refused.values() if any(phrase in message for phrase in _NOBODY)), None
            ):
                raise SlurmError(f"scontrol could not reach slurmctld: {nobody}")
            # a request without a result (scontrol died, or reported nothing) is sent once more; every request may be
            # repeated
            alone = [number for number in alone if outcomes.get(number) is None]
        for number in alone:
            self.before_change()
            if max(len(os.fsencode(argument)) for argument in requests[number]) >= LONGEST_ARGUMENT:
                refused[number] = "its new value is too long for an argument of scontrol"
                continue
            process = self._finish("scontrol", *requests[number])
            if process.returncode:
                message = decoded(process.stderr).strip()
                if any(phrase in message for phrase in _NOBODY):
                    raise failed("scontrol", requests[number], process)
                refused[number] = _short(message) or f"exit code {process.returncode}, no reason given"
        return dict(sorted(refused.items()))

    def _finish(
        self, program: str, *arguments: str, stdin: str = "", more_s: float = 0.0, limit_s: float | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        command = [f"{self._bin}/{program}" if self._bin else program, *arguments]
        timeout = (self._timeout if limit_s is None else min(limit_s, self._timeout)) + more_s
        self.calls += 1
        try:
            return subprocess.run(
                command,
                input=stdin.encode(),
                capture_output=True,
                timeout=timeout,
                env=self._env,
                check=False,
                cwd="/",
            )
        except subprocess.TimeoutExpired:
            raise SlurmTimeout(
                f"{program} did not answer within {timeout:g} s; is slurmctld running and not overloaded?"
            ) from None
        except OSError as error:
            raise SlurmError(
                f"{program} cannot be started ({error.strerror}: {command[0]}); install slurm-client or set slurm_bin"
            ) from None


def failed(program: str, arguments: Sequence[str], done: subprocess.CompletedProcess[bytes]) -> SlurmError:
    """Return the error of a command that has failed, with what it wrote to stderr."""
    return SlurmError(
        f"`{_shown(program, arguments)}` failed with exit code {done.returncode}: "
        f"{_short(decoded(done.stderr)) or 'no reason given'}"
    )


def decoded(output: bytes) -> str:
    """Return a message of a command; what is not UTF-8 is escaped."""
    return output.decode("utf-8", "backslashreplace")


def check_fields(fields: Mapping[str, str]) -> None:
    """Reject text that no command can carry; raises ValueError."""
    for key, value in fields.items():
        if not _FIELD.fullmatch(key) or "\0" in value:
            raise ValueError(f"{key}={value!r} cannot be passed to scontrol")


def check_signal(name: str) -> None:
    """Reject names that are not signals; raises ValueError."""
    if not _SIGNAL.fullmatch(name):
        raise ValueError(f"{name!r} is not a signal")


def checked_job(job: int | str) -> str:
    """Return a job id in Slurm's form; raises ValueError."""
    text = str(job)
    if not _JOB.fullmatch(text):
        raise ValueError(f"{text!r} is not a job id; write 123, 123_4 or 123_[5-7]")
    return text


def _short(text: str) -> str:
    line = " / ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= 300 else line[:300] + "..."


def _shown(program: str, arguments: Iterable[str]) -> str:
    """Return a command for a message: without random marks, so that a command that fails again has the same message."""
    line = " ".join([program, *(ascii(_MARK.sub("...", argument))[1:-1] for argument in arguments)])
    return line if len(line) <= 200 else line[:200] + "..."
