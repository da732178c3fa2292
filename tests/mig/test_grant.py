import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_migbatch.mig.grant import MARKER_OPEN, Grant, GrantError, parse_comment, strip
from slurm_migbatch.mig.profile import SUFFIXES, Profile

profiles = st.builds(Profile, st.integers(1, 99), st.integers(0, 9999), st.sampled_from(SUFFIXES))
parts = st.lists(st.tuples(profiles, st.integers(1, 64)), min_size=1, max_size=8, unique_by=lambda part: part[0])
decisions = st.from_regex(r"\A[0-9a-z]{0,16}\Z")
grants = st.builds(Grant, parts, decisions) | st.builds(Grant, st.just(()), decisions, st.just(True))
comments = st.text(max_size=200).filter(lambda text: MARKER_OPEN not in text)

WELL_FORMED = [
    "[mig:",
    "]",
    "#",
    ",",
    ":",
    " ",
    "1g.10gb",
    "2g.20gb.me",
    "1g.24gb.me.all",
    "-me",
    ".gfx",
    "1",
    "64",
    "7fq3k",
    "guest",
    "guest:1",
]
ODD = ["\n", "+me", "none", "auto", "0", "65", "001", "[MIG:", "\x00", "\u0661", "\udcff", "[", "$(id)", ";", "'"]
fragments = st.sampled_from([*WELL_FORMED, *ODD])
texts_like_markers = st.lists(fragments, max_size=14).map("".join) | st.text(max_size=80)


def test_marker_is_parsed_as_documented():
    grant = parse_comment("train llama [mig:2g.20gb:1,1g.10gb.me:2#7fq3k]")
    assert grant == Grant([(Profile(2, 20), 1), (Profile(1, 10, "+me"), 2)], "7fq3k")
    assert grant.marker == "[mig:2g.20gb:1,1g.10gb.me:2#7fq3k]"
    assert grant.gres == "mig:2g.20gb:1,mig:1g.10gb.me:2"
    assert grant.total == 3
    assert [p.name for p in grant.profiles] == ["2g.20gb", "1g.10gb+me", "1g.10gb+me"]


@given(grants, comments)
def test_attached_marker_is_read_back_and_stripped(grant, comment):
    marked = grant.attach(comment)
    assert parse_comment(marked) == grant
    assert parse_comment(marked.encode("utf-8", "surrogatepass")) == grant
    assert strip(marked) == comment


@given(grants, st.binary(max_size=100).filter(lambda raw: b"[mig:" not in raw))
def test_comments_need_not_be_utf8(grant, raw):
    assert parse_comment(raw + b" " + grant.marker.encode()) == grant


@given(texts_like_markers)
@example("[mig:1g.10gb:1]\n")
@example("x[mig:1g.10gb:1]")
@example("[mig:1g.10gb:1] [mig:1g.10gb:1]")
@example("[mig:1g.10gb:1,1g.10gb:2]")
@example("[mig:" + ",".join(f"{i}g.10gb:1" for i in range(1, 10)) + "]")
@example("[mig:guest:1]")
@example("[mig:guest:2]")
@example("[mig:guest:1,1g.10gb:1]")
@example("[mig:1g.10gb:1,guest:1]")
@example("[mig:1g.10gb:1#]")
@example("[mig:1g.10gb:1#ABC]")
@example("[mig:1g.10gb:1#" + "a" * 17 + "]")
def test_only_one_well_formed_marker_at_the_end_is_accepted(text):
    for comment in (text, text.encode("utf-8", "surrogatepass")):
        try:
            grant = parse_comment(comment)
        except GrantError:
            assert MARKER_OPEN in text
        else:
            assert (grant is None) == (MARKER_OPEN not in text)
            if grant is not None:
                assert text == grant.marker or text.endswith(" " + grant.marker)
                assert text.count(MARKER_OPEN) == 1
                assert 1 <= len(grant.parts) <= 8 or (grant.guest and not grant.parts)
                assert all(1 <= count <= 64 for _, count in grant.parts)


@given(
    st.binary(max_size=120),
    st.sampled_from([b"", b"[mig:", b" [mig:1g.10gb:1", b"[mig:1g.10gb:1]"]),
    st.binary(max_size=40),
)
def test_arbitrary_bytes_raise_nothing_but_grant_error(before, middle, after):
    try:
        parse_comment(before + middle + after)
    except GrantError:
        assert b"[mig:" in before + middle + after


@given(st.lists(st.tuples(profiles, st.integers(-1, 70)), max_size=10), st.text(max_size=20))
def test_every_valid_grant_is_read_back_from_its_marker(listed, decision):
    try:
        grant = Grant(listed, decision)
    except GrantError:
        return
    assert re.fullmatch(r"\[mig:[0-9a-z.,:#-]+\]", grant.marker)
    assert parse_comment(grant.marker) == grant


def test_long_comment_is_parsed_and_a_second_marker_in_it_is_refused():
    filler = "[mi" * 200_000
    assert parse_comment(filler + " [mig:1g.10gb:1]").total == 1
    with pytest.raises(GrantError):
        parse_comment("[mig:7g.80gb:8] " + filler + " [mig:1g.10gb:1]")


def test_guest_grant_has_no_slice_of_its_own():
    grant = parse_comment("finetune [mig:guest:1#7fq3k]")
    assert grant == Grant((), "7fq3k", guest=True) != Grant((), guest=True)
    assert (grant.marker, grant.gres, grant.total) == ("[mig:guest:1#7fq3k]", "mig:guest:1", 1)
    assert grant.profiles == () and grant.guest and not Grant([(Profile(1, 10), 1)]).guest
    with pytest.raises(GrantError):
        Grant([(Profile(1, 10), 1)], guest=True)
    for text in ("[mig:guest:2]", "[mig:guest:1,1g.10gb:1]", "[mig:Guest:1]", "[mig:guest]"):
        with pytest.raises(GrantError):
            parse_comment(text)


def test_comment_that_already_holds_a_marker_is_refused():
    with pytest.raises(GrantError, match="submit filter"):
        Grant([(Profile(1, 10), 1)]).attach("[mig:7g.80gb:8]")


def test_grant_is_an_immutable_value():
    grant = Grant([(Profile(1, 10), 1)])
    assert grant == Grant([(Profile(1, 10), 1)]) and hash(grant) == hash(Grant([(Profile(1, 10), 1)]))
    with pytest.raises(AttributeError):
        grant.decision = "x"
