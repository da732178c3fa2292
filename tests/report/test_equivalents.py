"""The GPU equivalent: the part of a GPU that a slice is."""

from __future__ import annotations

import pytest

from slurm_migbatch.report.equivalents import gpu_equivalent


@pytest.mark.parametrize(
    ("profile", "memory_slices", "share"),
    [
        ("1g.10gb", None, 1 / 7),
        ("1g.10gb", 1, 1 / 7),
        ("1g.20gb", 2, 2 / 8),
        ("2g.20gb", None, 2 / 7),
        ("3g.40gb", None, 4 / 8),
        ("4g.40gb", 4, 4 / 7),
        ("7g.80gb", None, 1.0),
        ("1g.10gb+me", None, 1 / 7),
        ("1g.10gb.me", None, 1 / 7),
        ("no profile", None, 0.0),
    ],
)
def test_gpu_equivalent_is_the_larger_share(profile: str, memory_slices: int | None, share: float) -> None:
    assert gpu_equivalent(profile, memory_slices) == pytest.approx(share)


def test_gpu_equivalent_on_gpus_of_four_compute_slices() -> None:
    assert gpu_equivalent("2g.12gb", 2, (4, 4)) == 0.5
    assert gpu_equivalent("4g.24gb", 4, (4, 4)) == 1.0
    assert gpu_equivalent("1g.24gb", 3, (4, 12)) == 0.25
