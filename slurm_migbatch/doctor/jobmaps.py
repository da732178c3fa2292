"""Check the directories in which GPU exporters look for jobs; see `node/jobmaps.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.findings import BAD, GOOD, Finding
from slurm_migbatch.node.jobmaps import problems

SUBJECT: Final = "job maps"


def check_job_maps(config: NodeConfig) -> Iterator[Finding]:
    """Yield problems of JobMapDir and GpustatDir; nothing if neither is configured."""
    configured = [path for path in (config.job_map_dir, config.gpustat_dir) if path]
    found = problems(config)
    for text in found:
        advice = "correct JobMapDir= and GpustatDir= in node.conf, or the directory; jobs are not affected"
        yield Finding(BAD, SUBJECT, f"exporters cannot map slices to jobs: {text}", advice)
    if configured and not found:
        yield Finding(GOOD, SUBJECT, ", ".join(configured))
