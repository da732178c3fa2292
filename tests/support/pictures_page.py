"""Pages of `migbatch report`, created by its command."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.report import report
from slurm_migbatch.store.db import open_store
from tests.support.busy_month import fill

OCTOBER = datetime(2026, 10, 1).timestamp()
HOSTILE = "</script><script>document.body.dataset.broken=1</script><img src=x onerror=alert(1)>"


def october(directory: Path) -> str:
    """Make the record of a month in which one account's name is markup; return its URL."""
    url = f"sqlite:///{directory}/record.db"
    with open_store(url) as store:
        fill(store, OCTOBER, 31, ("chemistry", "physics", HOSTILE))
    return url


def page_of(url: str, file: Path, *options: str) -> str:
    """Return the page of that October."""
    window = ("-S", "2026-10-01", "-E", "2026-11-01")
    assert run(report, "migbatch report", ["--db", url, "--html", str(file), *window, *options]) == 0
    return file.read_text(encoding="utf-8")
