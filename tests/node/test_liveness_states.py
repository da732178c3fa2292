"""The two lists of ended states, one of them for hooks, which import the standard library, pynvml and mig only."""

from slurm_migbatch.node.liveness import FINAL
from slurm_migbatch.slurm.states import ENDED


def test_hooks_and_the_controller_take_the_same_states_for_ended():
    assert sorted(FINAL) == sorted(ENDED)
