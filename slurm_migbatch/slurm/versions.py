"""Parse Slurm releases; document which are supported, and what differs between them for the CLI backend.

What 22.05.8, 24.11.5 and 26.05.5 printed is recorded in tests/slurm/assets; the tests on a real Slurm also run on
23.11.4 and 25.11.2.

=======================  ============================  ===========================  ============================
what                     22.05                         24.11                        26.05
=======================  ============================  ===========================  ============================
squeue tres-per-node     `gres:mig:1g.10gb:2`          `gres/mig:1g.10gb:2`         as 24.11
types with count 0       `Gres=` shows those of        hidden until an update       as 24.11
                         slurm.conf                    has set them
`GresUsed=`              also gres that the node       only what the node has       as 24.11
                         lacks (`gpu:0`)
times of `show node`     always ISO                    follow SLURM_TIME_FORMAT     as 24.11 (we read none)
a job that only the      `ReqNodeNotAvail,             as 22.05                     `None`
catalog node fits        UnavailableNodes:cat`
requeued job waits with  `BeginTime`, 121 s            as 22.05                     as 22.05
tasks of an array that   own rows if                   shown as the rest of their   as 24.11
were changed alone       SQUEUE_ARRAY_UNIQUE is set    array, always (`arrays.py`)
partitions with capital  as named                      in lower case, jobs sorted   as 24.11
letters in `--priority`                                as of tier 1 (`order.py`)
`--gres=mig:1g.10gb`     refused at submission         kept without a count         as 24.11
refusal for one task     `6_0: why`                    `6_[0]: why`                 as 24.11
--exclusive in squeue    OverSubscribe=NO, others OK   as 22.05                     OverSubscribe=NO as others,
                                                                                    Exclusive=NODE
=======================  ============================  ===========================  ============================

Only the array tasks, the partitions and --exclusive need code of their own: the GRES parser reads every prefix, a
missing type and one with count 0 mean the same to migbatch, unknown keys are skipped, and the supply planner takes all
of these reasons for "waits for supply". If a release changes names of squeue's fields, adapt `SQUEUE_FIELDS` in
`listing.py`.
"""

from __future__ import annotations

import re

from slurm_migbatch.slurm.client import SlurmError

OLDEST = (22, 5)
NEWEST = (26, 5)
"""The newest release that was tested; later ones are used in the same way."""
_VERSION = re.compile(r"\bslurm\S*\s+(\d{2})\.(\d{1,2})(?:\.(\d{1,3}))?", re.IGNORECASE)

#: year, month and patch: (24, 11, 5)
Release = tuple[int, int, int]


def parse_release(text: str) -> Release:
    """Return the release in the output of `squeue --version`, such as `slurm-wlm 24.11.5`; raises SlurmError."""
    match = _VERSION.search(text)
    if match is None:
        raise SlurmError(f"squeue --version answered {text.strip()[:80]!r}, which is not a Slurm release")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def parse_version(text: str) -> tuple[int, int]:
    """Parse the version without the patch; raises SlurmError for an unsupported release, too."""
    version = parse_release(text)[:2]
    if version < OLDEST:
        raise SlurmError(f"Slurm {version[0]}.{version[1]:02d} is too old: 22.05 or later is needed")
    return version
