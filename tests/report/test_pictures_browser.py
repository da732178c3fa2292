"""The report page in a real Chromium: it is drawn, loads nothing, obeys keys, and fits screens of every width."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, browser
from tests.support.pictures_page import october, page_of

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("pictures")
    file = directory / "page.html"
    page_of(october(directory), file)
    return f"file://{file}"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_page_is_drawn_without_loading_anything_and_fits_the_screen(chromium, url, width, dark):
    page = chromium.page()
    page.show(url, width, dark=dark)
    drawn = page.run("[...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('.main-svg').length > 0)")
    assert drawn == [True] * 9
    assert page.complaints == []
    assert [request for request in page.requests if not request.startswith(("file:", "data:", "blob:"))] == []
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.body.dataset.broken") is None
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark


def test_text_has_enough_contrast_in_both_colour_schemes(chromium, url):
    """WCAG AA: 4.5 to 1, also for the less prominent text."""
    for dark in (False, True):
        page = chromium.page()
        page.show(url, dark=dark)
        colours = page.run("""['--page', '--card', '--text', '--soft', '--link'].map(
            name => getComputedStyle(document.documentElement).getPropertyValue(name).trim())""")
        behind, card, *texts = map(_luminance, colours)
        for text in texts:
            for background in (behind, card):
                assert (max(text, background) + 0.05) / (min(text, background) + 0.05) >= 4.5
        painted = page.run("getComputedStyle(document.querySelector('#chart-activity .xtick text')).fill")
        assert painted == page.run("getComputedStyle(document.body).color")


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_everything_can_be_reached_and_operated_by_keys(chromium, url):
    page = chromium.page()
    page.show(url)
    wanted = page.run("document.querySelectorAll('a, .legend button, .chart, summary').length")
    reached = set()
    for _ in range(wanted + 20):
        page.press("Tab")
        reached.add(
            page.run("""(() => { const all = [...document.querySelectorAll('a, .legend button, .chart, summary')];
            return all.indexOf(document.activeElement) })()""")
        )
    assert set(range(wanted)) <= reached
    hidden = "document.getElementById('chart-accounts').data[1].visible"
    page.run("document.querySelectorAll('#accounts .legend button')[1].focus()")
    page.press("Enter")
    assert page.run(hidden) is False
    assert page.run("document.activeElement.getAttribute('aria-pressed')") == "false"
    page.press(" ")
    assert page.run(hidden) is True


def test_keys_zoom_and_move_a_chart(chromium, url):
    page = chromium.page()
    page.show(url)
    page.run("document.getElementById('chart-activity').focus()")
    ends = "document.getElementById('chart-activity').layout.xaxis.range.map(end => Date.parse(end))"
    low, high = page.run(ends)
    page.press("+")
    closer = page.run(ends)
    assert low < closer[0] < closer[1] < high
    page.press("ArrowRight")
    moved = page.run(ends)
    assert moved[0] > closer[0]
    assert moved[1] - moved[0] == closer[1] - closer[0]
    page.press("0")
    assert page.run(ends) == [low, high]


def test_page_follows_a_change_of_the_colour_scheme(chromium, url):
    page = chromium.page()
    page.show(url)
    fill = "getComputedStyle(document.querySelector('#chart-layout .ytick text')).fill"
    before = page.run(fill)
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.run(
        f"new Promise(done => {{ const look = () => {fill} !== '{before}' ? done() : setTimeout(look, 20); look() }})"
    )
    assert page.run(fill) == page.run("getComputedStyle(document.body).color")


def test_layout_cell_states_what_the_memory_slice_held(chromium, url):
    page = chromium.page()
    page.show(url)
    texts = page.run("[...new Set(document.getElementById('chart-layout').data[0].text.flat())]")
    assert any(text.startswith("n1 GPU 0, memory slice 0: ") and text.endswith("% of the time") for text in texts)
