"""MIG geometries of GPUs for experiments, where no driver can be asked.

The rows are what the simulated driver of the test bed reports (`testbed/driver/tables.c`; a test holds them equal), in
NVML's figures: profile, device profile id, compute slices, memory slices, usable MiB, SMs, copy engines, decoders,
encoders, JPEG engines, OFAs, most instances, placements as start:size.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from slurm_migbatch.mig.geometry import Geometry, ProfileInfo
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile

_TABLES: Final = {
    "a30": (
        "NVIDIA A30",
        """
        4g.24gb  0  4 4  24064  56 4  4 0 1 1  1  0:4
        2g.12gb  5  2 2  11968  28 2  2 0 0 0  2  0:2 2:2
        2g.12gb+me  6  2 2  11968  28 2  2 0 1 1  1  0:2 2:2
        1g.6gb  14  1 1  5952  14 1  0 0 0 0  4  0:1 1:1 2:1 3:1
        1g.6gb+me  21  1 1  5952  14 1  1 0 1 1  1  0:1 1:1 2:1 3:1
        """,
    ),
    "a100-40gb": (
        "NVIDIA A100-SXM4-40GB",
        """
        7g.40gb  0  7 8  40192  98 7  5 0 1 1  1  0:8
        4g.20gb  5  4 4  19968  56 4  2 0 0 0  1  0:4
        3g.20gb  9  3 4  19968  42 3  2 0 0 0  2  0:4 4:4
        2g.10gb  14  2 2  9856  28 2  1 0 0 0  3  0:2 2:2 4:2
        1g.10gb  15  1 2  9856  14 1  1 0 0 0  4  0:2 2:2 4:2 6:2
        1g.5gb  19  1 1  4864  14 1  0 0 0 0  7  0:1 1:1 2:1 3:1 4:1 5:1 6:1
        1g.5gb+me  20  1 1  4864  14 1  1 0 1 1  1  0:1 1:1 2:1 3:1 4:1 5:1 6:1
        """,
    ),
    "a100-80gb": (
        "NVIDIA A100-SXM4-80GB",
        """
        7g.80gb  0  7 8  80896  98 7  5 0 1 1  1  0:8
        4g.40gb  5  4 4  40192  56 4  2 0 0 0  1  0:4
        3g.40gb  9  3 4  40192  42 3  2 0 0 0  2  0:4 4:4
        2g.20gb  14  2 2  19968  28 2  1 0 0 0  3  0:2 2:2 4:2
        1g.20gb  15  1 2  19968  14 1  1 0 0 0  4  0:2 2:2 4:2 6:2
        1g.10gb  19  1 1  9728  14 1  0 0 0 0  7  0:1 1:1 2:1 3:1 4:1 5:1 6:1
        1g.10gb+me  20  1 1  9728  14 1  1 0 1 1  1  0:1 1:1 2:1 3:1 4:1 5:1 6:1
        """,
    ),
    "h100-80gb": (
        "NVIDIA H100 80GB HBM3",
        """
        7g.80gb  0  7 8  81152  132 8  7 0 7 1  1  0:8
        4g.40gb  5  4 4  40448  64 4  4 0 4 0  1  0:4
        3g.40gb  9  3 4  40448  60 3  3 0 3 0  2  0:4 4:4
        2g.20gb  14  2 2  20096  32 2  2 0 2 0  3  0:2 2:2 4:2
        1g.20gb  15  1 2  20096  26 1  1 0 1 0  4  0:2 2:2 4:2 6:2
        1g.10gb  19  1 1  9984  16 1  1 0 1 0  7  0:1 1:1 2:1 3:1 4:1 5:1 6:1
        1g.10gb+me  20  1 1  9984  16 1  1 0 1 1  1  0:1 1:1 2:1 3:1 4:1 5:1 6:1
        """,
    ),
}
GPUS: Final = tuple(_TABLES)


@cache
def geometry(name: str) -> Geometry:
    """The geometry of `a30`, `a100-40gb`, `a100-80gb` or `h100-80gb`; raises KeyError with the names."""
    try:
        title, table = _TABLES[name]
    except KeyError:
        raise KeyError(f"no geometry is kept for {name}; there are {', '.join(GPUS)}") from None
    return Geometry(title, [_row(line.split()) for line in table.splitlines() if line.strip()])


def _row(cells: list[str]) -> ProfileInfo:
    placements = tuple(Placement.parse(text) for text in cells[12:])
    return ProfileInfo._make((Profile.parse(cells[0]), *(int(cell) for cell in cells[1:12]), placements))
