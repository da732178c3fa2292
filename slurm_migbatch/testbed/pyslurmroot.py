"""Build pyslurm in a --slurm-root for the Slurm of that root, to be used by a test cluster's migbatchd."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Final

import slurm_migbatch

from .errors import TestbedError
from .running_cluster import RunningCluster

_HOME: Final = "/opt/pyslurm"
PYTHON: Final = f"{_HOME}/bin/python"
"""The Python of the root that has pyslurm, as seen from inside."""
VERSION: Final = "25.11.2"
"""The release that is built; it needs Slurm 25.11."""
# apt's ca-certificates writes the certificate file, so the machine's is mounted over it afterwards.
_BUILD: Final = f"""set -e
export DEBIAN_FRONTEND=noninteractive
mount -t proc proc "$0"/proc
mount --bind /dev "$0"/dev
touch "$0"/etc/resolv.conf
mount --bind /etc/resolv.conf "$0"/etc/resolv.conf
chroot "$0" apt-get update -qq
chroot "$0" apt-get install -y -qq --no-install-recommends gcc python3-dev python3-venv libslurm-dev ca-certificates
for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
    [ ! -e "$file" ] || {{ touch "$0$file"; mount --bind "$file" "$0$file"; }}
done
chroot "$0" python3 -m venv {_HOME}
export SLURM_INCLUDE_DIR=/usr/include SLURM_LIB_DIR=/usr/lib/x86_64-linux-gnu
chroot "$0" {_HOME}/bin/pip install --quiet pyslurm=={VERSION}
"""
_ASKED: Final = ("__init__.py", "slurm/__init__.py", "slurm/pyslurm_worker.py", "slurm/states.py")
"""The files of migbatch that Python needs."""


def offered(root: Path | None) -> bool:
    """Return whether pyslurm is in `root`; the machine's own Slurm has none."""
    return root is not None and Path(f"{root}{PYTHON}").exists()


def build(root: Path) -> None:
    """Build pyslurm in `root`, whose Slurm must be 25.11 (about five minutes).

    Raises:
        TestbedError: a step failed; the text holds the end of its output.
    """
    argv = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _BUILD, str(root)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode != 0 or not offered(root):
        ending = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise TestbedError(f"pyslurm {VERSION} cannot be built in {root}:\n{ending}")


def python(cluster: RunningCluster) -> Path:
    """Write a program that runs the root's Python in a running cluster, beside the files of migbatch that it needs."""
    directory = cluster.directory / "pyslurm"
    package = directory / "slurm_migbatch"
    for name in _ASKED:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(slurm_migbatch.__file__).parent / name, package / name)
    inside = cluster.command(["env", f"PYTHONPATH={directory}", PYTHON])
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(inside)} "$@"\n')
    program.chmod(0o755)
    return program
