"""Partly broken states of a node: each is caused in files or on a simulated machine, and reported."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_migbatch.cli.doctor import print_findings
from slurm_migbatch.doctor import containers, disks, drained, gpus, hooks, link, slurmfiles
from slurm_migbatch.doctor.node import NodePlaces, examine, examine_quietly
from slurm_migbatch.install import scripts
from slurm_migbatch.install.files import read
from slurm_migbatch.install.slurmconf import Conf, load
from slurm_migbatch.node import failure
from slurm_migbatch.node.caps import helper_is_setuid
from slurm_migbatch.node.findings import FAIL, LONGEST, MOST, OK, UNKNOWN, WARN, Finding, rows_to_report
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.install import HOOKS, render
from slurm_migbatch.slurm.fields import fields_of, reason_of
from slurm_migbatch.testbed.simdriver import build
from tests.support.directories import open_to_users
from tests.support.hung_mount import hung_mount
from tests.support.nodes import ALICE, Node, in_child

#: a program that sets its process name to its first argument and holds the file of its second argument open
_HOLD = """import sys
open("/proc/self/comm", "w").write(sys.argv[1])
held = open(sys.argv[2])
print("open", flush=True)
input()
"""


def wrong(findings) -> list[tuple[str, str]]:
    """Subject and text of the findings to correct; each has advice."""
    found = list(findings)
    assert found and all(finding.advice for finding in found if finding.level != OK)
    return [(finding.subject, finding.text) for finding in found if finding.level == FAIL]


def only_problem(findings) -> str:
    """Subject, text and advice of the only finding to correct."""
    found = list(findings)
    (bad,) = [finding for finding in found if finding.level == FAIL]
    assert bad.advice
    return f"{bad.subject}: {bad.text} -> {bad.advice}"


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A directory of installed hooks, and a slurm.conf that names them."""
    (tmp_path / "hooks").mkdir()
    for name in HOOKS:
        program = tmp_path / "hooks" / name
        program.write_text(render(name, [str(tmp_path)], "/etc/migbatch", "/usr/bin/python3"))
        program.chmod(0o755)
    lines = [f"{key}={tmp_path}/hooks/{name}" for key, name in hooks.HOOKS]
    (tmp_path / "slurm.conf").write_text("\n".join(["GresTypes=gpu,mig", *lines, ""]))
    (tmp_path / "gres.conf").write_text("NodeName=n1 AutoDetect=off\n")
    (tmp_path / "cgroup.conf").write_text("ConstrainDevices=yes\n")
    return tmp_path


def conf(slurm: Path, name: str = "slurm.conf") -> Conf:
    return load(str(slurm / name), read)


def check_hooks_of(slurm: Path, *, several: bool = False):
    return hooks.check_hooks(hooks.gather(conf(slurm), f"{slurm}/hooks", several=several))


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# --- hooks


def test_installed_hooks_are_ok(slurm: Path) -> None:
    assert wrong(check_hooks_of(slurm)) == []


def test_missing_hook_is_reported(slurm: Path) -> None:
    (slurm / "hooks/epilog").unlink()
    assert "epilog is not on this host" in only_problem(
        finding for finding in check_hooks_of(slurm) if "is missing" not in finding.text
    )
    assert any("epilog is missing" in text for _, text in wrong(check_hooks_of(slurm)))


def test_hook_that_is_not_executable_is_reported(slurm: Path) -> None:
    (slurm / "hooks/prolog").chmod(0o644)
    assert f"chmod 755 {slurm}/hooks/prolog" in only_problem(check_hooks_of(slurm))


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_hook_writable_by_others_is_reported(slurm: Path, mode: int) -> None:
    (slurm / "hooks/prolog").chmod(mode)
    assert f"chmod go-w {slurm}/hooks/prolog" in only_problem(check_hooks_of(slurm))


def test_hook_not_owned_by_root_is_reported(slurm: Path) -> None:
    os.chown(slurm / "hooks/task_prolog", 1234, 0)
    assert "belongs to uid 1234" in only_problem(check_hooks_of(slurm))


def test_hook_whose_package_is_missing_is_reported(slurm: Path) -> None:
    program = slurm / "hooks/epilog"
    program.write_text(render("epilog", ["/opt/gone"], "/etc/migbatch", "/usr/bin/python3"))
    assert "loads /opt/gone, which does not exist" in only_problem(check_hooks_of(slurm))


@pytest.mark.parametrize(("closed", "mode"), [("slurm_migbatch", 0o700), ("slurm_migbatch/node/conf.py", 0o600)])
def test_package_that_users_cannot_read_is_reported(slurm: Path, closed: str, mode: int) -> None:
    """Users run TaskProlog, and pip writes with root's umask: 077 on many hardened hosts."""
    (slurm / "slurm_migbatch/node").mkdir(parents=True)
    for name in ("__init__.py", "node/__init__.py", "node/task_prolog.py", "node/conf.py"):
        (slurm / "slurm_migbatch" / name).touch(0o644)
    for part in (slurm / "slurm_migbatch", slurm / "slurm_migbatch/node"):
        part.chmod(0o755)
    open_to_users(slurm)
    assert wrong(check_hooks_of(slurm)) == []
    (slurm / closed).chmod(mode)
    problem = only_problem(check_hooks_of(slurm))
    assert problem.startswith(f"TaskProlog: users cannot read {slurm / closed} (mode 0{mode:o})")


def test_hook_of_another_release_is_reported(slurm: Path) -> None:
    """After an upgrade of the package hooks run, but lack what the new release's do."""
    program = slurm / "hooks/epilog"
    program.write_text(program.read_text().replace("10.0", "1.0"))
    (found,) = [finding for finding in check_hooks_of(slurm) if finding.level != OK]
    assert found.level == WARN and str(program) in found.text and "install --role node --apply" in found.advice


def test_unset_hook_in_slurm_conf_is_reported(slurm: Path) -> None:
    change(slurm / "slurm.conf", "TaskProlog=", "#TaskProlog=")
    assert "slurm.conf has no TaskProlog=" in only_problem(check_hooks_of(slurm))


def test_site_wrapper_that_does_not_run_the_hook_is_reported(slurm: Path) -> None:
    wrapper, ours = slurm / "site.sh", f"{slurm}/hooks/prolog"
    wrapper.write_text(f"#!/bin/sh\nmkdir -p /scratch\n# {ours}\n")
    wrapper.chmod(0o755)
    change(slurm / "slurm.conf", f"\nProlog={ours}", f"\nProlog={wrapper}")
    problem = only_problem(check_hooks_of(slurm))
    assert f"{wrapper} does not run {ours}" in problem and scripts.hook_line(ours) in problem
    wrapper.write_text(scripts.call_hook(wrapper.read_text(), ours))
    assert wrong(check_hooks_of(slurm)) == []


def test_program_without_directory_is_found_beside_slurm_conf(slurm: Path) -> None:
    change(slurm / "slurm.conf", f"\nProlog={slurm}/hooks/prolog", "\nProlog=site.sh")
    (slurm / "site.sh").write_text(scripts.stub(f"{slurm}/hooks/prolog"))
    (slurm / "site.sh").chmod(0o755)
    assert wrong(check_hooks_of(slurm)) == []


def test_hook_pattern_without_a_program_that_runs_the_hook_is_reported(slurm: Path) -> None:
    folder, ours = slurm / "prolog.d", f"{slurm}/hooks/prolog"
    folder.mkdir()
    (folder / "10-scratch.sh").write_text("#!/bin/sh\nexit 0\n")
    (folder / "10-scratch.sh").chmod(0o755)
    change(slurm / "slurm.conf", f"\nProlog={ours}", f"\nProlog={folder}/*.sh")
    assert "migbatch install --role node --edit" in only_problem(check_hooks_of(slurm))
    stub = Path(scripts.name_in(f"{folder}/*.sh"))
    stub.write_text(scripts.stub(ours))
    stub.chmod(0o755)
    assert wrong(check_hooks_of(slurm)) == []


@pytest.mark.parametrize("several", [False, True])
def test_hook_pattern_that_matches_nothing_is_reported(slurm: Path, several: bool) -> None:
    change(slurm / "slurm.conf", f"\nProlog={slurm}/hooks/prolog", f"\nProlog={slurm}/prolog.d/*.sh")
    assert f"{slurm}/prolog.d/*.sh does not run {slurm}/hooks/prolog" in only_problem(
        check_hooks_of(slurm, several=several)
    )


def test_last_of_several_hook_values_is_used_on_old_slurm_releases(slurm: Path) -> None:
    site = slurm / "site.sh"
    site.write_text("#!/bin/sh\n")
    site.chmod(0o755)
    with (slurm / "slurm.conf").open("a") as file:
        file.write(f"Prolog={site}\n")
    assert "does not run" in only_problem(check_hooks_of(slurm))
    assert wrong(check_hooks_of(slurm, several=True)) == []


def test_hook_that_would_run_twice_is_reported(slurm: Path) -> None:
    """Slurm was upgraded since: the controller's line is new, the site's script still has the earlier line."""
    site, ours, stub = slurm / "site.sh", f"{slurm}/hooks/prolog", slurm / "migbatch-prolog"
    site.write_text(scripts.call_hook("#!/bin/sh\nmkdir -p /scratch\n", ours))
    stub.write_text(scripts.stub(ours))
    for program in (site, stub):
        program.chmod(0o755)
    change(slurm / "slurm.conf", f"\nProlog={ours}", f"\nProlog={stub}\nProlog={site}")
    (found,) = [finding for finding in check_hooks_of(slurm, several=True) if finding.level != OK]
    assert found.level == WARN and f"{ours} runs 2 times for each job" in found.text
    assert found.advice == f"remove its line from {site}: {stub} is sufficient"
    site.write_text("#!/bin/sh\nmkdir -p /scratch\n")
    assert [finding for finding in check_hooks_of(slurm, several=True) if finding.level != OK] == []


@pytest.mark.parametrize(
    "line",
    [
        'if [ -z "$SLURM_JOB_GPUS" ]; then echo "export CUDA_VISIBLE_DEVICES=NoDevFiles"; fi',
        "echo unset CUDA_VISIBLE_DEVICES",
    ],
)
def test_task_prolog_that_sets_the_devices_after_ours_is_reported(slurm: Path, line: str) -> None:
    site, ours = slurm / "site.sh", f"{slurm}/hooks/task_prolog"
    change(slurm / "slurm.conf", f"TaskProlog={ours}", f"TaskProlog={site}")
    script = "#!/bin/sh\n# CUDA_VISIBLE_DEVICES\n"
    site.write_text(scripts.call_hook(f"{script}{line}\n", ours))
    site.chmod(0o755)
    (found,) = [finding for finding in check_hooks_of(slurm) if finding.level != OK]
    assert (found.level, found.subject) == (WARN, "TaskProlog")
    assert found.text.startswith(f"{site} changes CUDA_VISIBLE_DEVICES after {ours}")
    assert f"in {site} move the line that runs ours below" in found.advice
    site.write_text(f"{script}{line}\n{scripts.hook_line(ours)}\n")
    assert [finding for finding in check_hooks_of(slurm) if finding.level != OK] == []


# --- Slurm's files


@pytest.mark.parametrize("kind", ["nvml", "full", "NVML"])
def test_autodetect_on_a_mig_node_is_reported(slurm: Path, kind: str) -> None:
    def check(text: str):
        (slurm / "gres.conf").write_text(text)
        return slurmfiles.check_autodetect(conf(slurm, "gres.conf"), ["n1", "n2"])

    assert "NodeName=n[1-2] AutoDetect=off" in only_problem(check(f"AutoDetect={kind}\n"))
    assert "gres.conf:2: " in only_problem(check(f"AutoDetect=off\nNodeName=n2 AutoDetect={kind}\n"))
    assert wrong(check(f"AutoDetect={kind}\nNodeName=n[1-2] AutoDetect=off\n")) == []
    assert wrong(check(f"NodeName=c1 AutoDetect={kind}\n")) == []
    assert wrong(check("Name=gpu File=/dev/nvidia0\n")) == []


def test_unconstrained_gpu_devices_are_reported(slurm: Path) -> None:
    def check(plugin: str, *whole: str, gres: str = "gpu:1,mig:1g.10gb:7") -> list[Finding]:
        (slurm / "slurm.conf").write_text(f"TaskPlugin={plugin}\nNodeName=n[1-2] Gres={gres}\n")
        files = conf(slurm), conf(slurm, "cgroup.conf"), conf(slurm, "gres.conf")
        return list(slurmfiles.check_cgroup(*files, "n1", whole=whole, sliced=()))

    assert [finding.level for finding in check("task/affinity,task/cgroup", "/dev/nvidia1")] == [OK]
    assert "every job can open /dev/nvidia1" in only_problem(check("task/none", "/dev/nvidia1"))
    assert [finding.level for finding in check("task/none")] == [OK], "no slice is better protected with cgroups"
    unmanaged = check("task/none", "/dev/nvidia1", gres="mig:1g.10gb:7")
    assert [finding.level for finding in unmanaged] == [OK], (
        "Slurm allocates no whole GPU there, as for one of a display"
    )
    (slurm / "cgroup.conf").write_text("ConstrainDevices=no\n")
    assert "/dev/nvidia1" in only_problem(check("task/cgroup", "/dev/nvidia1"))


@pytest.mark.parametrize(
    ("line", "listed"),
    [
        ("NodeName=n[1-2] Name=gpu Type=h100 File=/dev/nvidia[0-3]", "/dev/nvidia0, /dev/nvidia1"),
        ("Name=gpu File=/dev/nvidia1", "/dev/nvidia1"),
        ("NodeName=n1 Name=gpu MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia0"),
        ("NodeName=n2 Name=gpu File=/dev/nvidia[0-3]", ""),
        ("NodeName=n1 Name=gpu File=/dev/nvidia[2-3]", ""),
        ("NodeName=n1 Name=gpu Count=4", ""),
    ],
)
def test_devices_that_slurm_denies_to_jobs_with_slices_are_reported(slurm: Path, line: str, listed: str) -> None:
    """Slurm denies a job every device of gres.conf that is not allocated to it, and slices are only counted."""
    (slurm / "gres.conf").write_text(f"NodeName=n1 AutoDetect=off\n{line}\n")

    def check(gres: str) -> list[Finding]:
        (slurm / "slurm.conf").write_text(f"TaskPlugin=task/cgroup,task/affinity\nNodeName=n[1-2] Gres={gres}\n")
        files = conf(slurm), conf(slurm, "cgroup.conf"), conf(slurm, "gres.conf")
        whole, sliced = ("/dev/nvidia2", "/dev/nvidia3"), ("/dev/nvidia0", "/dev/nvidia1")
        return list(slurmfiles.check_cgroup(*files, "n1", whole=whole, sliced=sliced))

    found = check("gpu:h100:4,mig:1g.10gb:7")
    assert [finding.level for finding in found] == [FAIL if listed else OK]
    assert not listed or f"a job can open {listed}, a device of gres.conf" in only_problem(found)
    assert [finding.level for finding in check("mig:1g.10gb:7")] == [OK], "Slurm ignores what the node does not count"


def test_cloud_nodes_that_slurm_hides_are_reported(slurm: Path) -> None:
    (slurm / "slurm.conf").write_text(
        "NodeName=DEFAULT State=CLOUD\nNodeName=g[1-2] Gres=gpu:4,mig:none:28\nNodeName=c1\n"
        "NodeName=g3 Gres=mig:none:7 State=UNKNOWN\n"
    )
    for private in ("none", "jobs,usage"):
        (found,) = slurmfiles.check_cloud_nodes(conf(slurm), {"privatedata": private})
        assert found.level == WARN and found.text.startswith("g[1-2]: Slurm hides State=CLOUD nodes")
    assert list(slurmfiles.check_cloud_nodes(conf(slurm), {"privatedata": "cloud,jobs"})) == []


def test_containers_in_which_tasks_fail_or_get_no_slices_are_reported(slurm: Path) -> None:
    enroot, task_prolog = slurm / "enroot", slurm / "migbatch-task_prolog"

    def check(release: tuple[int, ...] = (22, 5)) -> list[Finding]:
        return list(containers.check_containers(containers.gather(conf(slurm), str(enroot)), release))

    change(slurm / "slurm.conf", "TaskProlog=", f"TaskProlog={task_prolog}\n#")
    assert check() == [], "without pyxis"
    (slurm / "plugstack.conf").write_text("#optional spank_pyxis.so\ninclude more.d/*\n")
    (slurm / "more.d").mkdir()
    assert check() == []
    (slurm / "more.d/p.conf").write_text("required /usr/lib/slurm/spank_pyxis.so runtime_path=/run\n")
    assert f"{task_prolog} does not exist" in only_problem(check())
    assert [finding.text for finding in check() if finding.level == WARN] == [
        f"{enroot}/hooks.d/50-migbatch.sh is missing: containers get no slices"
    ]
    for folder in ("mounts.d", "hooks.d"):
        (enroot / folder).mkdir(parents=True)
    (enroot / "hooks.d/50-migbatch.sh").touch()
    (enroot / "mounts.d/10-system.fstab").write_text(f"/proc /proc none rbind\n#{task_prolog}\n/ /host none bind\n")
    assert [finding.level for finding in check()] == [FAIL], "neither mounts it"
    for mount in (f"{task_prolog}\n", f"/x {task_prolog} none bind\n", f"{slurm} {slurm} none rbind\n"):
        (enroot / "mounts.d/site.fstab").write_text(mount)
        assert [finding.level for finding in check()] == [OK], mount
    (old,) = check((24, 11))
    assert old.level == WARN and "libraries" in old.text
    assert [finding.level for finding in check((25, 11))] == [OK]


def test_missing_or_unreadable_cli_filter_is_reported(slurm: Path) -> None:
    assert list(slurmfiles.check_cli_filter(conf(slurm))) == []
    (slurm / "slurm.conf").write_text("CliFilterPlugins=cli_filter/lua\n")
    script = slurm / "cli_filter.lua"
    assert "is missing: every srun" in only_problem(slurmfiles.check_cli_filter(conf(slurm)))
    script.write_text(scripts.DOES_NOTHING)
    script.chmod(0o600)
    assert "users cannot read it" in only_problem(slurmfiles.check_cli_filter(conf(slurm)))


@pytest.mark.parametrize("skipped", [True, False])
def test_cli_filter_that_loads_a_missing_file_is_reported(open_tmp_path: Path, skipped: bool) -> None:
    script, module = open_tmp_path / "cli_filter.lua", open_tmp_path / "migbatch_cli_filter.lua"
    (open_tmp_path / "slurm.conf").write_text("CliFilterPlugins=lua\n")
    script.write_text(scripts.call_lua("", str(module)) if skipped else f'local migbatch = dofile("{module}")\n')
    (found,) = slurmfiles.check_cli_filter(conf(open_tmp_path))
    assert found.level == (WARN if skipped else FAIL) and f"loads {module}, which is missing" in found.text
    assert str(module) in found.advice and ("every srun" in found.text) is not skipped
    module.touch()
    assert [finding.level for finding in slurmfiles.check_cli_filter(conf(open_tmp_path))] == [OK]


# --- GPUs


@pytest.fixture(scope="session")
def library() -> Path:
    return build()


@contextmanager
def a_node(root: Path, library: Path, gpus=("h100-80gb",), *, mig: bool = True, **settings: object) -> Iterator[Node]:
    node = Node(root, "n1", gpus, library, mig=mig, settings=settings)
    try:
        yield node
    finally:
        node.close()


def gpu_findings(node: Node, held=()) -> list[Finding]:
    driver = Gpus(node.config)
    try:
        return list(gpus.check_gpus(gpus.gather(driver.all(), node.config), held))
    finally:
        driver.reset()


def test_gpu_in_mig_mode_is_ok(tmp_path: Path, library: Path) -> None:
    with a_node(tmp_path / "n1", library) as node:
        assert wrong(gpu_findings(node)) == []


def test_mig_off_or_pending_a_reset_is_reported(tmp_path: Path, library: Path) -> None:
    with a_node(tmp_path / "n1", library, ["a100-40gb"], mig=False) as node:
        assert "MIG is off" in only_problem(gpu_findings(node)) and "migbatch node init" in only_problem(
            gpu_findings(node)
        )
        driver = Gpus(node.config)
        driver.all()[0].set_mig_mode(True)
        driver.reset()
        problem = only_problem(gpu_findings(node))
        assert "MIG needs a reset" in problem and "nvidia-smi --gpu-reset -i GPU-" in problem


def test_gpus_that_only_root_may_examine_are_no_fault_for_other_users(open_tmp_path: Path, library: Path) -> None:
    with a_node(open_tmp_path / "n1", library) as node:
        output = open_tmp_path / "found"
        output.touch()
        output.chmod(0o666)

        def check() -> int:
            os.setresuid(ALICE, ALICE, ALICE)
            output.write_text("\n".join(map(str, gpu_findings(node))))
            return 0

        in_child(check)
        text = output.read_text()
        assert f"level='{UNKNOWN}', subject='GPU 0'" in text and "run migbatch doctor as root" in text
        assert "drain the node" not in text


def test_lost_gpu_is_reported(tmp_path: Path, library: Path) -> None:
    with a_node(tmp_path / "n1", library, ["h100-80gb", "h100-80gb"]) as node:
        driver = Gpus(node.config)
        listed = driver.all()
        node.machine.set_lost(1)
        assert only_problem(gpus.check_gpus(gpus.gather(listed, node.config), ())).startswith("GPU 1: ")
        driver.reset()
        found = examine_quietly(NodePlaces(str(node.etc)), node.config, driver)
        driver.reset()
        assert any(subject == "GPUs" and "fell off the bus" in text for subject, text in wrong(found))


def test_gpus_excluded_by_node_conf_are_reported(tmp_path: Path, library: Path) -> None:
    with a_node(tmp_path / "n1", library, Gpus="7") as node:
        assert "Gpus= in node.conf" in only_problem(gpu_findings(node))


def test_entry_of_gpus_that_names_no_gpu_is_reported(tmp_path: Path, library: Path) -> None:
    """After a GPU was replaced, the new one has another UUID and would silently stay unused."""
    with a_node(tmp_path / "n1", library, ["h100-80gb", "h100-80gb"]) as node:
        first = node.machine.dump()["gpus"][0]["uuid"]
        for names, absent in ((f"{first},GPU-replaced", "GPU-replaced"), (f"{first},1", "")):
            node.configure(Gpus=names)
            driver = Gpus(node.config)
            found = examine_quietly(NodePlaces(str(node.etc)), node.config, driver)
            driver.reset()
            texts = [finding.text for finding in found if finding.subject == "GPUs"]
            assert texts == ([f"Gpus= in node.conf names {absent}, which the driver does not list"] if absent else [])


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("nv-hostengine", "systemctl stop nvidia-dcgm"),
        ("nvidia-persiste", "systemctl stop nvidia-persistenced"),
        ("slurmd", "HWLOC_COMPONENTS=-opencl"),
        ("python3", "end process "),
    ],
)
def test_processes_blocking_mig_mode_are_reported_with_advice(
    tmp_path: Path, library: Path, name: str, advice: str
) -> None:
    """A process of that name has the device open, like DCGM, persistenced, hwloc in slurmd or a job's program."""
    with a_node(tmp_path / "n1", library, mig=False) as node:
        device = node.machine.dev_root / "nvidia0"
        assert list(gpus.holders([str(device)])) == []
        line = [sys.executable, "-c", _HOLD, name, str(device)]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            held = list(gpus.holders([str(device)]))
            alone = list(gpus.holders([str(device)], gpus.SLURM))
            process.communicate(b"\n")
        assert [(holder.pid, holder.name) for holder in held] == [(process.pid, name)]
        assert bool(alone) is (name == "slurmd")
        found = gpu_findings(node, held)
        problem = next(f"{finding.text} -> {finding.advice}" for finding in found if finding.subject == "GPU 0")
        assert f"in use by {name} ({process.pid})" in problem and advice in problem


@pytest.mark.parametrize("name", ["data", "nvidia0"])
def test_hung_file_system_does_not_block_the_checks(open_tmp_path: Path, name: str) -> None:
    """A user's FUSE mount that others may enter, or a server that is down; the agent checks once a minute."""
    device, hung = open_tmp_path / "dev" / "nvidia0", open_tmp_path / name
    device.parent.mkdir()
    device.touch()
    hung.mkdir()
    hold = f"import os, time\nos.open({str(hung)!r}, os.O_PATH)\nprint(flush=True)\ntime.sleep(600)"
    code = f"from slurm_migbatch.doctor.gpus import holders\nassert not list(holders([{str(device)!r}]))"
    with hung_mount(hung), subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        process = subprocess.Popen([sys.executable, "-c", code])
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()
            holder.kill()
    process.wait()


@pytest.mark.parametrize(("user", "listed"), [(0, False), (65534, True)])
def test_only_migbatch_processes_of_root_are_not_listed_as_holders(
    open_tmp_path: Path, user: int, listed: bool
) -> None:
    """The arguments of users' processes are not read: they may be in a file whose file system does not answer."""
    device = open_tmp_path / "nvidia0"
    device.touch(0o644)
    hold = f"import os\nos.setuid({user})\nheld = open({str(device)!r})\nprint(flush=True)\ninput()"
    line = [sys.executable, "-c", hold, "/opt/bin/migbatch"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert [holder.pid for holder in gpus.holders([str(device)])] == [process.pid] * listed
        process.communicate(b"\n")


def test_setuid_program_that_a_user_calls_slurmd_is_not_taken_for_slurmd(open_tmp_path: Path) -> None:
    """It runs as root, under the name of the user's link to it, with the files that the user has opened."""
    device, program = open_tmp_path / "nvidia0", open_tmp_path / "slurmd"
    device.touch(0o644)
    shutil.copy(shutil.which("sleep") or "", program)
    program.chmod(0o4755)
    with device.open() as held, subprocess.Popen([program, "600"], stdin=held, user=65534) as process:
        try:
            assert Path(f"/proc/{process.pid}").stat().st_uid == 0
            assert list(gpus.holders([str(device)], gpus.SLURM)) == []
            assert [holder.pid for holder in gpus.holders([str(device)])] == [process.pid]
        finally:
            process.kill()


def test_process_names_are_printed_without_control_characters(
    tmp_path: Path, library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any user may choose a process name, and open a GPU on which MIG is off."""
    with a_node(tmp_path / "n1", library, mig=False) as node:
        device = node.machine.dev_root / "nvidia0"
        line = [sys.executable, "-c", _HOLD, "\x1b[2J\x9b\nok   n1", str(device)]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            held = list(gpus.holders([str(device)]))
            process.communicate(b"\n")
        print_findings(list(gpu_findings(node, held)), quiet=False)
    shown = capsys.readouterr().out
    assert f"ok   n1 ({process.pid})" in shown
    assert all(text.isprintable() for text in shown.split("\n"))
    assert not [text for text in shown.split("\n") if text.startswith("ok   n1")]


def test_mig_manager_that_systemd_starts_is_reported(tmp_path: Path) -> None:
    """At boot it sets MIG mode and makes slices by its own configuration, as it did before migbatch was installed."""
    unit, enabled = tmp_path / "nvidia-mig-manager.service", tmp_path / "units/multi-user.target.wants"
    unit.touch()
    enabled.mkdir(parents=True)
    assert not list(gpus.check_manager(tmp_path / "units"))
    (enabled / unit.name).symlink_to(unit)
    (found,) = gpus.check_manager(tmp_path / "units")
    assert (found.level, found.subject) == (WARN, "nvidia-mig-manager")
    assert found.advice.startswith("systemctl disable nvidia-mig-manager")
    unit.unlink()
    assert not list(gpus.check_manager(tmp_path / "units")), "it was removed"


def test_slurmd_holding_a_gpu_in_mig_mode_is_reported(tmp_path: Path, library: Path) -> None:
    with a_node(tmp_path / "n1", library) as node:
        device = str(node.machine.dev_root / "nvidia0")
        held = [gpus.DeviceHolder(7, "slurmd", device)]
        assert "slices stay busy" in only_problem(gpu_findings(node, held))
        assert wrong(gpu_findings(node, [gpus.DeviceHolder(7, "nv-hostengine", device)])) == []


def test_setuid_nvidia_modprobe_is_reported(tmp_path: Path) -> None:
    helper = tmp_path / "nvidia-modprobe"
    helper.touch()
    assert wrong(gpus.check_helper(helper_is_setuid([str(helper)]))) == []
    helper.chmod(0o755 | stat.S_ISUID)
    assert f"chmod u-s {helper}" in only_problem(gpus.check_helper(helper_is_setuid([str(helper)])))


# --- room


@contextmanager
def a_disk(place: Path, options: str) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "doctor", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("size=1m", "has 1 MiB left"),
        ("size=64m,nr_inodes=20", "inodes left"),
        ("size=64m,ro", "is mounted read-only"),
    ],
)
def test_full_or_read_only_disk_is_reported(tmp_path: Path, options: str, message: str) -> None:
    with a_disk(tmp_path / "disk", options) as place:
        assert message in only_problem(
            disks.check_disks([disks.read_disk("journal and spool", str(place / "n1/state"), 16)])
        )
    with a_disk(tmp_path / "other", "size=64m") as place:
        assert wrong(disks.check_disks([disks.read_disk("journal and spool", str(place), 16)])) == []


# --- drained, clock, reports


@pytest.mark.parametrize(
    ("state", "reason", "level"),
    [
        ("IDLE", "", OK),
        ("MIXED", "", OK),
        ("IDLE+DRAIN", "maintenance", WARN),
        ("IDLE+DRAIN", "migbatch: GPU-1 is lost", FAIL),
        ("IDLE+DRAIN", "migbatch: GPU-1 is lost, Xid=79", FAIL),
        ("DOWN+DRAIN", "Prolog error", FAIL),
        ("IDLE+DRAIN", "Epilog error", FAIL),
    ],
)
def test_node_drained_by_a_hook_is_reported_with_the_hook_error(state: str, reason: str, level: str) -> None:
    shown = f"NodeName=n1 Arch=x86_64 State={state} ThreadsPerCore=1 Partitions=gpu " + (
        f"Reason={reason} [root@2026-11-22T22:10:00]\n" if reason else "\n"
    )
    shown_state, shown_reason = fields_of(shown)["State"], reason_of(shown)
    assert (shown_state, shown_reason) == (state, reason)
    (found,) = drained.check_drained("n1", shown_state, shown_reason, "prolog exited with 11: no directory")
    assert found.level == level
    assert ("error of the hook: prolog exited with 11" in found.text) is (level == FAIL)
    # if slurmd drains a node because of its Prolog, Slurm holds the job
    assert ("scontrol release" in found.advice) is (level == FAIL)


@pytest.mark.parametrize(
    ("state", "level"),
    [
        ("IDLE+NOT_RESPONDING", WARN),
        ("IDLE+COMPLETING+NOT_RESPONDING", WARN),
        ("IDLE+CLOUD+NOT_RESPONDING+POWERING_UP", OK),
        ("MIXED+REBOOT_ISSUED+NOT_RESPONDING", OK),
    ],
)
def test_node_whose_slurmd_does_not_answer_is_reported(state: str, level: str) -> None:
    """Slurm starts no jobs there, and sets it to DOWN only after SlurmdTimeout."""
    (found,) = drained.check_drained("n1", state, "", "")
    assert found.level == level and state.lower() in found.text
    assert ("systemctl status slurmd" in found.advice) is (level == WARN)


def test_error_of_the_last_failed_hook_is_recorded(tmp_path: Path) -> None:
    assert failure.last(str(tmp_path)) == ""
    failure.note(str(tmp_path), "prolog", 11, "no\nx" * 1000)
    recorded = failure.last(str(tmp_path))
    assert recorded.startswith("prolog exited with 11 (20") and len(recorded) < failure.LONGEST + 100
    (tmp_path / failure.NAME).write_text("odd")
    assert failure.last(str(tmp_path)) == ""


@pytest.mark.parametrize(("ahead", "text"), [(400.0, "400 s ahead of"), (-7.0, "7 s behind")])
def test_clock_difference_to_the_controller_is_reported(ahead: float, text: str) -> None:
    assert text in only_problem(link.check_clock("this host", ahead))
    assert wrong(link.check_clock("this host", ahead / 1000)) == []


def test_reported_findings_are_bounded_and_sorted_worst_first() -> None:
    many = [Finding(OK, "a", "b"), *(Finding(WARN, "x" * 1000, "y" * 1000, "z" * 1000) for _ in range(1000))]
    found = rows_to_report([*many, Finding(UNKNOWN, "u", "t", "a"), Finding(FAIL, "s", "t", "a")])
    assert [finding["level"] for finding in found[:3]] == [FAIL, UNKNOWN, WARN]
    assert len(found) == MOST and max(len(text) for finding in found for text in finding.values()) == LONGEST


def test_healthy_node_has_nothing_to_correct(open_tmp_path: Path, library: Path, slurm: Path) -> None:
    settings = {"SlurmConf": slurm / "slurm.conf"}
    with a_node(slurm / "n1", library, **settings) as node:
        node.executor.journal.check()
        places = NodePlaces(str(node.etc), f"{slurm}/hooks", name="n1")
        driver = Gpus(node.config)
        assert wrong(examine_quietly(places, node.config, driver)) == []
        (slurm / "gres.conf").write_text("AutoDetect=nvml\n")
        assert only_problem(examine_quietly(places, node.config, driver)).startswith("gres.conf: ")
        driver.reset()


def test_files_readable_by_root_only_are_no_problem_for_other_users(open_tmp_path: Path, slurm: Path) -> None:
    """An administrator who is not root yet must not be told that a hook or slurm.conf does not exist."""
    (slurm / "wrapper").write_text("#!/bin/sh\n")
    (slurm / "wrapper").chmod(0o700)
    change(slurm / "slurm.conf", f"Prolog={slurm}/hooks/prolog", f"Prolog={slurm}/wrapper")
    etc = slurm / "etc"
    etc.mkdir()
    (etc / "node.conf").write_text("")
    places = NodePlaces(str(etc), f"{slurm}/hooks", f"{slurm}/slurm.conf", "n1")

    output = open_tmp_path / "found"

    def found() -> str:
        def check() -> int:
            os.setresuid(ALICE, ALICE, ALICE)
            output.write_text(
                "\n".join(f"{finding.level} {finding.subject}: {finding.text}" for finding in examine(places))
            )
            return 0

        in_child(check)
        return output.read_text()

    output.touch()
    output.chmod(0o666)
    assert f"unknown Prolog: {slurm}/wrapper is readable by root only" in found()
    change(slurm / "slurm.conf", f"Prolog={slurm}/wrapper", f"Prolog={slurm}/hooks/prolog")
    (slurm / "hooks/prolog").chmod(0o700)
    assert found().count(f"unknown Prolog: {slurm}/hooks/prolog is readable by root only") == 1
    (slurm / "gres.conf").chmod(0o600)
    with (slurm / "slurm.conf").open("a") as file:
        file.write("CliFilterPlugins=lua\n")
    text = found()
    assert text.count(f"unknown files: {slurm}/gres.conf: Permission denied") == 1
    assert f"FAIL cli_filter.lua: {slurm}/cli_filter.lua is missing" in text, "the later checks are made"
    (slurm / "slurm.conf").chmod(0o600)
    text = found()
    assert f"unknown files: {slurm}/slurm.conf: Permission denied" in text and "unknown controller: " in text


@pytest.mark.parametrize(("deadline", "limit", "short"), [(30, 60, False), (30, 58, True), (50, 60, True)])
def test_slurm_that_kills_hooks_before_they_give_up_is_reported(
    tmp_path: Path, library: Path, slurm: Path, deadline: int, limit: int, short: bool
) -> None:
    """The longest hook waits in vain for the agent, for its own process, and for the one that refuses the job."""
    with (slurm / "slurm.conf").open("a") as file:
        file.write(f"PrologEpilogTimeout={limit}\n")
    with a_node(tmp_path / "n1", library, SlurmConf=slurm / "slurm.conf", HookDeadline=deadline) as node:
        places = NodePlaces(str(node.etc), f"{slurm}/hooks", name="n1")
        found = wrong(examine_quietly(places, node.config, node.executor.gpus))
    assert any(subject == "PrologEpilogTimeout" for subject, _ in found) is short
