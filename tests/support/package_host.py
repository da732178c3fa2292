"""A host to install packages on: overlays over this machine's /etc, /opt, /usr and /var."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

FOLDERS = ("etc", "opt", "usr", "var")
#: files of package managers and of man
THEIRS = ("var/lib/dpkg", "var/lib/rpm", "var/log/dpkg.log", "var/cache/man", "var/cache/debconf")
_ENTER = """set -e
for folder in etc opt usr var; do
    mkdir -p "$0/$folder" "$0/$folder.work"
    mount -t overlay "$folder" -o "lowerdir=/$folder,upperdir=$0/$folder,workdir=$0/$folder.work" "/$folder"
done
mount -t tmpfs -o mode=755 run /run
exec /bin/sh -c "$1"
"""


class PackageHost:
    """The host; no process of it runs between two commands."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, command: str, *, codes: Sequence[int] = (0,), where: Path | None = None, **environment: str) -> str:
        """Run a shell command as root; return its output.

        Raises:
            AssertionError: the exit status is not one of `codes`.
        """
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _ENTER, str(self.directory), command],
            check=False,
            cwd=where or "/",
            env={"PATH": path, "LC_ALL": "C.UTF-8", "HOME": "/root", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode in codes, f"{command}: exit {done.returncode}:\n{done.stdout}"
        return done.stdout

    def written(self) -> dict[str, Path]:
        """Return the files that are new on this host: path without the first slash -> its location on this machine."""
        return {name: path for name, path in self._upper() if not name.startswith(THEIRS) and not _is_old(name, path)}

    def _upper(self) -> Iterator[tuple[str, Path]]:
        for folder in FOLDERS:
            for path in sorted((self.directory / folder).rglob("*")):
                yield str(path.relative_to(self.directory)), path


def _is_old(name: str, path: Path) -> bool:
    """Return whether it is an existing directory, present only because something below it was written."""
    return path.is_dir() and not path.is_symlink() and Path("/", name).is_dir()


def pack_installed(requirements: Sequence[str], folder: Path) -> None:
    """Write wheels of installed distributions and their dependencies, to build packages without an index."""
    seen: set[str] = set()
    remaining = [Requirement(text) for text in requirements]
    while remaining:
        requirement = remaining.pop()
        installed = distribution(requirement.name)
        if installed.name not in seen:
            seen.add(installed.name)
            _pack(installed, folder)
        for line in installed.requires or ():
            needed = Requirement(line)
            extras = [*requirement.extras, ""]
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                key = f"{needed.name}{sorted(needed.extras)}"
                if key not in seen:
                    seen.add(key)
                    remaining.append(needed)


def _pack(found: Distribution, folder: Path) -> None:
    lines = (found.read_text("WHEEL") or "").splitlines()
    tags = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    parts = [sorted(set(column)) for column in zip(*(tag.split("-") for tag in tags), strict=True)]
    tag = "-".join(".".join(part) for part in parts)
    name = found.name.replace("-", "_").replace(".", "_")
    with zipfile.ZipFile(folder / f"{name}-{found.version}-{tag}.whl", "w") as archive:
        for file in found.files or ():
            path = Path(str(found.locate_file(file)))
            if ".." not in file.parts and "__pycache__" not in file.parts and path.is_file():
                archive.write(path, str(file))
