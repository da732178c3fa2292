"""Records what squeue and scontrol print for a set of telling jobs; run it by hand for a new Slurm release.

    python tests/slurm/record_client_assets.py [--slurm-root DIR]

Writes tests/slurm/assets/VERSION/{version,jobs,nodes}.txt. The tests find the folders by themselves.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from slurm_migbatch.slurm.listing import NODES_COMMAND, sharing_of, squeue_command
from slurm_migbatch.slurm.versions import parse_version
from slurm_migbatch.testbed.cluster import Cluster

ASSETS = Path(__file__).parent / "assets"
MARK = "\x1f0123456789abcdef\x1f"

#: (name, options); the order of submission is the order of ids, from 1
JOBS = (
    (
        "free-text",
        ["--gres=mig:1g.10gb:1", "-t", "10", "--comment=a\x1fb\x1e|%\nNodeName=x Gres=y \u00e9", "-J", "two\nlines"],
    ),
    ("two-types", ["--gres=mig:1g.10gb:1,mig:1g.10gb.me:1", "-n", "3", "-N", "1"]),
    ("two-nodes", ["--gres=mig:1g.10gb:1", "-N", "2", "-n", "2"]),
    ("nobody-offers", ["--gres=mig:7g.80gb:1", "-t", "1-0", "-p", "train,gpu"]),
    ("begins-later", ["--gres=mig:1g.10gb:1", "--begin=now+1hour"]),
    ("held", ["--gres=mig:1g.10gb:1", "-H"]),
    ("array", ["--gres=mig:1g.20gb:1", "--array=0-400:2%4", "-t", "5"]),
    ("array-list", ["--gres=mig:7g.80gb:1", "--array=1,3,5-9"]),
    ("depends", ["--gres=mig:1g.10gb:1", "--dependency=afterok:1"]),
    ("named-node", ["--gres=mig:1g.10gb:1", "-w", "n2"]),
    ("no-mig", []),
)


def record(cluster: Cluster) -> Path:
    """Submit, look, write."""
    env = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    for _, options in JOBS:
        cluster.submit(*options, wrap="sleep 600")
    cluster.run(["sbatch", "--gres=mig:1g.10gb:1", "--wrap=sleep 600", ":", "--gres=mig:1g.10gb:1"], "mbbob")
    time.sleep(4)
    version = cluster.run(["squeue", "--version"]).stdout
    folder = ASSETS / "{}.{:02d}".format(*parse_version(version))
    folder.mkdir(parents=True, exist_ok=True)
    here = str(cluster.directory)
    for name, text in (
        ("version", version),
        ("jobs", cluster.run(squeue_command(MARK, sharing=sharing_of(parse_version(version))), env=env).stdout),
        ("nodes", cluster.run(NODES_COMMAND, env=env).stdout),
    ):
        (folder / f"{name}.txt").write_text(text.replace(here, "/testbed"))
    return folder


def main() -> None:
    """Record one release."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slurm-root", default="")
    with Cluster(nodes=2, gpus=1, slurm_root=parser.parse_args().slurm_root) as cluster:
        print(record(cluster))


if __name__ == "__main__":
    main()
