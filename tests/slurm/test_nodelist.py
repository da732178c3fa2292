"""Host lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.slurm.nodelist import MAX_HOSTS, NodeListError, expand, fold


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("n1", ("n1",)),
        ("n[1-4,7],m3", ("n1", "n2", "n3", "n4", "n7", "m3")),
        ("n[01-03]", ("n01", "n02", "n03")),
        ("n[8-11]", ("n8", "n9", "n10", "n11")),
        ("n[098-101]", ("n098", "n099", "n100", "n101")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n[1-2]-ib", ("n1-ib", "n2-ib")),
        ("a, b ,a", ("a", "b")),
        ("gpu-a.site.org", ("gpu-a.site.org",)),
    ],
)
def test_expand(text: str, names: tuple[str, ...]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["n[", "n]", "n[]", "n[1-]", "n[3-1]", "n[a-b]", "n[1,]", "n[[1]]", "a,,b", "a,", "n[1]]", "a b"]
)
def test_malformed_host_list_is_refused(text: str) -> None:
    with pytest.raises(NodeListError):
        expand(text)


@pytest.mark.parametrize(
    "text", [f"n[0-{MAX_HOSTS}]", "n[1-999999999999999999]", "a[1-300]b[1-300]c[1-300]", "a[1-65000],b[1-65000]"]
)
def test_lists_of_too_many_hosts_are_refused_quickly(text: str) -> None:
    with pytest.raises(NodeListError, match="more than"):
        expand(text)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["n2", "n1", "n2"], "n[1-2]"),
        (["n1", "n2", "n3", "n7", "m3"], "m3,n[1-3,7]"),
        (["n09", "n10", "n11"], "n[09-11]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n1", "n01"], "n01,n1"),
        (["login", "n1"], "login,n1"),
    ],
)
def test_fold(names: list[str], text: str) -> None:
    assert fold(names) == text


names = st.builds(
    lambda prefix, number, width: f"{prefix}{number:0{width}d}",
    st.sampled_from(["n", "gpu-", "r1n", ""]),
    st.integers(min_value=0, max_value=1200),
    st.integers(min_value=1, max_value=4),
) | st.sampled_from(["login", "a-b.c", "x1y"])


@given(st.sets(names, max_size=40))
def test_folding_neither_loses_nor_adds_hosts(some: set[str]) -> None:
    assert set(expand(fold(some))) == some
    assert fold(expand(fold(some))) == fold(some)


@given(st.text(alphabet="n01[]-, ", max_size=20))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        expand(text)
    except NodeListError as error:
        assert str(error)
