"""How a job wants its slices named in CUDA_VISIBLE_DEVICES: `cuda=uuid` or `cuda=index` in its hints.

Every CUDA program understands the UUID of a slice, and many frameworks around CUDA take it for a number and end: vLLM
0.10 to 0.20 (issues 6551 and 41848), dorado (812, 1586), relion (1262), ray (32778). `engine=vllm` asks for the index
by itself. Whether an index can be given is found by TaskProlog.
"""

from __future__ import annotations

UUID, INDEX = "uuid", "index"
_NUMBERED = b"vllm"
"""The engine that is known to read numbers only."""
_LONGEST = 1024


def wanted(comment: bytes) -> str:
    """Return `index` where the hints of a comment ask for it; `uuid` for anything else, also for what is no hint."""
    text = comment[:_LONGEST].lower()
    if not text.startswith(b"migbatch:"):
        return UUID
    fields = dict(token.partition(b"=")[::2] for token in text[9:].split(b" ") if b"=" in token)
    form = fields.get(b"cuda", b"index" if fields.get(b"engine") == _NUMBERED else b"uuid")
    return INDEX if form == b"index" else UUID
