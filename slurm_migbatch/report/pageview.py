"""Draw a page of `migbatch top` as lines of text: pure, at any width, for any content."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from slurm_migbatch.mig.text import printable
from slurm_migbatch.report.cells import Cells, columns, job_text, longest_name
from slurm_migbatch.report.gpugrid import CLOSED, FREE, PATTERN, STYLE, GridWidths, ordered_gpus
from slurm_migbatch.report.page import FAULTY, LOAN, OFFERED, USED, EventRow, LoanRow, Page, QueueRow
from slurm_migbatch.report.pagestate import EVENTS, GPUS, LOANS, QUEUE, Extent, PageState

_T = TypeVar("_T")

_LEGEND: Final = (
    (USED, "job"), (LOAN, "on loan"), (OFFERED, "offered"), (FREE, "free"), (FAULTY, "faulty"), (CLOSED, "closed"),
)  # fmt: skip
_HEAD: Final = "reverse"
_FOCUS: Final = "bold reverse"
#: rows of panes that are not in focus
_ASIDE: Final = {GPUS: 8, QUEUE: 5, LOANS: 4, EVENTS: 4}
#: characters of the longest job id: those of federations are long, and the number of a task follows
_LONGEST_JOB: Final = 18
_LATEST: Final = 253402300799.0
#: half a year: of times farther away, month and day alone may mean another year
_FAR_S: Final = 182 * 86400

HELP: Final = (
    "q, F10           leave",
    "h, ?, F1         this help",
    "space            refresh now",
    "d, s             seconds between refreshes",
    "Tab              the next part of the page: GPUs, queue, loans, events",
    "arrows, PgUp, PgDn, Home, End",
    "                 scroll that part",
    "N P M T          order of GPUs: node, compute slices in use, memory slices in",
    "                 use, time in use",
    "R                reverse the order",
    "u                only jobs of one user",
    "p                only one profile or partition",
    "Esc              clear the filters",
    "z                colours on or off",
    "",
    "Slots: = a job   ~ on loan to a training job   : offered to Slurm   . free",
    "       ! cannot be destroyed   x free, but its node is closed",
)


@dataclass(frozen=True)
class Frame:
    """The drawn lines, and the extent of each pane."""

    lines: tuple[Text, ...]
    extents: dict[str, Extent] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pane:
    """A part of a page; its rows are rendered only when visible, because a site may have thousands."""

    name: str
    title: Text
    count: int
    draw: Callable[[int], Text]


def frame(
    page: Page | None, width: int, height: int | None, state: PageState, trouble: str = "", remarks: Iterable[str] = ()
) -> Frame:
    """Return the lines of a terminal.

    Args:
        page: the last answer; None before the first.
        height: None draws all rows, and no footer.
        trouble: why the page is not newer.
        remarks: about missing parts.
    """
    width = max(1, width)
    if state.help:
        lines = [_line(text, width) for text in ("Keys of migbatch top", "", *HELP, "", "press any key to return")]
        return Frame(tuple(lines[:height]))
    head = _header(page, width, state, [*([trouble] if trouble else ()), *remarks])
    if page is None:
        return Frame(tuple(head[:height]))
    panes = [pane for pane in _panes(page, width, state, height is None) if pane.name in state.panes]
    foot = [] if height is None else [_footer(width, state)]
    body_rows = None if height is None else max(0, height - len(head) - len(foot))
    body, extents = _body(panes, state, body_rows, width)
    lines = [*head, *body]
    if height is not None:
        lines = lines[: max(0, height - len(foot))]
        lines += [Text("")] * (height - len(foot) - len(lines)) + foot
    return Frame(tuple(lines[:height]), extents)


# -- lines -------------------------------------------------------------------------------------------------------


def _line(text: str, width: int, style: str = "") -> Text:
    text = printable(text)
    return Text(set_cell_size(text, width).rstrip() if cell_len(text) > width else text, style)


def _filled(text: str, width: int, style: str) -> Text:
    return Text(set_cell_size(printable(text), width), style)


def _clock(moment: float, now: float) -> str:
    """Return a time of day, with the date if it is another day; the date with its year if that is far away."""
    if not 0 < moment < _LATEST:
        return "-"
    local, local_now = time.localtime(moment), time.localtime(now if 0 < now < _LATEST else moment)
    if abs(moment - now) > _FAR_S and 0 < now < _LATEST:
        return time.strftime("%Y-%m-%d", local)
    return time.strftime("%H:%M" if local[:3] == local_now[:3] else "%m-%d %H:%M", local)


def _moment(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if 0 < moment < _LATEST else "-"


def _span(seconds: float) -> str:
    """Return a duration as 42s, 12m, 3h05, 2d04."""
    if not 0 <= seconds < _LATEST:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60:02d}"
    return f"{whole // 86400}d{whole // 3600 % 24:02d}"


# -- header and footer -------------------------------------------------------------------------------------------


def _header(page: Page | None, width: int, state: PageState, remarks: Sequence[str]) -> list[Text]:
    filters = " ".join(f"{name}={value}" for name, value in (("user", state.user), ("only", state.only)) if value)
    name = f"migbatch - {page.cluster or 'cluster'} - {_moment(page.at)}" if page is not None else "migbatch - waiting"
    lines = [_line(f"{name}  every {state.interval:g}s  {filters}".rstrip(), width, "bold")]
    if page is not None:
        totals = page.totals
        loans = sum(loan.state != "waiting" for loan in page.loans)
        lines.append(
            _line(
                f"Nodes {totals.nodes}, {totals.closed} closed   GPUs {totals.gpus}   "
                f"Slices {totals.used}/{totals.slices} in use   Waiting {page.waiting}   Loans {loans}",
                width,
            )
        )
        profiles = [f"{row.profile} {row.used}+{row.offered}" for row in page.profiles]
        lines.append(_line(_listed("In use + offered:", profiles or ["nothing"], width), width))
        if page.left_out:
            lines.append(_line(f"{page.left_out} more GPUs; choose some with u, p or --nodes", width, "bold"))
    return lines + [_line(f"! {remark}", width, "bold #d55e00") for remark in remarks[:4]]


def _listed(title: str, words: Sequence[str], width: int) -> str:
    """Return as many words after a title as fit; dots for the others."""
    line = title
    for index, word in enumerate(words):
        longer = f"{line}{'  ' if index else ' '}{word}"
        if cell_len(longer) + (4 if index + 1 < len(words) else 0) > width:
            return f"{line} ..."
        line = longer
    return line


def _footer(width: int, state: PageState) -> Text:
    if state.prompt is not None:
        typed = printable(f"{state.prompt.title}: {state.prompt.typed}_")
        while cell_len(typed) > width:
            typed = typed[1:]
        return Text(typed, "bold")
    if state.message:
        return _line(state.message, width, "bold")
    line = Text()
    for kind, word in _LEGEND:
        line.append(PATTERN.get(kind, kind) * 2, STYLE[kind])
        line.append(f" {word}  ")
    keys = "h help  q quit"
    gap = width - cell_len(line.plain) - len(keys)
    if gap >= 0:
        line.append(" " * gap + keys)
    line.truncate(width, overflow="crop")
    return line


# -- panes -------------------------------------------------------------------------------------------------------


def _body(
    panes: Sequence[_Pane], state: PageState, body_rows: int | None, width: int
) -> tuple[list[Text], dict[str, Extent]]:
    shares = _shares(panes, state, body_rows)
    lines: list[Text] = []
    extents: dict[str, Extent] = {}
    for pane in panes:
        if pane.name not in shares:
            continue
        shown = min(shares[pane.name], pane.count)
        first = 0 if body_rows is None else min(max(0, state.offsets.get(pane.name, 0)), pane.count - shown)
        extents[pane.name] = Extent(pane.count, shown)
        title = pane.title
        if shown < pane.count:
            position = f" {first + 1}-{first + shown}/{pane.count}"
            title = _filled(title.plain, max(0, width - len(position)), str(title.style))
            title.append(position[-width:])
        lines += [title, *map(pane.draw, range(first, first + shown))]
    return lines, extents


def _shares(panes: Sequence[_Pane], state: PageState, body_rows: int | None) -> dict[str, int]:
    """Return the rows of each drawn pane; every pane has its title, the focused one gets the remaining rows."""
    if body_rows is None:
        return {pane.name: pane.count for pane in panes if pane.count or pane.name == GPUS}
    focus = next((pane for pane in panes if pane.name == state.pane), panes[0] if panes else None)
    if focus is None:
        return {}
    shares = {focus.name: 0}
    rows_left = body_rows - 1 - min(focus.count, max(3, body_rows // 3))
    for pane in panes:
        rows = min(pane.count, _ASIDE.get(pane.name, 4), rows_left - 1)
        if pane is not focus and pane.count and rows > 0:
            shares[pane.name] = rows
            rows_left -= rows + 1
    spare = body_rows - len(shares) - sum(shares.values())
    shares[focus.name] = max(0, min(spare, focus.count))
    spare -= shares[focus.name]
    for pane in panes:
        if pane.name in shares and spare > 0:
            extra = min(spare, pane.count - shares[pane.name])
            shares[pane.name] += extra
            spare -= extra
    return shares


def _panes(page: Page, width: int, state: PageState, whole: bool) -> list[_Pane]:
    def pane(name: str, title: str, count: int, draw: Callable[[int], Text]) -> _Pane:
        return _Pane(name, _filled(title, width, _FOCUS if name == state.pane and not whole else _HEAD), count, draw)

    def table(name: str, header: Cells, rows: Sequence[_T], texts: Callable[[_T, float], Sequence[str]]) -> _Pane:
        sizes = [size for _, size in header]

        def draw(at: int) -> Text:
            return Text(columns(list(zip(texts(rows[at], page.at), sizes, strict=True)), width))

        return pane(name, columns(header, width), len(rows), draw)

    gpus = ordered_gpus(page.gpus, page.at, state)
    names = {row.job: row.name for row in page.names}
    grid = GridWidths.of(gpus, width, names)

    def gpu(at: int) -> Text:
        same_node = at > 0 and state.sort == "node" and gpus[at - 1].node == gpus[at].node
        return grid.line(gpus[at], same_node)

    ids = (*(row.job for row in page.loans), *(_job_of_event(row, names) for row in page.events))
    jobs = min(_LONGEST_JOB, max(map(len, ids), default=0))
    loans = _fitted(_LOAN_HEAD, {"LOAN": jobs, "WHERE": longest_name(map(_place, page.loans), width)})
    events = _fitted(_EVENT_HEAD, {"JOB": jobs, "NODE": longest_name((row.node for row in page.events), width)})
    return [
        pane(GPUS, grid.title, len(gpus), gpu),
        table(QUEUE, _QUEUE_HEAD, page.queue, _queue_texts),
        table(LOANS, loans, page.loans, _loan_texts),
        table(EVENTS, events, page.events[::-1], lambda row, now: _event_texts(row, now, names)),
    ]


def _fitted(header: Cells, longest: Mapping[str, int]) -> Cells:
    """Return the columns, those with `longest` at least as wide as that."""
    sizes = ((title, size, max(abs(size), longest.get(title, 0))) for title, size in header)
    return tuple((title, -wide if size < 0 else wide) for title, size, wide in sizes)


_QUEUE_HEAD: Final = (("QUEUE", 14), ("JOBS", -6), ("LONGEST", -7), ("START BY", 11), ("WHY", 0))
_LOAN_HEAD: Final = (
    ("LOAN", -8), ("USER", 8), ("PROFILE", 9), ("WHERE", 9), ("STATE", 9), ("SINCE", -6), ("STEPS", -6), ("RUN", -3),
    ("WHY", 0),
)  # fmt: skip
#: kinds of events of one run
_OF_RUNS: Final = frozenset({"start", "stop", "misfit"})
_EVENT_HEAD: Final = (("TIME", 11), ("EVENT", 8), ("NODE", 9), ("JOB", -8), ("USER", 8), ("WHAT", 0))


def _queue_texts(row: QueueRow, now: float) -> Sequence[str]:
    start = {"now": "now", "open": "no limit", "at": _clock(row.expected, now)}.get(row.start, "-")
    why = "; ".join(text for text in (row.reason, row.why) if text)
    return row.wants, str(row.jobs), _span(now - row.since), start, why


def _place(row: LoanRow) -> str:
    return f"{row.node}:{row.gpu}" if row.gpu else row.node


def _loan_texts(row: LoanRow, now: float) -> Sequence[str]:
    progress = f"{100 * row.items / row.goal:.0f}% done" if row.goal > 0 and math.isfinite(row.items / row.goal) else ""
    why = "; ".join(text for text in (progress if row.items >= 0 else "", row.why) if text)
    return (
        row.job, row.user, row.profile or "-", _place(row) or "-", row.state, _span(now - row.since),
        str(row.steps) if row.steps >= 0 else "-", str(row.restarts), why,
    )  # fmt: skip


def _event_texts(row: EventRow, now: float, names: Mapping[int, str]) -> Sequence[str]:
    return _clock(row.at, now), row.kind, row.node, _job_of_event(row, names), row.user, row.text


def _job_of_event(row: EventRow, names: Mapping[int, str]) -> str:
    """Return the job of an event: an action on a job with the number of an array is one on the array."""
    name = job_text(row.job, names)
    return name if row.kind in _OF_RUNS or not name.startswith(f"{row.job}_") else str(row.job)
