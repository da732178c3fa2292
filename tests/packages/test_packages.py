"""`make deb` and `make rpm`: built without an index, installed, used, and removed completely."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import tomllib

from tests.support.package_host import PackageHost, pack_installed
from tests.support.stock_site import commands

pytestmark = [pytest.mark.packages, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PREFIX = "opt/slurm-migbatch"
ROLES = ("controller", "node", "login")
KINDS = ("deb", "rpm")
UNITS = {"controller": "migbatchd.service", "node": "migbatch-node.service"}
PLACES = (PREFIX, "usr/bin/mig", "usr/sbin/migbatchd", "usr/share/", "usr/lib/systemd/system/mig")
RECORD = "var/lib/migbatch/install/record.json"
#: Debian's rpm refuses to install without --force-debian, and does not know of Debian's Python
RPM = "rpm --dbpath /var/lib/rpm --force-debian"
INSTALL = {"deb": "dpkg -i {}", "rpm": f"{RPM} -U --replacepkgs --nodeps {{}}"}
REMOVE = {"deb": "dpkg -r slurm-migbatch-{}", "rpm": f"{RPM} -e --nodeps slurm-migbatch-{{}}"}
VERIFY = {"deb": "dpkg --verify slurm-migbatch-{}", "rpm": f"{RPM} -V --nodeps slurm-migbatch-{{}}"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A directory with wheels of everything that the packages contain, and of what builds ours."""
    folder = tmp_path_factory.mktemp("wheels")
    needed = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
    needed += [line for role in ROLES for line in PROJECT["project"]["optional-dependencies"][role]]
    pack_installed([line for line in needed if "python_version <" not in line], folder)
    return folder


def make(wheels, folder, line, **values):
    """Run a line of make with no other source of packages than the directory of wheels."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "PYTHON"))}
    env = {**own, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "WHEELS": str(wheels), **values}
    done = subprocess.run(
        line.split(), cwd=ROOT, env={**env, "PACKAGES": str(folder)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(wheels, tmp_path_factory):
    """The packages of one kind, built on first use: kind -> the directory that has them in `build/packages`."""
    found = {}

    def build(kind):
        if kind == "rpm" and shutil.which("rpmbuild") is None:
            pytest.skip("rpmbuild is not installed (Debian: rpm)")
        if kind not in found:
            found[kind] = tmp_path_factory.mktemp(kind)
            make(wheels, found[kind] / "build/packages", f"make {kind}")
        return found[kind]

    return build


@pytest.fixture
def host(tmp_path):
    assert not Path("/", PREFIX).exists(), "this machine has an installation that the packages would replace"
    return PackageHost(tmp_path)


def package(folder, role):
    (path,) = (folder / "build/packages").glob(f"slurm-migbatch-{role}[-_]*")
    return path


def open_to_others(path):
    """Return what is wrong with the owner or mode of a packaged file; empty if nothing is."""
    status = path.lstat()
    if (status.st_uid, status.st_gid) != (0, 0):
        return "is not root's"
    if not path.is_symlink() and stat.S_IMODE(status.st_mode) not in (0o755, 0o644):
        return f"has mode {stat.S_IMODE(status.st_mode):o}"
    return ""


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", KINDS)
def test_package_can_be_installed_used_and_removed(built, host, kind, role):
    assert "next: migbatch install --role" in host.run(INSTALL[kind].format(package(built(kind), role)))
    before = host.written()
    assert {name: reason for name, path in before.items() if (reason := open_to_others(path))} == {}
    assert [name for name in before if not name.startswith(PLACES)] == []
    units = [Path(name).name for name in before if name.startswith("usr/lib/systemd")]
    assert units == ([UNITS[role]] if role in UNITS else [])

    version = PROJECT["project"]["version"]
    assert host.run("migbatch --version") == f"migbatch {version}\n"
    for program in ("migbatch", "migacct", *(["migbatchd"] if role == "controller" else [])):
        assert "Usage:" in host.run(f"{program} --help")
        (page,) = (path for name, path in before.items() if re.search(rf"/{program}\.\d\.gz$", name))
        text = gzip.decompress(page.read_bytes()).decode()
        assert re.match(rf'\.TH {program.upper()} \d "\d{{4}}-\d\d-\d\d" .*\n\.nh\n', text)
        assert re.search(rf"(?m)^\.SH NAME\n{program} \\- \w", text) and ".SH OPTIONS" in text
        script = f"/usr/share/bash-completion/completions/{program}"
        assert f"complete -o nosort -F _{program}_completion {program}" in host.run(
            f"bash -c 'source {script} && complete -p {program}'"
        )
    answers = host.run("migbatch", _MIGBATCH_COMPLETE="bash_complete", COMP_WORDS="migbatch no", COMP_CWORD="1")
    assert answers.split() == ["plain,node", "plain,nodes"]

    host.run(INSTALL[kind].format(package(built(kind), role)))
    assert host.run(VERIFY[kind].format(role)) == "", "running it changes nothing that the package owns"
    assert sorted(host.written()) == sorted(before), "a second installation changes nothing"
    host.run(REMOVE[kind].format(role))
    assert list(host.written()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_node_package_is_not_removed_while_slurm_uses_its_hooks(built, host, kind):
    host.run(INSTALL[kind].format(package(built(kind), "node")))
    host.run("mkdir -p /etc/slurm && printf 'ClusterName=c\\nSlurmctldHost=ctl\\n' > /etc/slurm/slurm.conf")
    clean = sorted(host.written())
    shown = host.run("migbatch install --role node", codes=(1,))
    assert "/etc/migbatch/hooks/prolog" in shown and "migbatch-node.service" not in shown.partition("next:")[0]
    assert sorted(host.written()) == clean
    host.run("migbatch install --role node --apply")
    assert host.run("migbatch install --role node") == "nothing to do\n"
    assert host.run(VERIFY[kind].format("node")) == ""
    assert (host.directory / "etc/migbatch/hooks/prolog").read_text().startswith(f"#!/{PREFIX}/bin/python3 -ISB\n")
    # 11 is the exit code of a hook that cannot trust or import what it runs
    assert "installed properly" not in host.run("/etc/migbatch/hooks/task_prolog")
    output = host.run("chmod g+w /opt/slurm-migbatch/lib; /etc/migbatch/hooks/prolog", codes=(11,))
    assert "must belong to root and be writable by nobody else" in output
    host.run("chmod g-w /opt/slurm-migbatch/lib")

    before = sorted(host.written())
    output = host.run(REMOVE[kind].format("node"), codes=(1,))
    assert "migbatch install --role node --uninstall --apply" in output
    assert sorted(host.written()) == before
    host.run("migbatch install --role node --uninstall --apply")
    host.run("mkdir -p /var/lib/migbatch/n1 && echo 1 > /var/lib/migbatch/n1/journal")
    assert "/var/lib/migbatch" in host.run(REMOVE[kind].format("node"))
    assert "var/lib/migbatch/n1/journal" in host.written(), "the journal stays"
    assert not [name for name in host.written() if name.startswith(PLACES)]
    if kind == "deb":
        assert "deleting /var/lib/migbatch" in host.run("dpkg -P slurm-migbatch-node")
        assert not [name for name in host.written() if "migbatch" in name]


def test_deb_package_of_another_role_replaces_the_first(built, host):
    host.run(INSTALL["deb"].format(package(built("deb"), "login")))
    host.run("mkdir -p /var/lib/migbatch && touch /var/lib/migbatch/journal")
    host.run(INSTALL["deb"].format(package(built("deb"), "node")))
    assert "deleting" not in host.run("dpkg -P slurm-migbatch-login")
    assert "var/lib/migbatch/journal" in host.written()
    assert host.run(VERIFY["deb"].format("node")) == "" and host.run("migbatch --version")
    assert f"usr/lib/systemd/system/{UNITS['node']}" in host.written()


def test_rpm_package_of_another_role_conflicts_with_the_first(built, host):
    host.run(INSTALL["rpm"].format(package(built("rpm"), "login")))
    # Debian's rpm does not know what a real host has
    output = host.run(f"{RPM} -i {package(built('rpm'), 'node')}", codes=(1, 2))
    assert "slurm-migbatch-login conflicts with slurm-migbatch-node" in output


@pytest.mark.parametrize("kind", KINDS)
def test_package_depends_on_the_python_that_it_was_built_for(built, kind):
    path = str(package(built(kind), "node"))
    argv = ["dpkg-deb", "-f", path, "Depends"] if kind == "deb" else ["rpm", "-qp", "--requires", path]
    asked = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split("\n")
    name = Path("/usr/bin/python3").resolve().name
    assert (name if kind == "deb" else f"/usr/bin/{name}") in asked


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ROLES)
def test_package_of_the_controller_recommends_what_slurmctlds_lua_needs(built, kind, role):
    """Not more: Red Hat has it in a repository that may not be enabled."""
    path = str(package(built(kind), role))
    argv = ["dpkg-deb", "-f", path, "Recommends"] if kind == "deb" else ["rpm", "-qp", "--recommends", path]
    asked = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert asked == (["lua-posix"] if role == "controller" else [])


def test_package_can_be_built_with_another_prefix(wheels, tmp_path, host):
    script = "python3 packages/build.py deb --role node --prefix /opt/site/mig-1.0 --output"
    make(wheels, tmp_path, f"{script} {tmp_path} --wheels {wheels}")
    (path,) = tmp_path.glob("*.deb")
    host.run(f"dpkg -i {path}")
    assert host.run("migbatch --version").startswith("migbatch ")
    assert host.run("readlink /usr/bin/migbatch") == "/opt/site/mig-1.0/bin/migbatch\n"
    unit = host.written()["usr/lib/systemd/system/migbatch-node.service"].read_text()
    assert "\nExecStart=/opt/site/mig-1.0/bin/migbatch node agent" in unit
    assert [name for name in host.written() if name.startswith(PREFIX)] == []


def test_documented_package_installation_commands_work(built, host):
    """The page's commands, on a controller; the fixture ran `make deb`, and without an index dpkg replaces apt."""
    first, *rest = commands("Packages")
    assert first == "make deb"
    for line in rest:
        host.run(line.replace("apt-get install", "dpkg -i"), where=built("deb"))
    assert f"{PREFIX}/bin/migbatchd" in host.written()
