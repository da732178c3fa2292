"""Every program and subcommand with only the node's packages installed, or none: one line that says what to do."""

import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import click
import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.store.db import open_store

PACKAGE = Path(__file__).parents[2] / "slurm_migbatch"
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
SCRIPTS = PROJECT["scripts"]

PROGRAM = """
import sys
allowed = set(sys.argv.pop(1).split(","))

class Missing:
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and top not in sys.stdlib_module_names and not top.startswith("_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing)
import importlib
module, _, name = sys.argv.pop(1).partition(":")
getattr(importlib.import_module(module), name)()
"""


@cache
def modules(*extras):
    """Names that can be imported where these extras are installed and nothing else."""
    wanted = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    names = {canonicalize_name(Requirement(text).name) for text in wanted}
    found = {
        module
        for module, owners in packages_distributions().items()
        if names & {canonicalize_name(owner) for owner in owners}
    }
    return ",".join(sorted({*found, "slurm_migbatch"}))


def start(extras, program, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, modules(*extras), SCRIPTS[program], *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "100", **environment},
    )


def leaves(command, path=()):
    ctx = click.Context(command)
    if not isinstance(command, click.Group):
        yield path
        return
    for name in command.list_commands(ctx):
        yield from leaves(command.get_command(ctx, name), (*path, name))


LEAVES = sorted(leaves(cli))
#: commands of the simulator and the experiments
LAB = ("bench", "eval", "simulate")


def one_line(done, program, extra, *packages):
    """The program has ended with one line that names a missing package and the extra that installs it."""
    assert done.stdout == ""
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"{program}: error: ")
    assert f"pip install 'slurm-migbatch[{extra}]'" in done.stderr
    assert any(f"the Python package {name}, " in done.stderr for name in packages), done.stderr


@pytest.mark.parametrize("extras", [(), ("node",)], ids=["bare", "node"])
def test_controller_program_names_its_missing_packages(extras):
    one_line(start(extras, "migbatchd"), "migbatchd", "controller", "sqlalchemy", "numpy", "starlette")


QUESTIONS = [
    ("migacct",),
    ("migacct", "-j", "7", "-o", "all"),
    ("migbatch", "nodes", "--watch"),
    *(("migbatch", *words) for words in (("show", "7"), ("why", "7"), ("nodes",), ("loans",), ("explain",), ("top",))),
]


@pytest.mark.parametrize("asked", QUESTIONS, ids=" ".join)
def test_user_commands_on_login_nodes_need_no_packages(asked):
    """No service runs here: a command fails only when it does not know which service to ask, and not before."""
    done = start(("login",), *asked)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{asked[0]}: error: no /etc/migbatch/login.conf, and `scontrol show")
    assert done.stderr.count("\n") == 1
    assert start(("login",), *asked[: 2 if asked[0] == "migbatch" else 1], "-h").returncode == 0


def test_database_on_a_server_needs_the_controller_packages(tmp_path):
    one_line(start(("login",), "migacct", "--db", "postgresql:///x"), "migacct", "controller", "sqlalchemy")


def test_sqlite_file_is_read_without_any_package(tmp_path):
    url = f"sqlite:///{tmp_path}/x.db"
    open_store(url).close()
    done = start(("login",), "migacct", "-P", "-o", "jobid,gpuhours,smactive", "--db", url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "JobID|GPUHours|SMActive\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_no_subcommand_ends_in_a_traceback(path):
    """Node subcommands show their help; the others show it or say what to install."""
    done = start(("node",), "migbatch", *path, "-h")
    if done.returncode == 0 or path[0] in ("node", "progress"):
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Usage: ")
    else:
        extra = "lab" if path[0] in LAB else "controller"
        one_line(done, "migbatch", extra, "sqlalchemy", "numpy", "jinja2", "scipy")


def test_node_commands_need_pynvml(tmp_path):
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "node.conf").write_text(f"StateDir={tmp_path}/state\nRunDir={tmp_path}/run\n")
    for verb in ("status", "init", "reconcile"):
        one_line(start((), "migbatch", "node", verb, "--etc", str(etc), "--node", "n1"), "migbatch", "node", "pynvml")


def test_package_missing_at_a_later_import_gives_the_same_error(tmp_path):
    """`simulate` checks its arguments before it imports the packages that they need."""
    scenario = tmp_path / "scenario.toml"
    (tmp_path / "trace.csv").write_text("")
    scenario.write_text('[workload]\ntrace = "sacct"\npath = "trace.csv"\n[policy]\nname = "fifo"\n')
    done = start(("node",), "migbatch", "simulate", str(scenario))
    one_line(done, "migbatch", "lab", "numpy")


def test_html_report_is_refused_before_anything_is_read(tmp_path):
    words = ("report", "--db", f"sqlite:///{tmp_path}/x.db", "--html", str(tmp_path / "page.html"))
    one_line(start(("controller",), "migbatch", *words), "migbatch", "report", "plotly", "markupsafe")
    assert list(tmp_path.iterdir()) == []


def test_a_plot_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "bench.py").write_text("def make(batch): return lambda: None\n")
    target = ("--model", "m", "-o", str(tmp_path / "m.csv"), "--plot", str(tmp_path / "m.svg"))
    done = start(("controller",), "migbatch", "profile", "run", f"{tmp_path}/bench.py:make", *target)
    one_line(done, "migbatch", "plot", "matplotlib")
    assert not (tmp_path / "m.csv").exists()
    folders = ("--data", str(tmp_path), "--plot", str(tmp_path / "plots"))
    one_line(start(("controller",), "migbatch", "bench", "lending", *folders), "migbatch", "lab", "matplotlib")


WITHOUT_CHECKOUT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
from slurm_migbatch.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, "the simulator and the experiments (slurm_migbatch.lab) are") for name in LAB),
        ("testbed", "the test bed (slurm_migbatch.testbed) is"),
    ],
)
def test_a_site_may_leave_out_the_lab_and_the_test_bed(tmp_path, name, part):
    """As a site's package that installs only the product does."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("lab", "testbed", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CHECKOUT, name, "-h"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
    )
    text = f"migbatch: error: {part} not installed; install all with: pip install 'slurm-migbatch[lab]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", text)


def test_missing_module_of_the_product_keeps_its_traceback():
    @click.command()
    def command():
        raise ModuleNotFoundError("No module named 'slurm_migbatch.gone'", name="slurm_migbatch.gone")

    with pytest.raises(ModuleNotFoundError):
        run(command, "prog", [])


def test_completion_of_subcommands_imports_none_of_them():
    asked = {"_MIGBATCH_COMPLETE": "bash_complete", "COMP_WORDS": "migbatch ", "COMP_CWORD": "1"}
    done = start((), "migbatch", **asked)
    assert done.stderr == ""
    assert done.stdout.split() == [f"plain,{name}" for name in sorted(cli.list_commands(click.Context(cli)))]
