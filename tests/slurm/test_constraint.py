"""--constraint, evaluated as far as it is simple."""

import pytest

from slurm_migbatch.slurm.constraint import satisfier

NODE = frozenset({"a100", "mig=on", "rack:1"})


@pytest.mark.parametrize(
    ("constraint", "satisfied"),
    [
        ("a100", True), ("a100&mig=on", True), ("a100,rack:1", True), ("a100&h100", False), ("a100,h100", False),
        ("h100|a100", True), ("h100|h200", False),
        ("", None), ("a100&h100|mig=on", None), ("[a100|h100]", None), ("a100*2", None), ("(a100&mig=on)|h100", None),
        ("!h100", None), ("a100&", None),
    ],
)  # fmt: skip
def test_simple_constraints_are_evaluated_and_all_others_are_left_to_slurm(constraint, satisfied):
    check = satisfier(constraint)
    assert (None if check is None else check(NODE)) is satisfied
