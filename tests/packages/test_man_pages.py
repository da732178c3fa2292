"""The manual pages in packages, checked by two programs that print and check such pages."""

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


def test_every_command_has_a_man_page(pages: list[Path]) -> None:
    assert {"migbatch.1", "migacct.1", "migbatchd.8", "migbatch-doctor.1", "migbatch-db-backup.1"} <= {
        page.name for page in pages
    }


def test_man_pages_pass_mandoc_and_groff_checks(pages: list[Path]) -> None:
    for line in (["mandoc", "-T", "lint", "-W", "warning"], ["groff", "-man", "-ww", "-z", "-T", "utf8"]):
        done = subprocess.run([*line, *map(str, pages)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_man_page_has_the_standard_sections(pages: list[Path]) -> None:
    (doctor,) = (page for page in pages if page.name == "migbatch-doctor.1")
    shown = subprocess.run(["mandoc", "-T", "utf8", str(doctor)], capture_output=True, text=True, check=True).stdout
    plain = subprocess.run(["col", "-b"], input=shown, capture_output=True, text=True, check=True).stdout
    assert [line for line in plain.splitlines() if line.isupper() and not line.startswith(" ")] == [
        "NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS",
    ]  # fmt: skip
    assert "migbatch-doctor - Check this host" in plain
