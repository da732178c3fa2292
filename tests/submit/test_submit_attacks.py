"""A user cannot get a larger slice by editing comment, extra or gres.

Every attack is tried on the service's rewrite and on the shim without service; what counts is what the node's Prolog
would read afterwards: the marker at the end of the comment, against the GRES that Slurm allocates.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.mig.grant import Grant, GrantError, parse_comment
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.slurm.gres import counts
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, Answer, JobRequest, Pass, Present, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from tests.support.examples import examples
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import Shim

USER = 1001
FAKE = "[mig:7g.80gb:1]"


@dataclass(frozen=True)
class Job:
    """What slurmctld holds of a job."""

    tres_per_node: str = ""
    comment: str = ""
    extra: str = ""
    pending: bool = True

    def after(self, request: JobRequest, answer: Answer, *, old_release: bool) -> Job:
        """The job after the request was answered, as slurmctld applies it; on releases up to 25.05 a filter that sets
        "" in a change leaves the field as it is."""
        if isinstance(answer, Refuse):
            return self
        changes = dict(answer.changes) if isinstance(answer, Accept) else {}
        values = {}
        for name in ("tres_per_node", "comment", "extra"):
            given = getattr(request, name)
            if name in changes:
                given = None if old_release and changes[name] == "" and request.now is not None else changes[name]
            values[name] = getattr(self, name) if given is None else given
        return Job(**values, pending=self.pending)

    def present(self) -> Present:
        return Present(self.pending, "gpu", self.tres_per_node or None, comment=self.comment, extra=self.extra)

    def check(self) -> None:
        """The Prolog would create no more slices than Slurm allocated."""
        try:
            grant = parse_comment(self.comment.encode("latin-1"))
        except GrantError:
            return  # the Prolog refuses the job
        if grant is None:
            return
        allocated = Counter(counts(self.tres_per_node, "mig"))
        granted = Counter({profile.gres_type: count for profile, count in grant.parts})
        assert granted <= allocated, f"{self.comment!r} against {self.tres_per_node!r}"


ATTACKS = [
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment=FAKE),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment=f"hello {FAKE} hello"),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment=f"{FAKE}   "),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment=f"{FAKE} {FAKE}"),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment=f"x\n{FAKE}\n"),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment=f"x\r{FAKE}\x00"),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment="[MIG:7g.80gb:1]"),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment="[Mig:7g.80gb:1]"),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", extra=FAKE),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment="x" * 1008 + FAKE),
    JobRequest(USER, tres_per_node=None, comment=FAKE),
    JobRequest(USER, tres_per_node="gres/fpga:1", comment=FAKE),
]
HARMLESS = [
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment="\uff3bmig:7g.80gb:1]".encode().decode("latin-1")),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment="[\u043cig:7g.80gb:1]".encode().decode("latin-1")),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment="[ mig:7g.80gb:1]"),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment="[mig\u200b:7g.80gb:1]".encode().decode("latin-1")),
    JobRequest(USER, tres_per_node="gres/mig:1g.10gb:1,gres/mig:1g.10gb:1"),
    JobRequest(USER, tres_per_node="gres/gres/mig:1g.10gb:1"),
    JobRequest(USER, tres_per_node="gres/gres:mig:1g.10gb:1"),
]
MALFORMED = [
    "gres/MIG:7g.80gb",
    "gres/Mig:1g.10gb",
    "gres/ mig:7g.80gb",
    "gres/mig:7g.80gb ",
    "gres/mig :7g.80gb",
    "gres/\tmig:7g.80gb",
    "gres/'mig':7g.80gb",
    "gres/mig:1g.10gb:-1",
    "gres/mig:1g.10gb:1k",
    "gres/mig:1g.10gb:18446744073709551617",
    "gres/mig:1g.10gb:4294967297",
    "gres/mig:1g.10gb:0x10",
    "gres/mig:1g.10gb:1,gres/mig:none:1",
    "gres/mig:1g.10gb:64,gres/mig:1g.10gb:64",
    "gres/mig:1g.10gb;gres/mig:7g.80gb",
    "gres/mig:1g.10gb\x00",
    "gres/mig:1g.10gb(S:0)",
]


@pytest.fixture(params=["service", "shim"])
def filtered(request: pytest.FixtureRequest, chooser: Chooser, shim: Shim):
    def run(asked: JobRequest) -> Answer:
        if request.param == "shim":
            return shim(asked)
        if asked.now is None and asked.partition is None:
            asked = replace(asked, partition="gpu")
        return rewrite(asked, SITE, chooser, SubmitPolicy(), decision_id="abc12345")

    return run


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forged_marker_is_refused(filtered, attack: JobRequest) -> None:
    answer = filtered(attack)
    assert isinstance(answer, Refuse), answer
    assert "copied from squeue" in answer.sentence


@pytest.mark.parametrize("asked", HARMLESS)
def test_lookalike_markers_and_gres_do_not_change_the_grant(filtered, asked: JobRequest) -> None:
    job = Job().after(asked, filtered(asked), old_release=False)
    job.check()
    grant = parse_comment(job.comment.encode("latin-1"))
    assert grant is not None and grant.gres == "mig:1g.10gb:" + str(counts(job.tres_per_node, "mig")["1g.10gb"])


@pytest.mark.parametrize("gres", MALFORMED)
def test_a_malformed_request_is_refused(filtered, gres: str) -> None:
    answer = filtered(JobRequest(USER, tres_per_node=gres))
    assert isinstance(answer, Refuse), answer
    assert answer.sentence.isprintable() and answer.sentence.isascii()


def test_long_comment_cannot_push_the_marker_past_the_limit(filtered) -> None:
    for length in range(985, 1025):
        asked = JobRequest(USER, tres_per_node="gres/mig:1g.10gb", comment="x" * length)
        answer = filtered(asked)
        if isinstance(answer, Accept):
            assert len(answer.changes["comment"]) <= 1024
            assert parse_comment(answer.changes["comment"]) is not None


def test_started_job_keeps_its_grant(filtered) -> None:
    job = Job("gres/mig:1g.10gb:1", "mine [mig:1g.10gb:1#abc]", pending=False)
    for comment in (FAKE, "", "new", "x [mig:", "[mig:1g.10gb:1#abc]"):
        request = JobRequest(USER, comment=comment, now=job.present())
        after = job.after(request, filtered(request), old_release=False)
        after.check()
        assert parse_comment(after.comment) == Grant(parse_comment(job.comment).parts, "abc")


def test_marker_is_removed_when_a_pending_job_gives_up_its_slice(filtered) -> None:
    """With a marker that stays after the GRES is cleared, the Prolog would create a slice that Slurm does not count."""
    for old_release in (True, False):
        for comment in ("[mig:1g.10gb:1]", "mine [mig:1g.10gb:1#k]"):
            job = Job("gres/mig:1g.10gb:1", comment)
            for gres in ("", "gres/fpga:1", "gres/gpu:0"):
                request = JobRequest(USER, tres_per_node=gres, now=job.present())
                after = job.after(request, filtered(request), old_release=old_release)
                assert parse_comment(after.comment) is None


fragments = st.sampled_from(
    [
        FAKE,
        "[mig:",
        "]",
        "mig:7g.80gb:1",
        " ",
        "\n",
        "x",
        "migbatch: ",
        "mem=1gb ",
        "#",
        "\xff",
        "y" * 500,
        "[mig:1g.10gb:1#abc]",
    ]
)
texts = st.one_of(st.none(), st.lists(fragments, max_size=4).map("".join))
gres = st.one_of(
    st.none(),
    st.sampled_from(
        [
            "",
            "gres/mig:1g.10gb:1",
            "gres/mig:auto",
            "gres/mig:2g.20gb:2",
            "gres/gpu:1",
            "gres/fpga:1",
            "gres/mig:7g.80gb",
        ]
    ),
    st.sampled_from(MALFORMED),
)
steps = st.lists(st.tuples(gres, texts, texts, st.booleans()), min_size=1, max_size=5)


@settings(max_examples=examples(400), deadline=None)
@given(steps=steps, old_release=st.booleans())
def test_no_sequence_of_edits_gains_a_larger_slice(chooser: Chooser, shim: Shim, steps, old_release: bool) -> None:
    """Submit, then update repeatedly, with the job starting at some point; service and shim take turns."""
    job: Job | None = None
    for number, (tres, comment, extra, start) in enumerate(steps):
        if job is None:
            asked = JobRequest(USER, partition="gpu", tres_per_node=tres, comment=comment, extra=extra)
        else:
            asked = JobRequest(USER, tres_per_node=tres, comment=comment, extra=extra, now=job.present())
        answer = shim(asked) if number % 2 else rewrite(asked, SITE, chooser, SubmitPolicy(), decision_id="abc12345")
        if isinstance(answer, Refuse):
            if job is None:
                return
            continue
        before = job or Job()
        if not before.pending and asked.tres_per_node is not None:
            asked = replace(asked, tres_per_node=None)  # slurmctld: the job is not pending
        job = before.after(asked, answer, old_release=old_release)
        job.check()
        assert len(job.comment) <= 1024 or isinstance(answer, Pass)
        job = replace(job, pending=job.pending and not start)
