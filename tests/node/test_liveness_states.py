"""The two lists of ended states; one is for hooks, which import only the standard library, pynvml and mig."""

from slurm_migbatch.node.liveness import FINAL
from slurm_migbatch.slurm.states import ENDED


def test_hooks_and_controller_use_the_same_list_of_ended_states():
    assert sorted(FINAL) == sorted(ENDED)
