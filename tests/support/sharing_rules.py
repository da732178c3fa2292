"""Rules of sharing that only tests apply."""

from __future__ import annotations

from slurm_migbatch.decide.lending.lookahead import SharingRule

ANY = SharingRule("any", lambda own, other, slow_own, slow_other: 0.0)
"""Share always, with the first job."""
