"""The contract's world on a real Slurm."""

from __future__ import annotations

import time
from collections.abc import Iterator

from slurm_migbatch.slurm.client import SlurmClient
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.errors import TestbedError

#: seconds within which Slurm makes any change, on a busy machine
PATIENCE_S = 180.0


class RealWorld:
    """The jobs of one test on a cluster shared by all tests."""

    def __init__(self, cluster: Cluster, client: SlurmClient) -> None:
        self.cluster, self.client = cluster, client
        self.nodes = cluster.spec.node_names
        self._offers = {node.name: node for node in client.nodes() if node.name in self.nodes}
        self._jobs: list[int] = []

    def submit(self, want: str, *, partition: str = "gpu", hold: bool = False, comment: str = "") -> int:
        options = ["--gres=" + want, "-p", partition, f"--comment={comment}", *(["-H"] if hold else [])]
        return self.sbatch(*options)

    def sbatch(self, *options: str, wrap: str = "sleep 600") -> int:
        """Submit a batch job that is cancelled after the test; return its id."""
        self._jobs.append(self.cluster.submit("--output=/dev/null", *options, wrap=wrap))
        return self._jobs[-1]

    def array(self, want: str, tasks: str) -> int:
        return self.sbatch("--gres=" + want, "--array=" + tasks)

    def het(self, *wants: str) -> int:
        options = [option for want in wants for option in (":", "--gres=" + want)]
        return self.sbatch(*options[1:])

    def timed(self, want: str, minutes: int, nodes: int = 1) -> int:
        return self.sbatch("--gres=" + want, f"--time={minutes}", f"--nodes={nodes}")

    def dependent(self, want: str, *after: int, comment: str = "") -> int:
        jobs = ":".join(map(str, after))
        return self.sbatch("--gres=" + want, f"--dependency=afterok:{jobs}", f"--comment={comment}")

    def release(self, job: int) -> None:
        self.cluster.run(["scontrol", "release", str(job)])

    def suspend(self, job: int) -> None:
        self.cluster.run(["scontrol", "suspend", str(job)])

    def refusal(self, want: str) -> str:
        try:
            self.submit(want)
        except TestbedError as error:
            return str(error)
        return ""

    def passes(self) -> Iterator[None]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            yield
            time.sleep(0.1)

    def close(self) -> None:
        """Cancel all jobs, and restore every node's initial offer."""
        for job in self._jobs:
            self.client.cancel(job)
        for _ in self.passes():
            if not self.client.jobs():
                break
        self.client.set_gres(
            {
                name: ",".join(f"mig:{kind}:{count}" for kind, count in node.gres.items() if count)
                for name, node in self._offers.items()
            }
        )
