"""Every command of docs/asked.md, in the page's order, as a user of a test bed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import cancel
from tests.support.login_node import LoginNode

pytestmark = pytest.mark.slurm
PAGE = Path(__file__).resolve().parents[2] / "docs/asked.md"
SECTION = re.compile(r"^## (.+?)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = [(name, "".join(BLOCK.findall(text))) for name, text in SECTION.findall(PAGE.read_text(encoding="utf-8"))]
#: what a section's commands or its last batch job print
ANSWERS = {
    "How does a job": r"2g\.20gb MIG-",
    "Can I ask by memory": r"1g\.20gb has 2\d{4} MiB",
    "Free slices": r"Slurm:\s+JobHeldUser",
    "How do I use several": r"task 1: MIG-",
    "Counts of slices": r"mig:none:\d+[\s\S]*n1 (idle|mixed)",
    "What did my job": r"2g\.20gb[\s\S]*COMPLETED",
    "Which compute instance": r"3g\.40gb MIG-",
    "Nodes and partitions": r"n1",
    "A notebook": r"would have MIG-",
    "Do Snakemake": "a rule of Snakemake has MIG-",
    "Does MPS": "no MPS in this partition",
    "Should this job": r"Held:\s+2g\.20gb for[\s\S]*PROFILE",
}


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    with Cluster(nodes=2, gpus=2, migbatch="all", slurm_root=slurm_root) as made:
        login, home = LoginNode(made), made.home("mbalice")
        (home / "bin").mkdir()
        for command in ("migbatch", "migacct"):
            (home / "bin" / command).write_text(login.script(command))
            (home / "bin" / command).chmod(0o755)
        yield made
        cancel(made)


def test_every_section_has_commands() -> None:
    assert len(SECTIONS) == 17 and all(commands for _, commands in SECTIONS)


def test_the_commands_do_what_the_page_says(bed: Cluster) -> None:
    """One after the other, because later ones look at what earlier ones did."""
    home = bed.home("mbalice")
    for name, commands in SECTIONS:
        bed.wait("the end of the last section's jobs", lambda: "completing" not in bed.node_states().values())
        before = set(home.glob("slurm-*.out"))
        done = bed.run(["sh", "-e", "-c", f'PATH="$HOME/bin:$PATH"\n{commands}'], "mbalice", check=False)
        assert done.returncode == 0, (name, done)
        new = sorted(set(home.glob("slurm-*.out")) - before, key=lambda path: path.stat().st_mtime)
        output = done.stdout + done.stderr + "".join(path.read_text() for path in new)
        wanted = next((answer for start, answer in ANSWERS.items() if name.startswith(start)), "")
        assert re.search(wanted, output), (name, output)
