"""A wrong prediction is corrected by the runs that followed it: the slice that is chosen, and what migacct shows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.commands import migbatch
from tests.support.end_to_end import PATIENCE_S, account, sbatch, until

#: the site's facts of its models; each would be right with 22 gflops (`TRUTH`)
FACTS = {
    "family": "encoder",
    "params_m": 110,
    "reference": 128,
    "kernels": 170,
    "activation_mib": 40,
    "weight_bytes": 4,
}
MODELS = {"heavier": {**FACTS, "gflops": 440.0}, "lighter": {**FACTS, "gflops": 1.1, "activation_mib": 2.0}}
LEARNING = {"every_s": 2.0, "min_new": 1, "keep": 50}
#: milliseconds of a batch of 32 by profile: 3 on the host, and 6 on all 132 SMs
TRUTH = {"1g.10gb": 52.5, "1g.20gb": 33.5, "2g.20gb": 27.75, "3g.40gb": 16.2, "4g.40gb": 15.4, "7g.80gb": 9.0}
SLO_MS = {"heavier": 80, "lighter": 40}
#: profiles that really keep the limit, none with more than two slices of the GPU
RIGHT = {"heavier": ("1g.10gb", "1g.20gb", "2g.20gb"), "lighter": ("1g.20gb", "2g.20gb")}
CASES = "".join(f"{profile}) l={ms};;" for profile, ms in TRUTH.items())
WORK = f"""case $MIGBATCH_PROFILE in {CASES} *) exit 9;; esac
echo "items=3200 seconds=$(awk "BEGIN {{ print $l / 10 }}") batch=32 latency_ms=$l" >> $MIGBATCH_PROGRESS"""


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    config = {"learning": LEARNING, "models": MODELS}
    with Cluster(None, slurm_root=slurm_root, migbatch="all", nodes=1, config=config) as running:
        yield running


def model(bed: Cluster, *arguments: str) -> str:
    return migbatch(bed, "model", *arguments, "-c", str(bed.product.config))


def listed(bed: Cluster) -> dict:
    return json.loads(model(bed, "list", "--json"))


def asking(name: str) -> str:
    return f"migbatch: model={name} batch=32 slo={SLO_MS[name]}ms"


def explained(bed: Cluster, name: str) -> dict:
    """What `migbatch explain` says, including the answer of the running service."""
    socket = str(bed.product.state / "submit.sock")
    options = ("-c", str(bed.product.config), "--service", socket, "--json", "-p", "gpu", "--gres=mig:auto")
    return json.loads(migbatch(bed, "explain", *options, f"--comment={asking(name)}"))


def answered_with(bed: Cluster, version: int | None, name: str) -> None:
    """Wait until the service answers as the file of a version (0: physics; None: the current one) predicts."""

    def agrees() -> bool:
        found = explained(bed, name)
        number = listed(bed)["current"] if version is None else version
        wanted = f"learned-{number}" if number else "prior"
        mine, theirs = found["changes"], found["service"]["changes"]
        return found["decision"]["predictor"] == wanted and mine["tres_per_node"] == theirs["tres_per_node"]

    until(f"answers of version {version}", agrees)


def run_job(bed: Cluster, name: str, user: str) -> tuple[str, float]:
    """Run a job of the model; return its profile, and measured over predicted latency as migacct shows them."""
    job, message = sbatch(bed, "--gres=mig:auto", f"--comment={asking(name)}", wrap=WORK, user=user)
    assert job, message
    assert bed.wait_job(job) == "COMPLETED", bed.output(job)
    row = account(bed, job, decided=True)

    def latency_recorded() -> bool:
        nonlocal row
        row = account(bed, job, decided=True)
        return row["measured_latency_ms"] is not None

    bed.wait(f"what job {job} reported", latency_recorded, PATIENCE_S)
    assert row["measured_latency_ms"] == pytest.approx(TRUTH[row["profile"]])
    return row["profile"], row["measured_latency_ms"] / row["predicted_latency_ms"]


def learned(bed: Cluster, name: str) -> None:
    """Wait until every run has been learned from, and the service answers by the result."""
    until("the refit", lambda: not json.loads(model(bed, "show", "--json"))["waiting"]["runs"])
    answered_with(bed, None, name)


@pytest.mark.parametrize("name", list(MODELS))
def test_choice_of_the_slice_is_corrected_by_learning_from_runs(bed: Cluster, name: str) -> None:
    profiles, ratios = [], []
    for _ in range(4):
        runs = []
        for user in ("mbalice", "mbbob"):
            runs.append(run_job(bed, name, user))
        profile, ratio = runs[0]  # the next run may already use what this one taught
        profiles.append(profile)
        ratios.append(ratio)
        learned(bed, name)
    assert profiles[0] not in RIGHT[name], profiles
    assert profiles[-1] in RIGHT[name], (profiles, ratios)
    assert not 1 / 3 < ratios[0] < 3, ratios
    assert abs(math.log(ratios[-1])) < math.log(1.25), ratios
    shown = json.loads(model(bed, "show", "--json"))
    assert shown["version"] == shown["current"] > 0
    assert 0.8 < shown["report"]["trained"][f"{name}/infer/h100-80gb"]["time"]["ratio"] < 1.25
    assert f"{name}/infer/h100-80gb" in bed.product.migbatch("model", "show", "-c", str(bed.product.config))


def test_rollback_of_the_model_acts_at_once_and_survives_restarts(bed: Cluster) -> None:
    """After a rollback to physics the wrong slice is chosen again; a restart of migbatchd changes nothing."""
    current = listed(bed)["current"]
    assert current > 0
    model(bed, "rollback", "0")
    answered_with(bed, 0, "lighter")
    assert "1g.10gb" in explained(bed, "lighter")["service"]["changes"]["tres_per_node"]
    assert [version["version"] for version in listed(bed)["versions"] if version["status"] == "rejected"] == [current]
    restart(bed)
    answered_with(bed, 0, "lighter")
    model(bed, "rollback", str(current))
    answered_with(bed, current, "lighter")
    assert "1g.10gb" not in explained(bed, "lighter")["service"]["changes"]["tres_per_node"]
    restart(bed)
    answered_with(bed, current, "lighter")


def restart(bed: Cluster) -> None:
    bed.stop("migbatchd")
    bed.product.start_daemon()
    bed.wait("the submit service", (bed.product.state / "submit.sock").exists, PATIENCE_S)


def test_broken_model_file_falls_back_to_the_version_before(bed: Cluster) -> None:
    current = listed(bed)["current"]
    path = bed.product.state / "models" / f"model-{current}.json.gz"
    content = path.read_bytes()
    path.write_bytes(content[:100])
    restart(bed)
    earlier = [
        version["version"]
        for version in listed(bed)["versions"]
        if version["version"] < current and not version["status"]
    ]
    assert earlier, listed(bed)
    answered_with(bed, max(earlier), "lighter")
    assert re.search(rf"{current} +unusable", model(bed, "list"))
    assert f"model-{current}.json.gz" in bed.daemons.log("migbatchd").read_text()
    path.write_bytes(content)
    restart(bed)
    answered_with(bed, current, "lighter")
