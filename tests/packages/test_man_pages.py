"""The manual that packages bring, as two programs that print and check such pages see it."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.package_programs import program


@pytest.fixture(scope="module")
def contents() -> ModuleType:
    return program("contents")


@pytest.fixture(scope="module")
def pages(contents: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("man")
    found = []
    for path, data in contents.contents("controller", "/opt/slurm-migbatch", "usr/share/zsh", "2026-01-31"):
        if "/man/" in path:
            found.append(directory / Path(path).stem)
            found[-1].write_bytes(gzip.decompress(data))
    return found


def test_there_is_a_page_of_each_command(pages: list[Path]) -> None:
    assert {"migbatch.1", "migacct.1", "migbatchd.8", "migbatch-doctor.1", "migbatch-db-backup.1"} <= {
        page.name for page in pages
    }


def test_nothing_is_wrong_with_any(pages: list[Path]) -> None:
    for line in (["mandoc", "-T", "lint", "-W", "warning"], ["groff", "-man", "-ww", "-z", "-T", "utf8"]):
        done = subprocess.run([*line, *map(str, pages)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_page_has_the_parts_of_one(pages: list[Path]) -> None:
    (doctor,) = (page for page in pages if page.name == "migbatch-doctor.1")
    shown = subprocess.run(["mandoc", "-T", "utf8", str(doctor)], capture_output=True, text=True, check=True).stdout
    plain = subprocess.run(["col", "-b"], input=shown, capture_output=True, text=True, check=True).stdout
    assert [line for line in plain.splitlines() if line.isupper() and not line.startswith(" ")] == [
        "NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS",
    ]  # fmt: skip
    assert "migbatch-doctor - Check this host" in plain
