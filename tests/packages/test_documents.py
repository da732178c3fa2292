"""Packages contain the pages for users and administrators with everything that these link to."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.support.package_programs import program

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return program("build")


def test_packages_contain_all_user_documentation_and_no_code(build: ModuleType) -> None:
    pages = {str(page.relative_to(ROOT)) for page in build.documentation()}
    assert {f"docs/{name}.md" for name in ("admin", "install", "measurements", "operate", "users")} <= pages
    assert {"README.md", "SECURITY.md", "CHANGELOG.md", "docs/report.png"} <= pages
    assert {Path(page).suffix for page in pages} == {".md", ".png"}


def test_every_link_in_packaged_documentation_resolves(build: ModuleType) -> None:
    pages = set(build.documentation())
    for page in pages:
        linked = build._LINK.findall(page.read_text(encoding="utf-8")) if page.suffix == ".md" else []
        assert all((page.parent / name).resolve() in pages for name in linked), page
