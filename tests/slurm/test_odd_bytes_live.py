"""Every byte in every field that a user can set, on a real Slurm: each query still shows all jobs, each unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from slurm_migbatch.daemon.ended import HistoryClient, SlurmrestdHistoryClient
from slurm_migbatch.slurm import gres
from slurm_migbatch.testbed import restd
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.examples import thinned
from tests.support.real_world import RealWorld

pytestmark = pytest.mark.slurm

ALL = bytes(range(1, 256))
#: bytes that separate fields, lines or words somewhere, or are not UTF-8
SEPARATORS = b"\t\n\r\x1f \"%',:;=[\\]|\x80\xff"
#: runs commands, one argument list each, and prints how each ended
RUN = """
import json, os, subprocess, sys
for argv in json.load(sys.stdin):
    done = subprocess.run(list(map(os.fsencode, argv)), capture_output=True)
    print(json.dumps([done.returncode, done.stdout.decode("utf-8", "surrogateescape")]))
"""
#: option of sbatch -> the value that holds the odd bytes
SUBMITTED = {
    "--job-name": "a{}b",
    "--comment": "a{}b",
    "--account": "a{}b",
    "--wckey": "a{}b",
    "--gres": "mig:1g.10gb:1,gpu:a{}b:0",
    "--constraint": "a{}b",
    "--dependency": "afterok:1{}",
    "--chdir": "/tmp/a{}b",
    "--reservation": "a{}b",
    "--array": "1-2{}",
    "--licenses": "a{}b:0",
    "--nodelist": "n1{}",
    "--exclude": "n1{}",
    "--partition": "gpu{}",
    "--qos": "a{}b",
    "--mail-user": "a{}b",
    "--output": "/tmp/a{}b",
    "--begin": "now+1hour{}",
    "--signal": "USR1{}",
}
#: key of `scontrol update JobId=` -> the value, and who sets it
UPDATED = {
    "Name": "a{}b",
    "Comment": "a{}b",
    "Account": "a{}b",
    "WCKey": "a{}b",
    "Gres": "mig:1g.10gb:1,gpu:a{}b:0",
    "Features": "a{}b",
    "Dependency": "afterok:1{}",
    "ReservationName": "a{}b",
    "Licenses": "a{}b:0",
    "ReqNodeList": "n1{}",
    "ExcNodeList": "n1{}",
    "Partition": "gpu{}",
    "MailUser": "a{}b",
    "StdOut": "/tmp/a{}b",
    "WorkDir": "/tmp/a{}b",
    "Extra": "a{}b",
    "AdminComment": "a{}b",
    "Reason": "a{}b",
}
BY_ROOT = ("AdminComment",)


def text(raw: bytes) -> str:
    """The bytes as Python shows those that it exchanges with the system."""
    return raw.decode("utf-8", "surrogateescape")


def filled(pattern: str, raw: bytes) -> str:
    before, _, behind = pattern.partition("{}")
    return before + text(raw) + behind


def values_for(pattern: str, turn: int) -> list[str]:
    """A value for each separator and for each other byte; a turn may have only a third of the others."""
    return [filled(pattern, bytes([value])) for value in sorted({*SEPARATORS, *thinned(ALL, turn)})]


class Bench(RealWorld):
    """A cluster to which a user submits whatever Slurm accepts."""

    client: HistoryClient

    def commands(self, commands: Sequence[Sequence[str]], user: str | None = "mbbob") -> list[tuple[int, str]]:
        done = self.cluster.run(["/usr/bin/python3", "-c", RUN], user, input=json.dumps(commands), timeout=600)
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]  # type: ignore[misc]

    def held(self, options: Sequence[str]) -> list[int]:
        """Submit a job with each option; ids of those that Slurm accepted."""
        words = ["sbatch", "--hold", "--parsable", "--output=/dev/null", "--wrap=true"]
        found = [int(out) for code, out in self.commands([[*words, option] for option in options]) if code == 0]
        self._jobs.extend(found)
        return found

    def listed(self) -> set[str]:
        return set(self.cluster.run(["squeue", "-h", "-a", "-r", "-o", "%A"]).stdout.split())

    def looked_at(self) -> dict[str, str]:
        """Comments by job, after every kind of query; no job is missing, and none is unread."""
        rows = self.client.jobs()
        assert {str(row.job_id) for row in rows} == self.listed()
        assert [row for row in rows if row.unread] == []
        texts = self.client.gres_texts()
        for row in rows:
            assert texts[row.job_id] == row.gres
            if "mig:" in row.gres:
                assert gres.readable_counts(row.gres, "mig") == {"1g.10gb": 1}
        assert {node.name for node in self.client.nodes()} >= set(self.nodes)
        assert self.client.ended({row.job_id for row in rows}) == []
        return {str(row.job_id): row.comment for row in rows}


@pytest.fixture(params=["commands", pytest.param("slurmrestd", marks=pytest.mark.slurmrestd)])
def bench(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Bench]:
    if request.param == "commands":
        client = HistoryClient(cluster.bin, cluster.slurm_conf)
    else:
        where, token = restd.address(cluster.directory), str(restd.token_file(cluster.directory))
        user = cluster.spec.slurm_user
        client = SlurmrestdHistoryClient(cluster.bin, cluster.slurm_conf, address=where, token_file=token, user=user)
    bench = Bench(cluster, client)
    yield bench
    bench.close()


@pytest.mark.parametrize("option", ["--gres=gpu:a\x1fb:0", "--account=a\x1fb", "--gres=gpu:a\nb:0", "--gres=gpu:a|b:0"])
def test_job_with_odd_bytes_hides_no_other_job(bench: Bench, option: str) -> None:
    plain = bench.submit("mig:1g.10gb:1", hold=True, comment="plain")
    (odd,) = bench.held([option])
    assert bench.looked_at() == {str(plain): "plain", str(odd): ""}


@pytest.mark.parametrize("option", SUBMITTED)
def test_queries_still_work_with_any_byte_in_a_submit_option(bench: Bench, option: str) -> None:
    plain = bench.submit("mig:1g.10gb:1", hold=True, comment="plain")
    pattern = SUBMITTED[option]
    taken = bench.held([f"{option}={filled(pattern, ALL)}"])
    if not taken:  # at least one of the bytes is refused
        taken = bench.held([f"{option}={value}" for value in values_for(pattern, list(SUBMITTED).index(option))])
    shown = bench.looked_at()
    assert shown[str(plain)] == "plain"
    assert set(map(str, taken)) <= shown.keys()
    if option == "--comment":
        assert shown[str(taken[0])] == filled(pattern, ALL)


def test_queries_still_work_with_any_byte_in_an_update(bench: Bench) -> None:
    plain = bench.submit("mig:1g.10gb:1", hold=True, comment="plain")
    taken = 0
    for turn, (key, pattern) in enumerate(UPDATED.items()):
        (array,) = bench.held(["--array=1-255"])
        user = None if key in BY_ROOT else "mbbob"
        update = ["scontrol", "update"]
        (whole,) = bench.commands([[*update, f"JobId={array}", f"{key}={filled(pattern, ALL)}"]], user)
        if whole[0]:
            values = enumerate(values_for(pattern, turn), 1)
            asked = [[*update, f"JobId={array}_{number}", f"{key}={value}"] for number, value in values]
            answers = bench.commands(asked, user)
            taken += sum(not code for code, _ in answers)
        else:
            taken += 1
        assert bench.looked_at()[str(plain)] == "plain"
        bench.client.cancel(array)
    assert taken > len(UPDATED) / 2


def test_comment_written_back_keeps_its_bytes(bench: Bench) -> None:
    """Dispatch and lending write a job's own comment back to Slurm, beside changes of other jobs."""
    comment = filled("a{}b", ALL)
    odd, plain = bench.held(["--comment=" + comment, "--comment=plain"])
    longest = "x" * 200_000  # more than one argument of a command can hold
    updates = {str(plain): {"Comment": "changed"}, str(odd): {"Comment": comment + "c"}, "1_[1]": {"Comment": longest}}
    with pytest.raises(Exception, match="rejected 1 of 3") as caught:
        bench.client.update_jobs(updates)
    assert "too long" in str(caught.value)
    shown = bench.looked_at()
    assert (shown[str(odd)], shown[str(plain)]) == (comment + "c", "changed")


def test_arrays_with_separately_changed_tasks_need_no_command_each(bench: Bench) -> None:
    name = "--job-name=a\nJobId=9 ArrayJobId=9 ArrayTaskId=1 ArrayTaskThrottle=7 \nb"
    answers = bench.commands([["sbatch", "--hold", "--parsable", "--array=1-3%2", name, "--wrap=true"]] * 20)
    arrays = [int(out) for _, out in answers]
    bench._jobs.extend(arrays)
    bench.commands([["scontrol", "update", f"JobId={array}_2", "Comment=x"] for array in arrays])
    bench.client.jobs()
    bench.client.calls = 0
    rows = bench.client.jobs()
    assert bench.client.calls <= 5
    assert len(rows) == 2 * len(arrays)
    assert {row.job_id: (row.array_task, row.throttle) for row in rows if row.job_id == row.array_job} == dict.fromkeys(
        arrays, ("1,3%2", 2)
    )


def test_text_of_a_node_that_imitates_another_one_hides_neither(bench: Bench) -> None:
    first, second = bench.nodes[:2]
    before = {node.name: node for node in bench.client.nodes()}
    forged = f"x\nNodeName={second} CPUAlloc=0 CPUTot=1 Gres=mig:7g.80gb:9 GresUsed=mig:7g.80gb:0 State=IDLE"
    bench.cluster.run(["scontrol", "update", f"NodeName={first}", f"Comment={forged}"])
    try:
        after = {node.name: node for node in bench.client.nodes()}
    finally:
        bench.cluster.run(["scontrol", "update", f"NodeName={first}", "Comment="])
    assert after == before


def test_addresses_of_all_nodes_are_listed(bench: Bench) -> None:
    addresses = bench.client.node_addresses()
    assert addresses.keys() >= set(bench.nodes)
    assert all(addresses.values())
