"""Steps that Slurm starts in containers get the slices of their job.

pyxis and Enroot are not in Debian: `tests/support/container_plugin.c` and `container_start.sh` do in their place, and
in their order, what matters here.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import PYTHON, UUID
from tests.support.namespaces import need_user_namespaces

pytestmark = pytest.mark.slurm
SUPPORT = Path(__file__).parents[1] / "support"
RENDER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from slurm_migbatch.node.install import enroot_hook
print(enroot_hook(Path(sys.argv[2]), sys.executable))
"""
SHOW = "echo cuda=$CUDA_VISIBLE_DEVICES nvidia=$NVIDIA_VISIBLE_DEVICES slices=$MIGBATCH_SLICES etc=$(ls -d /etc/*)"


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    if slurm_root:
        pytest.skip("the kernel creates no user namespaces in a chroot")
    need_user_namespaces()
    with Cluster(None, nodes=2, gpus=1, migbatch="all") as running:
        etc = running.directory / "etc"
        plugin = etc / "container.so"
        release = re.search(r"(\d+)\.(\d+)\.(\d+)", running.run(["slurmd", "-V"]).stdout)
        assert release
        number = sum(int(part) << shift for part, shift in zip(release.groups(), (16, 8, 0), strict=True))
        source = SUPPORT / "container_plugin.c"
        words = ["gcc", "-shared", "-fPIC", f"-DRELEASE={number}", "-o", str(plugin), str(source)]
        subprocess.run(words, check=True)
        start = etc / "container_start.sh"
        start.write_text((SUPPORT / "container_start.sh").read_text())
        start.chmod(0o755)
        for name in ("hooks.d", "mounts.d"):
            (etc / "enroot" / name).mkdir(parents=True)
        hook = etc / "enroot/hooks.d/50-migbatch.sh"
        hook.write_text(running.run([PYTHON, "-c", RENDER, str(running.directory / "lib"), str(etc)]).stdout)
        hook.chmod(0o755)
        (etc / "plugstack.conf").write_text(f"required {plugin} {start} {etc}/enroot\n")
        image(running).mkdir()
        running.run(["scontrol", "reconfigure"])
        yield running


@pytest.fixture
def mounted(bed: Cluster) -> Iterator[Cluster]:
    """The test bed, whose containers have the program that Slurm runs in them as TaskProlog."""
    fstab = bed.directory / "etc/enroot/mounts.d/50-migbatch.fstab"
    program = bed.directory / "etc/migbatch-task_prolog"
    fstab.write_text(f"{program} {program} none x-create=file,bind,ro,nofail,silent\n")
    yield bed
    fstab.unlink()


def image(bed: Cluster) -> Path:
    return bed.directory / "image"


def srun(bed: Cluster, *options: str, command: str = SHOW, check: bool = True) -> subprocess.CompletedProcess[str]:
    words = ["srun", *options, f"--container-image={image(bed)}", "sh", "-c", command]
    return bed.run(words, "mbalice", check=check)


def test_task_in_a_container_without_task_prolog_fails(bed: Cluster) -> None:
    """The reason why the program must be mounted."""
    done = srun(bed, check=False)
    assert done.returncode and "TaskProlog failed" in done.stderr


def test_step_in_a_container_gets_the_slices_of_its_job_and_may_report(mounted: Cluster) -> None:
    report = "echo items=5 seconds=1 >> $MIGBATCH_PROGRESS && cat $MIGBATCH_PROGRESS"
    found = srun(mounted, "--gres=mig:1g.10gb:2", command=f"{SHOW}; {report}").stdout
    first, second, *rest = UUID.findall(found)
    assert f"cuda={first},{second} nvidia={first},{second} slices=2" in found and rest == [first, second]
    assert "items=5 seconds=1" in found
    assert "etc=\n" in found, "it is a container"


def test_each_task_in_a_container_gets_its_own_slice(mounted: Cluster) -> None:
    found = srun(mounted, "--gres=mig:1g.10gb:2", "-n2", command="echo $CUDA_VISIBLE_DEVICES $MIGBATCH_DEVICES").stdout
    tasks = [line.split() for line in found.splitlines()]
    assert len({cuda for cuda, _ in tasks}) == 2 and all(UUID.fullmatch(cuda) for cuda, _ in tasks)
    assert all(cuda == device for cuda, device in tasks)


def test_steps_that_run_at_once_get_different_slices(mounted: Cluster) -> None:
    both = "while [ $(wc -l < $MIGBATCH_PROGRESS) -lt 2 ]; do sleep 0.1; done"
    command = f"echo got $CUDA_VISIBLE_DEVICES $MIGBATCH_JOB_SLICES; echo items=1 >> $MIGBATCH_PROGRESS; {both}"
    step = f"srun --exact -n1 --gres=mig:1g.10gb:1 --container-image={image(mounted)} sh -c '{command}' &"
    job = mounted.submit("--gres=mig:1g.10gb:2", "-n2", wrap=f"{step}\n{step}\nwait")
    mounted.wait_job(job, "COMPLETED")
    found = [line.split()[1:] for line in mounted.output(job).splitlines() if line.startswith("got")]
    assert len({devices for devices, _ in found}) == 2 and all(UUID.fullmatch(devices) for devices, _ in found), found
    assert {total for _, total in found} == {"2"}


def test_steps_on_two_nodes_get_their_nodes_slices(mounted: Cluster) -> None:
    step = f"srun --container-image={image(mounted)} sh -c 'echo step $CUDA_VISIBLE_DEVICES $NVIDIA_VISIBLE_DEVICES'"
    job = mounted.submit("--gres=mig:1g.10gb", "-N2", wrap=f"echo batch $CUDA_VISIBLE_DEVICES; {step}")
    mounted.wait_job(job, "COMPLETED")
    lines = [line.split() for line in mounted.output(job).splitlines()]
    batch = [words[1] for words in lines if words[0] == "batch"]
    steps = [words[1:] for words in lines if words[0] == "step"]
    assert len({cuda for cuda, _ in steps}) == 2 and all(cuda == nvidia for cuda, nvidia in steps)
    assert batch[0] in {cuda for cuda, _ in steps}


def test_step_in_a_container_of_a_job_without_slices_starts(mounted: Cluster) -> None:
    assert "cuda= nvidia=all slices= etc=\n" in srun(mounted).stdout
