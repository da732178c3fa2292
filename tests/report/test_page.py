"""A page of `migbatch top`: sent over the network, drawn at any width and height, and what each key changes."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from slurm_migbatch.report.page import (
    FAULTY,
    LOAN,
    OFFERED,
    USED,
    EventRow,
    GpuRow,
    LoanRow,
    NameRow,
    Page,
    PageError,
    ProfileRow,
    QueueRow,
    SlotRow,
    Totals,
)
from slurm_migbatch.report.pagestate import EVENTS, GPUS, PANES, QUEUE, SORTS, Extent, PageState, Prompt, press
from slurm_migbatch.report.pageview import frame
from tests.support.examples import examples
from tests.support.pages import NOW, gpu, page, slot

TEXTS = st.text(max_size=30) | st.sampled_from(["\x1b[2J", "日本語のユーザー", "a\tb\nc", "e\u0301" * 9, "x" * 300, ""])
NUMBERS = st.integers(-(10**12), 10**12)
REALS = st.floats() | st.just(NOW)
KEYS = st.sampled_from(
    [*"qhzuPpMTNRds? 1a.", "up", "down", "pgup", "pgdn", "home", "end", "tab", "backtab", "enter", "esc", "backspace"]
)
#: without the key that leaves the page
STAYS = KEYS.filter(lambda key: key != "q")


def rows(kind, *parts):
    return st.lists(st.builds(kind, *parts), max_size=5).map(tuple)


SLOTS = rows(
    SlotRow, st.sampled_from([USED, LOAN, OFFERED, FAULTY, "new"]), st.integers(-2, 12), st.integers(-2, 12), TEXTS,
    NUMBERS, NUMBERS, TEXTS, REALS,
)  # fmt: skip
ODD = st.builds(
    Page, REALS, TEXTS, st.builds(Totals, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    rows(ProfileRow, TEXTS, NUMBERS, NUMBERS), NUMBERS,
    rows(GpuRow, TEXTS, NUMBERS, st.integers(-3, 100), TEXTS, st.booleans(), TEXTS, SLOTS),
    rows(QueueRow, TEXTS, NUMBERS, REALS, TEXTS, TEXTS, TEXTS, REALS),
    rows(LoanRow, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, REALS, TEXTS, NUMBERS, NUMBERS, REALS, REALS, TEXTS),
    rows(EventRow, REALS, TEXTS, TEXTS, NUMBERS, TEXTS, TEXTS), NUMBERS, rows(NameRow, NUMBERS, TEXTS),
)  # fmt: skip
PAGES = st.none() | st.just(page()) | ODD


@settings(max_examples=examples(150))
@given(
    shown=PAGES, width=st.integers(40, 200), height=st.none() | st.integers(1, 70), keys=st.lists(STAYS, max_size=12),
    trouble=TEXTS,
)  # fmt: skip
def test_no_line_of_any_page_is_wider_than_the_terminal(shown, width, height, keys, trouble):
    state, extents = PageState(), {}
    for key in keys:
        state = press(state, key, extents)
        extents = frame(shown, width, height, state).extents
    drawn = frame(shown, width, height, state, trouble, [trouble])
    assert height is None or len(drawn.lines) <= height
    for line in drawn.lines:
        assert cell_len(line.plain) <= width
        assert line.plain.isprintable()


@settings(max_examples=examples(100))
@given(shown=ODD)
def test_page_is_unchanged_by_writing_and_reading(shown):
    assert Page.read(shown.write()).write() == shown.write()


@settings(max_examples=examples(100))
@given(
    value=st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5), data=st.data()
)
def test_text_that_is_not_a_page_is_refused(value, data):
    fields = json.loads(page().write())
    name = data.draw(st.sampled_from(sorted(fields)))
    for body in (
        "",
        "[]",
        "7",
        json.dumps(value),
        json.dumps({**fields, "version": 1}),
        json.dumps({**fields, name: None}),
    ):
        with pytest.raises(PageError):
            Page.read(body)
    for part in ("gpus", "queue", "loans", "events", "profiles", "names"):
        with pytest.raises(PageError):
            Page.read(json.dumps({**fields, part: [[value]]}))


def text(shown=None, width=80, height=24, state=None, **more):
    drawn = frame(shown or page(), width, height, state or PageState(), **more)
    return "\n".join(line.plain.rstrip() for line in drawn.lines)


def test_each_kind_of_slot_has_its_own_pattern():
    drawn = text()
    assert "gpu1  0 |=3g.40gb 4711 alice============|=4712==|:1g::::|.......|.......|" in drawn
    assert "      1 |~4g.40gb 4690 carol~~~~~~~~~~~~|:2g.20gb:::::::|!1g!!!!|.......|" in drawn
    assert "|xxxxxxx|xxxxxxx|" in drawn
    styles = {span.style for line in frame(page(), 80, 24, PageState()).lines for span in line.spans}
    assert len({style for style in styles if " on " in str(style)}) == 4


def test_page_shows_queue_loans_and_events():
    drawn = text(width=120)
    assert "Nodes 3, 1 closed   GPUs 4   Slices 17/32 in use   Waiting 14   Loans 1" in drawn
    assert "1g.10gb 1+1  2g.20gb 0+1  3g.40gb 1+0  4g.40gb 1+0" in drawn
    assert "Resources; reserved on gpu2" in drawn
    assert "75% done; idle" in drawn and "5200" in drawn
    assert "GPU 0: fell off the bus" in drawn
    assert "service is away" in text(trouble="the service is away")


def test_jobs_are_shown_by_their_names():
    shared = slot(LOAN, 0, 4, "4g.40gb", 12)._replace(guest=13)
    slots = (shared, slot(USED, 4, 1, "1g.10gb", 21), slot(USED, 5, 1, "1g.10gb", 22), slot(USED, 6, 1, "1g.10gb", 9))
    printed = {12: "11_1", 13: "11_12", 21: "9_1", 22: "9_10000", 9: "9_10001"}
    events = tuple(EventRow(NOW, "start", "n1", job, "ann", "1g.10gb") for job in (22, 23, 9))
    events += (EventRow(NOW, "throttle", "", 9, "ann", "3 tasks to start"),)
    drawn = text(
        replace(page(), gpus=(gpu("n1", 0, *slots),), events=events, names=tuple(map(NameRow._make, printed.items())))
    )
    assert "|~4g.40gb 11_1+11_12~" in drawn
    # a slice too narrow for 9_10000 has the task's number; that of 9_10001 would be taken for the whole array
    assert "|=9_1===|=22====|=======|" in drawn
    jobs = [line.split()[3] for line in drawn.splitlines() if " start " in line and " n1 " in line]
    assert jobs == ["9_10001", "23", "9_10000"]
    assert [line.split()[2] for line in drawn.splitlines() if " throttle " in line] == ["9"], "the array"


def test_shared_slice_shows_both_jobs_and_a_hidden_job_is_not_named():
    shared = slot(LOAN, 0, 4, "4g.40gb", 12)._replace(guest=13)
    drawn = text(replace(page(), gpus=(gpu("n1", 0, shared, slot(USED, 4, 2, "2g.20gb")),)))
    assert "|~4g.40gb 12+13~" in drawn
    assert "|=2g.20gb -====" in drawn
    assert "MIG is off" in text(replace(page(), gpus=(gpu("n1", 0)._replace(slices=0),)))


def test_readme_shows_the_page_as_it_is_drawn(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        drawn = text(height=18)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert f"```\n{drawn}\n```" in (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize("width", [80, 120])
def test_nodes_and_jobs_with_long_names_are_distinguished(width):
    def renamed(row):
        return row._replace(node=row.node and row.node.replace("gpu", "rack12-dgx-00"))

    gpus, loans, events = (tuple(map(renamed, rows)) for rows in (page().gpus, page().loans, page().events))
    loans = tuple(row._replace(job=str(int(row.job) + (63 << 26))) for row in loans)
    shown = replace(page(), gpus=gpus, loans=loans, events=events)
    drawn = text(shown, width)
    for row in gpus:
        assert f"\n{row.node}  " in drawn
    for row in loans:
        assert f"\n{row.job} " in drawn and (not row.gpu or f"{row.node}:{row.gpu} " in drawn)
    task = loans[0]._replace(job=f"{loans[0].job}_100")
    assert f"\n{task.job} " in text(replace(shown, loans=(task,)), width)
    for row in events:
        assert f" {row.node} " in drawn
    assert " mixed" in drawn and " alloc" in drawn


def test_start_in_another_year_has_its_year():
    now = page().at
    for days, year in ((1, False), (180, False), (400, True), (3650, True)):
        drawn = text(replace(page(), queue=(page().queue[0]._replace(expected=now + days * 86400, start="at"),)))
        assert (time.strftime("%Y-%m-%d", time.localtime(now + days * 86400)) in drawn) is year, days


def many(count):
    return replace(page(), gpus=tuple(gpu(f"n{at:04d}", at % 8) for at in range(count)))


def test_thousands_of_gpus_are_scrolled():
    shown, state = many(8000), PageState()
    first = frame(shown, 80, 24, state)
    assert first.extents[GPUS].rows == 8000
    assert any(f"1-{first.extents[GPUS].shown}/8000" in line.plain for line in first.lines)
    for key, line in (("end", "n7999"), ("up", "n7998"), ("home", "n0000"), ("pgdn", "n0009"), ("down", "n0010")):
        state = press(state, key, first.extents)
        assert line in text(shown, state=state)
    assert "n0000" not in text(shown, state=state)
    assert text(shown, height=None).count("\nn") == 8000


def test_short_terminal_keeps_every_pane_and_the_focused_one_gets_the_rest():
    state = PageState()
    for pane in PANES:
        extents = frame(many(500), 80, 16, state).extents
        assert extents[state.pane].shown >= min(3, extents[state.pane].rows), pane
        state = press(state, "tab", extents)
    assert state.pane == GPUS
    assert press(state, "backtab", {}).pane == EVENTS
    assert QUEUE not in frame(page(), 80, 24, PageState(panes=(GPUS,))).extents


@pytest.mark.parametrize(
    ("key", "order"), [("N", "gpu1"), ("M", "gpu2"), ("P", "gpu2"), ("T", "gpu1")], ids=["node", "memory", "g", "time"]
)
def test_keys_sort_the_gpus(key, order):
    state = press(PageState(), key, {})
    assert state.sort == SORTS[key]
    found = text(state=state).splitlines()[4]
    assert found.startswith(order)
    back = text(state=press(state, "R", {})).splitlines()[4]
    assert back != found


def typed(state, *keys):
    for key in keys:
        state = press(state, key, {})
    return state


def test_keys_change_the_state_of_the_page():
    assert typed(PageState(), "q").over
    assert typed(PageState(), "h").help
    assert not typed(PageState(), "h", "x").help
    assert "time in use" in text(state=typed(PageState(), "?"), height=30)
    assert typed(PageState(), " ").refreshes == 1
    assert not typed(PageState(), "z").colour
    assert typed(PageState(), "left", "1", "f5") == PageState()


def test_typed_settings_are_applied_or_refused():
    state = typed(PageState(), "u", *"alicf", "backspace", "e")
    assert state.prompt == Prompt("user", "User (empty: all)", "alice")
    assert "User (empty: all): alice_" in text(state=state)
    assert typed(state, "esc").user == ""
    state = typed(state, "enter")
    assert (state.user, state.refreshes, state.prompt) == ("alice", 1, None)
    assert "user=alice" in text(state=state)
    assert typed(state, "p", *"1g.10gb", "enter").only == "1g.10gb"
    assert typed(state, "esc").user == ""
    assert typed(PageState(), "d", *"7.5", "enter").interval == 7.5
    for wrong in ("x", "0.1", "nan", "1e9"):
        refused = typed(PageState(), "s", *wrong, "enter")
        assert refused.interval == 3.0 and refused.message
        assert refused.message in text(state=refused)


def test_scrolling_stops_at_both_ends():
    state = PageState()
    extents = {GPUS: Extent(10, 4)}
    assert press(state, "up", extents).offsets[GPUS] == 0
    for _ in range(20):
        state = press(state, "down", extents)
    assert state.offsets[GPUS] == 6
    assert press(state, "pgup", extents).offsets[GPUS] == 3
    assert not math.isnan(press(state, "down", {}).offsets[GPUS])
