"""docs/install.md on a site that was set up by hand: only the page's commands change anything, up to the first slice.

The tests build on each other, in the order of the document. The site's own prolog, rules and limits stay active.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from slurm_migbatch.install.scripts import SEVERAL
from tests.support.stock_site import GPU_NODES, NODES, StockSite, headings

pytestmark = pytest.mark.slurm
MIGBATCH = "/opt/slurm-migbatch/bin/migbatch"
DRY = f"{MIGBATCH} install --role"
USER = "mbalice"
HOOKS = ("Prolog", "Epilog", "TaskProlog")


@pytest.fixture(scope="module")
def untouched() -> dict[str, tuple[bytes, int, int]]:
    """The site's files before anything was installed; filled by the fixture `site`."""
    return {}


@pytest.fixture(scope="module")
def site(untouched: dict[str, tuple[bytes, int, int]], slurm_root: str) -> Iterator[StockSite]:
    """The site with everything installed by the document's commands, up to the login node."""
    running = StockSite(slurm_root)
    with running:
        untouched.update(state_of(running))
        running.follow("On the controller", "ctl")
        assert state_of(running) == untouched, "nothing of Slurm's is touched before nodes have reported"
        running.follow("On each GPU node", *GPU_NODES)
        running.wait("the nodes' reports", lambda: reported(running) == set(GPU_NODES))
        running.follow("On the controller, once the nodes have reported", "ctl")
        running.follow("On every node", *NODES)
        running.follow("On a login node", "login")
        running.wait("an offer", lambda: offers(running))
        yield running


def offers(site: StockSite) -> bool:
    """Return whether every GPU node has the counts of a plan: the rest of its counts is `mig:none` then."""
    gres = site.on("ctl", f"sinfo -h -N -p gpu -n {','.join(GPU_NODES)} -o %G", codes=(0, 1)).splitlines()
    return len(gres) == len(GPU_NODES) and all(re.search(r"mig:none:[1-9]", count) for count in gres)


def state_of(site: StockSite) -> dict[str, tuple[bytes, int, int]]:
    """The contents of /etc/slurm: name -> bytes, mode and owner."""
    folder = site.directory / "slurm"
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.stat()
        text = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = text, status.st_mode, status.st_uid
    return found


def reported(site: StockSite) -> set[str]:
    text = site.on("ctl", f"{MIGBATCH} nodes", codes=(0, 1))
    return {node for node in GPU_NODES if re.search(rf"^{node}\b", text, re.MULTILINE)}


def submit(site: StockSite, *options: str, wrap: str = "env", name: str = "work") -> int:
    line = ["sbatch", "--parsable", "-p", "gpu", "-t", "5", "-J", name, *options, "--wrap", wrap]
    return int(site.on("login", line, USER).split()[-1])


def state(site: StockSite, job: int) -> str:
    text = site.on("login", f"scontrol -o show job {job}")
    found = re.search(r"JobState=(\w+) Reason=(\S+)", text)
    assert found, text
    return found[1]


def ended(site: StockSite, job: int) -> dict[str, str]:
    """Wait for a job's end; return its script's environment variables."""
    site.wait(f"job {job}", lambda: state(site, job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"))
    assert state(site, job) == "COMPLETED", site.on("login", f"scontrol show job {job}")
    lines = (site.home(USER) / f"slurm-{job}.out").read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines)


def test_document_has_no_sections_but_those_that_tests_follow():
    assert headings() == [
        "Packages",  # instead of venv and pip: tests/packages
        "On the controller",
        "On each GPU node",
        "On the controller, once the nodes have reported",
        "On every node",
        "On a login node",
        "On a login node, as a user",
        "Two controllers",  # test_two_controllers.py
        "On the second controller, once every slurmd was restarted",
        "Uninstall",
        "Uninstall, on each GPU node",
        "Uninstall, on every node",
    ]


def test_first_job_gets_its_slice(site: StockSite):
    job = int(site.follow("On a login node, as a user", "login", user=USER).split()[-1])
    site.wait("its end", lambda: state(site, job) == "COMPLETED")
    assert (site.home(USER) / f"slurm-{job}.out").read_text().startswith("MIG-")


@pytest.mark.parametrize("profile", ["1g.6gb", "1g.5gb", "2g.20gb"])
def test_jobs_get_slices_of_every_gpu_model_and_the_sites_scripts_run(site: StockSite, profile: str):
    found = ended(site, submit(site, f"--gres=mig:{profile}", wrap='env; test -d "$SCRATCH" && echo scratch=there'))
    assert found["CUDA_VISIBLE_DEVICES"].startswith("MIG-") and found["MIGBATCH_PROFILE"] == profile
    assert found["SLURM_JOB_NODELIST"] == ("m1" if profile in ("1g.6gb", "1g.5gb") else found["SLURM_JOB_NODELIST"])
    assert found["scratch"] == "there", "the site's prolog made it, its TaskProlog named it"
    site.wait("the site's epilog", lambda: "scratch-" not in site.on("m1", "ls /var/tmp"))


def test_job_waits_for_a_profile_not_on_offer_whatever_else_it_requests(site: StockSite):
    """The first such jobs are submitted while nothing offers the profile, and are served by a new layout."""
    offered = site.on("ctl", "sinfo -h -N -p gpu -o '%N %G'")
    assert not re.search(r"mig:7g\.80gb:[1-9]", re.sub(r"^no-mig-slice-free.*$", "", offered, flags=re.MULTILINE))
    asked = ("--gres=mig:7g.80gb", "-c", "2", "--mem=180G", "-C", "h100")
    jobs = [submit(site, *asked), submit(site, "--gres=mig:4g.24gb", "-c", "16", "--mem=100G", "--tmp=900")]
    assert [ended(site, job)["MIGBATCH_PROFILE"] for job in jobs] == ["7g.80gb", "4g.24gb"]
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        submit(site, "--gres=mig:7g.80gb", "--mem=300G")


def test_submit_rules_of_the_site_still_apply(site: StockSite):
    with pytest.raises(AssertionError, match="jobs need a project"):
        submit(site, "--gres=mig:1g.10gb", name="noproject")
    job = submit(site, "--gres=mig:1g.10gb")
    assert "AdminComment=seen by the rule of the house" in site.on("login", f"scontrol -o show job {job}")
    with pytest.raises(AssertionError, match="limit"):
        site.on("login", "sbatch -p gpu --wrap true", USER)  # require_timelimit is the site's too
    with pytest.raises(AssertionError, match="mig:1g"):
        submit(site, "--gres=mig:1g")  # migbatch's rule, after the site's
    ended(site, job)
    plain = site.on("login", ["sbatch", "--parsable", "-p", "cpu", "-t", "5", "--wrap", "env"], USER)
    assert "CUDA_VISIBLE_DEVICES" not in ended(site, int(plain.split()[-1]))


def test_request_for_a_whole_gpu_becomes_a_slice(site: StockSite):
    found = ended(site, submit(site, "--gpus=h100:1"))
    assert found["CUDA_VISIBLE_DEVICES"].startswith("MIG-")


def test_whole_gpu_is_of_the_model_of_the_constraint_or_node(site: StockSite):
    """Without either it is that of most GPUs of the partition."""
    assert ended(site, submit(site, "--gpus=1", "-C", "ampere"))["MIGBATCH_PROFILE"] == "7g.40gb"
    found = ended(site, submit(site, "--gpus=1", "-w", "m1"))
    assert (found["MIGBATCH_PROFILE"], found["SLURM_JOB_NODELIST"]) == ("7g.40gb", "m1")
    message = site.on("login", "sbatch -p gpu -t 5 -J work --gpus=1 --wrap true 2>&1", USER)
    assert "of its kinds (h100-80gb, a100-40gb, a30-24gb) the first is taken" in message


def test_install_has_nothing_more_to_do_and_doctor_reports_no_failure(site: StockSite):
    for host, role in (("ctl", "controller"), ("h1", "node"), ("h2", "node"), ("m1", "node"), ("login", "login")):
        assert site.on(host, f"{DRY} {role} --edit").endswith("nothing to do\n")
        assert site.on(host, f"{DRY} {role} --edit --apply").endswith("0 files and directories changed\n")
    # where slurm.conf now names the hooks, nodes report within a minute that they are called
    site.wait("0 failed", lambda: "0 failed" in site.on("ctl", f"{MIGBATCH} doctor", codes=(0, 1)))


def test_migbatch_hooks_are_installed_once(site: StockSite):
    """Where slurm.conf may have several values the controller adds migbatch's hook, else it is added to the site's."""
    several = site.root.version() >= SEVERAL["Prolog"]
    beside = [path.name for path in (site.directory / "slurm/prolog.d").iterdir() if "migbatch" in path.name]
    assert bool(beside) is not several
    assert ("migbatch" in (site.directory / "slurm/epilog.sh").read_text()) is not several
    shown = site.on("ctl", "scontrol show config")
    assert ("/etc/slurm/migbatch-prolog" in shown and "/etc/slurm/migbatch-epilog" in shown) is several
    assert "migbatch" in (site.directory / "slurm/task_prolog.sh").read_text()
    output = site.on("h1", f"{MIGBATCH} doctor --role node", codes=(0, 1, 2))
    assert all(re.search(rf"^ok +{key}: runs /etc/migbatch/hooks/", output, re.MULTILINE) for key in HOOKS), output


def test_edited_file_is_not_overwritten(site: StockSite):
    path = site.directory / "slurm/migbatch.conf"
    ours = path.read_text()
    path.write_text(ours.replace("TmpDisk=1000", "TmpDisk=2000"))
    output = site.on("ctl", f"{DRY} controller --edit --apply", codes=(1,))
    assert "/etc/slurm/migbatch.conf was edited since migbatch wrote it" in output
    assert "TmpDisk=2000" in path.read_text()
    path.write_text(ours)


def test_cli_filter_is_installed_only_on_request(site: StockSite):
    assert re.search(r"CliFilterPlugins\s+= \(null\)", site.on("ctl", "scontrol show config"))
    output = site.on("ctl", f"{DRY} controller --edit --cli-filter", codes=(1,))
    assert "+CliFilterPlugins=cli_filter/lua" in output and (site.directory / "slurm/cli_filter.lua").exists()


def test_uninstall_is_refused_while_a_job_requests_a_slice(site: StockSite):
    job = submit(site, "--gres=mig:1g.10gb", "-H")
    before = state_of(site)
    output = site.on("ctl", f"{DRY} controller --uninstall --apply", codes=(1,))
    assert f"{job} (pending)" in output and "scancel" in output
    assert state_of(site) == before
    site.on("login", f"scancel {job}", USER)


def test_uninstall_keeps_changes_of_the_site_and_restores_all_other_bytes(
    site: StockSite, untouched: dict[str, tuple[bytes, int, int]]
):
    partitions = site.directory / "slurm/partitions.conf"
    late = b"PartitionName=late Nodes=c1 # opened while migbatch was here\n"
    partitions.write_bytes(partitions.read_bytes() + late)
    site.wait("the end of all jobs", lambda: site.on("ctl", "squeue -h -a") == "")
    site.follow("Uninstall", "ctl")
    site.follow("Uninstall, on each GPU node", *GPU_NODES)
    site.follow("Uninstall, on every node", *NODES)
    expected = dict(untouched)
    text, mode, owner = expected["partitions.conf"]
    expected["partitions.conf"] = text + late, mode, owner
    assert state_of(site) == expected
    left = site.on("h1", "ls -A /etc/migbatch /etc/systemd/system/migbatch-node.service", codes=(2,))
    assert re.findall(r"^\S+$", left.partition("/etc/migbatch:")[2], re.MULTILINE) == ["node.conf"], "it was edited"
    assert "No such file" in site.on("ctl", "ls /etc/migbatch", codes=(2,))
    job = site.on("login", ["sbatch", "--parsable", "-p", "gpu", "-t", "5", "--gres=gpu:h100:1", "--wrap", "env"], USER)
    deadline = time.monotonic() + 120
    while state(site, int(job.split()[-1])) != "COMPLETED" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "SCRATCH" in ended(site, int(job.split()[-1])), "whole GPUs are handed out as before"
