"""Data folders that several experiments read."""

import gzip

import pytest

from slurm_migbatch.lab.studies.instances import InstanceBench
from slurm_migbatch.profiling.table import read_folder

HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"


@pytest.fixture
def openb(tmp_path):
    """A folder with 60 pods of 15 minutes that request a third, a half or all of a GPU."""
    lines = [HEADER]
    for i in range(60):
        milli, qos = (330, 500, 1000)[i % 3], ("LS", "BE")[i % 2]
        start = 106 * 86400 + 10 * i
        lines.append(f"openb-pod-{i:04d},1000,1000,1,{milli},,{qos},Succeeded,{start},{start + 900},{start}")
    folder = tmp_path / "alibaba_gpu2023_openb"
    folder.mkdir()
    (folder / "openb_pod_list_default.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path


PARVAGPU_MODELS = {"bert": 3.0, "densenet121": 1.0, "resnet50": 0.8, "vgg16": 2.0}
PARVAGPU_SLICES = (1, 2, 3, 4, 7)


def _seconds(work, gpc, batch, procs):
    """A host that takes 3 ms, and a device whose time grows with the work and shrinks with the slice."""
    return max(0.003, work * 1e-3 * batch * procs / gpc) + 0.0005 * procs


@pytest.fixture(scope="session")
def parvagpu(tmp_path_factory):
    """ParvaGPU's folder with four made-up models, every figure of which follows one law, and two scenarios."""
    tmp_path = tmp_path_factory.mktemp("data")
    lines = ["model,gpc,batch,procs,throughput_per_s,latency_s"]
    for model, work in PARVAGPU_MODELS.items():
        for gpc in PARVAGPU_SLICES:
            for batch in (1, 2, 4, 8, 16, 32):
                for procs in (1, 2, 3):
                    took = _seconds(work, gpc, batch, procs)
                    lines.append(f"{model},{gpc},{batch},{procs},{batch / took:.6f},{took:.6f}")
    folder = tmp_path / "parvagpu"
    (folder / "raw" / "SLO").mkdir(parents=True)
    (folder / "parvagpu_a100_80gb_mig.csv").write_text("\n".join(lines) + "\n")
    (folder / "raw" / "SLO" / "SLO_latency.csv").write_text("200,100,N/A,150\n400,200,160,300\n")
    (folder / "raw" / "SLO" / "SLO_req_rate.csv").write_text("300,500,N/A,400\n600,1500,2000,1000")
    return tmp_path


@pytest.fixture(scope="session")
def instance_bench(parvagpu):
    """ParvaGPU's scenarios with every model held out, which takes seconds to learn."""
    folder = parvagpu / "parvagpu"
    return InstanceBench(folder, read_folder(folder), lambda *_: None)
