"""Remove from reasons of loans what was computed from a training job's hints, for users who may not see these.

The record has reasons as texts, also those of earlier releases, so the texts themselves are searched. They contain
nothing that a user wrote.
"""

from __future__ import annotations

import re
from typing import Final

_NUMBER: Final = r"[\w.]+"
_ESTIMATES: Final = re.compile(
    # `pairs.pairs`
    r": (?:both end|its user's \d+ pending jobs end) [\w ]+"
    rf" \(slowed down {_NUMBER} and {_NUMBER} times\)"
    # `pairs.partings`
    rf"| it takes {_NUMBER} times as long, and that one {_NUMBER} times:"
    # `round.decide`
    rf"| makes it {_NUMBER} times faster"
)


def without_estimates(why: str) -> str:
    """Return a reason without figures from the lengths, models and speeds of training jobs."""
    return _ESTIMATES.sub("", why)
