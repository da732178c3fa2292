"""The functions that docs/papers.md names exist in the code."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
NAMES = sorted(
    set(re.findall(r"`((?:decide|lab|predict|submit|workload)(?:\.\w+)+)`", PAGE.read_text(encoding="utf-8")))
)


def test_the_page_names_functions():
    assert len(NAMES) > 15


@pytest.mark.parametrize("name", NAMES)
def test_named_function_exists(name):
    *parts, last = name.split(".")
    holder = importlib.import_module(".".join(("slurm_migbatch", *parts[:2])))
    for part in (*parts[2:], last):
        if hasattr(holder, part):
            holder = getattr(holder, part)
        else:
            holder = importlib.import_module(f"{holder.__name__}.{part}")
