"""Imported packages are declared by the extra that installs the importing package; declared packages are imported."""

import ast
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slurm_migbatch.doctor.controller import needed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "slurm_migbatch"
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: what is installed on a compute node with the extra `node`, and works there
ON_NODES = (
    "__init__.py",
    "mig/",
    "node/",
    "elastic/",
    "values/",
    *(f"cli/{name}.py" for name in ("__main__", "main", "common", "ending", "node", "progress", "doctor")),
)
owners = cache(packages_distributions)
#: provided by the job's own Python, if at all
USERS_OWN = {"torch"}
#: imported by mypy only, which installs it
FOR_MYPY = {"typing_extensions"}


def declared(*extras):
    found = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    for line in (line for extra in extras for line in PROJECT["optional-dependencies"][extra]):
        wanted = Requirement(line)
        found |= declared(*wanted.extras) if wanted.name == PROJECT["name"] else {canonicalize_name(wanted.name)}
    return found


@cache
def modules_of(path):
    """Full names of the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module))
    return found


def imported(path):
    """Top-level modules that a file imports, without the standard library and this package."""
    tops = {name.partition(".")[0] for name in modules_of(path)}
    return tops - set(sys.stdlib_module_names) - {"slurm_migbatch"} - USERS_OWN - FOR_MYPY


def distributions(module):
    """Names of the distributions that provide a module, as pip writes them; if not installed, the module's name."""
    return {canonicalize_name(name) for name in owners().get(module, [module])}


def undeclared(path, *extras):
    known = declared(*extras)
    return {module for module in imported(path) if not distributions(module) & known}


def extras_of(path):
    name = str(path.relative_to(PACKAGE))
    if name == "slurm/pyslurm_worker.py":
        return ("pyslurm-25-11",)
    if name == "profiling/plot.py":
        return ("plot",)
    if name.startswith("report/pictures/"):
        return ("report",)
    if name.startswith("lab/"):
        return ("lab",)
    return ("node",) if name.startswith(ON_NODES) else ("controller",)


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted({p.parent for p in PACKAGE.rglob("*.py")}), ids=lambda p: p.name)
def test_imports_are_declared(package):
    missing = {str(path.relative_to(ROOT)): undeclared(path, *extras_of(path)) for path in package.glob("*.py")}
    assert {path: modules for path, modules in missing.items() if modules} == {}


@pytest.mark.slow
def test_imports_of_the_tests_are_declared():
    extras = ("dev", "engine", "pyslurm-25-11")
    missing = {str(path.relative_to(ROOT)): undeclared(path, *extras) - {"tests"} for path in TESTS}
    assert {path: modules for path, modules in missing.items() if modules} == {}


def test_no_test_module_imports_another():
    """Code that several of them need is in tests/support."""
    shared = ("tests.support",)
    others = {
        str(path.relative_to(ROOT)): {
            name for name in modules_of(path) if name.partition(".")[0] == "tests" and not name.startswith(shared)
        }
        for path in TESTS
    }
    assert {path: modules for path, modules in others.items() if modules} == {}


EXTRAS = ("", "node", "controller", "plot", "report", "lab", "mysql", "postgres", "pyslurm-25-11")


@pytest.mark.parametrize("extra", EXTRAS)
def test_declared_packages_are_used(extra):
    """Database drivers are not imported by name: SQLAlchemy is given their names."""
    files = [
        path for path in PACKAGE.rglob("*.py") if extra != "node" or str(path.relative_to(PACKAGE)).startswith(ON_NODES)
    ]
    used = {name for path in files for module in imported(path) for name in distributions(module)}
    text = (PACKAGE / "store/engines.py").read_text(encoding="utf-8").lower()
    used |= {name for name in ("pymysql", "psycopg") if f"+{name}" in text}
    wanted = declared(extra) - declared() if extra else declared()
    assert wanted - used == set()


def test_doctor_requires_the_packages_of_the_controller_extra():
    later = {
        Requirement(line).name for line in PROJECT["optional-dependencies"]["controller"] if "python_version" in line
    }
    assert {canonicalize_name(name) for name in needed()} == declared("controller") - declared() - later
