"""The GRES parser, on what Slurm's releases print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.slurm.gres import Gres, GresError, counts, parse, parse_entry, profile_in, readable_counts, split


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gres:mig:1g.10gb:2", [("mig", "1g.10gb", 2)]),
        ("gres/mig:2g.20gb", [("mig", "2g.20gb", 1)]),
        ("gres/mig:2g.20gb=3,gres/mig=3", [("mig", "2g.20gb", 3), ("mig", None, 3)]),
        ("mig", [("mig", None, 1)]),
        ("mig:2", [("mig", None, 2)]),
        ("mig:1g", [("mig", None, 2**30)]),  # what Slurm reads, not what the user meant
        ("mig:auto", [("mig", "auto", 1)]),
        ("shard:2k", [("shard", None, 2048)]),
        ("mig:1g.10gb.me:1", [("mig", "1g.10gb.me", 1)]),
        ("mig:1g.24gb-me:4", [("mig", "1g.24gb-me", 4)]),
        ("mig:1g.10gb:14(S:0-1),gpu:h100:8(S:0,2)", [("mig", "1g.10gb", 14), ("gpu", "h100", 8)]),
        ("gpu:h100:2(IDX:0,3-4),mig:1g.10gb:0(IDX:N/A)", [("gpu", "h100", 2), ("mig", "1g.10gb", 0)]),
        ("shard:8(-/5,5/5,3/5,0/5)", [("shard", None, 8)]),
        ("mig:1g.10gb(CNT:2)", [("mig", "1g.10gb", 2)]),
        ("bandwidth:lustre:no_consume:4G,mig:1g.10gb:3", [("bandwidth", "lustre", 4 * 2**30), ("mig", "1g.10gb", 3)]),
        ("seats:no_consume:3", [("seats", None, 3)]),
        ("cpu=4,mem=10G,node=1,gres/mig:1g.10gb=2", [("cpu", None, 4), ("mem", None, 10 * 2**30)]),
        ("(null)", []),
        ("N/A", []),
        ("gres:none", []),
        ("", []),
        (None, []),
    ],
)
def test_gres_as_slurm_prints_it_is_parsed(text: str | None, expected: list[tuple[str, str | None, int]]) -> None:
    assert [(gres.name, gres.type, gres.count) for gres in parse(text)][: len(expected)] == expected
    assert bool(parse(text)) == bool(expected)


@pytest.mark.parametrize("text", ["mig:", ":1", "mig:a:b:1", "mig:1g.10gb:-1", "mig=x", "mig:a b", "mig,,gpu", "a\nb"])
def test_malformed_gres_is_rejected(text: str) -> None:
    with pytest.raises(GresError, match="not a GRES entry"):
        parse(text)


def test_details_and_prefix_are_kept() -> None:
    assert parse_entry("gres/gpu:h100:2(IDX:0,3)") == Gres("gpu", "h100", 2)


def test_counts_adds_up_typed_entries() -> None:
    assert counts("mig:1g.10gb:3,gpu:4,mig:2g.20gb:1(S:0),mig:1g.10gb:2,mig=6", "mig") == {"1g.10gb": 5, "2g.20gb": 1}
    assert counts("(null)", "mig") == {}


def test_readable_counts_skips_unreadable_entries() -> None:
    assert readable_counts("gres/mig:1g.10gb:2,gres/gpu:a\x1fb:0,mig:2g.20gb,mig:1g.10gb:x:1", "mig") == {
        "1g.10gb": 2,
        "2g.20gb": 1,
    }
    assert readable_counts("", "mig") == readable_counts("N/A", "mig") == {}


@given(st.lists(st.text(st.characters(blacklist_characters=",()[]"), max_size=20)))
def test_other_entries_neither_hide_an_entry_nor_add_a_type(others: list[str]) -> None:
    found = readable_counts(",".join([*others, "gres/mig:1g.10gb:2", *others]), "mig")
    assert found["1g.10gb"] >= 2
    assert found.keys() == {"1g.10gb"} or any("mig" in other for other in others)


names = st.text(alphabet="abgimpu0123._-", min_size=1, max_size=8).filter(lambda text: not text[0].isdigit())


@given(st.lists(st.tuples(names, st.one_of(st.none(), names), st.integers(0, 10**6)), min_size=1, max_size=5))
def test_formatted_gres_list_parses_back(entries: list[tuple[str, str | None, int]]) -> None:
    text = ",".join(str(Gres(name, kind, count)) for name, kind, count in entries)
    if text.lower() in ("none", "n/a"):
        return
    assert [(gres.name, gres.type, gres.count) for gres in parse(text)] == entries


@given(st.text(alphabet="a,()[:", max_size=20))
def test_splitting_loses_nothing(text: str) -> None:
    assert ",".join(split(text)) == text


@pytest.mark.parametrize(
    ("kind", "profile"),
    [
        ("a100_3g.39gb", "3g.39gb"),
        ("nvidia_a100_80gb_pcie_mig_1g10gb+me", "1g.10gb.me"),
        ("H100_7G_80GB", "7g.80gb"),
        ("1g.24gb-me", "1g.24gb-me"),
        ("1g.24gb.me.all", "1g.24gb.me.all"),
        ("a100-sxm4-80gb", None),
        ("h100_123g.10gb", None),
        ("3g.40gbx", None),
        ("h100", None),
    ],
)
def test_profile_in_the_name_of_a_gpu_type(kind: str, profile: str | None) -> None:
    assert profile_in(kind) == profile
