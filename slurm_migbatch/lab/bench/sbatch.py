"""Time sbatch with the submit filter, without it, and with reduced filters, on private clusters.

Reduced filters are scripts that do nothing, and the filter's own script in front of a process with a constant answer.

The clusters run at the same time and alternate in short blocks, so that other work on the machine affects all equally.
Jobs are submitted by ordinary users (root's pass the filter untouched) and held, so that only the submission is
measured.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.lab.bars import mean_with_interval, times_of
from slurm_migbatch.lab.bench.hooks import BenchError
from slurm_migbatch.lab.bench.rpcs import diag
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.client import ask
from slurm_migbatch.submit.request import Answer, JobRequest
from slurm_migbatch.submit.service import reserved
from slurm_migbatch.submit.shim import JOB_SUBMIT
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.values.quantiles import quantile

_RPC: Final = "REQUEST_SUBMIT_BATCH_JOB"
_CROWD: Final = "crowd"
#: the share of submissions that counts as the fastest
_UNDISTURBED: Final = 0.1
#: a site's lua plugin without any rule
_EMPTY: Final = {
    "job_submit": "function slurm_job_submit() return slurm.SUCCESS end\n"
    "function slurm_job_modify() return slurm.SUCCESS end\nreturn slurm.SUCCESS\n",
    "cli_filter": "function slurm_cli_setup_defaults() return slurm.SUCCESS end\n"
    "function slurm_cli_pre_submit() return slurm.SUCCESS end\n"
    "function slurm_cli_post_submit() return slurm.SUCCESS end\nreturn slurm.SUCCESS\n",
}
#: runs inside the test bed as the user: n submissions, one after the other, numbered; prints the seconds of each
_SUBMIT: Final = """
import json, os, sys, time
first, n, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
null = os.open(os.devnull, os.O_WRONLY)
quiet = [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
spent = []
for number in range(first, first + n):
    line = [word.replace("{n}", str(number)) for word in argv]
    began = time.perf_counter()
    pid = os.posix_spawn(line[0], line, os.environ, file_actions=quiet)
    status = os.waitpid(pid, 0)[1]
    spent.append(time.perf_counter() - began)
    if status:
        sys.exit(f"sbatch ended with status {status}")
print(json.dumps(spent))
"""


@dataclass(frozen=True)
class SubmissionKind:
    """One kind of submission: the request with the filter, and the same job's request without it. `{n}` is
    replaced by a growing number; `slices`: the filter grants slices.
    """

    name: str
    asked: tuple[str, ...] = ()
    granted: tuple[str, ...] = ()
    slices: bool = True


def _kind(name: str, slo: str) -> SubmissionKind:
    comment = f"--comment=migbatch: model=bert-large batch=32 slo={slo}ms"
    return SubmissionKind(name, ("--gres=mig:auto", comment), ("--gres=mig:1g.10gb:1", comment))


SAME: Final = _kind("the same request again", "200")
OTHER: Final = _kind("requests that differ", "{n}")
PLAIN: Final = SubmissionKind("jobs without slices", slices=False)
KINDS: Final = (SAME, OTHER, PLAIN)


#: answers every connection to a socket with the same bytes
_ANSWER: Final = """
import socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
while True:
    link, _ = listener.accept()
    while link.recv(65536):
        link.send(sys.argv[2].encode("latin-1"))
"""


@dataclass(frozen=True)
class Clusters:
    """The clusters to compare."""

    filtered: Cluster
    asking: Cluster
    empty: Cluster
    without: Cluster

    def clusters_by_name(self, *, advice: bool) -> dict[str, tuple[Cluster, Path]]:
        """Return the clusters by name, each with the slurm.conf of its clients; `advice`: they load cli_filter."""
        clusters = {"with": self.filtered, "asking": self.asking, "empty": self.empty, "without": self.without}
        return {name: (cluster, _conf(cluster, advice=advice)) for name, cluster in clusters.items()}


@contextmanager
def started(directory: Path, users: int) -> Iterator[Clusters]:
    """Start the clusters; `directory` gets the scripts. `users` is of the filtered one."""
    for name, text in _EMPTY.items():
        (directory / f"{name}.lua").write_text(text)
    scripts = {name: str(directory / f"{name}.lua") for name in _EMPTY}
    # a test bed waits longer for the service than a site does
    config = {"submit": {"deadline_ms": 100}}
    with ExitStack() as stack:

        def start(**spec: object) -> Cluster:
            return stack.enter_context(Cluster(None, nodes=1, gpus=1, **spec))

        filtered = start(users=users, migbatch="all", config=config)
        asking = stack.enter_context(_answering(filtered, directory))
        yield Clusters(
            filtered,
            start(users=1, **{**scripts, "job_submit": str(asking)}),
            start(users=1, **scripts),
            start(users=1),
        )


@contextmanager
def _answering(filtered: Cluster, directory: Path) -> Iterator[Path]:
    """Start a process that gives the filter's answer to `SAME` to every request; yield the script that calls it."""
    service = reserved(filtered.product.state / "submit.sock")
    answer = protocol.encode_answer(_answer_to(SAME, filtered)).decode("latin-1")
    socket, script = directory / "answers.sock", directory / "asking.lua"
    text = (filtered.product.etc / JOB_SUBMIT).read_text()
    script.write_text(text.replace(str(service), str(socket)))
    line = [sys.executable, "-IS", "-c", _ANSWER, str(socket), answer]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield script
        finally:
            process.kill()


def _answer_to(kind: SubmissionKind, filtered: Cluster) -> Answer:
    gres, comment = (option.partition("=")[2] for option in kind.asked)
    prefix = "gres:" if filtered.root.version() < (23, 11) else "gres/"
    request = JobRequest(
        filtered.users[0].uid, partition="gpu", tres_per_node=f"{prefix}{gres}", comment=comment, batch=1
    )
    return ask(filtered.product.state / "submit.sock", request)


def _conf(cluster: Cluster, *, advice: bool) -> Path:
    """Return a slurm.conf for clients; cli_filter is optional and runs inside sbatch itself."""
    if advice:
        return cluster.slurm_conf
    conf = cluster.slurm_conf.parent / "plain/slurm.conf"
    conf.parent.mkdir(exist_ok=True)
    lines = [line for line in cluster.conf_text().splitlines() if not line.startswith("CliFilterPlugins")]
    conf.write_text("\n".join(lines) + "\n")
    return conf


class _Series:
    """The submissions of one kind on one side."""

    def __init__(self, cluster: Cluster, conf: Path, kind: SubmissionKind, *, filtered: bool) -> None:
        self._cluster, self._conf = cluster, conf
        self._options = kind.asked if filtered else kind.granted
        self.times: list[float] = []
        self.medians: list[float] = []
        self._rpcs, self._rpc_s = 0, 0.0
        submit(cluster, self._options, conf, 5, first=1)

    def block(self, count: int) -> None:
        """Run some more submissions."""
        before = diag(self._cluster)
        spent = submit(self._cluster, self._options, self._conf, count, first=100 + len(self.times))
        done = diag(self._cluster).since(before).types.get(_RPC)
        if done is not None:
            self._rpcs, self._rpc_s = self._rpcs + done.count, self._rpc_s + done.seconds
        self.times += spent
        self.medians.append(statistics.median(spent))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form; `slurmctld_us`: time of one submission in slurmctld's statistics."""
        spent = round(self._rpc_s / max(self._rpcs, 1) * 1e6)
        return {**times_of(self.times), "slurmctld_us": spent}


def compare(
    clusters: Clusters, kinds: Sequence[SubmissionKind], submissions: int, block: int, *, advice: bool = False
) -> dict[str, Any]:
    """Submit jobs of some kinds to all clusters alternately; `advice`: with cli_filter.

    Returns:
        Figures by the names of the kinds: times on each side, and of the filter, of the constant answer and of empty
        scripts over none, and of the filter over empty scripts, `ratio`, the median of the blocks' ratios of medians;
        the mean of these ratios with its 95 % interval; the ratio of the total times; and that of the fastest tenth,
        which other work on the machine does not disturb.
    """
    clusters_by_name = clusters.clusters_by_name(advice=advice)
    series = {
        kind.name: {
            name: _Series(*side, kind, filtered=name in ("with", "asking")) for name, side in clusters_by_name.items()
        }
        for kind in kinds
    }
    names = list(clusters_by_name)
    for number in range(math.ceil(submissions / block)):
        for kind in kinds:
            first = number % len(names)
            for name in names[first:] + names[:first]:
                series[kind.name][name].block(block)
    granted = clusters.filtered.run(["squeue", "-h", "-o", "%k"]).stdout.count("[mig:")
    expected = submissions * sum(kind.slices for kind in kinds)
    if granted < expected:
        raise BenchError(f"the filter granted {granted} of {expected} jobs a slice, so the times are invalid")
    return {name: _figures(found) for name, found in series.items()}


def _figures(series: Mapping[str, _Series]) -> dict[str, Any]:
    figures: dict[str, Any] = {name: figure.to_dict() for name, figure in series.items()}
    for over, figure, other in (
        ("filter_over_none", series["with"], series["without"]),
        ("asking_over_none", series["asking"], series["without"]),
        ("empty_over_none", series["empty"], series["without"]),
        ("filter_over_empty", series["with"], series["empty"]),
    ):
        ratios = [ours / theirs for ours, theirs in zip(figure.medians, other.medians, strict=True)]
        mean, low, high = mean_with_interval(ratios)
        figures[over] = {
            "ratio": statistics.median(ratios),
            "mean": mean,
            "interval_95": [low, high],
            "total": sum(figure.times) / sum(other.times),
            "undisturbed": quantile(figure.times, _UNDISTURBED) / quantile(other.times, _UNDISTURBED),
        }
    return figures


def submit(
    cluster: Cluster, options: Sequence[str], conf: Path, count: int, *, first: int = 0, user: str = "mbalice"
) -> list[float]:
    """Run sbatch `count` times as a user, numbered from `first`; return the seconds of each."""
    sbatch = str(cluster.root.locate("sbatch"))
    argv = [sbatch, "--hold", "--output=/dev/null", *options, "--wrap=true"]
    line = ["/usr/bin/python3", "-ISc", _SUBMIT, str(first), str(count), *argv]
    done = cluster.run(line, user, check=False, env={"SLURM_CONF": str(conf)}, timeout=1200.0)
    if done.returncode:
        raise BenchError(f"sbatch failed: {done.stderr.strip()[-300:]}")
    spent: list[float] = json.loads(done.stdout)
    return spent


def crowd(cluster: Cluster, each: int) -> dict[str, Any]:
    """Let all users of the filtered cluster submit `each` jobs at once, every second user the same request again.

    Returns:
        Times of one sbatch, and how many jobs the compiled table decided on because the service did not answer: they
        have no decision record.
    """
    conf = _conf(cluster, advice=False)
    users = [user.name for user in cluster.users]

    def work(number: int) -> list[float]:
        kind = (SAME, OTHER)[number % 2]
        options = (*kind.asked, f"--job-name={_CROWD}")
        return submit(cluster, options, conf, each, first=100_000 + number * each, user=users[number])

    began = time.monotonic()
    with ThreadPoolExecutor(len(users)) as pool:
        times = [spent for times_of_user in pool.map(work, range(len(users))) for spent in times_of_user]
    seconds = time.monotonic() - began
    comments = cluster.run(["squeue", "-h", "-n", _CROWD, "-o", "%k"]).stdout.splitlines()
    if sum("[mig:" in comment for comment in comments) != len(times):
        raise BenchError(f"{len(times)} jobs were submitted and {len(comments)} are in the queue with a slice")
    return {
        "users": len(users),
        "submissions": len(times),
        "by_table": sum("#auto]" in comment for comment in comments),
        "seconds": round(seconds, 1),
        "sbatch": times_of(times),
    }
