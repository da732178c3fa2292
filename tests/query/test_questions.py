"""Questions as received over the network, from malicious users: each field, and the whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_migbatch.config import Config, DaemonConfig, QueryConfig, StoreConfig, SubmitConfig
from slurm_migbatch.query import login
from slurm_migbatch.query.login import LoginError, of_slurm, read_conf
from slurm_migbatch.query.protocol import DEFAULT_PORT, Answer, AnswerError
from slurm_migbatch.query.questions import KINDS, SEPARATORS, Question, QuestionError, RunsQuestion, is_job, read, write
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.query.worker import Answerer
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.values import fields
from tests.support.examples import examples
from tests.support.gpu_kinds import SITE
from tests.support.query_site import ALICE, BOB, fill

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
#: text that might have a meaning to a part of the service: SQL, Slurm's grammars, paths, formats, terminals
NASTY = st.sampled_from(
    [
        "7", "7_1", "7_[1-9999]", "8+1", "1" * 18, "n[1-65536]", "n[1-3,07],m3", "[", "]", "n1,,", "x' OR '1'='1", "%",
        "'; DROP TABLE runs; --", "/etc/shadow", "../../etc/passwd", "sqlite:////etc/passwd", "http://127.0.0.1/",
        "mig:auto", "mig:1g.10gb:1", "gpu:1", "gpu:99999999999999999999", "migbatch: model=bert-large batch=32",
        "migbatch: model=" + "x" * 900, "[mig:7g.80gb:1]", "all", "all,all", "+all", "jobid%9999", "jobid%-0", "%s%n",
        "%Y", "%1000000000d", "relative", "now-999999999weeks", "uts99999999999", "0000-00-00", "99/99/99", "R,CD",
        "\x1b[2J", "\0", "\ud800", "\u202e", "ÿ" * 60, "K", "Q", "|", "", "root", "0", "4294967295", "-1",
    ]
)  # fmt: skip


SENSIBLE = {
    "runs": {"allusers": True, "start": "now-1hour"},
    "show": {"job": "8"},
    "why": {"job": "8"},
    "usage": {"start": "now-1hour"},
    "waste": {"start": "now-1hour"},
    "explain": {"gres": "mig:auto", "partition": "gpu"},
}


def valued(kind: type[Question]) -> st.SearchStrategy[dict[str, Any]]:
    """A meaningful question except for a few fields, whose values have the right type."""
    by_type: dict[str, st.SearchStrategy[Any]] = {
        "bool": st.booleans(),
        "str": NASTY | st.text(max_size=40),
        "str | None": st.none() | NASTY | st.text(max_size=40),
        "int | None": st.none() | st.integers(-2, 10**7),
        "tuple[str, ...]": st.lists(NASTY | st.text(max_size=20), max_size=3),
    }
    by_name = {name: by_type[facts["kind"]] for name, facts in fields(kind)}
    chosen = st.sets(st.sampled_from(sorted(by_name)), max_size=3)
    some = chosen.flatmap(lambda names: st.fixed_dictionaries({name: by_name[name] for name in names}))
    return some.map(lambda given: {"ask": kind.kind, **SENSIBLE.get(kind.kind, {}), **given})


class PlayedSite(QuerySite):
    """A site with one job of another user in the queue."""

    def slurm(self) -> Any:
        waits = JobRow(8, uid=BOB, user="bin", partition="gpu", gres="gres:mig:1g.10gb:1", comment="secretcomment8")
        node = NodeRow("n1", frozenset({"MIXED"}), {"1g.10gb": 7}, {"1g.10gb": 2}, ("gpu",))
        known = {"jobs": lambda _: [waits], "nodes": lambda _: [node], "default_partition": lambda _: "gpu"}
        known |= {"settings": lambda _: {}, "associations": lambda *_: {}}
        return type("Played", (), known)()


ASKED = st.one_of([valued(kind) for kind in KINDS.values()])


@settings(max_examples=examples(500))
@given(body=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 65536)
@example(b'{"ask":' + b"9" * 60000 + b"}")
@example(b'{"ask":"runs","ask":"show"}')
def test_body_that_is_not_a_question_is_refused(body: bytes) -> None:
    with pytest.raises(QuestionError):
        read(body)
        raise QuestionError("the smallest questions are accepted")


@settings(max_examples=examples(500))
@given(given=ASKED, name=st.text(max_size=12), value=JSON)
def test_every_field_has_its_type_and_bounds(given: dict[str, Any], name: str, value: Any) -> None:
    try:
        question = read(json.dumps({**given, name: value}).encode())
    except QuestionError:
        return
    assert name in {item for item, _ in fields(question)}
    assert read(write(question)) == question
    for item, facts in fields(question):
        found = getattr(question, item)
        for text in found if isinstance(found, tuple) else (found,) if isinstance(found, str) else ():
            assert len(text) <= facts["limit"]
            separators = SEPARATORS if item == "delimiter" else ""
            assert question.bytewise or not any(ord(char) < 32 and char not in separators for char in text)


@pytest.fixture(scope="module")
def answerer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answerer]:
    home = tmp_path_factory.mktemp("questions")
    fill(f"sqlite:///{home}/db")
    (home / "catalog.json").write_text(json.dumps(SITE.to_dict()))
    base = Config()
    config = dataclasses.replace(
        base,
        store=StoreConfig(f"sqlite:///{home}/db"),
        submit=SubmitConfig(catalog=str(home / "catalog.json")),
        query=QueryConfig(answer_mb=1),
        daemon=DaemonConfig(run_dir=str(home)),
    )
    found = Answerer(config)

    class Granted:
        async def rights(self, uid: int) -> Rights:
            return Rights(uid, private=frozenset())

    found._privacy = Granted()  # type: ignore[assignment]
    found._site = PlayedSite(config, quiet=True)
    yield found
    found.close()


@settings(max_examples=examples(500))
@given(given=ASKED)
@example({"ask": "page", "start": "now-999999999weeks"})
@example({"ask": "runs", "start": "0001-01-01", "end": "9999-12-30"})
def test_every_question_is_answered_without_an_internal_error(answerer: Answerer, given: dict[str, Any]) -> None:
    answer = answerer.answer(ALICE, json.dumps(given).encode())
    assert "internal error" not in answer.error, answer.error
    assert Answer.read(answer.write()) == answer
    assert not any(word in answer.out + answer.error for word in ("root:x:0", "secretname8", "secretcomment8"))
    texts = [value for value in given.values() if isinstance(value, str)]
    assert not any("\x1b" in line for line in answer.out.splitlines()) or any("\x1b" in text for text in texts)


def test_malformed_answers_are_refused() -> None:
    fields = ("", '"code":"0"', '"code":999', '"code":true', '"code":0,"out":7', '"code":0,"err":[7]')
    bodies = [b"", b"[]", b"{}", b'{"version":2,"code":0}', b"[" * 99999]
    bodies += [f'{{"version":1,{text}}}'.encode() for text in fields]
    for body in bodies:
        with pytest.raises(AnswerError):
            Answer.read(body)
    assert Answer.read(Answer(3, "ü\n", ("a", "b")).write()) == Answer(3, "ü\n", ("a", "b"))


def test_times_are_in_the_time_zone_of_the_user(answerer: Answerer) -> None:
    def answer_to(**given: Any) -> Answer:
        return answerer.answer(ALICE, write(RunsQuestion(jobs="7", columns="submit", header=False, **given)))

    local_time = answer_to().out.strip()
    moment = datetime.fromisoformat(local_time).timestamp()
    for zone in ("Asia/Tokyo", "America/St_Johns", "UTC"):
        expected = datetime.fromtimestamp(moment, ZoneInfo(zone)).replace(tzinfo=None).isoformat()
        assert answer_to(zone=zone).out.strip() == expected
        assert answer_to(zone=zone, start=expected).out.strip() == expected
    rule = datetime.fromtimestamp(moment, timezone(timedelta(hours=3))).replace(tzinfo=None).isoformat()
    assert answer_to(zone="<+03>-3").out.strip() == answer_to(zone="EAT-3EAT-3,M3.5.0,M10.5.0/3").out.strip() == rule
    assert answer_to().out.strip() == local_time
    assert answer_to(zone="Mars/Olympus").error == "TZ: the controller does not know the time zone Mars/Olympus"
    for wrong in ("/etc/passwd", "../../etc/passwd", ":UTC", "a b"):
        with pytest.raises(QuestionError, match="TZ has"):
            write(RunsQuestion(zone=wrong))


@pytest.mark.parametrize("delimiter", ["\t", "\x1f", ";;", ""])
def test_column_delimiters_that_programs_use_are_accepted(answerer: Answerer, delimiter: str) -> None:
    asked = RunsQuestion(jobs="7", columns="jobid,user", header=False, delimiter=delimiter)
    assert answerer.answer(ALICE, write(asked)).out == f"7{delimiter}daemon\n"
    for wrong in ("\n", "\x1b[2J", "\0"):
        with pytest.raises(QuestionError, match="delimiter has"):
            write(RunsQuestion(delimiter=wrong))


def test_time_formats_may_have_flags_but_no_widths() -> None:
    for style in ("%-d.%-m. %H:%M", "%_H%%", "%s", "relative", ""):
        assert read(write(RunsQuestion(time_style=style))) == RunsQuestion(time_style=style)
    for style in ("%10d", "%-10d", "%"):
        with pytest.raises(QuestionError, match="SLURM_TIME_FORMAT"):
            write(RunsQuestion(time_style=style))


def test_unset_fields_are_not_sent_so_that_other_releases_can_answer() -> None:
    assert json.loads(write(RunsQuestion(jobs="7"))) == {"ask": "runs", "jobs": "7"}


def test_valid_job_ids_are_accepted_and_others_refused() -> None:
    assert all(map(is_job, ("7", "7_1", "7+1", "7.0", "7_1.batch", "7+0.0+1")))
    assert all(map(is_job, ("7_[1-2]", "7_[8-50%1]", "7_[0-9:3%4]", "7_[1,3,5,1...%2]", "7_[4-9,...]")))
    wrong = ("", "x", "7_", "7_[]", "7_[%2]", "7_[1-]", "7_[a]", "7_[1", "-7", "\u0667", "7 ", "7\n", "1" * 19)
    assert not any(map(is_job, wrong))
    with pytest.raises(QuestionError):
        write(RunsQuestion(jobs="7" * 40000))


# -- where to ask ------------------------------------------------------------------------------------------------


def test_login_conf_is_parsed_and_its_errors_are_reported() -> None:
    text = "# ours\nServers = http://ctl1, https://ctl2:7000,http://[::1]  # two\nSlurmUser=root\nMungeSocket=/m\n"
    found = read_conf(text.splitlines(), "login.conf")
    assert found.urls == ("http://ctl1:6831", "https://ctl2:7000", "http://[::1]:6831")
    assert (found.uids, found.munge_socket) == (frozenset({0}), "/m")
    for wrong in ("", "Servers=", "Servers=ctl", "Servers=file:///etc", "Servers=http://a/b", "Server=http://a", "x"):
        with pytest.raises(LoginError, match=r"login\.conf"):
            read_conf(wrong.splitlines(), "login.conf")


def test_without_login_conf_the_slurmctld_hosts_are_asked() -> None:
    config = """Configuration data as of 2026-01-01
AuthInfo                = cred_expire=9,socket=/run/m
SlurmUser               = slurm(64030)
SlurmctldHost[0]        = ctl1(10.0.0.1)
SlurmctldHost[1]        = ctl2
"""
    found = of_slurm(config)
    assert found.urls == ("http://10.0.0.1:6831", "http://ctl2:6831")
    assert (found.uids, found.munge_socket) == (frozenset({0, 64030}), "/run/m")
    with pytest.raises(LoginError, match=r"login\.conf"):
        of_slurm("nothing")


def test_login_node_defaults_match_the_configuration_defaults() -> None:
    from slurm_migbatch.config import DEFAULT_PATH

    base = Config()
    assert login.CONFIG == DEFAULT_PATH
    assert f"sqlite:///{login.RECORD}" == base.store.url
    assert base.query.port == DEFAULT_PORT
