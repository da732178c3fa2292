"""job_submit.lua in each Lua that is installed: slurmctld is linked to 5.1 on Debian, to 5.3 or 5.4 on Red Hat."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.request import Accept, JobRequest, Pass, Present, Refuse
from tests.support.lua_shim import INTERPRETERS, Shim, finds_posix
from tests.support.submit_agreement import USER, agree

GRANTED = "x [mig:1g.10gb:1#auto]"
REQUESTS = {
    "auto": JobRequest(USER, partition="gpu", tres_per_node="gres/mig:auto:2", comment="migbatch: mem=18gb"),
    "no hints": JobRequest(USER, partition="gpu", tres_per_node="gres:mig"),
    "profiles": JobRequest(USER, partition="gpu", tres_per_node="gres/mig:1g.10gb:2,gres/fpga:1,gres/mig:2g.20gb"),
    "GPUs in total": JobRequest(
        USER, partition="gpu", tres_per_job="gres/gpu:4", min_nodes=2, max_nodes=2, num_tasks=4
    ),
    "GPUs per task": JobRequest(USER, partition="gpu", tres_per_task="gres/gpu:1", num_tasks=2, tres_bind="gres/gpu:1"),
    "CPUs per GPU": JobRequest(
        USER,
        partition="gpu",
        tres_per_node="gres/gpu:2",
        cpus_per_tres="gres/gpu:3",
        mem_per_tres="gres/gpu:500",
        batch=1,
    ),
    "no slices": JobRequest(USER, partition="cpu", tres_per_node="gres/fpga:1"),
    "refused": JobRequest(USER, partition="gpu", tres_per_node="gres/mig:9g.9gb:1"),
    "refused hint": JobRequest(USER, partition="gpu", tres_per_node="gres/mig:auto", comment="migbatch: modle=x"),
    "update": JobRequest(
        USER, tres_per_node="gres/mig:2g.20gb:1", now=Present(True, "gpu", "gres/mig:1g.10gb:1", comment=GRANTED)
    ),
}
MODEL = JobRequest(
    USER, partition="gpu", tres_per_node="gres/mig:auto", comment="migbatch: model=bert-large slo=200ms", batch=1
)


def test_lua_of_debian_is_tested() -> None:
    assert "lua5.1" in INTERPRETERS


@pytest.mark.parametrize("lua", INTERPRETERS)
def test_answers_without_lua_posix_are_those_of_the_service(lua: str, tmp_path: Path, chooser: Chooser) -> None:
    """Red Hat has lua-posix in a repository that may not be enabled."""
    nowhere = {
        f"LUA_{kind}{version}": "/nonexistent/?"
        for kind in ("PATH", "CPATH")
        for version in ("", "_5_2", "_5_3", "_5_4", "_5_5")
    }
    with Shim(tmp_path, lua=lua, environment={**os.environ, **nowhere}) as shim:
        found = {name: type(agree(asked, shim, chooser)) for name, asked in REQUESTS.items()}
        assert isinstance(shim(MODEL), Refuse)
    assert found == {
        name: Pass if name == "no slices" else Refuse if name.startswith("refused") else Accept for name in REQUESTS
    }


@pytest.mark.parametrize("lua", INTERPRETERS)
def test_answers_of_the_table_are_those_of_the_service(lua: str, tmp_path: Path, table: Path, chooser: Chooser) -> None:
    if not finds_posix(lua):
        pytest.skip(f"no lua-posix for {lua}")
    with Shim(tmp_path, lua=lua, table=str(table)) as shim:
        for hints in ("batch=32 slo=200ms", "slo=20ms", "items=1e6 deadline=2h", "role=train batch=7", "input=384"):
            asked = replace(MODEL, comment=f"migbatch: model=bert-large {hints}")
            assert isinstance(agree(asked, shim, chooser), Accept)
