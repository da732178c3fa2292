"""Helpers of the node's tests: a simulated machine, its configuration, hooks, and invariants to check."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from slurm_migbatch.mig.driver import Instance
from slurm_migbatch.mig.layout import Layout, Slot
from slurm_migbatch.mig.nvml import NvmlDriver
from slurm_migbatch.node import config, effects, handoff, plan
from slurm_migbatch.node.deadline import Deadline
from slurm_migbatch.node.executor import Executor, Outcome
from slurm_migbatch.node.hookenv import HookEnv
from slurm_migbatch.node.journal import Journal
from slurm_migbatch.node.journal_rows import JournalSlice
from slurm_migbatch.testbed.simdriver import SimulatedMachine

ALICE, BOB = 64001, 64002
GUEST = "[mig:guest:1]"

_LIBC = ctypes.CDLL(None)
_MNT_DETACH = 2

SCONTROL = """#!/bin/sh
echo "$@" >> {log}
cat {answer} 2>/dev/null
exit $(cat {code} 2>/dev/null || echo 0)
"""


SQUEUE = """#!/bin/sh
if test "$*" = --version; then cat {root}/squeue.version 2>/dev/null || echo slurm-wlm 24.11.5; exit; fi
for word; do case $word in --jobs=*) job=${{word#--jobs=}};; --Format=*ArrayTaskID*) name=yes;; esac; done
if test "$name"; then
    if test -e {root}/squeue.down; then exit 1; fi
    cat {root}/squeue.name.$job 2>/dev/null || echo "$job $job N/A 0"; exit
fi
echo "$job" >> {root}/squeue.log
if test -e {root}/squeue.down; then
    echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1
elif test -e {root}/squeue/$job; then cat {root}/squeue/$job
elif test -d {root}/squeue; then echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1
else echo "$job 0 RUNNING {name}"; fi
"""


class Node:
    """A machine directory with everything a node has: driver, /proc, /dev, node.conf, state and run directories."""

    #: the small file system with its state, if a test has made one
    disk: Path

    def __init__(
        self,
        root: Path,
        name: str,
        gpus: Iterable[str],
        library: Path,
        *,
        mig: bool = True,
        latency: float = 0.0,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.root, self.name = root, name
        root.mkdir(parents=True)
        self.machine = SimulatedMachine.create(
            root / "machine", gpus=list(gpus), mig=mig, latency=latency, library=library
        )
        self.etc = root / "etc"
        self.etc.mkdir()
        self.scontrol_log = root / "scontrol.log"
        (root / "bin").mkdir()
        scontrol = root / "bin" / "scontrol"
        scontrol.write_text(
            SCONTROL.format(log=self.scontrol_log, answer=root / "scontrol.answer", code=root / "scontrol.code")
        )
        scontrol.chmod(0o755)
        squeue = root / "bin" / "squeue"
        squeue.write_text(SQUEUE.format(root=root, name=name))
        squeue.chmod(0o755)
        self.settings: dict[str, object] = {
            "StateDir": root / "state",
            "RunDir": root / "run",
            "NvmlLibrary": self.machine.library,
            "ProcRoot": self.machine.proc_root,
            "DevRoot": self.machine.dev_root,
            "BootIdFile": self.machine.boot_id_file,
            "ScontrolPath": scontrol,
            "SlurmdSpoolDir": root / "spool",
            "HookDeadline": 20,
            "BusyRetry": 0.05,
            "JobMapDir": root / "jobmap",
            "GpustatDir": root / "gpustat",
        }
        self._executor: Executor | None = None
        self.configure(**(settings or {}))

    def configure(self, **settings: object) -> None:
        self.settings |= settings
        conf = self.etc / "node.conf"
        conf.write_text("".join(f"{key}={value}\n" for key, value in self.settings.items()))
        conf.chmod(0o644)
        self.config = config.load(str(self.etc), self.name)

    # -- hooks

    def environ(
        self, hook: str, job: object, marker: str = "", *, uid: int = ALICE, restart: int = 0, **extra: object
    ) -> dict[bytes, bytes]:
        values: dict[str, object] = {
            "SLURM_JOB_ID": job,
            "SLURM_JOB_UID": uid,
            "SLURM_JOB_USER": f"user{uid}",
            "SLURM_JOB_ACCOUNT": "physics",
            "SLURM_JOB_PARTITION": "gpu",
            "SLURMD_NODENAME": self.name,
            "SLURM_SCRIPT_CONTEXT": f"{hook}_slurmd",
            "SLURM_JOB_RESTART_COUNT": restart,
            "SLURM_JOB_COMMENT": f"a comment {marker}" if marker else None,
            "SLURM_JOB_EXIT_CODE2": "0:0" if hook == "epilog" else None,
        } | extra
        return {key.encode(): str(value).encode() for key, value in values.items() if value is not None}

    def env(self, hook: str, job: object, marker: str = "", **values: Any) -> HookEnv:
        return HookEnv.read(hook, self.environ(hook, job, marker, **values))

    @property
    def executor(self) -> Executor:
        if self._executor is None:
            self._executor = Executor(self.config)
        return self._executor

    @property
    def running(self) -> bool:
        """Whether an executor is open."""
        return self._executor is not None

    def forget_executor(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor.gpus.reset()
            self._executor = None

    def prolog(self, job: object, marker: str, **values: Any) -> Outcome:
        return self.executor.run(self.env("prolog", job, marker, **values))

    def epilog(self, job: object, **values: Any) -> Outcome:
        return self.executor.run(self.env("epilog", job, **values))

    def reconcile(self) -> list[str]:
        return self.executor.repairer.repair_all(Deadline(30))

    def close(self) -> None:
        self.forget_executor()
        # not by umount(8): tests make many nodes, and a fork takes longer than this call
        _LIBC.umount2(self.config.progress_path.encode(), _MNT_DETACH)

    # -- state

    @property
    def journal(self) -> Journal:
        return self.executor.journal

    def slices(self, state: str | None = None) -> list[JournalSlice]:
        return [row for row in self.journal.slices() if state in (None, row.state)]

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [event for event in self.journal.spooled(10000) if kind in (None, event["kind"])]

    def instances(self) -> dict[tuple[str, Slot], Instance]:
        """Return the driver's instances by GPU UUID and slot."""
        driver = NvmlDriver(str(self.machine.library))
        try:
            return {(gpu.uuid, i.slot): i for gpu in driver.gpus() if gpu.mig_mode()[0] for i in gpu.instances()}
        finally:
            driver.close()

    def handoff(self, job: int, restart: int = 0) -> handoff.Handoff | None:
        return handoff.load(self.executor.paths.job, job, restart)

    def cap(self, minor: int) -> tuple[int, int]:
        """Return owner and mode of a capability device."""
        status = os.stat(self.machine.dev_root / "nvidia-caps" / f"nvidia-cap{minor}")
        assert stat.S_ISCHR(status.st_mode)
        return status.st_uid, stat.S_IMODE(status.st_mode)

    def job_maps(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Return what dcgm-exporter and jobstats read: jobs by `<gpu>.<gi>`, and (job, uid) by MIG UUID.

        dcgm-exporter takes each file whose name is a GPU's index or `<gpu>.<gi>` and each line in it as a job; jobstats
        opens the file of the MIG UUID and takes two numbers from its first line.
        """
        mapped = {
            path.name: [line for line in path.read_text().split("\n") if line]
            for path in Path(self.config.job_map_dir).glob("*")
            if re.fullmatch(r"\d+(\.\d+)?", path.name)
        }
        stat_files = Path(self.config.gpustat_dir).glob("*")
        return mapped, {
            path.name: path.read_text().split("\n")[0].split(" ") for path in stat_files if path.name[0] != "."
        }

    def scontrol_calls(self) -> list[str]:
        return self.scontrol_log.read_text().splitlines() if self.scontrol_log.exists() else []

    def slurm_says(self, *rows: str) -> None:
        """Set squeue's answer for each job; from now on it knows no other jobs.

        An answer is `<job> <restarts> <state> [<nodes>]`, or `<job> <restarts> <GRES>` if a job's grant is requested.
        """
        (self.root / "squeue").mkdir(exist_ok=True)
        for row in rows:
            (self.root / "squeue" / row.split()[0]).write_text(f"{row}\n")

    def slurm_is(self, release: str) -> None:
        """Set the release of the node's Slurm, e.g. 22.05.8."""
        (self.root / "squeue.version").write_text(f"slurm-wlm {release}\n")

    def slurm_names(self, job: int, *rows: str) -> None:
        """Set squeue's answer to a request for the names of a job.

        Each row is `<job> <array job> <task> <first of a heterogeneous job>`.
        """
        (self.root / f"squeue.name.{job}").write_text("".join(f"{row}\n" for row in rows))

    def asked_slurm(self) -> list[int]:
        log = self.root / "squeue.log"
        return [int(job) for job in log.read_text().split()] if log.exists() else []

    def make_by_hand(self, profile: str, start: int, size: int, gpu: int = 0) -> Instance:
        driver = NvmlDriver(str(self.machine.library))
        try:
            return driver.gpus()[gpu].create(Slot.of(profile, start, size))
        finally:
            driver.close()

    def destroy_by_hand(self) -> None:
        driver = NvmlDriver(str(self.machine.library))
        try:
            for gpu in driver.gpus():
                for instance in gpu.instances():
                    gpu.destroy(instance)
        finally:
            driver.close()

    # -- invariants

    def check(self) -> None:
        """Assert that journal and driver agree, no slot has two owners, and capability devices the right ones."""
        in_driver = self.instances()
        rows = [row for row in self.journal.slices() if row.state != "lost"]
        assert not [row for row in rows if row.state in ("intent", "evict")], "a change is unfinished"
        hosts = {row.id: row for row in rows if row.beside is None}
        guests = [row for row in rows if row.beside is not None]
        assert len({row.beside for row in guests}) == len(guests), "a slice has three holders"
        for guest in guests:
            assert guest.beside is not None
            host = hosts[guest.beside]
            assert host.state == guest.state == "held" and (host.gpu, host.slot) == (guest.gpu, guest.slot)
            assert host.uid == guest.uid, "two users hold one slice"
            assert (host.job, host.restart) != (guest.job, guest.restart)
        assert {(row.gpu, row.slot) for row in rows} == set(in_driver), "journal and driver differ"
        assert len(hosts) == len(in_driver), "a slot has two rows"
        for gpu in {row.gpu for row in rows}:
            Layout([row.slot for row in hosts.values() if row.gpu == gpu])
        runs = {(run.job, run.restart): run for run in self.journal.runs()}
        for row in rows:
            instance = in_driver[row.gpu, row.slot]
            if row.state == "zombie":
                continue
            assert instance.ci_id is not None and instance.mig_uuid == row.mig_uuid and instance.gi_id == row.gi
            owner = 0
            if row.state == "held":
                assert row.job is not None and row.restart is not None and row.uid is not None
                assert runs[row.job, row.restart].state == "running"
                owner = row.uid
                content = self.handoff(row.job, row.restart)
                assert content is not None and row.mig_uuid in {entry.mig_uuid for entry in content.slices}
            if row.state != "foreign":
                for minor in (row.cap_gi, row.cap_ci):
                    assert minor is not None and self.cap(minor) == (owner, 0o400)
        opened = {minor for row in rows if row.state in ("held", "zombie") for minor in (row.cap_gi, row.cap_ci)}
        for path in (self.machine.dev_root / "nvidia-caps").glob("nvidia-cap*"):
            assert path.stat().st_uid == 0 or int(path.name.removeprefix("nvidia-cap")) in opened, f"{path} is a user's"
        listed = {key: self.handoff(*key) for key in handoff.listed(self.executor.paths.job)}
        assert {key for key, run in runs.items() if run.state in ("running", "misfit")} <= set(listed) <= set(runs)
        for key, found in listed.items():
            assert found is not None and bool(found.slices) is (runs[key].state == "running")
        assert not [run for run in runs.values() if run.state in ("starting", "ending")]
        self.check_job_maps([row for row in rows if row.state == "held"])
        seqs = [event["seq"] for event in self.events()]
        assert seqs == sorted(set(seqs))

    def check_job_maps(self, held: Iterable[JournalSlice]) -> None:
        """Assert that the exporters' files contain the held slices with their jobs and users, and nothing else."""
        indices = {gpu.uuid: gpu.index for gpu in self.executor.gpus.listed()}
        jobs: dict[str, list[str]] = {}
        owners: dict[str, list[str]] = {}
        for row in sorted(held, key=lambda row: row.beside is not None):
            jobs.setdefault(f"{indices[row.gpu]}.{row.gi}", []).append(str(row.job))
            owners.setdefault(row.mig_uuid or "", [str(row.job), str(row.uid)])
        assert self.job_maps() == (jobs, owners)


def in_child(work: Callable[[], object], kill_at: int | None = None) -> tuple[int, int]:
    """Run `work` in a child; with `kill_at`, it is killed right before its k-th side effect.

    Return the wait status and the number of side effects (only meaningful if it was not killed).
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code: object = 70
        try:
            os.close(read)
            count = 0

            def hook(name: str) -> None:
                nonlocal count
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            effects.hook = hook
            code = work()
            os.write(write, str(count).encode())
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code if isinstance(code, int) else 71)
    os.close(write)
    with os.fdopen(read) as pipe:
        count = int(pipe.read() or 0)
    return os.waitpid(pid, 0)[1], count


def publish(node: Node) -> None:
    """Publish a plan in which job 1 may share the slice that job 9 holds."""
    (row,) = node.slices("held")
    slot = [row.slot.profile.name, *row.slot.placement]
    raw = {"version": 7, "gpus": {row.gpu: [slot]}, "guests": {"1": [row.gpu, *slot, 9, 0]}}
    plan.store(str(node.config.state_dir), json.dumps(raw).encode())
