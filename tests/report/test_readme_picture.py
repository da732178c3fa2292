"""The README's picture of `migbatch report` is drawn by the command that docs/developers.md names."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.support.report_picture import HEIGHT, WIDTH, draw

pytestmark = pytest.mark.browser


def test_readme_picture_is_drawn_at_its_size(tmp_path: Path) -> None:
    draw(tmp_path / "report.png", days=3)
    picture = (tmp_path / "report.png").read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (WIDTH, HEIGHT)
    assert len(picture) <= 150_000
