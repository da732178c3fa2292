"""Other Slurm releases: a minimal Debian of another suite by debootstrap, for --slurm-root."""

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
# Slurm's own reader of GPUs (contrib) is packaged for some suites only.
EXTRA = {"trixie": ("slurm-wlm-nvml-plugin",)}
_SCRIPTS = Path("/usr/share/debootstrap/scripts")


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


def make_root(suite: str, target: Path, url: str | None = None, log: Path | None = None) -> None:
    """Install a minimal Debian `suite` with Slurm into `target` (about a minute and 350 MB).

    The root appears at `target` complete or not at all.
    """
    if target.exists():
        raise TestbedError(f"{target} exists; remove it first to make it again")
    if not shutil.which("debootstrap"):
        raise TestbedError("debootstrap is missing; apt-get install debootstrap")
    script = next(path for path in (_SCRIPTS / suite, _SCRIPTS / "sid") if path.exists())
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # A mount namespace of its own: what debootstrap mounts goes away with it, also after a kill.
    argv = ["unshare", "--mount", "--propagation", "private", "debootstrap", "--variant=minbase"]
    argv += ["--components=main,contrib", f"--include={','.join([*PACKAGES, *EXTRA.get(suite, ())])}"]
    done = subprocess.run([*argv, suite, partial, url or mirror(), script], check=False, capture_output=True, text=True)
    if log:
        log.write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        ending = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        shutil.rmtree(partial, ignore_errors=True)
        raise TestbedError(f"debootstrap {suite} failed:\n{ending}")
    shutil.rmtree(partial / "var/cache/apt/archives", ignore_errors=True)
    partial.rename(target)
