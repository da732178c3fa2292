"""A new user's questions and typing errors, as a user of a test bed: `transcript.txt` is the output, word for word.

Every line of the document that begins with `$` is run, in its order. If the output has changed, the test names the file
that has it now; replace the document by that file if the new output is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import account, accounts, cancel, gate, sbatch, until
from tests.support.lending import LENDING, running
from tests.support.login_node import LoginNode

pytestmark = pytest.mark.slurm
DOCUMENT = Path(__file__).with_name("transcript.txt")
#: what differs from one run to the next, and what replaces it in the document
VOLATILE = (
    (r"MIG-[0-9a-f-]{36}", "MIG-UUID"),
    (r"GPU-[0-9a-f-]{36}", "GPU-UUID"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "DATE-AND-TIME"),
    (r"\b\d+:\d\d:\d\d\b", "H:MM:SS"),
    (r"\bin \d+ ms\b", "in N ms"),
    (r"(?<=of GPU )\d(?= on n\d)", "G"),
    (r"(?<=b at )\d:(?=\d of GPU)", "S:"),
    (r"(?<=b@)\d:(?=\d of GPU)", "S:"),
    (r"[\d.e+-]+ GPU-hours", "N GPU-hours"),
    (r"(?<=\|)\d+\.\d+(?=\|)", "N"),
    # the forecast depends on how long the slices before were idle
    (r"inference may need it soon", "no inference is expected to need it"),
    # 23.11 clears the reason of a job that its backfill scheduler has looked at
    (r"(?<=Slurm:     )None;", "Resources;"),
    # releases of Slurm differ in whether a node planned for a job says so, and in what follows a refusal
    (r"\+planned", ""),
    (r"(?<=STATE) +(?=GPU  MODEL)", "  "),
    (r"(?<=mixed) +(?=\d    H100)", "  "),
    (r"(?m)^ {13,}(?=\d    H100)", " " * 13),
    (r"(?m)^(sbatch|srun): error: (Batch job submission failed|Unable to allocate resources): .*\n", ""),
)


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    """Job 1 has ended, 2 ran out of memory, 3 holds n1, 4 waits for it, 5 runs on n2 and 6 has been lent the rest."""
    with Cluster(None, nodes=2, gpus=2, migbatch="all", config={"lending": LENDING}, slurm_root=slurm_root) as made:
        login, home = LoginNode(made), made.home("mbalice")
        (home / "bin").mkdir()
        for command in ("migbatch", "migacct"):
            (home / "bin" / command).write_text(login.script(command))
            (home / "bin" / command).chmod(0o755)
        _jobs(made)
        yield made
        cancel(made)


def _jobs(bed: Cluster) -> None:
    seen, wait = gate(bed)
    report = f'echo "items=1200 seconds=60" >> $MIGBATCH_PROGRESS; {wait}'
    hints = "--comment=migbatch: model=bert-large batch=32 slo=200ms"
    ran_out = 'echo "oom=1" >> $MIGBATCH_PROGRESS; exit 1'
    chemistry = ("-A", "chemistry", "-p", "gpu")
    jobs = [sbatch(bed, *chemistry, "-J", "resnet", "-w", "n1", "--gres=mig:2g.20gb", wrap=report)]
    until("a look at the queue", lambda: accounts(bed).get("1", {}).get("name") == "resnet")
    seen.touch()
    account(bed, 1)
    jobs.append(sbatch(bed, *chemistry, "-J", "bert", "-w", "n1", "--gres=mig:auto", hints, wrap=ran_out))
    account(bed, 2, "FAILED", decided=True)
    jobs.append(
        sbatch(bed, *chemistry, "-J", "serve", "-w", "n1", "-t", "600", "--gres=mig:7g.80gb:2", wrap="sleep 3600")
    )
    bed.wait_job(3, "RUNNING")
    jobs.append(sbatch(bed, *chemistry, "-J", "whole", "-w", "n1", "--gres=mig:7g.80gb", wrap="true"))
    jobs.append(sbatch(bed, *chemistry, "-J", "notebook", "-w", "n2", "--gres=mig:4g.40gb", wrap="sleep 3600"))
    bed.wait_job(5, "RUNNING")
    train = "--comment=migbatch: role=train signal=usr1 min=7g.80gb"
    jobs.append(
        sbatch(bed, "-A", "chemistry", "-p", "train", "-J", "train", "--gres=mig:auto", train, wrap="sleep 3600")
    )
    assert [job for job, _ in jobs] == [1, 2, 3, 4, 5, 6], jobs
    until("the loan", lambda: 6 in running(bed))
    for job in (3, 5):
        account(bed, job, "RUNNING")
    until("the reservation", lambda: "reserved" in _run(bed, "migbatch why 4"))
    until("what is offered beside them", lambda: "1g.10gb:1,2g.20gb:1" in _run(bed, "migbatch nodes -n n2"))


def _run(bed: Cluster, command: str) -> str:
    """What a user sees: output, then errors, then the exit code if it is not 0; what is volatile replaced."""
    done = bed.run(["sh", "-c", f'PATH="$HOME/bin:$PATH"\n{command}'], "mbalice", check=False)
    text = done.stdout + done.stderr
    for pattern, instead in VOLATILE:
        text = re.sub(pattern, instead, text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return text + (f"[exit code {done.returncode}]\n" if done.returncode else "")


def test_commands_print_what_the_document_shows(bed: Cluster, tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    commands = re.findall(r"^\$ (.+)$", text, re.MULTILINE)
    assert len(commands) >= 20
    parts = re.split(r"(?m)^(\$ .+\n)(?:.*\S.*\n)*", text)
    for at in range(1, len(parts), 2):
        parts[at] += "".join(f"{line}\n" for line in _run(bed, parts[at][2:]).splitlines() if line)
    now = tmp_path / DOCUMENT.name
    now.write_text("".join(parts), encoding="utf-8")
    assert now.read_text(encoding="utf-8") == text, f"the current output is in {now}"
