"""Fixtures of several test modules of decisions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.loan_world import LoanWorld, MakeWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MakeWorld]:
    made: list[LoanWorld] = []

    def make(**options: Any) -> LoanWorld:
        made.append(LoanWorld(f"sqlite:///{tmp_path}/{len(made)}.db", **options))
        return made[-1]

    yield make
    for world in made:
        world.close()
