"""Run the demonstration: a private cluster with simulated GPUs, jobs of three users, and a check of every claim.

Run by `make demo`. Exit status 0 only if every check at the end passes.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from .cluster import Cluster
from .errors import TestbedError
from .proc import wait_until
from .running_cluster import FINAL
from .watch import HandoffWatch

_UUIDS = re.compile(r"(batch script|task \d+): (\S*)")
_DEVICE = re.compile(r"MIG-[0-9a-f-]{36}")


@dataclass
class DemoJob:
    """One submission of the demonstration."""

    user: str
    script: str
    options: tuple[str, ...] = ()
    seconds: int = 4
    tasks: int = 1
    array: int = 0
    end: str = "COMPLETED"
    id: int = 0
    waited_for: str = ""
    submit_output: str = ""

    @property
    def records(self) -> tuple[str, ...]:
        """Job ids as squeue and migacct print them."""
        return tuple(f"{self.id}_{i}" for i in range(self.array)) if self.array else (str(self.id),)


@dataclass
class Checks:
    """Checks that print their results and collect the failures."""

    failed: list[str] = field(default_factory=list)

    def print_check(self, sentence: str, problems: list[str]) -> None:
        """Print one line of the closing check."""
        click.echo(f"  {'ok ' if not problems else 'NOT'}  {sentence}")
        for problem in problems[:8]:
            click.echo(f"       {problem}")
        self.failed += problems


class Demo:
    """Submit, show, wait and check."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.jobs: list[DemoJob] = []
        self.checks = Checks()
        # Ordinary users may not be able to read the checkout.
        self.examples = cluster.directory / "examples"
        self.examples.mkdir()
        self.examples.chmod(0o755)
        for script in files("slurm_migbatch.sbatch_examples").iterdir():
            if script.is_file():
                (self.examples / script.name).write_bytes(script.read_bytes())
                (self.examples / script.name).chmod(0o644)

    def run(self) -> int:
        """Run the whole demonstration; return 0 if every claim was verified."""
        began = time.monotonic()
        with HandoffWatch(self.cluster) as watch:
            self._first_wave()
            self._layouts("while they run")
            self._second_wave()
            self._layouts("a moment later")
            self._await_end()
        click.echo("\n$ migacct -a --starttime now-1hour")
        click.echo(self._migacct())
        click.echo("Closing check")
        self._verify(watch)
        click.echo(f"\n{len(self.jobs)} submissions in {time.monotonic() - began:.0f} s.")
        if self.checks.failed:
            click.echo(f"FAILED: {len(self.checks.failed)} problems.")
        return 1 if self.checks.failed else 0

    # --- submitting

    def _first_wave(self) -> None:
        cancelled = DemoJob("mbbob", "explicit_profile.sh", ("--job-name=cancelled",), seconds=600, end="CANCELLED")
        self._submit(DemoJob("mbalice", "batch_inference.sh", seconds=10))
        self._submit(cancelled)
        self._submit(DemoJob("mbalice", "array_inference.sh", seconds=8, array=4))
        self._submit(DemoJob("mbcarol", "multi_slice.sh", seconds=8, tasks=3))
        self._submit(DemoJob("mbalice", "refused.sh", end="REFUSED"))
        self._wait_until(
            lambda: self.cluster.states().get(str(cancelled.id)) == "RUNNING", "the job that will be cancelled runs"
        )

    def _second_wave(self) -> None:
        self._submit(DemoJob("mbbob", "vllm.sh", seconds=6))
        self._submit(DemoJob("mbcarol", "whole_gpu.sh", seconds=5))
        self._submit(DemoJob("mbcarol", "whole_gpu.sh", ("--gpus=2", "--nodes=1"), seconds=3))
        self._submit(DemoJob("mbbob", "explicit_profile.sh", ("--gres=mig:1g.20gb:2",), seconds=4))
        cancelled = next(job for job in self.jobs if job.end == "CANCELLED")
        self._command("mbbob", ["scancel", str(cancelled.id)])

    def _submit(self, job: DemoJob) -> None:
        offered = self._offered()
        command = ["sbatch", *job.options, str(self.examples / job.script)]
        done = self._command(job.user, command, env={"WORK_SECONDS": str(job.seconds)})
        output = done.stdout + done.stderr
        match = re.search(r"Submitted batch job (\d+)", output)
        job.id, job.submit_output = int(match[1]) if match else 0, output
        self.jobs.append(job)
        if not job.id and job.end != "REFUSED":
            raise TestbedError(f"{job.script} was not accepted: {output.strip()}")
        if job.id:
            requested = self._requested(job.id)
            job.waited_for = ",".join(
                profile for profile, count in requested.items() if offered.get(profile, 0) < count
            )

    def _command(self, user: str, argv: list[str], env: dict[str, str] | None = None) -> _Done:
        shown = " ".join(Path(argument).name if argument.startswith("/") else argument for argument in argv)
        click.echo(f"\n{user}$ {shown}")
        done = self.cluster.run(argv, user, check=False, env=env)
        for line in (done.stdout + done.stderr).splitlines():
            click.echo(f"    {line}")
        return _Done(done.stdout, done.stderr)

    # --- looking

    def _layouts(self, when: str) -> None:
        time.sleep(1.0)
        click.echo(f"\n# migbatch nodes   ({when})")
        click.echo(self.cluster.product.migbatch("nodes"))

    def _offered(self) -> dict[str, int]:
        """Return the free slices known to Slurm: the most on any one node, by GRES type."""
        nodes = json.loads(self.cluster.product.migbatch("nodes", "--json"))["nodes"]
        largest: dict[str, int] = {}
        for node in nodes:
            for profile, count in node["offered"].items():
                largest[profile] = max(largest.get(profile, 0), count)
        return largest

    def _requested(self, job: int) -> dict[str, int]:
        text = self.cluster.run(["squeue", "-h", "-a", "-r", "-t", "all", "-j", str(job), "-o", "%b"]).stdout
        parts = re.findall(r"mig:([^:,\s]+):(\d+)", text.splitlines()[0] if text else "")
        return {profile: int(count) for profile, count in parts}

    def _wait_until(self, ready: Callable[[], bool], event: str, timeout: float = 300.0) -> None:
        wait_until(ready, timeout, event, every=0.5)

    def _await_end(self) -> None:
        click.echo("\nwaiting for the jobs to end ...")
        records = [record for job in self.jobs if job.id for record in job.records]

        def over() -> bool:
            states = self.cluster.states()
            return all(states.get(record, "") in FINAL for record in records)

        self._wait_until(over, "the end of all jobs")
        self._wait_until(lambda: not self._leases(), "the end of all leases")
        # What is missing from the record after that fails a closing check.
        with suppress(TestbedError):
            self._wait_until(self._recorded, "the record of all jobs", 60.0)

    def _recorded(self) -> bool:
        known = self._accounts()

        def whole(record: str, end: str) -> bool:
            row = known.get(record, {"state": "", "slices": []})
            ends = [entry["until_unix_s"] for entry in row["slices"]]
            return row["state"] == end and bool(ends) and None not in ends

        return all(whole(record, job.end) for job in self.jobs if job.id for record in job.records)

    def _leases(self) -> list[str]:
        """Return the slices that the nodes' own journals still count as held."""
        return [
            f"{node}: {entry['profile']} of job {entry['job']}"
            for node, status in self._node_status()
            for gpu in status["gpus"]
            for entry in gpu["slices"]
            if entry["state"] != "idle"
        ]

    def _node_status(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for node in self.cluster.spec.node_names:
            yield node, json.loads(self._on_node("status", node, "--json"))

    def _on_node(self, verb: str, node: str, *options: str) -> str:
        return self.cluster.product.migbatch(
            "node", verb, "--etc", str(self.cluster.product.etc), "--node", node, *options
        )

    def _migacct(self, *options: str) -> str:
        argv = [str(Path(sys.executable).with_name("migacct")), "-a", "--starttime", "now-1hour", *options]
        return self.cluster.run_here(argv)

    # --- checking

    def _verify(self, watch: HandoffWatch) -> None:
        check = self.checks.print_check
        records = self._accounts()
        accepted = [job for job in self.jobs if job.end != "REFUSED"]
        refused = [job for job in self.jobs if job.end == "REFUSED"]
        check(
            "the malformed request was refused with its reason",
            [
                f"{job.script}: {job.submit_output.strip()}"
                for job in refused
                if job.id or "1g.10gb" not in job.submit_output
            ],
        )
        check(
            "every other job ended as it should, and migacct knows each",
            [
                f"{record}: {records[record]['state'] if record in records else 'not in migacct'}, not {job.end}"
                for job in accepted
                for record in job.records
                if records.get(record, {}).get("state") != job.end
            ],
        )
        waiting_jobs = [job for job in accepted if job.waited_for]
        check(
            "a job waited for a re-plan and got its slice: "
            + ", ".join(f"{job.id} ({job.waited_for})" for job in waiting_jobs[:3]),
            [] if waiting_jobs else ["every profile was on offer when it was asked for"],
        )
        check("every task saw exactly its own slices", list(self._wrong_devices(records)))
        check(
            f"no neighbour was touched (looked {watch.rounds} times, {len(watch.held)} slices)",
            watch.problems or ([] if watch.held else ["nothing was seen"]),
        )
        check("nothing is held on any GPU, and no device belongs to a user", [*self._leases(), *self._open_devices()])
        check("idle slices are taken down when the administrator wants the GPUs empty", list(self._cleared()))
        check(
            "no node was drained",
            [f"{node}: {state}" for node, state in self.cluster.node_states().items() if state.rstrip("*") != "idle"],
        )

    def _accounts(self) -> dict[str, dict[str, Any]]:
        return {str(row["job"]): row for row in json.loads(self._migacct("--json"))["jobs"]}

    def _wrong_devices(self, records: dict[str, dict[str, Any]]) -> Iterator[str]:
        completed = [(job, record) for job in self.jobs if job.end == "COMPLETED" for record in job.records]
        slices = {record: records.get(record, {}).get("slices", []) for _, record in completed}
        for job, record in completed:
            yield from self._wrong_output(job, record, [str(entry["mig_uuid"]) for entry in slices[record]])
        yield from _given_twice(slices)

    def _wrong_output(self, job: DemoJob, record: str, own: list[str]) -> Iterator[str]:
        seen_by_task = {task: _DEVICE.findall(uuids) for task, uuids in _UUIDS.findall(self._output(job, record))}
        if seen_by_task.pop("batch script", None) != own or not own:
            yield f"{record}: the batch script saw something else than {own}"
        if len(seen_by_task) != job.tasks:
            yield f"{record}: {len(seen_by_task)} tasks reported, not {job.tasks}"
        shared = [uuid for uuids in seen_by_task.values() for uuid in uuids]
        if sorted(shared) != sorted(own):
            yield f"{record}: its tasks saw {shared}, its slices are {own}"

    def _output(self, job: DemoJob, record: str) -> str:
        texts = [
            path.read_text() for path in self.cluster.home(job.user).glob("*.out") if path.stem.endswith(f"-{record}")
        ]
        return "\n".join(texts)

    def _open_devices(self) -> Iterator[str]:
        for node in self.cluster.spec.node_names:
            for path in (self.cluster.node_directory(node) / "driver/dev/nvidia-caps").glob("nvidia-cap*"):
                status = path.stat()
                if status.st_uid != 0 or status.st_mode & 0o077:
                    yield f"{node}: {path.name} belongs to uid {status.st_uid}, mode {status.st_mode & 0o777:o}"

    def _cleared(self) -> Iterator[str]:
        for node in self.cluster.spec.node_names:
            self._on_node("clear", node)
            for gpu in self.cluster.machine(node).dump()["gpus"]:
                for instance in gpu["instances"]:
                    yield f"{node}: GPU {gpu['index']} still has a {instance['profile']}"


def _given_twice(slices: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the slices that two jobs had at once, by the node's own times: Slurm's are rounded."""
    leases: dict[str, list[tuple[str, float, float]]] = {}
    for record, entries in slices.items():
        for entry in entries:
            uuid = entry["mig_uuid"]
            since, until = entry["since_unix_s"] or 0.0, entry["until_unix_s"] or math.inf
            for other, start, end in leases.setdefault(uuid, []):
                if since < end and start < until:
                    yield f"{uuid} was given to {other} and {record} at once"
            leases[uuid].append((record, since, until))


@dataclass(frozen=True)
class _Done:
    stdout: str
    stderr: str


def main() -> int:
    """Run the demonstration as a program."""
    click.echo("Starting a private Slurm cluster: 2 nodes, 2 simulated H100s each ...")
    began = time.monotonic()
    try:
        with Cluster(nodes=2, gpus=2, gpu_type="h100-80gb", latency="real", migbatch="all") as cluster:
            click.echo(f"up after {time.monotonic() - began:.0f} s")
            return Demo(cluster).run()
    except TestbedError as error:
        click.echo(f"demo: {error}", err=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
