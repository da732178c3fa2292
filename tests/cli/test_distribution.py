"""What is installed: templates and examples are included, and are the same from a checkout, a wheel and an sdist."""

import json
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted(path.name for path in (ROOT / "gres_templates").glob("*.j2"))
#: read by other templates only
INCLUDED = {"migbatch_core.lua.j2"}
#: used by a test bed's Slurm only
STOCK = {"cgroup.conf.j2", "testbed.conf.j2"}

#: prints where the package and its data are, the text of each template, and the names of the examples
PROGRAM = """
import json
from importlib.resources import files
from pathlib import Path

import slurm_migbatch
from slurm_migbatch import site
from slurm_migbatch.submit import shim
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.workload.catalog import SiteCatalog

counts = {"1g.10gb": 7, "none": 0}
node, catalog = site.NodeLine("n[1-2]", counts), site.NodeLine("migcatalog", counts)
cluster = {
    "site": site.Site((24, 11), [node], catalog, job_submit=True),
    "bed": {
        "name": "c", "host": "h", "hosts": ["h(127.0.0.1)"], "run": "/r", "log": "/l",
        "port": 1, "ports": {"n1": 3}, "dbd_port": 2, "directory": "/d", "munge_socket": "/m",
        "options": {}, "gres": "",
        "spec": {"node_names": ["n1"], "cpus": 4, "partition_nodes": {}, "features": {}, "slurm_user": "slurm"},
    },
    "version": (24, 11), "constrained": False,
}
unit = {"program": "/opt/migbatch", "config": "/etc/migbatch.toml", "user": "root", "etc": "/etc/migbatch"}
dbd = {"dbd": {"host": "h", "port": 2, "user": "slurm", "munge_socket": "/m", "log": "/l", "pid_file": "/p"}}
names = {
    "cgroup.conf.j2": cluster, "gres.conf.j2": cluster, "slurm.conf.j2": cluster, "testbed.conf.j2": cluster,
    "migbatchd.service.j2": unit, "slurmdbd.conf.j2": dbd,
}
texts = {template: site.render(template, **values) for template, values in names.items()}
for name in (shim.JOB_SUBMIT, shim.CLI_FILTER):
    texts[f"{name}.j2"] = shim.render(name, socket="/s", table="/t", catalog=SiteCatalog(), policy=SubmitPolicy())
data = [files(f"slurm_migbatch.{folder}") for folder in ("gres_templates", "sbatch_examples")]
print(json.dumps({
    "package": str(Path(slurm_migbatch.__file__).parent),
    "data": [str(folder) for folder in data],
    "texts": texts,
    "files": [sorted(entry.name for entry in folder.iterdir() if entry.is_file()) for folder in data],
}))
"""


def told_by(python):
    done = subprocess.run([python, "-Ic", PROGRAM], cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def build(source, kind, folder):
    """Build an sdist or a wheel of `source` into `folder`, without fetching anything; its path."""
    code = f"import sys; from setuptools.build_meta import build_{kind} as b; b(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return path


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the repository without build outputs: builds write beside their sources."""
    folder = tmp_path_factory.mktemp("checkout") / "slurm_migbatch"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    return folder


@pytest.fixture(scope="module")
def unpacked(checkout, tmp_path_factory):
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run(["tar", "-xzf", build(checkout, "sdist", folder), "-C", folder], check=True)
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    return source


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    """The wheel of the sdist, as `pip install` of an sdist makes it."""
    return build(unpacked, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of a fresh environment with the wheel; the packages that it needs are those of the tests."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "-q", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "needed.pth").write_text("\n".join(site.getsitepackages()))
    return python


@pytest.mark.slow
def test_an_installed_wheel_renders_every_template(installed):
    found = told_by(str(installed))
    package = Path(found["package"])
    assert package.is_relative_to(installed.parents[1])
    assert found["data"] == [str(package / "gres_templates"), str(package / "sbatch_examples")]
    assert sorted({*found["texts"], *INCLUDED}) == TEMPLATES
    assert found["files"] == [
        sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file())
        for folder in ("gres_templates", "sbatch_examples")
    ]
    assert all("migbatch" in text or template in STOCK for template, text in found["texts"].items())


def test_a_checkout_and_a_wheel_render_the_same_templates(installed):
    assert told_by(sys.executable)["texts"] == told_by(str(installed))["texts"]


def test_a_checkout_reads_the_folders_of_the_repository():
    found = told_by(sys.executable)
    assert found["package"] == str(ROOT / "slurm_migbatch")
    assert found["data"] == [str(ROOT / "gres_templates"), str(ROOT / "sbatch_examples")]


def test_a_checkout_and_its_sdist_build_the_same_wheel(checkout, wheel, tmp_path):
    with zipfile.ZipFile(build(checkout, "wheel", tmp_path)) as direct, zipfile.ZipFile(wheel) as other:
        assert sorted(direct.namelist()) == sorted(other.namelist())
        names = [name for name in direct.namelist() if ".dist-info/" not in name]
        assert {name: direct.read(name) for name in names} == {name: other.read(name) for name in names}


def test_a_wheel_has_one_top_level_name_and_all_files_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"slurm_migbatch"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "slurm_migbatch").rglob("*") if path.is_file()}
    assert {name for name in sources if "__pycache__" not in name} <= names
    app = {str(path.relative_to(ROOT)) for path in (ROOT / "sbatch_examples/ondemand").rglob("*") if path.is_file()}
    assert app and {f"slurm_migbatch/{name}" for name in app} <= names


def test_an_sdist_has_the_folders_that_a_site_copies_from(unpacked):
    for folder in ("prolog", "epilog", "gres_templates", "sbatch_examples", "tests"):
        assert {path.name for path in (unpacked / folder).iterdir()} >= {
            path.name for path in (ROOT / folder).iterdir() if path.name != "__pycache__"
        }
