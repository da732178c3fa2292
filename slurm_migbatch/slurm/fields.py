"""Parse records that `scontrol --oneliner show` prints: `Key=value` fields, separated by spaces.

In records of nodes, partitions and reservations, texts that someone wrote freely (comments, the reason of a node) come
last and may look like other fields, so the first field of each name counts. In records of jobs JobName comes second.
"""

from __future__ import annotations

import re

#: the only value with spaces that is read, and what scontrol prints after it
_AFTER_REASON = re.compile(r"\s(?:Comment|Extra|InstanceId|InstanceType|ReservationName)=")
#: printed after the first line of a reason
_WHO_WHEN = re.compile(r"\s*\[[^\[\]]*@[^\[\]]*\](?=\s*\Z|\s*\n|\s{2})")


def fields_of(record: str) -> dict[str, str]:
    """Return the fields of one record, each up to the next space."""
    words = record.split()
    return dict([word.split("=", 1) for word in reversed(words) if "=" in word])


def reason_of(record: str) -> str:
    """Return the Reason= of a node's record without who set it and when; empty if there is none."""
    before, found, after = record.partition(" Reason=")
    if not found or _AFTER_REASON.search(before):
        return ""
    return _WHO_WHEN.sub("", _AFTER_REASON.split(after, 1)[0], 1).strip()
