"""Parse records that `scontrol --oneliner show` prints: `Key=value` fields, separated by spaces.

Texts that someone wrote freely (comments, the reason of a node) come last and may look like other fields, so the first
field of each name counts.
"""

from __future__ import annotations

import re

#: the only value with spaces that is read, and what scontrol prints after it
_REASON = re.compile(r"\sReason=(.*?)(?=\s(?:Comment|Extra|InstanceId|InstanceType|ReservationName)=|\Z)", re.DOTALL)
_WHO_WHEN = re.compile(r"\s*\[[^\[\]]*@[^\[\]]*\]\s*\Z")


def fields_of(record: str) -> dict[str, str]:
    """Return the fields of one record, each up to the next space."""
    words = record.split()
    return dict([word.split("=", 1) for word in reversed(words) if "=" in word])


def reason_of(record: str) -> str:
    """Return the Reason= of a node's record without who set it and when; empty if there is none."""
    match = _REASON.search(record) if " Reason=" in record else None
    return _WHO_WHEN.sub("", match[1]).strip() if match else ""
