"""Install other Slurm releases: a minimal Debian or Ubuntu of another suite by debootstrap, for --slurm-root."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .errors import TestbedError

# python3: hooks inside run with the root's own interpreter.
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurmdbd", "munge", "slurm-wlm-basic-plugins"),
    *("slurmrestd", "slurm-wlm-jwt-plugin", "lua-posix", "python3"),
)
# Slurm's NVML plugin (contrib) is packaged for some suites only; Ubuntu's package depends on a driver.
EXTRA = {"trixie": ("slurm-wlm-nvml-plugin",)}
#: suites of Ubuntu; every other one is Debian's
UBUNTU = frozenset({"noble", "resolute"})
#: keyring with which debootstrap checks Ubuntu's packages; Debian 12 has no package of it, and without it they are not
#: checked
UBUNTU_KEYRING = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
_SCRIPTS = Path("/usr/share/debootstrap/scripts")
_UBUNTU_SCRIPT = "gutsy"
"""Script for all of Ubuntu's suites; debootstrap has a link to it for those that it knows."""


def mirror(etc: Path = Path("/etc/apt")) -> str:
    """Return the Debian archive of this machine's apt sources, so that site mirrors and proxies are respected."""
    for url in _sources(etc):
        if re.search(r"/debian/?$", url):
            return url
    raise TestbedError(f"no Debian archive (a URL ending in /debian) in {etc}/sources.list*; give one with --mirror")


def _sources(etc: Path) -> Iterator[str]:
    files = [
        etc / "sources.list",
        *sorted(etc.glob("sources.list.d/*.list")),
        *sorted(etc.glob("sources.list.d/*.sources")),
    ]
    for path in files:
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            if path.suffix == ".sources":
                fields = line.split()[1:] if line.lower().startswith("uris:") else []
            else:
                fields = [field for field in re.sub(r"\[.*?\]", "", line).split()[1:2] if line.startswith("deb ")]
            yield from fields


def make_root(suite: str, target: Path, url: str | None) -> None:
    """Install a minimal Debian or Ubuntu `suite` with Slurm into `target` (one to three minutes, 350 MB and more).

    The root appears at `target` complete or not at all.

    Args:
        suite: a suite of Ubuntu if listed in UBUNTU, else of Debian.
        target: the directory to create.
        url: the archive; None: the one in this machine's apt sources for Debian, debootstrap's for Ubuntu.

    Raises:
        TestbedError: `target` exists, or debootstrap is missing or failed.
    """
    if target.exists():
        raise TestbedError(f"{target} exists; remove it first to make it again")
    if not shutil.which("debootstrap"):
        raise TestbedError("debootstrap is missing; apt-get install debootstrap")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # In a private mount namespace, debootstrap's mounts disappear with the process, even if it is killed.
    argv = ["unshare", "--mount", "--propagation", "private", "debootstrap", "--variant=minbase"]
    argv += [f"--components={_components(suite)}", f"--include={','.join([*PACKAGES, *EXTRA.get(suite, ())])}"]
    script = _script(suite)
    archive = url or (_default_mirror(script) if suite in UBUNTU else mirror())
    done = subprocess.run([*argv, suite, partial, archive, script], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        ending = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        shutil.rmtree(partial, ignore_errors=True)
        raise TestbedError(f"debootstrap {suite} failed:\n{ending}")
    shutil.rmtree(partial / "var/cache/apt/archives", ignore_errors=True)
    partial.rename(target)


def _components(suite: str) -> str:
    return "main,universe" if suite in UBUNTU else "main,contrib"


def _script(suite: str) -> Path:
    fallback = _UBUNTU_SCRIPT if suite in UBUNTU else "sid"
    return next(path for path in (_SCRIPTS / suite, _SCRIPTS / fallback) if path.exists())


def _default_mirror(script: Path) -> str:
    """Return the archive that debootstrap's own script names for supported suites."""
    match = re.search(r"\*\)\s+default_mirror\s+(\S+)", script.read_text())
    if not match:
        raise TestbedError(f"{script} names no archive; give one with --mirror")
    return match[1]
