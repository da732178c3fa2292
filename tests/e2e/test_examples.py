"""The examples and the app for Open OnDemand, as shipped, on a real Slurm.

Jupyter, vLLM, TRL and lm_eval are not on a test bed. A small program stands in for each, under its name: it
records what it was given, and reads CUDA_VISIBLE_DEVICES as the real one would. So these tests check what the scripts
request, get and call, but not those programs. The figures in the tests' docstrings are calculated by hand.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import PATIENCE_S, PYTHON, UUID, cancel, marked
from tests.support.erb import render

pytestmark = pytest.mark.slurm
EXAMPLES = Path(__file__).resolve().parents[2] / "sbatch_examples"
USER = "mbalice"
STAND_IN = f"""#!{PYTHON}
import json, os, sys
name, job = os.path.basename(sys.argv[0]), os.environ["SLURM_JOB_ID"]
devices = os.environ["CUDA_VISIBLE_DEVICES"]
if name == "vllm":
    int(devices)  # as vLLM 0.10 to 0.20 do
else:
    assert devices.startswith("MIG-")
secret = os.environ.get("JUPYTER_TOKEN_FILE", "")
if name == "vllm":
    secret = os.environ["HOME"] + "/vllm-" + job + ".key"
call = {{
    "arguments": sys.argv[1:], "devices": devices, "profile": os.environ["MIGBATCH_PROFILE"],
    "key": os.environ.get("VLLM_API_KEY", ""), "token": open(secret).read() if secret else "",
    "mode": os.stat(secret).st_mode & 0o777 if secret else 0,
}}
with open(os.environ["HOME"] + "/calls/" + name + "-" + job + ".json", "w") as file:
    json.dump(call, file)
sys.exit(os.path.exists(os.environ["HOME"] + "/fail-" + name))
"""


@pytest.fixture(scope="module")
def site(slurm_root: str) -> Iterator[Cluster]:
    with Cluster(nodes=1, gpus=2, migbatch="all", slurm_root=slurm_root) as made:
        home = made.home(USER)
        for folder in ("bin", "calls", "examples"):
            (home / folder).mkdir()
        (home / "calls").chmod(0o777)
        for name in ("jupyter", "vllm", "trl", "lm_eval", "python3"):
            (home / "bin" / name).write_text(STAND_IN)
            (home / "bin" / name).chmod(0o755)
        for script in EXAMPLES.glob("*.sh"):
            (home / "examples" / script.name).write_bytes(script.read_bytes())
        yield made


@pytest.fixture
def bed(site: Cluster) -> Iterator[Cluster]:
    yield site
    cancel(site)


def run(bed: Cluster, *argv: str) -> str:
    """Run a command of the user, with the stand-ins first on PATH; what it printed."""
    path = f"{bed.home(USER)}/bin:{bed.client_env(USER)['PATH']}"
    return bed.run(list(argv), USER, env={"PATH": path}).stdout


def submit(bed: Cluster, script: str) -> int:
    return int(run(bed, "sbatch", "--parsable", f"examples/{script}"))


def call(bed: Cluster, name: str, job: int) -> dict[str, Any]:
    """What a stand-in was given, once its job has completed."""
    assert bed.wait_job(job, "COMPLETED") == "COMPLETED"
    found: dict[str, Any] = json.loads((bed.home(USER) / f"calls/{name}-{job}.json").read_text())
    return found


def options(arguments: list[str]) -> dict[str, str]:
    """`--name value`, `--name=value` and `--name` of a command line."""
    pairs = re.findall(r"--([^\s=]+)(?:[ =](?!--)(\S+))?", " ".join(arguments))
    return dict(pairs)


def test_jupyter_example_gets_its_slice_and_a_private_token(bed: Cluster) -> None:
    """9 GB are 8583 MiB; 1g.10gb has 9.75 GiB or so, which is the smallest that has them."""
    job = submit(bed, "jupyter.sh")
    given = call(bed, "jupyter", job)
    assert given["profile"] == "1g.10gb" and UUID.fullmatch(given["devices"])
    assert given["arguments"][:2] == ["lab", "--no-browser"]
    assert options(given["arguments"])["ip"] == "127.0.0.1"
    output = (bed.home(USER) / f"jupyter-{job}.out").read_text()
    assert options(given["arguments"])["port"] in output
    token = given["token"]
    assert re.fullmatch("[0-9a-f]{48}", token) and given["mode"] == 0o600
    assert token not in output and token not in " ".join(given["arguments"])
    assert not (bed.home(USER) / f"jupyter-{job}.token").exists()


def test_vllm_example_gets_a_slice_for_weights_and_kv_cache(bed: Cluster) -> None:
    """7.62e9 parameters of 2 bytes are 14.2 GiB; 4 x 8192 tokens of 56 KiB 1.75 GiB; some 1 GiB for the engine itself.

    That is 17 of the 19.6 GiB of 1g.20gb, of which vLLM takes 0.9 at most: 17.6. 1g.10gb does not hold the weights.
    """
    job = submit(bed, "vllm.sh")
    given = call(bed, "vllm", job)
    assert (given["profile"], given["devices"]) == ("1g.20gb", "0")
    assert given["arguments"][:2] == ["serve", "Qwen/Qwen2.5-7B-Instruct"]
    asked = options(given["arguments"])
    assert (asked["host"], asked["max-model-len"], asked["max-num-seqs"]) == ("127.0.0.1", "8192", "4")
    assert int(asked["kv-cache-memory-bytes"]) == 4 * 8192 * 56 * 1024
    assert len(given["key"]) == 32 and given["token"].strip() == given["key"] and given["mode"] == 0o600
    assert not (bed.home(USER) / f"vllm-{job}.key").exists()
    output = (bed.home(USER) / f"vllm-{job}.out").read_text()
    assert given["key"] not in output + " ".join(given["arguments"]) and f"port {asked['port']}" in output


def test_lora_example_gets_a_slice_for_its_training_memory(bed: Cluster) -> None:
    """Weights of 14.2 GiB; logits of 2048 tokens x 152064 words, in 16 bits and with gradients in 32, are 2.9 GiB.

    With one recomputed layer, the inputs of 28 (0.4 GiB), adapters and CUDA's own GiB it is more than the 19.6 GiB of
    1g.20gb and 2g.20gb.
    """
    job = submit(bed, "lora.sh")
    given = call(bed, "trl", job)
    assert given["profile"] == "3g.40gb" and given["arguments"][0] == "sft"
    asked = options(given["arguments"])
    hinted = {
        "max_length": "2048",
        "per_device_train_batch_size": "1",
        "gradient_checkpointing": "",
        "dtype": "bfloat16",
    }
    assert hinted.items() <= asked.items() and "use_peft" in asked and asked["model_name_or_path"] == "Qwen/Qwen2.5-7B"
    assert "resume_from_checkpoint" not in asked


def test_lora_example_resumes_from_its_checkpoint(bed: Cluster) -> None:
    home = bed.home(USER)
    for steps in (200, 1000):
        (home / f"made/checkpoint-{steps}").mkdir(parents=True)
        (home / f"made/checkpoint-{steps}/trainer_state.json").touch()
    (home / "made/checkpoint-1100").mkdir()  # the job was ended while it was written
    job = int(run(bed, "env", f"OUTPUT={home}/made", bed.root.locate("sbatch"), "--parsable", "examples/lora.sh"))
    assert options(call(bed, "trl", job)["arguments"])["resume_from_checkpoint"] == f"{home}/made/checkpoint-1000"


def test_hyperparameters_example_runs_each_combination_in_a_task(bed: Cluster) -> None:
    """8 GB are 7630 MiB: 1g.10gb for each of nine tasks, and each task has a combination of its own."""
    array = submit(bed, "hyperparameters.sh")
    bed.wait("the end of the array", lambda: not run(bed, "squeue", "-h", "-j", str(array)).strip(), PATIENCE_S)
    home = bed.home(USER)
    calls = [json.loads(path.read_text()) for path in (home / "calls").glob("python3-*.json")]
    asked = [options(given["arguments"]) for given in calls if given["arguments"][0] == f"{home}/train.py"]
    assert {given["profile"] for given in calls} == {"1g.10gb"}
    grid = {(rate, decay) for rate in ("1e-4", "3e-4", "1e-3") for decay in ("0", "0.01", "0.1")}
    assert len(asked) == 9 and {(settings["learning-rate"], settings["weight-decay"]) for settings in asked} == grid
    assert {settings["output"] for settings in asked} == {f"{home}/grid-{array}-{task}.json" for task in range(9)}


def pipeline(bed: Cluster, name: str, *variables: str) -> list[int]:
    path = bed.home(USER) / name
    output = run(bed, "env", f"RUN={path}", *variables, "bash", "examples/pipeline.sh")
    return [int(job) for job in re.findall(r"(\d+) \(", output)]


def test_pipeline_example_gets_a_profile_for_each_stage(bed: Cluster) -> None:
    """Training 1.54e9 parameters: 2.9 GiB of weights and 5.8 GiB of logits of 2 x 2048 tokens: no longer 1g.10gb.

    Evaluation keeps 4 x 2048 tokens of 28 KiB (0.2 GiB) beside the weights: 1g.10gb again.
    """
    prepare, train, evaluate = pipeline(bed, "run")
    assert call(bed, "lm_eval", evaluate)["profile"] == "1g.10gb"
    first, second = call(bed, "python3", prepare), call(bed, "trl", train)
    assert (first["profile"], second["profile"]) == ("1g.10gb", "1g.20gb")
    assert options(first["arguments"])["output"] == options(second["arguments"])["dataset_name"]
    assert [marked(bed, job)[1] for job in (prepare, train, evaluate)] == ["1g.10gb:1", "1g.20gb:1", "1g.10gb:1"]


def test_pipeline_example_gives_its_deadline_to_all_jobs(bed: Cluster) -> None:
    """All jobs name the same pipeline; the first two take 30 minutes and two hours, which leaves the last 1.5."""
    jobs = pipeline(bed, "due_today", "DEADLINE=4h")
    shown = run(bed, "squeue", "-h", "-j", ",".join(map(str, jobs)), "-o", "%i %k").splitlines()
    assert len(shown) == 3 and all(" pipeline=run-due_today deadline=4h" in line for line in shown)
    last = call(bed, "lm_eval", jobs[2])["profile"]
    assert [marked(bed, job)[1] for job in jobs] == ["1g.10gb:1", "1g.20gb:1", f"{last}:1"]


def test_failed_stage_cancels_the_rest_of_the_pipeline(bed: Cluster) -> None:
    failing = bed.home(USER) / "fail-python3"
    failing.touch()
    prepare, train, evaluate = pipeline(bed, "failing")
    assert bed.wait_job(prepare, "FAILED") == "FAILED"
    assert {bed.wait_job(job, "CANCELLED") for job in (train, evaluate)} == {"CANCELLED"}
    failing.unlink()


#: what Open OnDemand puts around the app's scripts, as far as the app uses it (ood_core's batch_connect/template.rb)
PORTAL_JOB = """#!/bin/bash
find_port() { echo 23456; }
create_passwd() { tr -cd '[:alnum:]' </dev/urandom | head -c "$1"; }
export host=$(hostname) port
source ./before.sh
(umask 077; echo "password: $password" >connection.yml)
./script.sh
"""


@pytest.mark.parametrize(
    ("gres", "memory", "profile"),
    # 18 GB are 17167 MiB: 1g.20gb has them, 1g.10gb does not. A profile that is named is what the job gets.
    [("mig:auto", "18", "1g.20gb"), ("mig:1g.10gb", "18", "1g.10gb")],
)
def test_ondemand_app_gets_its_slice_and_keeps_its_password_secret(
    bed: Cluster, gres: str, memory: str, profile: str
) -> None:
    app, work = EXAMPLES / "ondemand", bed.home(USER) / f"session-{profile}"
    work.mkdir(mode=0o777)
    work.chmod(0o777)
    # the portal submits with --export=NONE, for which 26.05 starts a login shell: test users have none
    setup = f"export HOME={bed.home(USER)} PATH={bed.home(USER)}/bin:$PATH"
    context = {"portal": "https://portal.example.org", "environment": setup}
    for name in ("before.sh", "script.sh"):
        (work / name).write_text(render((app / f"template/{name}.erb").read_text(), **context))
        (work / name).chmod(0o755)
    text = render((app / "submit.yml.erb").read_text(), auto_gres=gres, gpu_memory=memory, bc_num_slots="2")
    native = yaml.safe_load(text)["script"]["native"]
    argv = [
        "env",
        "-u",
        "HOME",
        bed.root.locate("sbatch"),
        "--parsable",
        "--export=ALL",
        "-D",
        str(work),
        "-p",
        "gpu",
        "-t",
        "04:00:00",
        *native,
    ]
    job = int(bed.run(argv, USER, input=PORTAL_JOB).stdout)
    given = call(bed, "jupyter", job)
    assert given["profile"] == profile and UUID.fullmatch(given["devices"])
    assert given["arguments"] == ["lab", f"--config={work}/config.py"]
    config = (work / "config.py").read_text()
    assert (work / "config.py").stat().st_mode & 0o777 == 0o600
    password = (work / "connection.yml").read_text().split()[1]
    salt, digest = re.findall(r'"sha256:(\w+):(\w+)"', config)[0]
    assert len(password) == 32 and hashlib.sha256((password + salt).encode()).hexdigest() == digest
    assert password not in config and 'allow_origin = "https://portal.example.org"' in config
