"""`migbatch bench nodes` on a small site."""

from __future__ import annotations

import pytest

from slurm_migbatch.lab.bench.manynodes import UPDATE, measure

pytestmark = pytest.mark.slurm


def test_node_update_rpcs_are_counted_together_and_apart(slurm_root: str) -> None:
    result = measure(nodes=3, gpus=2, jobs=8, slurm_root=slurm_root, rest_s=1.0)
    busy = result["phases"]["jobs"]
    calls, _ = busy["rpcs"][UPDATE]
    assert calls >= 1 and busy["changes"] >= 1, "1g.10gb, of which few are offered to begin with"
    assert busy["rpcs"]["MESSAGE_EPILOG_COMPLETE"][0] == 8
    together, apart = result["updates"]["together"], result["updates"]["apart"]
    assert apart["rpcs"] == 3 and 1 <= together["rpcs"] <= 3
