"""Do a hook's work in a child process, so that the hook ends in time even if a call of the driver never returns.

Within such a call no deadline is checked, and a process that waits in the kernel module cannot even be killed: slurmd
would wait for it although PrologEpilogTimeout is over. So the process that slurmd waits for does not call the driver,
and the child has none of its descriptors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import time
from collections.abc import Callable, Iterator

from slurm_migbatch.mig import driver
from slurm_migbatch.node import client, exits, protocol

LONGEST = 500
REAP_S = 0.1
_PR_SET_PDEATHSIG = 1


class Hung(RuntimeError):
    """The child did not end in time, or there is none; the message names its last call of the driver, or the error."""


def run(work: Callable[[], Iterator[tuple[int, str]]], seconds: float) -> tuple[int, str]:
    """Return the exit code and line that `work` yields, in a child that has `seconds` for all of its work.

    Raises Hung if it has yielded nothing by then.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, exit codes, those of scontrol too, are lost
    last_call = mmap.mmap(-1, LONGEST)
    read, write = os.pipe()
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        raise Hung(f"its process could not be started: {error}") from None
    if pid == 0:
        try:
            _detach(parent)
            _note_calls(last_call)
            _answer(work, write)
        finally:
            os._exit(0)
    os.close(write)
    answer, ended = _read(read, time.monotonic() + seconds)
    os.close(read)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    _reap(pid)
    first, complete, _ = answer.partition(protocol.END)
    if complete:
        return client.decode(first)
    if ended:
        return exits.INTERNAL, "its process was killed (is the node out of memory?)"
    call = last_call[:].rstrip(b"\0").decode("utf-8", "replace")
    raise Hung(f"not done after {seconds:g} s, {f'in or after this call of the driver: {call}' if call else 'no call'}")


def _detach(parent: int) -> None:
    """Let this child end with its parent, and not hold what slurmd reads."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def _note_calls(last_call: mmap.mmap) -> None:
    """Write what the driver is asked to memory that the parent shares."""

    def note(text: str) -> None:
        last_call[:] = text.encode("utf-8", "replace")[:LONGEST].ljust(LONGEST, b"\0")

    driver.calling = note


def _answer(work: Callable[[], Iterator[tuple[int, str]]], write: int) -> None:
    try:
        for code, line in work():
            os.write(write, protocol.reply(code, line) + protocol.END)
    except BaseException as error:
        os.write(write, protocol.reply(exits.INTERNAL, f"failed: {type(error).__name__}: {error}") + protocol.END)


def _reap(pid: int) -> None:
    """Wait for the end of the child, which may be in a container where nobody else does; not if the kernel hangs."""
    until = time.monotonic() + REAP_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
        time.sleep(0.001)


def _read(handle: int, until: float) -> tuple[bytes, bool]:
    """Read until the other side is closed, or this time; return what was read, and whether it was closed."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    answer = b""
    while poll.poll(max(0.0, until - time.monotonic()) * 1000):
        part = os.read(handle, client.MAX_REPLY)
        if not part:
            return answer, True
        answer += part
    return answer, False
