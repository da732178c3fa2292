"""List a node's simulated GPUs with Slurm's own NVML plugin: a check of the simulated driver."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from slurm_migbatch.testbed.errors import TestbedError
from slurm_migbatch.testbed.running_cluster import RunningCluster

PLUGIN = "gpu_nvml.so"

# slurmd reads /proc/driver and /dev by fixed paths: a private mount namespace shows it those of the simulated machine.
_AS_MACHINE = """set -e
mount --bind "$0"/proc/driver /proc/driver
mount -t tmpfs -o mode=755 dev /dev
mknod -m 666 /dev/null c 1 3
mknod -m 444 /dev/urandom c 1 9
cp -a "$0"/dev/. /dev/
exec "$@" 2>&1
"""


@dataclass(frozen=True)
class SeenSlice:
    """A MIG device as slurmd lists it: "nvidia_h100_80gb_hbm3_1g.10gb", its ids and its device files."""

    type: str
    uuid: str
    gi_id: int
    ci_id: int
    files: tuple[str, ...]


def has_plugin(root: Path | None) -> bool:
    """Return whether the Slurm in `root` (None: the machine's) has the NVML plugin."""
    return any(Path(f"{root or ''}/usr/lib").glob(f"*/slurm*/{PLUGIN}"))


def slurmd_sees(cluster: RunningCluster, node: str) -> list[SeenSlice]:
    """Return the MIG devices that `slurmd -G` with AutoDetect=nvml lists on a node.

    Raises:
        TestbedError: slurmd failed; the text holds its output.
    """
    machine = cluster.machine(node)
    etc = cluster.node_directory(node) / "autodetect"
    etc.mkdir(exist_ok=True)
    (etc / "slurm.conf").write_text(
        "ClusterName=autodetect\n"
        f"SlurmctldHost={socket.gethostname()}\n"
        "GresTypes=gpu\n"
        f"NodeName={node} NodeHostname={socket.gethostname()} CPUs=64 Gres=gpu:64\n"
        f"SlurmdSpoolDir={etc}\n"
        f"AuthInfo=socket={cluster.munge_socket}\n"
    )
    (etc / "gres.conf").write_text("AutoDetect=nvml\n")
    (etc / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    # In a chroot the mounts are private already, and "/" is not a mount point, so its propagation cannot be changed.
    unshare = ["unshare", "--mount", "--propagation", "private" if cluster.root.path is None else "unchanged"]
    slurmd = ["slurmd", "-G", "-vvv", "-N", node, "-f", str(etc / "slurm.conf")]
    done = cluster.run(
        [*unshare, "sh", "-c", _AS_MACHINE, str(machine.directory), *slurmd],
        env={"LD_LIBRARY_PATH": str(machine.directory), "SLURM_CONF": str(etc / "slurm.conf")},
        check=False,
    )
    if "NVML plugin loaded" not in done.stdout:
        raise TestbedError(f"slurmd -G did not use the NVML plugin (exit {done.returncode}): {done.stdout[-1500:]}")
    return _parse(done.stdout)


def _parse(text: str) -> list[SeenSlice]:
    slices = []
    for block in re.split(r"_handle_mig: GPU minor \d+, MIG index \d+:", text)[1:]:
        values = dict(re.findall(r"_handle_mig: +([^:]+): (\S+)", block))
        slices.append(
            SeenSlice(
                type=values["MIG Profile"],
                uuid=values["UniqueID"],
                gi_id=int(values["GPU Instance (GI) ID"]),
                ci_id=int(values["Compute Instance (CI) ID"]),
                files=tuple(values["Device Files"].split(",")),
            )
        )
    return slices
