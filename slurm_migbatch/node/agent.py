"""Run the resident service `migbatch node agent`: fast hooks, events to the controller, plans from it, housekeeping.

It keeps NVML, the journal and Python itself loaded, so that a hook only sends a request. Hooks never wait for the
controller. Everything the agent does for hooks, a hook can do without it (`fallback.py`), so it may be stopped,
killed and updated at any time.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from slurm_migbatch.mig.driver import DriverError
from slurm_migbatch.node import exits, notify, protocol
from slurm_migbatch.node.client import SOCKET
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.controller_sync import ControllerSync
from slurm_migbatch.node.deadline import Deadline, TooLate, locked
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.findings import Finding
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.hookenv import HookEnvError
from slurm_migbatch.node.journal import JournalError
from slurm_migbatch.node.paths import Paths
from slurm_migbatch.node.watch import Watcher

WORKERS = 16
REQUEST_TIMEOUT_S = 5.0
log = logging.getLogger("migbatch.node")


class AgentError(RuntimeError):
    """The agent cannot start; the message says why."""


class Agent:
    """One node's agent. `run` works until `stop` is called or a signal of `stop_on` arrives."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        workers: int = WORKERS,
        checks: Callable[[Gpus], Iterable[Finding]] | None = None,
    ) -> None:
        """Set up. `checks`: see `ControllerSync`."""
        self._config = config
        self._checks = checks
        self._workers = workers
        self._gpus = Gpus(config)
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = threading.Event()
        self._work: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()

    def stop(self) -> None:
        """Let `run` finish its current work and return; may be called from any thread, and repeatedly."""
        with suppress(OSError):
            os.write(self._woken, b"x")

    def stop_on(self, *signals: signal.Signals) -> None:
        """Stop at these signals. Call it in the main thread.

        The kernel may deliver a signal to any thread of the process, and then `select` in the main thread continues to
        wait. So the interpreter writes to the pipe; the handlers do nothing.
        """
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, lambda *_: None)

    def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until stopped. Raises AgentError, PathsError, JournalError."""
        paths = Paths.open(self._config)
        try:
            with locked(paths.lock, ["agent"], Deadline(0.5)):
                self._serve(ready)
        except TooLate:
            raise AgentError(f"another agent already runs in {self._config.run_dir}") from None
        finally:
            paths.close()
            self._gpus.reset()

    def _serve(self, ready: Callable[[], None] | None) -> None:
        first = Executor(self._config, self._gpus)
        try:
            try:
                first.check()
                for line in first.repairer.repair_all(Deadline(60.0)):
                    log.info("repaired: %s", line)
            except (DriverError, TooLate, OSError) as error:  # for example RunDir is full; tried again later
                log.warning("cannot repair yet: %s", error)
        finally:
            first.close()
        listener = self._listen()
        controller_sync = ControllerSync(self._config, self._gpus, self._stopping, self._checks)
        threads = [threading.Thread(target=self._worker, name=f"hook-{i}") for i in range(self._workers)]
        threads.append(threading.Thread(target=self._housekeeping, name="housekeeping"))
        threads += controller_sync.threads()
        watch = Watcher(self._config, self._gpus).thread(self._stopping, self._wake)
        threads += [watch] if watch is not None else []
        try:
            for thread in threads:
                thread.start()  # not while users have all of the node's processes
            notify.notify("READY=1")
            if ready is not None:
                ready()
            self._accept(listener)
        finally:
            self.stop()  # also after an error: the watcher waits for the pipe
            self._stopping.set()
            notify.notify("STOPPING=1")
            with suppress(FileNotFoundError):
                Path(f"{self._config.run_dir}/{SOCKET}").unlink()
            listener.close()
            for _ in range(self._workers):
                self._work.put(None)
            controller_sync.stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _listen(self) -> socket.socket:
        path = f"{self._config.run_dir}/{SOCKET}"
        with suppress(FileNotFoundError):
            Path(path).unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_umask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(old_umask)
        listener.listen(128)
        listener.setblocking(False)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            readable, _, _ = select.select([listener.fileno(), self._wake], [], [], self._config.reconcile_every)
            if self._wake in readable:
                return
            if not readable and not Path(f"{self._config.run_dir}/{SOCKET}").exists():
                # hooks cannot reach it, and may have lock files in another directory: it must not repair beside them
                log.error("%s was emptied or deleted: the agent ends, to be started anew", self._config.run_dir)
                return
            with suppress(BlockingIOError, ConnectionError):
                self._work.put(listener.accept()[0])

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _worker(self) -> None:
        executor: Executor | None = None
        while True:
            link = self._work.get()
            if link is None:
                break
            with link:
                try:
                    executor = executor or Executor(self._config, self._gpus)
                    self._answer(executor, link)
                except Exception:
                    # No reply: the hook then does the work itself and reports the reason.
                    log.exception("a hook request failed")
                    if executor is not None:
                        executor.close()
                    executor = None
        if executor is not None:
            executor.close()

    def _answer(self, executor: Executor, link: socket.socket) -> None:
        """Run the hook that a connection requests, and send its exit code and line."""
        link.settimeout(REQUEST_TIMEOUT_S)
        try:
            peer = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if peer[1] != 0:
                log.warning("uid %d tried to run a hook", peer[1])
                return
            request = self._read(link)
        except OSError as error:
            log.warning("incomplete hook request: %s", error)
            return
        if not request:
            return  # `migbatch node status` only checks whether the agent answers
        if _is_closed(link):
            log.warning("a hook was killed, or did not wait for the agent any longer")
            return  # it has done its work itself, and by now its job may have ended or have its next run
        try:
            env = protocol.parse(request)
            if env.node != self._config.node:
                raise HookEnvError(f"this is the agent of node {self._config.node}, not of {env.node}")
            code, line = executor.run(env, lambda: _is_closed(link))
        except protocol.HookRequestError as error:
            log.warning("%s: its hook does the work itself; restart the agent after an upgrade", error)
            return
        except HookEnvError as error:
            code, line = exits.CONTEXT, str(error)
        if line:
            log.log(logging.WARNING if code else logging.INFO, "%s", line)
        with suppress(OSError):
            link.sendall(protocol.reply(code, line))

    @staticmethod
    def _read(link: socket.socket) -> bytes:
        request = b""
        while not request.endswith(protocol.END):
            part = link.recv(65536)
            if not part:
                break
            request += part
            if len(request) > protocol.MAX_REQUEST:
                break
        return request

    # -- housekeeping --------------------------------------------------------------------------------------------

    def _housekeeping(self) -> None:
        """Repair regularly: undo leftovers of dead hooks, end what Slurm has ended, find manual changes."""
        executor: Executor | None = None
        known = ("", "")
        while not self._stopping.wait(self._config.reconcile_every):
            try:
                executor = executor or Executor(self._config, self._gpus)
                known = self._reconcile(executor, known)
                continue
            except DriverError as error:
                log.warning("the driver does not answer: %s", error)
                self._gpus.reset()
                continue
            except (JournalError, TooLate, OSError) as error:
                log.warning("housekeeping: %s", error)
            except Exception:
                log.exception("housekeeping failed and will be tried again")
            if executor is not None:
                executor.close()
            executor = None
        if executor is not None:
            executor.close()

    @staticmethod
    def _reconcile(executor: Executor, known: tuple[str, str]) -> tuple[str, str]:
        """Repair once; return what could not be determined and errors of the job maps, each logged when new."""
        done, unknown = executor.reconcile(Deadline(executor.config.hook_deadline))
        for line in done:
            log.info("repaired: %s", line)
        if unknown and unknown != known[0]:
            log.warning("cannot determine ended runs: %s", unknown)
        if executor.maps.problem and executor.maps.problem != known[1]:
            log.warning("job maps are outdated: %s", executor.maps.problem)
        return unknown, executor.maps.problem


def _is_closed(link: socket.socket) -> bool:
    """Return whether the process at the other end has closed the connection."""
    poll = select.poll()
    poll.register(link, 0)  # POLLHUP is always reported
    return bool(poll.poll(0))
