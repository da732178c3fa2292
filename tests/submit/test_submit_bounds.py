"""What a submission costs, counted in steps: texts are bounded before they are read, and read in linear time.

slurmctld runs the filter under its locks, so every submission of the cluster waits for the heaviest one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.slurm.client import SLURM_LIMIT
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.answer_cache import LONGEST, AnswerCache
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import TEXTS, Accept, JobRequest, Present, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.submit.service import SubmitService
from slurm_migbatch.submit.table import TableCompiler, write_table
from slurm_migbatch.workload.catalog import MigNode, SiteCatalog
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import Shim

USER = 1001
HINTS = "migbatch: model=bert-large batch=32 slo=200ms"
#: fields of a request with a text of about n bytes
GRES: Final[dict[str, Callable[[int], str]]] = {
    "prefixes": lambda n: "gres:" * (n // 5) + "mig:auto",
    "prefixes, then another name": lambda n: "gres/" * (n // 5) + "migration",
    "entries": lambda n: ",".join(["mig:1g.10gb:1"] * (n // 14)),
    "entries with a prefix": lambda n: ",".join(["gres/mig:auto"] * (n // 14)),
    "GPUs": lambda n: ",".join(["gpu:h100:1"] * (n // 11)),
    "slices as GPUs": lambda n: ",".join(["gpu:1g.9gb:1"] * (n // 13)),
    "a type of many profiles": lambda n: "gpu:" + "1g1gb" * (n // 5),
    "entries of other names": lambda n: ",".join(["fpga:1"] * (n // 7)) + ",mig",
    "commas": lambda n: "," * n + "mig",
    "colons": lambda n: "mig" + ":" * n,
    "equals": lambda n: "mig" + "=" * n,
    "blanks": lambda n: " " * n + "mig",
    "quotes in the name": lambda n: "m" + "'" * n + "ig",
    "digits": lambda n: "mig:" + "9" * n,
    "digits and a letter": lambda n: "mig:1g.10gb:" + "9" * n + "k!",
    "a long type": lambda n: "mig:" + "a.1" * (n // 3),
    "a long type with an odd end": lambda n: "mig:" + "a.1" * (n // 3) + "!",
    "a long name": lambda n: "mig" * (n // 3),
}
COMMENTS: Final[dict[str, Callable[[int], str]]] = {
    "no hints": lambda n: "x" * n,
    "openings of markers": lambda n: "[mig" * (n // 4),
    "brackets": lambda n: "[" * n,
    "blanks": lambda n: "migbatch:" + " " * n,
    "pairs": lambda n: "migbatch: " + " ".join(f"k{i}=v" for i in range(n // 6)),
    "equals": lambda n: "migbatch: model=" + "=" * n,
    "model with slashes": lambda n: "migbatch: model=" + "a/" * (n // 2),
    "model without": lambda n: "migbatch: model=" + "a" * n,
    "items": lambda n: "migbatch: items=" + "k" * n + "x",
    "items, digits": lambda n: "migbatch: items=" + "9" * n + "e",
    "input": lambda n: "migbatch: input=" + "a" * n + ".",
    "input, sides": lambda n: "migbatch: input=" + "1x" * (n // 2),
    "slo": lambda n: "migbatch: slo=" + "1h" * (n // 2) + ".",
    "deadline": lambda n: "migbatch: items=1 deadline=" + "1-" * (n // 2),
    "mem": lambda n: "migbatch: mem=" + "1" * n + "g.",
    "min": lambda n: "migbatch: min=1g." + "1" * n + "gb",
    "max": lambda n: "migbatch: max=1g.10gb" + ".me" * (n // 3),
    "arch": lambda n: "migbatch: arch=" + "+" * n,
    "quantization": lambda n: "migbatch: model=llama-3.1-8b quantization=" + "q4_" * (n // 3),
    "params": lambda n: "migbatch: params=" + "8" * n + "b",
    "utilization": lambda n: "migbatch: gpu_memory_utilization=0." + "9" * n,
    "a key with errors": lambda n: "migbatch: " + "max_model_" * (n // 10) + "=1",
    "pairs that are not read": lambda n: "k=v," * (n // 4),
    "colons that are not read": lambda n: "a:" * (n // 2) + "=1",
    "a long word before a pair that is not read": lambda n: "a" * n + ":x=1",
    "one pair behind others": lambda n: "k=v;" * (n // 4) + "mem=1gb",
    "a size in a name": lambda n: "migbatch: model=" + "7b-" * (n // 3),
}
PARTITIONS: Final[dict[str, Callable[[int], str]]] = {
    "one again and again": lambda n: ",".join(["gpu"] * (n // 4)),
    "commas": lambda n: "," * n,
    "one long name": lambda n: "gpu" * (n // 3),
}
OTHERS: Final[dict[str, Callable[[int], str]]] = {"gpu": lambda n: "gpu:" * (n // 4)}


def requests(n: int) -> Iterator[tuple[str, JobRequest]]:
    """Submissions and changes of which one text has about n bytes."""
    asked = {"partition": "gpu", "tres_per_node": "gres/mig:auto", "comment": HINTS}
    for name, texts in (("comment", COMMENTS), ("extra", COMMENTS), ("partition", PARTITIONS)):
        for what, text in texts.items():
            yield f"{name}: {what}", JobRequest(USER, **{**asked, name: text(n)})
    for name in ("tres_per_node", "tres_per_job", "tres_per_socket", "tres_per_task"):
        for what, text in GRES.items():
            yield f"{name}: {what}", JobRequest(USER, partition="gpu", comment=HINTS, **{name: text(n)})
    for name in ("cpus_per_tres", "mem_per_tres", "tres_freq", "tres_bind"):
        for what, text in OTHERS.items():
            yield f"{name}: {what}", JobRequest(USER, **{**asked, "tres_per_node": "gpu:1", name: text(n)})
    for name, texts in (("comment", COMMENTS), ("extra", COMMENTS), ("tres_per_node", GRES)):
        for what, text in texts.items():
            now = Present(True, "gpu", "gres/mig:1g.10gb:1", comment="x [mig:1g.10gb:1]")
            yield f"change of {name}: {what}", JobRequest(USER, now=now, **{name: text(n)})
            held = {"tres_per_node": "gres/mig:1g.10gb:1", "comment": "x [mig:1g.10gb:1]", name: text(n)}
            yield f"changed with {name}: {what}", JobRequest(USER, comment="y", now=Present(True, "gpu", **held))


class Counted(str):
    """A text that counts the bytes that Python's own methods look at."""

    work = 0

    def _cut(self, text: str) -> Counted:
        Counted.work += len(text)
        return Counted(text)

    def __getitem__(self, key: Any) -> Counted:
        return self._cut(super().__getitem__(key))

    def __contains__(self, what: object) -> bool:
        Counted.work += len(self)
        return super().__contains__(what)  # type: ignore[operator]

    def startswith(self, *what: Any) -> bool:
        Counted.work += 1
        return super().startswith(*what)

    def find(self, *what: Any) -> int:
        Counted.work += len(self)
        return super().find(*what)

    def encode(self, *how: Any) -> bytes:
        Counted.work += len(self)
        return super().encode(*how)

    def split(self, *how: Any) -> list[str]:
        return [self._cut(part) for part in super().split(*how)]

    def partition(self, *how: Any) -> tuple[str, str, str]:
        head, separator, tail = super().partition(*how)
        return self._cut(head), self._cut(separator), self._cut(tail)

    def removesuffix(self, *what: Any) -> Counted:
        return self._cut(super().removesuffix(*what))

    def replace(self, *what: Any) -> Counted:
        return self._cut(super().replace(*what))

    def strip(self, *what: Any) -> Counted:
        return self._cut(super().strip(*what))

    def rstrip(self, *what: Any) -> Counted:
        return self._cut(super().rstrip(*what))


def counted(request: JobRequest) -> JobRequest:
    """The request with `Counted` texts."""

    def of(value: object) -> Any:
        return Counted(value) if type(value) is str else value

    fields = {name: of(value) for name, value in vars(request).items()}
    if request.now is not None:
        fields["now"] = Present(**{name: of(value) for name, value in vars(request.now).items()})
    return JobRequest(**fields)


def steps_of(work: Callable[[], object]) -> int:
    """Bytecodes that `work` takes, and bytes that `Counted` texts look at meanwhile."""
    codes = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal codes
        frame.f_trace_opcodes = True
        codes += event == "opcode"
        return trace

    Counted.work = 0
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return codes + Counted.work


@pytest.fixture(params=["service", "shim"])
def steps(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, table: Path, chooser: Chooser
) -> Iterator[Callable[[JobRequest], int]]:
    """Steps of an answer: of the service's rewrite, and of the shim's."""
    policy = SubmitPolicy(hints_in_extra=True)
    if request.param == "service":
        yield lambda asked: steps_of(lambda: rewrite(counted(asked), SITE, chooser, policy, decision_id="abc12345"))
        return
    folder = tmp_path_factory.mktemp("counting")
    with Shim(folder, table=str(table), policy=policy, count_steps=True) as shim:

        def of(asked: JobRequest) -> int:
            shim(asked)
            assert shim.errors == []
            return shim.steps

        yield of


@pytest.mark.slow
def test_steps_grow_at_most_linearly_with_the_length_of_a_text(steps: Callable[[JobRequest], int]) -> None:
    """The less of two repetitions: the first answer fills caches."""
    sizes = (240, 480, 960)
    for found in zip(*(requests(size) for size in sizes), strict=True):
        small, medium, large = [min(steps(request) for _ in range(2)) for _, request in found]
        assert large - medium <= 3 * max(medium - small, 0) + 4000, (found[0][0], small, medium, large)


@pytest.mark.parametrize("size", [2000, 16_000, 100_000])
def test_text_longer_than_the_slurm_limit_is_not_read(steps: Callable[[JobRequest], int], size: int) -> None:
    """Steps do not depend on the length at all."""
    for what, request in requests(size):
        assert steps(request) < 3000, what


@pytest.mark.parametrize("name", TEXTS)
def test_the_refusal_says_which_text_is_too_long(name: str, shim: Shim, chooser: Chooser) -> None:
    fields = {"partition": "gpu", "tres_per_node": "gres/gpu:1"}
    for length, refused in ((SLURM_LIMIT, False), (SLURM_LIMIT + 1, True), (100_000, True)):
        asked = JobRequest(USER, **{**fields, name: "m" * length})
        for answer in (rewrite(asked, SITE, chooser, SubmitPolicy()), shim(asked)):
            sentence = answer.sentence if isinstance(answer, Refuse) else ""
            assert (sentence == f"{TEXTS[name]} is {length} bytes long, Slurm's limit is 1024: shorten it") is refused


@pytest.mark.parametrize("name", ["tres_per_node", "comment", "extra"])
def test_too_long_text_of_a_job_without_slices_is_refused_too(name: str, shim: Shim, chooser: Chooser) -> None:
    """Slurm itself would refuse it, but later and without saying which option it was."""
    asked = JobRequest(USER, partition="cpu", **{name: "x" * 2000})
    for answer in (rewrite(asked, SITE, chooser, SubmitPolicy()), shim(asked)):
        assert isinstance(answer, Refuse) and "2000 bytes long" in answer.sentence


def test_request_with_all_texts_at_their_limit_fits_in_a_packet() -> None:
    text = "\xff" * SLURM_LIMIT
    now = Present(True, *[text] * 7)
    asked = JobRequest(4_000_000_000, job_id=4_000_000_000, now=now, **dict.fromkeys(TEXTS, text))
    message = protocol.encode(asked.to_fields())
    assert len(message) <= protocol.MAX_REQUEST
    assert JobRequest.from_fields(protocol.decode(message)) == asked


def test_answers_to_long_requests_are_not_cached(chooser: Chooser) -> None:
    """Four thousand of them would be a quarter of a gigabyte."""
    answers = AnswerCache()
    answers.keep(b"x" * LONGEST, "pass", b"verdict=pass\n\n", None, "")
    answers.keep(b"x" * (LONGEST + 1), "pass", b"verdict=pass\n\n", None, "")
    assert answers.get(b"x" * LONGEST) is not None
    assert answers.get(b"x" * (LONGEST + 1)) is None


@pytest.mark.parametrize(
    "message",
    [
        lambda n: b"uid=1\n" + b"".join(b"a%d=\n" % i for i in range(n // 8)) + b"\n",
        lambda n: b"uid=1\ncomment=" + b"%FF" * (n // 3) + b"\n\n",
        lambda n: b"uid=1\ncomment=" + b"%" * n + b"\n\n",
        lambda n: b"\n" * n,
        lambda n: b"=" * n + b"\n\n",
    ],
)
def test_packets_are_read_in_linear_time(message: Callable[[int], bytes], chooser: Chooser) -> None:
    service = SubmitService(SITE, chooser)
    small, medium, large = (steps_of(lambda n=n: service.handle(message(n), USER)) for n in (15_000, 30_000, 60_000))
    assert large - medium <= 3 * max(medium - small, 0) + 2000
    larger = message(10_000_000)
    assert steps_of(lambda: service.handle(larger, USER)) < 1000


@pytest.mark.parametrize(
    ("left", "rest"),
    [
        ("gres/gpu:1", "gres/gpu:0"),
        ("gres:gpu:h100:1", "gres/gpu:0"),
        ("cpu=2,gres/gpu=1", "cpu=2"),
        ("gres/gpu:1,cpu=2,gres/fpga:1", "cpu=2,gres/fpga:1"),
    ],
)
def test_steps_do_not_repeat_the_gpus_per_task_of_their_job(shim: Shim, left: str, rest: str) -> None:
    """sbatch leaves --tres-per-task in the job's environment, which has slices now."""
    asked = JobRequest(USER, partition="gpu", tres_per_task=left, num_tasks=1, batch=1)
    assert isinstance(shim(asked, environment=left), Accept)
    assert shim.environment == {"SLURM_TRES_PER_TASK": rest}


def test_steps_do_not_repeat_the_gpus_of_the_job_that_submitted_theirs(shim: Shim) -> None:
    """sbatch in a job on whole GPUs passes on its SLURM_GPUS."""
    asked = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:1g.10gb:1", batch=1)
    shim(asked, slurm_gpus="1", environment="gres/gpu:1")
    assert shim.environment == {"SLURM_GPUS": "0", "SLURM_TRES_PER_TASK": "gres/gpu:0"}
    shim(JobRequest(USER, partition="cpu", tres_per_node="gres/gpu:1", comment="x", batch=1), slurm_gpus="1")
    assert shim.environment == {"SLURM_GPUS": "1"}


def test_component_without_slices_gets_no_note_on_a_comment_that_may_be_of_another(shim: Shim) -> None:
    """One --comment may be for all components of a heterogeneous job."""
    plain = JobRequest(USER, partition="gpu", comment="migbatch: model=bert-large")
    assert "the job requests no slice" in shim(plain).message
    assert shim(plain, het_job_offset="1").message == ""
    assert isinstance(shim(replace(plain, comment="[mig:1g.10gb:1]"), het_job_offset="1"), Refuse)


def test_too_long_tres_per_task_in_the_job_environment_is_not_read(shim: Shim, tmp_path: Path) -> None:
    """sbatch leaves --tres-per-task there; a longer value is set by the user, and may have any length."""
    asked = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:1g.10gb:1", batch=1)
    shim(asked, environment="gres/mig:auto,cpu=2")
    assert shim.environment == {"SLURM_TRES_PER_TASK": "gres/mig:1,cpu=2"}
    for entries in (300, 3000):
        text = "gres/mig:auto,cpu=2" + ",mig" * entries
        shim(asked, environment=text)
        assert shim.environment == {"SLURM_TRES_PER_TASK": text}
    with Shim(tmp_path, count_steps=True) as counting:
        counting(asked, environment=",mig" * 300)
        few = counting.steps
        counting(asked, environment=",mig" * 8000)
        assert counting.steps <= few + 100


def on_nodes(count: int) -> SiteCatalog:
    """The site with this many nodes, each with a feature of its own."""
    names = [f"n{number}" for number in range(count)]
    features = [frozenset({"h100", f"mig_node_{name}"}) for name in names]
    return SiteCatalog(
        {name: SITE.partitions[name] for name in ("gpu", "old")},
        {
            name: MigNode(name, ("h100-80gb",), frozenset({"gpu"}), own, named=True)
            for name, own in zip(names, features, strict=True)
        },
        "migcatalog",
    )


@pytest.fixture(scope="module", params=["service", "shim"])
def steps_on_nodes(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    chooser: Chooser,
    compiler: TableCompiler,
) -> Iterator[Callable[[int, JobRequest], int]]:
    """Steps of an answer on a site of 10 or 210 nodes."""
    sites = {count: on_nodes(count) for count in (10, 210)}
    if request.param == "service":
        yield lambda count, asked: steps_of(lambda: rewrite(counted(asked), sites[count], chooser, SubmitPolicy()))
        return
    with ExitStack() as stack:
        shims = {}
        for count, site in sites.items():
            folder = tmp_path_factory.mktemp("counting")
            write_table(folder / "table.lua", compiler.text(site))
            shim = Shim(folder, table=str(folder / "table.lua"), catalog=site, count_steps=True)
            shims[count] = stack.enter_context(shim)

        def steps_on(count: int, asked: JobRequest) -> int:
            for _ in range(2):  # the first request reads the table
                shims[count](asked)
            assert shims[count].errors == []
            return shims[count].steps

        yield steps_on


@pytest.mark.parametrize(
    "longer",
    [
        {"features": "|".join(f"f{number}" for number in range(100))},
        {"features": "&".join(["h100"] * 100)},
        {"partition": ",".join(["old"] * 100 + ["gpu"])},
    ],
    ids=["any", "all", "partitions"],
)
def test_steps_for_each_node_do_not_depend_on_the_length_of_a_text(
    longer: dict[str, str], steps_on_nodes: Callable[[int, JobRequest], int]
) -> None:
    """slurmctld of a large site waits for the answer."""

    def each_node(**fields: str) -> float:
        asked = JobRequest(
            USER, **{"partition": "old,gpu", "tres_per_node": "gres/mig:1g.10gb:1", "features": "h100|f", **fields}
        )
        return (steps_on_nodes(210, asked) - steps_on_nodes(10, asked)) / 200

    assert 5 < each_node(**longer) <= 1.5 * each_node()
