"""The nodes that a job's user excludes, as its comment lists them."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.workload.excluded import LONGEST, MOST, OPEN, attached, excluded, excluded_among, split, user_text

GRANT, LOAN = "[mig:2g.20gb:1#7fq3k]", "[mig:loan:1#loan7fq3k]"
names = st.lists(st.sampled_from(["n1", "n[1-3,7]", "gpu-01", "a.b", "m[01-09]", "n1"]), min_size=1, max_size=60)


@given(st.text(), names, st.integers(0, 1000))
def test_node_list_is_written_as_far_as_it_fits_and_read_back(text: str, listed: list[str], max_bytes: int) -> None:
    written = attached(text, ",".join(listed), max_bytes)
    assert len(written) <= len(text) + max(0, min(max_bytes, LONGEST + len(OPEN) + 2))
    if written == text:
        assert max_bytes < len(OPEN) + 2 + len(listed[0])
        return
    before, nodes = split(written)
    assert before == text and ",".join(listed).startswith(nodes)
    full = [f"{written} {marker}" for marker in (GRANT, LOAN)]
    assert excluded(full[0]) == excluded(full[1]) == excluded(written) and "n1" in excluded(f"{OPEN}{nodes},n1]")
    assert user_text(full[0]) == text


@pytest.mark.parametrize(
    ("comment", "nodes"),
    [
        (f"migbatch: mem=3gb [mig-exclude:n[1-2],m7] {GRANT}", {"n1", "n2", "m7"}),
        (f"[mig-exclude:n1] {LOAN}", {"n1"}),
        (f"a[mig-exclude:n1] {GRANT}", set()),
        (f"[mig-exclude:n1] more {GRANT}", set()),
        (f"[mig-exclude:n[1] {GRANT}", set()),
        (f"[mig-exclude:n[3-1]] {GRANT}", set()),
        (f"[mig-exclude:n[0-{MOST + 1}]] {GRANT}", set()),
        (f"[mig-exclude:n[0-999999999999999999]x[0-999999999999999999]] {GRANT}", set()),
        (f"[mig-exclude:n[1-40]x[1-40]] {GRANT}", set()),
        (GRANT, set()),
        ("", set()),
    ],
)
def test_excluded_nodes_are_read_from_the_comment(comment: str, nodes: set[str]) -> None:
    assert excluded(comment) == nodes


def test_no_more_names_are_made_than_are_accepted() -> None:
    """Each job's comment is read in every round."""
    tracemalloc.start()
    try:
        for number in range(4):
            assert excluded(f"[mig-exclude:x{number}n[0-255][0-255]] {GRANT}") == set()
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_invalid_node_names_are_left_out() -> None:
    assert attached("", "n1,k b,n2,[,m", 100) == "[mig-exclude:n1,n2]"
    assert attached("x", "k b", 100) == "x"


def test_of_names_that_are_no_nodes_nothing_is_kept() -> None:
    """Users can write other ones into the comment of each of their jobs."""
    nodes = frozenset({"n1", "n2"})
    assert excluded_among(f"[mig-exclude:n[2-9]] {GRANT}", nodes) == {"n2"}
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(64):
            assert excluded_among(f"[mig-exclude:x{number}n[1-1000]] {GRANT}", nodes) == frozenset()
        assert tracemalloc.get_traced_memory()[0] - before < 200_000
    finally:
        tracemalloc.stop()
