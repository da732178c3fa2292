"""Build packages of Debian's or Red Hat's kind, one for each role of a host: `make deb`, `make rpm`.

A package holds a virtual environment with everything that the role needs, so that installing it fetches nothing. It is
made below a staging directory and then reads as if it had been made in its place. Nothing of Slurm's is touched by a
package: `migbatch install` does that, and a package is not removed before `migbatch install --uninstall`.
Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent
ROLES: Final = {
    "controller": "migbatchd, the service of slurmctld's host, and everything that nodes and login nodes have",
    "node": "Prolog, Epilog and agent of GPU nodes, and everything that login nodes have",
    "login": "migacct and the commands that ask migbatchd, for users",
}
#: of the environment only these stay: an administrator has no use for f2py or uvicorn on the PATH
PROGRAMS: Final = {
    "controller": {"migbatch": "usr/bin", "migacct": "usr/bin", "migbatchd": "usr/sbin"},
    "node": {"migbatch": "usr/bin", "migacct": "usr/bin"},
    "login": {"migbatch": "usr/bin", "migacct": "usr/bin"},
}
#: without it slurmctld's Lua reaches neither the submit service nor the compiled table
RECOMMENDED: Final = {"controller": "lua-posix"}
SERVICES: Final = {"controller": "migbatchd.service", "node": "migbatch-node.service"}
#: where zsh looks for completion
ZSH: Final = {"deb": "usr/share/zsh/vendor-completions", "rpm": "usr/share/zsh/site-functions"}
_RARE: Final = re.compile(r"/usr/share/(bash-completion|fish|zsh|doc/slurm-migbatch-\w+)(/|$)")
#: the file that a link of a page leads to
_LINK: Final = re.compile(r"\]\((?!https?://)([^)#\s]+)")
_PREFIX: Final = re.compile(r"(/[\w.+-]+){2,}")


class BuildError(RuntimeError):
    """A package cannot be built; the message says what to do."""


@dataclass(frozen=True)
class Request:
    """What to build.

    Attributes:
        kind: "deb" or "rpm".
        prefix: place of the virtual environment on the hosts.
        python: interpreter that the hosts have too.
        output: directory of the packages.
        wheels: directory with everything that is installed, or empty: from pip's index.
        extras: further extras of the controller, "mysql,postgres".
        epoch: time that files get, in seconds since 1970.
    """

    kind: str
    prefix: str
    python: str
    output: Path
    wheels: str
    extras: str
    epoch: int


@dataclass(frozen=True)
class Package:
    """A staged package.

    Attributes:
        role, version: what.
        stage: directory that holds its files as they will lie below `/`.
        compiled: whether it holds programs for one kind of processor.
        interpreter: path of the Python that it needs.
    """

    role: str
    version: str
    stage: Path
    compiled: bool
    interpreter: str

    @property
    def name(self) -> str:
        """Return the package's name."""
        return f"slurm-migbatch-{self.role}"

    @property
    def others(self) -> list[str]:
        """Return the packages that cannot be installed beside this one: each is everything that its host needs."""
        return [f"slurm-migbatch-{role}" for role in ROLES if role != self.role]


def run(*argv: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a program; returns what it wrote.

    Raises:
        BuildError: it failed, or is missing.
    """
    try:
        done = subprocess.run(argv, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    except FileNotFoundError:
        raise BuildError(
            f"{argv[0]} is missing: install it (dpkg-deb: dpkg; rpmbuild: rpm-build, Debian: rpm)"
        ) from None
    if done.returncode:
        raise BuildError(f"{' '.join(map(str, argv))}: exit {done.returncode}\n{done.stdout}")
    return done.stdout


# --- the virtual environment


def environment(request: Request, place: Path) -> Path:
    """Make a virtual environment with pip; returns its interpreter."""
    # by its own name, python3.11: the packages stay with that release when /usr/bin/python3 becomes another one
    run(Path(request.python).resolve(), "-I", "-m", "venv", place)
    return place / "bin/python3"


def pip(request: Request, python: Path, command: str, *arguments: str | Path) -> None:
    """Run pip with packages of the index, or of one directory only."""
    offline = ["--no-index", "--find-links", request.wheels] if request.wheels else []
    run(python, "-I", "-m", "pip", "--disable-pip-version-check", command, *offline, *arguments)


def wheel(request: Request, work: Path) -> Path:
    """Build the wheel of this checkout; nothing is written into the checkout."""
    source = work / "source"
    left = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, ignore=left)
    python = environment(request, work / "tools")
    pip(request, python, "wheel", "--no-deps", "--wheel-dir", work / "wheel", source)
    (path,) = (work / "wheel").glob("*.whl")
    return path


def documentation() -> list[Path]:
    """Return the pages for users and administrators, and what they link to, so that no link of theirs leads nowhere."""
    found = {ROOT / "docs" / f"{name}.md" for name in ("admin", "install", "operate", "users")}
    unread = sorted(found)
    while unread:
        page = unread.pop()
        if page.suffix == ".md":
            linked = {(page.parent / name).resolve() for name in _LINK.findall(page.read_text(encoding="utf-8"))}
            unread += sorted(linked - found)
            found |= linked
    return sorted(found)


def stage(request: Request, role: str, built: Path, work: Path) -> Package:
    """Fill the staging directory of one role."""
    root = work / role
    home = root / request.prefix.lstrip("/")
    python = environment(request, home)
    interpreter = str(python.resolve())
    more = {"controller": request.extras, "node": "login"}.get(role, "")
    extras = ",".join(filter(None, [role, more]))
    pip(request, python, "install", "--no-compile", f"{built}[{extras}]")
    date = datetime.fromtimestamp(request.epoch, timezone.utc).date().isoformat()
    run(python, "-I", HERE / "contents.py", role, request.prefix, ZSH[request.kind], date, root)
    documents = root / "usr/share/doc" / f"slurm-migbatch-{role}"
    documents.mkdir(parents=True)
    shutil.copyfile(ROOT / "LICENSE", documents / "copyright")
    for page in documentation():
        place = documents / page.relative_to(ROOT)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(page, place)
    # the package manager owns these files: nothing else is to be installed among them
    run(python, "-I", "-m", "pip", "uninstall", "--yes", "--quiet", "pip", "setuptools")
    for path in (home / "bin").iterdir():
        if path.name not in PROGRAMS[role] and not path.name.startswith("python"):
            path.unlink()
    relocate(home, str(root))
    for program, directory in PROGRAMS[role].items():
        link = root / directory / program
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"{request.prefix}/bin/{program}")
    compile_all(interpreter, home, root, request.epoch)
    settle(root, request.epoch)
    compiled = any(home.rglob("*.so"))
    return Package(role, built.name.split("-")[1], root, compiled, interpreter)


def relocate(home: Path, root: str) -> None:
    """Have the environment's own files name the place where it will be, not that where it was made.

    Raises:
        BuildError: the place where it was made stands in another file.
    """
    for path in home.rglob("__pycache__"):
        shutil.rmtree(path)
    for path in (home / "bin", home):
        for file in path.iterdir():
            if file.is_file() and not file.is_symlink():
                file.write_bytes(file.read_bytes().replace(root.encode(), b""))
    for path in home.rglob("*.dist-info/*"):
        # where the wheel was, and what pip had installed: the package manager knows better
        if path.name in ("direct_url.json", "INSTALLER", "REQUESTED", "RECORD"):
            path.unlink()
    for path in home.rglob("*"):
        if path.is_file() and not path.is_symlink() and root.encode() in path.read_bytes():
            raise BuildError(f"{path} names the directory where it was built, and would not work elsewhere")


def compile_all(interpreter: str, home: Path, root: Path, epoch: int) -> None:
    """Compile to byte code here: hooks write none, and what a package does not own would stay behind."""
    for path in home.rglob("*.py"):
        os.utime(path, (epoch, epoch))
    # some packages carry files for other releases of Python, which do not compile; nobody imports them
    paths = ["-s", str(root), "-p", "/", str(home / "lib")]
    subprocess.run([interpreter, "-Im", "compileall", "-qq", "--invalidation-mode=timestamp", *paths], check=False)


def settle(root: Path, epoch: int) -> None:
    """Let only the owner write, everybody read, and give everything one time."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


# --- what runs when a package comes and goes


def script(name: str, package: Package, prefix: str) -> str:
    """Return the script of packages/NAME.sh for one package."""
    values = {
        "@name@": package.name,
        "@role@": package.role,
        "@prefix@": prefix,
        "@unit@": SERVICES.get(package.role, ""),
    }
    text = (HERE / f"{name}.sh").read_text(encoding="utf-8")
    return re.sub("@\\w+@", lambda found: values[found[0]], text)


def deb(request: Request, package: Package) -> Path:
    """Build a Debian package of what was staged."""
    control = package.stage / "DEBIAN"
    control.mkdir()
    system = package.interpreter.startswith("/usr/bin/python3.")
    arch = run("dpkg", "--print-architecture").strip() if package.compiled else "all"
    size = sum(path.lstat().st_size for path in package.stage.rglob("*") if not path.is_dir()) // 1024
    fields = {
        "Package": package.name,
        "Version": _version(package),
        "Architecture": arch,
        "Section": "admin",
        "Priority": "optional",
        "Maintainer": "root <root@localhost>",
        "Installed-Size": str(size),
        "Depends": Path(package.interpreter).name if system else "",
        "Recommends": RECOMMENDED.get(package.role, ""),
        "Suggests": "munge, slurm-client",
        "Conflicts": ", ".join(package.others),
        "Replaces": ", ".join(package.others),
        "Description": f"dynamic NVIDIA MIG for Slurm: {package.role}\n {ROLES[package.role]}",
    }
    text = "".join(f"{key}: {value}\n" for key, value in fields.items() if value)
    (control / "md5sums").write_text(sums(package.stage), encoding="utf-8")
    (control / "control").write_text(text, encoding="utf-8")
    for name in ("postinst", "prerm", "postrm"):
        (control / name).write_text(script(f"deb-{name}", package, request.prefix), encoding="utf-8")
    settle(control, request.epoch)
    for name in ("postinst", "prerm", "postrm"):
        (control / name).chmod(0o755)
    target = request.output / f"{package.name}_{_version(package)}_{arch}.deb"
    epoch = {**os.environ, "SOURCE_DATE_EPOCH": str(request.epoch)}
    # gzip: every dpkg reads it, and numpy and scipy take minutes otherwise
    run("dpkg-deb", "--root-owner-group", "-Zgzip", "--build", package.stage, target, env=epoch)
    return target


def sums(root: Path) -> str:
    """Return the digests by which `dpkg --verify` sees what was changed on a host."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink())
    found = ((hashlib.md5(path.read_bytes(), usedforsecurity=False), path.relative_to(root)) for path in files)
    return "".join(f"{digest.hexdigest()}  {path}\n" for digest, path in found if path.parts[0] != "DEBIAN")


def rpm(request: Request, package: Package, work: Path) -> Path:
    """Build an RPM package of what was staged."""
    values = {
        "@name@": package.name,
        "@version@": _version(package),
        "@role@": package.role,
        "@what@": ROLES[package.role],
        "@python@": package.interpreter,
        "@recommends@": f"Recommends: {RECOMMENDED[package.role]}" if package.role in RECOMMENDED else "",
        "@others@": ", ".join(package.others),
        "@stage@": str(package.stage),
        "@arch@": "" if package.compiled else "BuildArch: noarch",
        "@files@": "\n".join([request.prefix, *listed(package.stage, request.prefix)]),
        "@post@": script("rpm-post", package, request.prefix),
        "@preun@": script("rpm-preun", package, request.prefix),
        "@postun@": script("rpm-postun", package, request.prefix),
    }
    text = (HERE / "slurm-migbatch.spec").read_text(encoding="utf-8")
    spec = work / f"{package.name}.spec"
    spec.write_text(re.sub("@[a-z]+@", lambda found: values[found[0]], text), encoding="utf-8")
    top = work / f"rpm-{package.role}"
    epoch = {**os.environ, "SOURCE_DATE_EPOCH": str(request.epoch)}
    run("rpmbuild", "-bb", "--quiet", "--define", f"_topdir {top}", spec, env=epoch)
    (built,) = (top / "RPMS").rglob("*.rpm")
    return Path(shutil.copy(built, request.output))


def listed(root: Path, prefix: str) -> list[str]:
    """Return the files outside the environment, and the directories that no host is sure to have, as RPM lists them."""
    found = []
    for path in sorted(root.rglob("*")):
        place = f"/{path.relative_to(root)}"
        if place == prefix or place.startswith(f"{prefix}/"):
            continue
        if path.is_symlink() or path.is_file():
            found.append(place)
        elif _RARE.match(place):
            found.append(f"%dir {place}")
    return found


def _version(package: Package) -> str:
    """Return the version so that 0.2.0.dev1 and 0.2.0rc1 come before 0.2.0, as both kinds of packages compare."""
    return re.sub(r"\.?(dev|a|b|rc)(?=\d)", r"~\1", package.version)


# --- the command


def build(request: Request, roles: Sequence[str]) -> list[Path]:
    """Build the packages of some roles; returns their paths.

    Raises:
        BuildError: a package cannot be built.
    """
    request.output.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory(prefix="migbatch-") as directory:
        work = Path(directory)
        built = wheel(request, work)
        for role in roles:
            package = stage(request, role, built, work)
            made.append(deb(request, package) if request.kind == "deb" else rpm(request, package, work))
    return made


def epoch() -> int:
    """Return the time that files get: SOURCE_DATE_EPOCH, or that of the last change of CHANGELOG.md."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    return int(given) if given.isdigit() else int((ROOT / "CHANGELOG.md").stat().st_mtime)


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=("deb", "rpm"))
    parser.add_argument("--role", action="append", choices=list(ROLES), help="one of them only; may be repeated")
    parser.add_argument("--prefix", default="/opt/slurm-migbatch", help="the virtual environment on the hosts")
    parser.add_argument("--python", default="/usr/bin/python3", help="an interpreter that the hosts have too")
    parser.add_argument("--output", type=Path, default=ROOT / "build/packages")
    parser.add_argument("--wheels", default="", help="take wheels of this directory, and ask no index")
    parser.add_argument("--extras", default="", help="further extras of the controller: mysql,postgres")
    given = parser.parse_args()
    if not _PREFIX.fullmatch(given.prefix):
        parser.error(f"--prefix {given.prefix}: an absolute path of at least two parts, of letters, digits and .+-_")
    request = Request(
        given.kind, given.prefix, given.python, given.output.resolve(), given.wheels, given.extras, epoch()
    )
    try:
        os.umask(0o022)
        for path in build(request, given.role or list(ROLES)):
            sys.stdout.write(f"{path}\n")
    except BuildError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
