"""Requests designed to be slow: those of one user never block others, and slurmctld is answered first."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from slurm_migbatch.submit.service import reserved
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import cancel, marked, sbatch, untroubled

LONG = 1_500_000
#: for Slurm 23.11, whose slurmctld itself takes time that grows with the square of the number of prefixes `gres:`
SHORTER = 200_000
#: Preloaded between sbatch or scontrol and their library: after all their checks it replaces one of the request's texts
#: by another, in whatever structure this release has.
CLIENT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static char *made(void)
{
    const char *unit = getenv("SWAP_UNIT"), *tail = getenv("SWAP_TAIL");
    size_t size = strlen(unit), count = strtoul(getenv("SWAP_BYTES"), 0, 10) / size;
    char *text = malloc(count * size + strlen(tail) + 1), *end = text;
    for (size_t i = 0; i < count; i++, end += size) memcpy(end, unit, size);
    strcpy(end, tail);
    return text;
}

static int sent(const char *name, void *request, void *answer)
{
    const char *from = getenv("SWAP_FROM");
    char *text = made(), *kept = 0, **place = 0;
    for (size_t i = 0; i < 160 && !place; i++) {
        char *word, seen[64] = {0}, *plain = seen;
        struct iovec to = {&word, sizeof word}, at = {(char **) request + i, sizeof word};
        if (process_vm_readv(getpid(), &to, 1, &at, 1, 0) != sizeof word) break;
        for (size_t n = 0; n < sizeof seen - 1; n++) {
            struct iovec into = {seen + n, 1}, of = {word + n, 1};
            if (process_vm_readv(getpid(), &into, 1, &of, 1, 0) != 1 || !seen[n]) break;
            if (seen[n] == '=') seen[n] = ':';  // as 24.11 writes --gpus-per-task
        }
        if (!strncmp(seen, "gres:", 5) || !strncmp(seen, "gres/", 5)) plain += 5;
        if (!strcmp(plain, from)) place = (char **) request + i, kept = word;
    }
    if (!place) return write(2, "nothing swapped\n", 16), -1;
    *place = text;
    int rc = ((int (*)(void *, void *)) dlsym(RTLD_NEXT, name))(request, answer);
    *place = kept;
    return rc;
}

int slurm_submit_batch_job(void *request, void *answer) { return sent("slurm_submit_batch_job", request, answer); }
int slurm_update_job2(void *request, void *answer) { return sent("slurm_update_job2", request, answer); }
"""

Send = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def send(stack: Cluster) -> Send:
    """Runs a client of a user, with its text `old` replaced by many times `unit` and then `tail`."""
    library = stack.directory / "client.so"
    source = library.with_suffix(".c")
    source.write_text(CLIENT)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    library.chmod(0o755)

    def run(
        old: str, unit: str, tail: str, *argv: str, size: int = LONG, user: str = "mbbob"
    ) -> subprocess.CompletedProcess[str]:
        if unit == "gres:" and stack.root.version() == (23, 11):
            size = min(size, SHORTER)
        swap = {"SWAP_FROM": old, "SWAP_UNIT": unit, "SWAP_TAIL": tail, "SWAP_BYTES": str(size)}
        line = ["env", f"LD_PRELOAD={library}", stack.root.locate(argv[0]), *argv[1:]]
        done = stack.run(line, user, check=False, env=swap)
        assert "nothing swapped" not in done.stderr, argv
        return done

    return run


@pytest.fixture(autouse=True)
def no_jobs_left(stack: Cluster) -> Iterator[None]:
    """Cancel what a test left; no node may be in trouble, and every process must still run."""
    yield
    stack.daemons.check()
    cancel(stack)
    untroubled(stack)


#: a text of the request, what replaces it (unit and tail), and the options that put it there
READ = [
    ("mig:1g.10gb:1", "gres:", "mig:auto", ["--gres=mig:1g.10gb:1"]),
    ("mig:1g.10gb:1", "gres/", "mig:auto", ["--gres=mig:1g.10gb:1"]),
    ("mig:1g.10gb:1", "mig:auto,", "mig:auto", ["--gres=mig:1g.10gb:1"]),
    ("mig:1g.10gb:1", ",", "mig:auto", ["--gres=mig:1g.10gb:1"]),
    ("mig:1g.10gb:1", ":", "", ["--gres=mig:1g.10gb:1"]),
    ("gpu:7", "gres:", "gpu:1", ["--gpus=7"]),
    ("gpu:7", "gres:", "gpu:1", ["--gpus-per-task=7", "-n1"]),
    ("gpu:7", "gres:", "gpu:1", ["--gpus-per-socket=7", "--sockets-per-node=1"]),
    ("swap", "[mig", "", ["--comment=swap", "--gres=mig:1g.10gb:1"]),
    ("swap", "k=v ", "", ["--comment=swap", "--gres=mig:1g.10gb:1"]),
    ("swap", "x", "", ["--comment=swap"]),
    ("swap", "gpu,", "gpu", ["--partition=swap", "--gres=mig:1g.10gb:1"]),
]
#: options that the filter does not read, for a job with slices
UNREAD = ["--job-name=swap", "--account=swap", "--wckey=swap", "--constraint=swap", "--licenses=swap", "--chdir=/swap"]


def test_overlong_texts_of_a_submission_are_refused_unread(stack: Cluster, send: Send) -> None:
    for old, unit, tail, options in READ:
        done = send(old, unit, tail, "sbatch", "--hold", *options, "--wrap=true")
        assert done.returncode != 0 and "bytes long, Slurm's limit is 1024" in done.stderr, (options, done.stderr)
    for option in UNREAD:
        send(option.partition("=")[2], "gres:", "", "sbatch", "--hold", "--gres=mig:1g.10gb:1", option, "--wrap=true")
        job, message = sbatch(stack, "--hold", "--gres=mig:1g.10gb:1", user="mbalice")
        assert job, message


def test_texts_within_slurms_limit_are_answered(stack: Cluster, send: Send) -> None:
    for old, unit, tail, options in READ:
        send(old, unit, tail, "sbatch", "--hold", *options, "--wrap=true", size=1000)
    job, message = sbatch(stack, "--hold", "--gres=mig:auto", user="mbalice")
    assert job, message
    assert marked(stack, job)[0] == marked(stack, job)[1]


def test_overlong_texts_of_an_update_are_refused_unread(stack: Cluster, send: Send) -> None:
    job, message = sbatch(stack, "--hold", "--gres=mig:1g.10gb:1", "--comment=mine", user="mbbob")
    assert job, message
    for old, unit, change in (
        ("mig:1g.20gb:1", "gres:", "Gres=mig:1g.20gb:1"),
        ("swap", "[mig", "Comment=swap"),
        ("swap", "gpu,", "Partition=swap"),
    ):
        done = send(old, unit, "", "scontrol", "update", f"JobId={job}", change)
        assert done.returncode != 0, change
        assert marked(stack, job) == ("1g.10gb:1", "1g.10gb:1")


def test_other_users_can_submit_during_heavy_submissions_of_one_user(stack: Cluster, send: Send) -> None:
    """Four clients of one user send heavy submissions without a pause while another submits ten jobs."""
    stop = []

    def flood(number: int) -> int:
        refused, first = 0, number
        while not stop or number < first + len(READ):  # each of them at least once
            old, unit, tail, options = READ[number % len(READ)]
            refused += "bytes long" in send(old, unit, tail, "sbatch", "--hold", *options, "--wrap=true").stderr
            number += 1
        return refused

    with ThreadPoolExecutor(4) as pool:
        floods = [pool.submit(flood, number) for number in range(4)]
        try:
            for _ in range(10):
                job, message = sbatch(stack, "--hold", "--gres=mig:auto", user="mbalice")
                assert job, message
                assert marked(stack, job) == ("1g.10gb:1", "1g.10gb:1")
        finally:
            stop.append(True)
        assert all(flood.result() for flood in floods)


FLOOD = """
import os, socket, sys
request = "kind=submit\\nuid=%d\\npartition=gpu\\ntres_per_node=%s\\ncomment=%s\\n\\n" % (
    os.getuid(), ",".join(["mig:1g.10gb:1"] * 64), "migbatch:%20model%3Dbert-large%20batch%3D32")
for path in sys.argv[1:]:
    if os.path.exists(path):
        print(path, flush=True)
while True:
    for path in sys.argv[1:]:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(path)
            link.send(request.encode())
        except OSError:
            pass
        link.close()
"""


def test_flood_at_the_submit_sockets_does_not_block_answers_to_slurmctld(stack: Cluster) -> None:
    """Decisions of the service have names; the compiled table's would end with #auto."""
    socket_paths = [str(reserved(stack.product.state / "submit.sock")), str(stack.product.state / "submit.sock")]
    argv = stack.command(["/usr/bin/python3", "-c", FLOOD, *socket_paths], "mbbob")
    env, home = stack.client_env("mbbob"), stack.home("mbbob")
    with ExitStack() as floods:
        for _ in range(4):
            child = subprocess.Popen(argv, env=env, cwd=home, stdout=subprocess.PIPE, text=True)
            floods.callback(child.communicate)
            floods.callback(child.kill)
            assert child.stdout is not None and [child.stdout.readline().strip() for _ in socket_paths] == socket_paths
        for _ in range(20):
            job, message = sbatch(stack, "--hold", "--gres=mig:auto", user="mbalice")
            assert job, message
            comment = stack.run(["squeue", "-h", "-j", str(job), "-o", "%k"]).stdout.strip()
            assert re.fullmatch(r"\[mig:1g\.10gb:1#[0-9a-z]{8}]", comment), comment
