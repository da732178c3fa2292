"""Settings of the page of `migbatch top`, and the effect of each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

GPUS: Final = "GPUs"
QUEUE: Final = "Queue"
LOANS: Final = "Loans"
EVENTS: Final = "Events"
PANES: Final = (GPUS, QUEUE, LOANS, EVENTS)

#: key -> order of the GPUs
SORTS: Final[Mapping[str, str]] = {"N": "node", "P": "compute", "M": "memory", "T": "time"}
SHORTEST_S: Final = 1.0
LONGEST_S: Final = 3600.0
_LONGEST_LINE: Final = 64

_PROMPTS: Final = {
    "u": ("user", "User (empty: all)"),
    "p": ("only", "Profile or partition (empty: all)"),
    "d": ("interval", "Seconds between refreshes"),
    "s": ("interval", "Seconds between refreshes"),
}
_STEPS: Final = {"up": -1, "down": 1, "k": -1, "j": 1}


class Extent(NamedTuple):
    """Rows of a pane: how many there are, how many are shown."""

    rows: int
    shown: int


@dataclass(frozen=True)
class Prompt:
    """A line being typed, and the setting that it is for."""

    setting: str
    title: str
    typed: str = ""


@dataclass(frozen=True)
class PageState:
    """The settings of one page; `interval` in seconds.

    Attributes:
        panes: the visible ones, `pane` the one that the arrows scroll.
        offsets: first visible row, by pane.
        sort: one of the values of SORTS; `reverse`: reverse the order.
        user, only: as in a query, whose jobs, which profile or partition.
        prompt: the line being typed.
        refreshes: incremented by each key that requests an immediate refresh.
    """

    panes: tuple[str, ...] = PANES
    pane: str = GPUS
    offsets: Mapping[str, int] = field(default_factory=dict)
    sort: str = "node"
    reverse: bool = False
    user: str = ""
    only: str = ""
    interval: float = 3.0
    colour: bool = True
    help: bool = False
    prompt: Prompt | None = None
    message: str = ""
    refreshes: int = 0
    over: bool = False


def press(state: PageState, key: str, extents: Mapping[str, Extent]) -> PageState:
    """Return the settings after a key.

    Args:
        state: the settings before.
        key: one character, or the name of a key: up, down, left, right, pgup, pgdn, home, end, tab, backtab, enter,
            esc, backspace, f1 ... f10.
        extents: of the panes as last drawn.
    """
    if state.prompt is not None:
        return _type(state, state.prompt, key)
    state = replace(state, message="")
    if key in ("q", "f10"):
        return replace(state, over=True)
    if state.help:
        return replace(state, help=False)
    if key in ("h", "?", "f1"):
        return replace(state, help=True)
    if key in (" ", "enter"):
        return replace(state, refreshes=state.refreshes + 1)
    if key in _PROMPTS:
        return replace(state, prompt=Prompt(*_PROMPTS[key]))
    if key in SORTS:
        return replace(state, sort=SORTS[key], reverse=False, offsets={**state.offsets, GPUS: 0})
    return _arrange(state, key, extents)


def _arrange(state: PageState, key: str, extents: Mapping[str, Extent]) -> PageState:
    if key == "R":
        return replace(state, reverse=not state.reverse)
    if key == "z":
        return replace(state, colour=not state.colour)
    if key in ("tab", "backtab"):
        position = state.panes.index(state.pane) if state.pane in state.panes else 0
        return replace(state, pane=state.panes[(position + (1 if key == "tab" else -1)) % len(state.panes)])
    if key == "esc":
        changed = bool(state.user or state.only)
        return replace(state, user="", only="", refreshes=state.refreshes + changed)
    return _scroll(state, key, extents.get(state.pane, Extent(0, 0)))


def _scroll(state: PageState, key: str, extent: Extent) -> PageState:
    last = max(0, extent.rows - extent.shown)
    offset = min(state.offsets.get(state.pane, 0), last)
    page = max(1, extent.shown - 1)
    targets = {"home": 0, "end": last, "pgup": offset - page, "pgdn": offset + page, "g": 0, "G": last}
    target = offset + _STEPS[key] if key in _STEPS else targets.get(key)
    if target is None:
        return state
    return replace(state, offsets={**state.offsets, state.pane: min(max(0, target), last)})


def _type(state: PageState, prompt: Prompt, key: str) -> PageState:
    if key == "esc":
        return replace(state, prompt=None)
    if key == "enter":
        return _set(replace(state, prompt=None), prompt)
    if key == "backspace":
        return replace(state, prompt=replace(prompt, typed=prompt.typed[:-1]))
    if len(key) == 1 and key.isprintable() and len(prompt.typed) < _LONGEST_LINE:
        return replace(state, prompt=replace(prompt, typed=prompt.typed + key))
    return state


def _set(state: PageState, prompt: Prompt) -> PageState:
    typed = prompt.typed.strip()
    if prompt.setting == "user":
        return replace(state, user=typed, refreshes=state.refreshes + 1, offsets={})
    if prompt.setting == "only":
        return replace(state, only=typed, refreshes=state.refreshes + 1, offsets={})
    try:
        seconds = float(typed)
    except ValueError:
        return replace(state, message=f"{typed!r} is not a number of seconds")
    if not SHORTEST_S <= seconds <= LONGEST_S:
        return replace(state, message=f"write {SHORTEST_S:g} to {LONGEST_S:g} seconds")
    return replace(state, interval=seconds)
