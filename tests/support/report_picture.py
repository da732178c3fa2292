"""Draw the README's picture of `migbatch report`, a month of invented jobs.

python -m tests.support.report_picture docs/report.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from slurm_migbatch.store.db import open_store
from tests.support.browser import browser
from tests.support.busy_month import fill
from tests.support.pictures_page import OCTOBER, page_of

#: size of the window in pixels, and so of the picture
WIDTH, HEIGHT = 1000, 655


def draw(file: Path, days: int = 31) -> None:
    """Write the upper part of the page of such a month as PNG."""
    # Chromium's helpers may write to the directory shortly after it has ended
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name)
        url = f"sqlite:///{directory}/record.db"
        with open_store(url) as store:
            fill(store, OCTOBER, days, ("chemistry", "physics", "biology"))
        page_of(url, directory / "page.html")
        with browser(directory) as running:
            page = running.page()
            page.show(f"file://{directory}/page.html", WIDTH, HEIGHT)
            page.picture(file, whole=False)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
