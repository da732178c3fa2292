"""Odd requests that bypass clients' checks: what a node reads as a job's grant is never more than Slurm allocates."""

from __future__ import annotations

import random
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from slurm_migbatch.mig.grant import GrantError, parse_comment
from slurm_migbatch.node.scontrol import LAST_WITH_COLON, ScontrolError, grant_of
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.shim import JOB_SUBMIT, render
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.errors import TestbedError
from slurm_migbatch.workload.catalog import Partition, SiteCatalog
from tests.support.end_to_end import until
from tests.support.gpu_kinds import H100

pytestmark = pytest.mark.slurm

SITE = SiteCatalog({"gpu": Partition("gpu", (H100,))})
TYPES = ("1g.10gb", "1g.10gb.me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
SUBMITTED, CHANGED = 400, 100
#: Preloaded between sbatch or scontrol and their library: prints at which places of a request a text is, or sends the
#: request once for each line of a file, with that line's texts, `place=text in hexadecimal`.
CLIENT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static void tell(char **request, const char *wanted)
{
    for (size_t i = 0; i < 130; i++) {
        char *word, seen[64] = {0};
        struct iovec to = {&word, sizeof word}, at = {request + i, sizeof word};
        if (process_vm_readv(getpid(), &to, 1, &at, 1, 0) != sizeof word) break;
        for (size_t n = 0; n < sizeof seen - 1; n++) {
            struct iovec into = {seen + n, 1}, of = {word + n, 1};
            if (process_vm_readv(getpid(), &into, 1, &of, 1, 0) != 1 || !seen[n]) break;
        }
        size_t length = strlen(seen), tail = strlen(wanted);
        if (length >= tail && !strcmp(seen + length - tail, wanted)) printf("%zu %s\n", i, seen);
    }
}

static int sent(const char *name, char **request, void *answer)
{
    int (*send)(void *, void *) = dlsym(RTLD_NEXT, name);
    char *line = 0;
    size_t room = 0;
    if (getenv("PLACE_OF")) tell(request, getenv("PLACE_OF"));
    FILE *file = fopen(getenv("REQUESTS"), "r");
    while (file && getline(&line, &room, file) > 0) {
        char *kept[130];
        memcpy(kept, request, sizeof kept);
        for (char *part = strtok(line, " \n"); part; part = strtok(0, " \n")) {
            char *hex = strchr(part, '=') + 1, *text = calloc(strlen(hex) / 2 + 1, 1);
            for (size_t i = 0; hex[2 * i]; i++) sscanf(hex + 2 * i, "%2hhx", (unsigned char *) text + i);
            request[strtoul(part, 0, 10)] = text;
        }
        send(request, answer);
        memcpy(request, kept, sizeof kept);
    }
    fflush(stdout);
    _exit(0);
}

int slurm_submit_batch_job(void *request, void *answer) { return sent("slurm_submit_batch_job", request, answer); }
int slurm_update_job2(void *request, void *answer) { return sent("slurm_update_job2", request, answer); }
"""
#: options that put a text into a field of the request, and the end of that text
PLACES = {
    "node": ("gres@mig:1g.10gb:3", ["--gres=mig:1g.10gb:3"]),
    "job": ("gpu:71", ["--gpus=71"]),
    "socket": ("gpu:72", ["--gpus-per-socket=72", "--sockets-per-node=1"]),
    "task": ("gpu@73", ["--gpus-per-task=73", "-n1"]),
    "cpus": ("gpu:74", ["--cpus-per-gpu=74", "--gpus=2"]),
    "comment": ("remark75", ["--comment=remark75"]),
    "name": ("name76", ["--job-name=name76"]),
}
FIELDS = ("node", "job", "socket", "task", "cpus")
KINDS = ("mig", "mig:1g.10gb", "mig:1g.10gb.me", "mig:1g.10gb+me", "mig:3g.40gb", "mig:none", "mig:auto", "mig:")
COUNTS: tuple[str, ...] = ("", ":1", ":2", "=2", ":01", ":+1", ":-1", ":0", ":64", ":1k", ":0x2", ":4294967297")
COUNTS += (":18446744073709551617", ":1(S:0)", ":1:2", ":1=2", ": 1", ":1\n", ":%1", ":\u0661")
OTHERS: tuple[str, ...] = ("gpu", "gpu:0", "gpu:", "gpu=", "gpu::0", "gpu:a b:0", "gpu(:0", "gpu:0(S:0)", "gpu:a=b:0")
OTHERS += ("gpu:none:0", "gpu:-0", "gpu:\n:0", "gpu:*:0", "gpu:mig:0", "gpu:gres/x:0", "gres:gpu:0", "xgres/gpu:0")
OTHERS += ("MIG:1g.10gb:1", "amig:1", "mig_:1", "gres", "gres:", "gres/", "gres//", "", ":", "=", "\x01", "none", "x:0")
OTHERS += ("shard:0", "license/x:0", "cpu:1", "node=1")


class Requests:
    """Random requests, the same ones in every run; most with the prefix of the release."""

    def __init__(self, version: tuple[int, int]) -> None:
        self._random = random.Random(20)
        self.prefix = "gres:" if version <= LAST_WITH_COLON else "gres/"

    def fields(self) -> dict[str, str]:
        """Texts of one or two fields."""
        fields = ["node"] if self._random.random() < 0.6 else self._random.sample(FIELDS, 2)
        return {field: self._text() for field in fields}

    def change(self) -> dict[str, str]:
        """The same for an update, some with a comment."""
        comment = {"comment": "mine"} if self._random.random() < 0.2 else {}
        return {**self.fields(), **comment}

    def _text(self) -> str:
        entries = [self._random.choice(KINDS) + self._random.choice((":1", ":2") * 10 + COUNTS)]
        for sample in (KINDS, OTHERS, OTHERS):
            if self._random.random() < 0.3:
                entries.append(self._random.choice(sample))
        self._random.shuffle(entries)
        return ",".join(self._random.choice([self.prefix] * 20 + ["", "gres:", "gres/"]) + entry for entry in entries)


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    """Without hooks: this is about what nodes would read."""
    with tempfile.TemporaryDirectory(prefix="migbatch-filter-", dir="/run") as made:
        folder = Path(made)
        folder.chmod(0o755)
        names = {"socket": str(folder / "none.sock"), "table": str(folder / "none.lua"), "catalog": SITE}
        text = render(JOB_SUBMIT, default_partition="gpu", policy=SubmitPolicy(), **names)
        (folder / JOB_SUBMIT).write_text(text, encoding="utf-8")
        spec = {"nodes": 1, "cpus": 4000, "job_submit": str(folder / JOB_SUBMIT), "counts": dict.fromkeys(TYPES, 5000)}
        with Cluster(None, slurm_root=slurm_root, **spec) as cluster:
            yield cluster


class Sender:
    """Sends requests of mbalice with texts that the commands refuse."""

    def __init__(self, bed: Cluster) -> None:
        self._bed, self._file = bed, bed.directory / "requests"
        self._library = bed.directory / "client.so"
        source = self._library.with_suffix(".c")
        source.write_text(CLIENT)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", "-o", self._library, source, "-ldl"], check=True)
        self._library.chmod(0o755)
        self._places = {name: self._place(end, "sbatch", *argv, "--wrap=") for name, (end, argv) in PLACES.items()}
        self._places["id"] = self._place("77777", "scontrol", "update", "JobId=77777", "Nice=1")

    def send(self, requests: list[Mapping[str, str]], *argv: str) -> None:
        """Send the command's request once for each of `requests`, its texts in place of the command's own."""
        lines = [" ".join(f"{self._places[name]}={text.encode().hex()}" for name, text in r.items()) for r in requests]
        self._file.write_text("".join(f"{line}\n" for line in lines))
        self._file.chmod(0o644)
        self._run(*argv, REQUESTS=str(self._file))

    def _place(self, end: str, *argv: str) -> int:
        """Find where a request has a text with this end; `@` stands for any of the separators."""
        for separator in ":/=":
            wanted = end.replace("@", separator)
            found = re.findall(r"(?m)^(\d+) ((?:gres[:/])?[\w:=.]+)$", self._run(*argv, PLACE_OF=wanted, REQUESTS="/"))
            found = [(place, text) for place, text in found if "per_task" not in text]
            if found:
                return int(found[0][0])
        raise AssertionError(f"no text of {argv} ends with {end}")

    def _run(self, *argv: str, **env: str) -> str:
        line = ["env", f"LD_PRELOAD={self._library}", self._bed.root.locate(argv[0]), *argv[1:]]
        return self._bed.run(line, "mbalice", check=False, env=env).stdout


def read_by_node(comment: str, gres: str, prefix: str) -> Counter[str]:
    """The slices that a node makes for a job, by its comment or, if an update wrote that, by what squeue shows."""
    try:
        grant = parse_comment("" if comment == "(null)" else comment)
        if grant is not None and grant.changed:
            grant = None if gres in ("", "N/A") or len(gres.split()) != 1 else grant_of(gres, prefix)
    except (GrantError, ScontrolError):
        return Counter()
    return Counter({profile.gres_type: count for profile, count in grant.parts}) if grant else Counter()


def test_no_request_makes_more_slices_than_slurm_allocates(bed: Cluster) -> None:
    requests, sender = Requests(bed.root.version()), Sender(bed)
    sent: dict[str, list[Mapping[str, str]]] = {f"s{number}": [requests.fields()] for number in range(SUBMITTED)}
    sent.update({f"u{number}": [{"node": f"{requests.prefix}mig:1g.20gb:1"}] for number in range(CHANGED)})
    sender.send([{"name": name, **texts[0]} for name, texts in sent.items()], "sbatch", "--hold", "--wrap=sleep 600")
    rows = bed.run(["squeue", "-h", "-o", "%j %A"]).stdout.splitlines()
    jobs = dict(row.split() for row in rows)
    assert len([name for name in jobs if name[0] == "u"]) == CHANGED
    for change in ("Nice=1", "NumNodes=1", "Nice=-1"):  # the last one is refused after the comment has been changed
        changes = {name: requests.change() for name in jobs if name[0] == "u"}
        to_send = [{"id": jobs[name], **texts} for name, texts in changes.items()]
        sender.send(to_send, "scontrol", "update", "JobId=1", change)
        for name, texts in changes.items():
            sent[name].append(texts)
    bed.run(["scontrol", "release", ",".join(jobs.values())])

    def started() -> bool:
        lines = bed.run(["squeue", "-h", "-t", "PENDING", "-o", "%A %r"]).stdout.splitlines()
        never = [line.split()[0] for line in lines if "BadConstraints" in line]
        if never:
            bed.run(["scancel", *never], check=False)
        return len(lines) == len(never)

    with suppress(TimeoutError, TestbedError):  # those that have started are enough
        until("all jobs that can start", started, 25.0)
    form = "\x1e%A\x1f%j\x1f%b\x1f%k\x1d"
    text = bed.run(["squeue", "-h", "-t", "RUNNING", "-o", form]).stdout
    shown = re.split(r"(?m)^JobId=(\d+) ", bed.run(["scontrol", "-d", "show", "job"]).stdout)[1:]
    blocks = dict(zip(shown[::2], shown[1::2], strict=True))
    compared, more = 0, []
    for job, name, gres, comment in re.findall("\x1e(.*?)\x1f(.*?)\x1f(.*?)\x1f(.*?)\x1d", text, re.DOTALL):
        (allocated,) = re.findall(r"(?m)^ +Nodes=n1 .* GRES=(.*)$", blocks[job])
        counts: Counter[str] = Counter()
        for kind, count in re.findall(r"mig:([^:,(]+)(?::|\(CNT:)(\d+)", allocated):
            counts[kind] += int(count)
        compared += 1
        if read_by_node(comment, gres, requests.prefix) - counts:
            more.append((sent[name], gres, comment, allocated))
    bed.run(["scancel", "-u", "mbalice"])
    assert more == []
    assert compared
