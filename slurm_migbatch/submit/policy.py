"""Settings of the site for submissions."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_migbatch.predict.recurring import NO_RUNS, RunsPolicy


@dataclass(frozen=True)
class SubmitPolicy:
    """Settings of the site.

    Attributes:
        trusted_uids: users whose updates of jobs are not restricted: root, SlurmUser, and the user migbatchd runs as.
            Of their own jobs only root's are left as they are: the Prolog asks slurmctld about these.
        hints_in_extra: whether hints in --extra are read too.
        runs: how earlier runs choose the profile of jobs without hints.
        advise: whether users are told that earlier runs used little of a whole GPU.
        describe: the migbatch program by which user commands describe models on disk; empty if none does.
    """

    trusted_uids: frozenset[int] = frozenset({0})
    hints_in_extra: bool = False
    runs: RunsPolicy = NO_RUNS
    advise: bool = False
    describe: str = ""
