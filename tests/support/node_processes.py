"""Run hooks and agents of a node in separate processes and threads."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slurm_migbatch.node import client, effects
from slurm_migbatch.node.agent import Agent
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.hookenv import HookEnv
from slurm_migbatch.node.watch import Watcher
from tests.support.nodes import Node, in_child


def in_processes(works: Iterable[Callable[[], int]]) -> list[int]:
    pids = []
    for work in works:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = work()
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(min(code, 100))
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def stopping_child(node: Node, env: HookEnv, k: int, given_up: Callable[[], bool] = lambda: False) -> tuple[int, bool]:
    """Run a hook in a child that stops itself before its k-th effect; return its pid, and whether it got there.

    `given_up`: as the agent's, whether the hook no longer waits for this process.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(name: str) -> None:
            nonlocal count
            count += 1
            if count == k:
                os.kill(os.getpid(), signal.SIGSTOP)

        effects.hook = hook
        try:
            Executor(node.config).run(env, given_up)
        finally:
            os._exit(0)
    status = os.waitpid(pid, os.WUNTRACED)[1]
    return pid, os.WIFSTOPPED(status)


@contextlib.contextmanager
def agent_process(node: Node, kill_at: int | None = None, workers: int = 4) -> Iterator[Child]:
    """Run an agent in a child; with `kill_at`, it is killed before its k-th side effect after it is ready."""
    node.forget_executor()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            count = 0
            lock = threading.Lock()

            def hook(name: str) -> None:
                nonlocal count
                with lock:
                    count += 1
                    if count == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)

            def ready() -> None:
                effects.hook = hook
                os.write(write, b"r")

            agent = Agent(node.config, workers=workers)
            agent.stop_on(signal.SIGTERM)
            agent.run(ready)
            os.write(write, str(count).encode())
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(70)
    os.close(write)
    child = Child(pid, read)
    assert os.read(read, 1) == b"r"
    try:
        yield child
    finally:
        child.stop()


class Child:
    """A child process, and the pipe for its count of side effects."""

    def __init__(self, pid: int, read: int) -> None:
        self.pid, self.read = pid, read
        self.status: int | None = None

    def stop(self) -> int:
        """Send SIGTERM and wait; return the number of side effects."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self.wait(seconds=120)
        return self.count

    def wait(self, seconds: float) -> None:
        """Wait until it has ended; one that does not end within `seconds` is killed and fails the test."""
        limit = time.monotonic() + seconds
        while (ended := os.waitpid(self.pid, os.WNOHANG))[0] == 0 and time.monotonic() < limit:
            time.sleep(0.002)
        late = ended[0] == 0
        if late:
            os.kill(self.pid, signal.SIGKILL)
            ended = os.waitpid(self.pid, 0)
        self.status = ended[1]
        self.count = int(os.read(self.read, 100) or 0)
        os.close(self.read)
        assert not late, f"agent {self.pid} did not end within {seconds:g} s of its signal"


def run_hook(
    node: Node, hook: str, job: int, marker: str = "", prepare: Callable[[], None] = lambda: None, **values: Any
) -> tuple[int, str]:
    """Run a hook in a child, as slurmd starts it; return its exit code and output line.

    `prepare` is called in the child before.
    """
    environ = node.environ(hook, job, marker, **values)
    read, write = os.pipe()

    def work() -> int:
        prepare()
        code, line = client.run(hook, str(node.etc), environ)
        os.write(write, line.encode() or b"-")
        return code

    status, _ = in_child(work)
    os.close(write)
    with os.fdopen(read) as pipe:
        line = pipe.read()
    assert os.WIFEXITED(status)
    return os.WEXITSTATUS(status), line


@contextlib.contextmanager
def watching(node: Node) -> Iterator[None]:
    """Run the agent's watcher of a node in a thread while the context is open."""
    stopping, (wake, woken) = threading.Event(), os.pipe()
    thread = Watcher(node.config, node.executor.gpus).thread(stopping, wake)
    assert thread is not None, "the node's configuration wants none"
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        os.write(woken, b"x")
        thread.join()
        os.close(wake)
        os.close(woken)
