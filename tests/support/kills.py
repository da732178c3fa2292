"""Kill a hook or the agent at every system call: strace counts the calls, and sends SIGKILL at one of them in each run.

The system calls of a thread are known from a run that is only traced. Each is identified by its name and its number
among the thread's calls of that name: that is how strace counts. A run that takes another path and never makes the call
ends normally; such runs are counted too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from slurm_migbatch.node import exits, install
from slurm_migbatch.testbed.registry import unmount_below
from tests.support.nodes import Node

#: thread, name of the system call, and its number among the thread's calls of that name
Call = tuple[int, str, int]
CALL = re.compile(r"(?:(\d+) +)?([a-z_][a-z0-9_]*)\(")


def program(node: Node, hook: str) -> str:
    """Write the hook as `migbatch install --role node` does; return its path."""
    path = node.root / "hooks" / hook
    path.parent.mkdir(exist_ok=True)
    python = str(Path(sys.executable).resolve())
    text = install.render(hook, install.package_paths(), str(node.etc), python)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        path.chmod(0o755)
    return str(path)


def calls(log: Path) -> list[Call]:
    """Return each system call in strace's log, in order; threads are numbered in the order of their first calls."""
    threads: dict[str | None, int] = {}
    counts: Counter[tuple[int, str]] = Counter()
    listed: list[Call] = []
    for line in Path(log).read_text(errors="replace").splitlines():
        match = CALL.match(line)
        if match is None:
            continue  # a resumed call, a signal, or an exit
        thread = threads.setdefault(match[1], len(threads))
        counts[thread, match[2]] += 1
        listed.append((thread, match[2], counts[thread, match[2]]))
    return listed


class Traced:
    """A program that runs under strace: the command `line`."""

    def __init__(self, node: Node, environ: Mapping[bytes, bytes], *line: str) -> None:
        self.node, self.environ, self.line = node, environ, line

    def count(self) -> list[Call]:
        """All system calls of it and its children but the first, which is strace's own."""
        log = self.node.root.with_name("strace.log")
        done = self._strace("-o", str(log))
        assert done.returncode == 0, done.stderr
        return [call for call in calls(log) if call != (0, "execve", 1)]

    def kill(self, call: Call) -> bool:
        """Run it with a SIGKILL right before that call; return whether it, or its child, was killed."""
        done = self._strace("-o", os.devnull, *_at(call))
        assert done.returncode in (0, -signal.SIGKILL, exits.INTERNAL), done.stderr
        return done.returncode != 0

    def _strace(self, *options: str) -> subprocess.CompletedProcess[bytes]:
        line = ["strace", "-f", "-qq", *options, "--", *self.line]
        return subprocess.run(line, env=self.environ, stdin=subprocess.DEVNULL, capture_output=True, check=False)


class Attached:
    """strace attached to the threads of a running process."""

    def __init__(self, pid: int, *options: str) -> None:
        self.strace = subprocess.Popen(["strace", *options], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self.pid = pid
        output = b""
        while b"attached" not in output:  # its last line where there are several threads
            assert self.strace.stderr is not None
            part = self.strace.stderr.readline()
            assert part, output
            output += part

    @classmethod
    def counting(cls, pid: int, log: Path) -> Attached:
        return cls(pid, "-f", "-p", str(pid), "-o", str(log))

    @classmethod
    def killing(cls, pid: int, call: Call) -> Attached:
        """Attach to one thread, which `call` identifies by its index among those of the process, oldest first."""
        thread = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))[call[0]]
        return cls(pid, "-p", str(thread), "-o", os.devnull, *_at(call))

    def end(self) -> None:
        self.strace.terminate()
        self.strace.communicate()


def threads_by_age(log: Path, found: list[Call]) -> list[Call]:
    """Return the result of `calls` with threads renumbered in the order of their ids."""
    order = list(dict.fromkeys(m[1] for line in Path(log).read_text().splitlines() if (m := CALL.match(line))))
    rank = {order.index(tid): i for i, tid in enumerate(sorted(order, key=int))}
    return [(rank[thread], name, number) for thread, name, number in found]


def _at(call: Call) -> tuple[str, str, str, str]:
    _, name, number = call
    return "-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={number}"


class Template:
    """A copy of a node's directory, to restore it repeatedly under the same path."""

    def __init__(self, node: Node) -> None:
        self.node = node
        node.forget_executor()
        self.copy = node.root.with_name(node.root.name + ".template")
        subprocess.run(["cp", "-a", node.root, self.copy], check=True)
        self._before: dict[str, tuple[int, int, int, int, int]] = {}
        self.restore()  # so that the first use finds the same as every later one

    @property
    def untouched(self) -> bool:
        """Whether everything in the directory is as it was when it was last restored."""
        return _tree(self.node.root) == self._before

    def restore(self) -> None:
        if self.node.running or not self.untouched:
            self.node.forget_executor()
            unmount_below(self.node.root)  # with the jobs' reports, which nobody can delete (append-only)
            shutil.rmtree(self.node.root)
            subprocess.run(["cp", "-a", self.copy, self.node.root], check=True)
            self._before = _tree(self.node.root)


def _tree(root: Path) -> dict[str, tuple[int, int, int, int, int]]:
    entries: dict[str, tuple[int, int, int, int, int]] = {}
    for directory, _, names in os.walk(root):
        for path in (directory, *(f"{directory}/{name}" for name in names)):
            status = os.lstat(path)
            entries[path] = status.st_ino, status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns
    return entries
