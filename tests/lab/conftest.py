"""Data folders that several experiments read."""

import gzip

import pytest

HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"


@pytest.fixture
def openb(tmp_path):
    """A folder with 60 pods of a quarter of an hour that ask for a third, a half or all of a GPU."""
    lines = [HEADER]
    for i in range(60):
        milli, qos = (330, 500, 1000)[i % 3], ("LS", "BE")[i % 2]
        start = 106 * 86400 + 10 * i
        lines.append(f"openb-pod-{i:04d},1000,1000,1,{milli},,{qos},Succeeded,{start},{start + 900},{start}")
    folder = tmp_path / "alibaba_gpu2023_openb"
    folder.mkdir()
    (folder / "openb_pod_list_default.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path
