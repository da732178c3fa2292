"""Slices that the command line requests beside variables such as SBATCH_GPUS, which stand for options."""

from __future__ import annotations

import pytest

from slurm_migbatch.submit.request import Accept, JobRequest, Refuse
from tests.support.lua_shim import Shim

SLICE, GPU = "mig:2g.20gb:1", "mig:7g.80gb:1"
SCRIPT = "#!/bin/sh\n%s\nsrun true\n"


def ask(shim: Shim, prefix: str = "gres/", script: str = "", gres: str = "mig:2g.20gb", **variables: str):
    asked = JobRequest(1001, partition="gpu", tres_per_node=prefix + gres, tres_per_job=f"{prefix}gpu:1", batch=1)
    return shim(asked, script=SCRIPT % script, **variables)


@pytest.mark.parametrize("prefix", ["gres/", "gres:"])
@pytest.mark.parametrize(
    ("variables", "granted", "cleared", "name"),
    [
        ({"sbatch_gpus": "1"}, SLICE, "tres_per_job", "SBATCH_GPUS in the environment is not applied beside --gres"),
        ({"sbatch_gres": "mig:2g.20gb"}, GPU, "", "SBATCH_GRES in the environment is not applied beside --gpus"),
    ],
)
def test_command_line_counts_more_than_a_variable(
    shim: Shim, prefix: str, variables: dict[str, str], granted: str, cleared: str, name: str
) -> None:
    answer = ask(shim, prefix, **variables)
    assert isinstance(answer, Accept) and name in answer.message
    assert answer.changes["tres_per_node"] == prefix + granted
    assert answer.changes["comment"] == f"[{granted}]"
    assert not cleared or answer.changes[cleared] == ""


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        ("", {}),
        ("", {"sbatch_gpus": "2"}),
        ("", {"sbatch_gpus": "1", "sbatch_gres": "mig:2g.20gb"}),
        ("#SBATCH --gres=mig:2g.20gb", {"sbatch_gpus": "1"}),
        ("#SBATCH -J x --gpus=1", {"sbatch_gres": "mig:2g.20gb"}),
        ("#SBATCH -G 1", {"sbatch_gres": "mig:2g.20gb"}),
    ],
)
def test_request_by_two_options_is_refused_if_it_is_not_known_which_counts(
    shim: Shim, script: str, variables: dict[str, str]
) -> None:
    """Variables count more than lines of the script."""
    answer = ask(shim, script=script, **variables)
    assert isinstance(answer, Refuse) and "slices are requested by more than one option" in answer.sentence


def test_variable_beside_gpus_of_the_command_line_is_left_to_slurm(shim: Shim) -> None:
    answer = ask(shim, gres="gpu:1", sbatch_gpus="1")
    assert isinstance(answer, Accept) and "environment" not in answer.message
