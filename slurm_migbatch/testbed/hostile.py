"""Simulate hostile users during the soak test: each part is limited in time and in its number of operations.

The parts run as a user of the test bed and as one file, `python3 hostile.py PART SECONDS ...`, with the standard
library only; each ends by itself, or on SIGTERM, and prints its operation counts as one JSON object. They connect to
loopback and to sockets of the test bed, and write to the home directory and to the progress files of their jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .running_cluster import RunningCluster

PYTHON = "/usr/bin/python3"

# --- the parts; standard library only

MOST_SUBMISSIONS = 3000
MOST_OWN_JOBS = 40
"""Pending jobs of the submitting user at a time; the oldest is cancelled."""
MOST_CONNECTIONS = 600
MOST_REPORTED = 128 << 20
"""Bytes that a job writes into its progress file at most."""

#: bytes that end a field, a line or a list in some format, and some that are not text
ODD = (
    *(bytes([number]) for number in (*range(1, 32), 127, 128, 160, 173, 255)),
    *(b"|", b",", b";", b"=", b":", b"%", b"\\", b"'", b'"', b"$(id)", b"`id`", b" ", b"[", b"]", b"(", b"*", b"#"),
    "\u2028".encode(),
    "\u202e".encode(),
    b"\xed\xa0\x80",
)
FREE = ("--job-name", "--account", "--comment", "--wckey", "--gres", "--constraint", "--dependency", "--chdir",
        "--mail-user", "--reservation", "--licenses", "--extra", "--output", "--container", "--signal")  # fmt: skip
GRES = (
    b"gpu:a\x1fb:0",
    b"mig:7g.80gb:1000000",
    b"mig:1g.10gb:0,mig:1g.10gb:0",
    b"mig:none:4",
    b"mig:auto:99999999999",
    b"mig:1g",
    b"mig:loan:1",
    b"gres:" * 20_000,
    b"mig:auto," * 10_000,
    b"mig:" + b"1g." * 30_000,
    b"gpu:" + b"\x1f" * 900 + b":0",
)
HINTS = (
    b"migbatch: model=" + b"a" * 900,
    b"migbatch: " + b"model=bert-large " * 55,
    b"migbatch: model=bert-large batch=1e308 input=-1 slo=0ns mem=99999tb",
    b"migbatch: model=\x1fbert batch=\x1e32",
    b"migbatch:" * 110,
)
FORGED = (b"[mig:7g.80gb:1]", b"x [mig:7g.80gb:1#abcdefgh]", b"[mig:", b"x\n[mig:7g.80gb:1]", b"[mig:7g.80gb:1] y")


class _End:
    """True after some seconds, or after SIGTERM or SIGINT: the part must stop."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._now)

    def _now(self, _number: int, _frame: object) -> None:
        self._at = 0.0

    def __bool__(self) -> bool:
        return time.monotonic() >= self._at


def submissions(draw: random.Random) -> Iterator[list[bytes]]:
    """Yield sbatch options endlessly: odd bytes, huge fields, arrays, forged markers, impossible requests."""
    while True:
        field = draw.choice(FREE).encode()
        odd = draw.choice(ODD)
        gres = draw.choice((b"--gres=mig:auto", b"--gres=mig:1g.10gb:1", b"--gpus=1"))
        yield [field + b"=a" + odd + b"b", gres]
        yield [b"--gres=gpu:a" + odd + b"b:0"]
        yield [field + b"=" + draw.choice((odd, b"x")) * draw.choice((1023, 1025, 20_000, 100_000)), gres]
        yield [b"--gres=" + draw.choice(GRES)]
        yield [b"--gres=mig:auto", b"--comment=" + draw.choice(HINTS)]
        yield [b"--gres=mig:1g.10gb:1", b"--comment=" + draw.choice(FORGED)]
        yield [b"--array=1-%d%%1" % draw.choice((2, 5, 20)), gres, b"--job-name=" + odd * 100]


def updates(draw: random.Random, job: bytes) -> list[bytes]:
    """Draw one scontrol update of an own job."""
    change = draw.choice(
        (
            b"Comment=" + draw.choice(FORGED),
            b"Comment=a" + draw.choice(ODD) + b"b",
            b"Name=a" + draw.choice(ODD) + b"b",
            b"Gres=" + draw.choice((b"mig:7g.80gb:1", b"gpu:a\x1fb:0", b"none", b"")),
            b"Features=a" + draw.choice(ODD),
            b"TimeLimit=%d" % draw.randrange(1, 10_000),
            b"ArrayTaskThrottle=%d" % draw.randrange(100),
            b"NumNodes=%d" % draw.choice((1, 2, 1000)),
            b"Dependency=afterany:%d" % draw.randrange(1, 3000),
            b"Nice=%d" % draw.randrange(-100, 100),
        )
    )
    return draw.choice(
        (
            [b"scontrol", b"update", b"JobId=" + job, change],
            [b"scontrol", b"update", b"JobId=" + job, change],
            [b"scontrol", b"hold", job],
            [b"scontrol", b"release", job],
            [b"scontrol", b"requeue", job],
            [b"scontrol", b"top", job],
            [b"scancel", job],
        )
    )


def submit(seconds: float) -> Counter[str]:
    """Submit, change and cancel continuously."""
    end, counts, own = _End(seconds), Counter[str](), deque[bytes]()
    draw = random.Random(os.getpid())  # noqa: S311 - any mix will do
    for options in submissions(draw):
        if end or counts["submissions"] >= MOST_SUBMISSIONS:
            break
        held = [b"--hold"] if draw.random() < 0.7 else []
        line = [b"sbatch", b"--parsable", b"-o", b"/dev/null", b"--time=1", *held, *options, b"--wrap", b"true"]
        code, output = _call(line)
        counts["submissions"] += 1
        counts["accepted" if code == 0 else "refused"] += 1
        if code == 0 and output.strip().isdigit():
            own.append(output.strip())
        for _ in range(2 if own else 0):
            code, _ = _call(updates(draw, draw.choice(own)))
            counts["changes" if code == 0 else "changes refused"] += 1
        while len(own) > MOST_OWN_JOBS:
            _call([b"scancel", own.popleft()])
    return counts


def _call(line: Sequence[bytes]) -> tuple[int, bytes]:
    try:
        done = subprocess.run(
            line, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return 1, b""
    return done.returncode, done.stdout


def report(seconds: float) -> Counter[str]:
    """Write to the progress file of this job as fast as possible, also by a hard link; for a job script."""
    end, counts = _End(seconds), Counter[str]()
    path = os.environ["MIGBATCH_PROGRESS"]
    folders = (Path(path).parents[1] / "scratch", Path.cwd())
    links = [folder / f"linked.{os.environ['SLURM_JOB_ID']}" for folder in folders]
    for link in links:
        try:
            os.link(path, link)
            counts["hard links"] += 1
        except OSError:
            counts["hard links refused"] += 1
    lines = b"items=1 seconds=1\n" * 3000 + b"\xff\x00=" * 1000 + b"9" * 5000 + b"\n"
    names = [path, *(str(link) for link in links if link.exists())]
    while not end and counts["bytes"] < MOST_REPORTED:
        for name in names:
            try:
                handle = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
            except OSError:
                counts["refused"] += 1
                continue
            try:
                counts["bytes"] += os.write(handle, lines)
            except OSError:
                counts["refused"] += 1
                time.sleep(0.01)
            finally:
                os.close(handle)
    while not end:
        time.sleep(0.2)
    for link in links:
        link.unlink(missing_ok=True)
    return counts


def descriptors(seconds: float, processes: int, per_process: int) -> Counter[str]:
    """Hold many open files in many processes."""
    end, counts = _End(seconds), Counter[str]()
    per_process = _open_files(per_process + 64) - 64
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            handle = os.open(os.devnull, os.O_RDONLY)
            with contextlib.suppress(OSError):
                for _ in range(per_process):
                    os.dup(handle)
            while not end and os.getppid() != 1:
                time.sleep(0.2)
            os._exit(0)
        children.append(child)
        counts["processes"] += 1
        counts["descriptors"] += per_process
    while not end:
        time.sleep(0.2)
    for child in children:
        # repeatedly: a forked child loses the bytes written before it ran
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            os.kill(child, signal.SIGTERM)
            time.sleep(0.05)
    return counts


def node_api(seconds: float, port: int) -> Counter[str]:
    """Connect to migbatchd and send nothing, half a header, an endless body, garbage or a request, or close at once."""
    end, counts = _End(seconds), Counter[str]()
    _open_files(MOST_CONNECTIONS + 256)
    draw = random.Random(os.getpid())  # noqa: S311
    head = b"POST /node/v1/events HTTP/1.1\r\nHost: migbatchd\r\n"
    waiting: deque[socket.socket] = deque()
    while not end:
        action = draw.choice(("silent", "silent", "silent", "half", "large", "garbage", "asked", "gone"))
        try:
            link = socket.create_connection(("127.0.0.1", port), timeout=2)
        except OSError:
            counts["refused"] += 1
            time.sleep(0.05)
            continue
        counts[action] += 1
        link.settimeout(0.2)
        with contextlib.suppress(OSError):
            if action == "half":
                link.sendall(head + b"Content-Le")
            elif action == "large":
                link.sendall(head + b"Content-Length: 4000000\r\n\r\n" + bytes(draw.choice((1000, 3_900_000))))
            elif action == "garbage":
                link.sendall(draw.randbytes(draw.choice((10, 1000, 100_000))))
            elif action == "asked":
                path = draw.choice((b"/healthz", b"/metrics", b"/v1/why/1", b"/v1/waiting", b"/v1/plan", b"/%00%ff"))
                link.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: migbatchd\r\n\r\n")
                link.recv(1000)
        if action in ("garbage", "asked", "gone"):
            link.close()
        else:
            waiting.append(link)
        while len(waiting) > MOST_CONNECTIONS:
            waiting.popleft().close()
        for _ in range(min(5, len(waiting))):  # now and then send one byte, as if more would follow
            waiting.rotate()
            with contextlib.suppress(OSError):
                waiting[0].sendall(b"x")
        time.sleep(0.005)
    return counts


def submit_socket(seconds: float, path: str) -> Counter[str]:
    """Connect to the submit socket and send nothing, garbage, the largest request or one that is slow to process."""
    end, counts = _End(seconds), Counter[str]()
    _open_files(MOST_CONNECTIONS + 256)
    draw = random.Random(os.getpid())  # noqa: S311
    heavy = b"".join(
        b"%s=%s\n" % (key, value)
        for key, value in (
            (b"version", b"1"),
            (b"tres_per_node", b"gres%3A" * 6000),
            (b"comment", b"migbatch%3A%20" + b"model=bert-large%20".replace(b"=", b"%3D") * 400),
        )
    )
    waiting: deque[socket.socket] = deque()
    while not end:
        action = draw.choice(("silent", "garbage", "largest", "heavy", "heavy"))
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(0.5)
        try:
            link.connect(path)
        except OSError:
            counts["refused"] += 1
            link.close()
            time.sleep(0.05)
            continue
        counts[action] += 1
        with contextlib.suppress(OSError):
            if action == "garbage":
                link.send(draw.randbytes(draw.choice((1, 500, 60_000))))
            elif action == "largest":
                link.send(b"a=" + b"x" * 65_000 + b"\n\n")
            elif action == "heavy":
                link.send(heavy + b"\n")
                link.recv(65536)
        if action == "silent":
            waiting.append(link)
            while len(waiting) > MOST_CONNECTIONS:
                waiting.popleft().close()
        else:
            link.close()
        time.sleep(0.005)
    return counts


def _open_files(wanted: int) -> int:
    """Raise the limit of open files as far as an ordinary user may, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


PARTS: Mapping[str, Callable[..., Counter[str]]] = {
    part.__name__: part for part in (submit, report, descriptors, node_api, submit_socket)
}


def main(name: str, seconds: str, *arguments: str) -> None:
    """Run one part."""
    counts = PARTS[name](float(seconds), *(int(text) if text.isdigit() else text for text in arguments))
    sys.stdout.write(json.dumps(counts) + "\n")


# --- started by the soak test


class Hostiles:
    """Run the parts on a test bed from `__enter__` to `__exit__`; then `counts` has their counts by user and part.

    Args:
        cluster: the test bed; it needs three users besides the ordinary ones.
        users: the names of those three.
        seconds: time after which every part ends by itself.
        parts: the parts to run; all if empty.
    """

    def __init__(self, cluster: RunningCluster, users: Sequence[str], seconds: float, parts: Sequence[str]) -> None:
        self._cluster = cluster
        self._users = tuple(users)
        self._seconds = seconds
        self._parts = frozenset(parts or PARTS)
        self._program = cluster.directory / "hostile.py"
        self._running: dict[str, subprocess.Popen[str]] = {}
        self.counts: dict[str, dict[str, int]] = {}

    def __enter__(self) -> Hostiles:
        self._program.write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
        submitter, owner, stranger = self._users
        self._start(submitter, "submit")
        self._start(owner, "descriptors", "50", "5000")
        self._start(stranger, "node_api", str(self._cluster.ports["migbatchd"]))
        self._start(stranger, "submit_socket", str(self._cluster.directory / "migbatch/submit.sock"))
        if "report" in self._parts:
            # two at a time, each for a quarter of a minute
            script = f"{PYTHON} {self._program} report 15"
            slices = ("--array=1-100%2", "--gres=mig:1g.10gb:1", "--time=1", "-o", "report.%a")
            self._cluster.submit(*slices, wrap=script, user=owner)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.terminate()
        for name, process in self._running.items():
            try:
                output, _ = process.communicate(timeout=150.0)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            with contextlib.suppress(json.JSONDecodeError):
                self.counts[name] = json.loads(output)
        for user in self._users:
            self._cluster.run(["scancel", "-u", user], check=False)
        if "report" in self._parts:
            self.counts[f"{self._users[1]} report"] = self._reports()

    def _reports(self) -> dict[str, int]:
        """Read the reports of the jobs that ran to their end."""
        reports: Counter[str] = Counter()
        for path in self._cluster.home(self._users[1]).glob("report.*"):
            with contextlib.suppress(json.JSONDecodeError):  # cancelled, or refused in its Prolog
                reports.update({"jobs": 1, **json.loads(path.read_text() or "{}")})
        return dict(reports)

    def _start(self, user: str, part: str, *arguments: str) -> None:
        if part not in self._parts:
            return
        line = [PYTHON, str(self._program), part, str(self._seconds), *arguments]
        self._running[f"{user} {part}"] = subprocess.Popen(
            self._cluster.command(line, user),
            env=self._cluster.client_env(user),
            cwd=self._cluster.home(user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is handled by the parent, which ends them
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
