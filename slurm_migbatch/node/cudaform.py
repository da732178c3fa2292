"""Determine the form of slices in CUDA_VISIBLE_DEVICES: `cuda=uuid` or `cuda=index` in the job's hints.

Every CUDA program accepts the UUID of a slice, but many frameworks around CUDA parse it as a number and fail: vLLM
0.10 to 0.20 (issues 6551 and 41848), dorado (812, 1586), relion (1262), ray (32778). `engine=vllm` implies the index.
TaskProlog determines whether an index can be used.
"""

from __future__ import annotations

UUID, INDEX = "uuid", "index"
_NUMBERED = b"vllm"
"""Engine that reads only numbers."""
_LONGEST = 1024


def wanted(comment: bytes) -> str:
    """Return `index` if the hints of a comment request it; `uuid` otherwise, also for invalid hints."""
    text = comment[:_LONGEST].lower()
    if not text.startswith(b"migbatch:"):
        return UUID
    fields = dict(token.partition(b"=")[::2] for token in text[9:].split(b" ") if b"=" in token)
    form = fields.get(b"cuda", b"index" if fields.get(b"engine") == _NUMBERED else b"uuid")
    return INDEX if form == b"index" else UUID


def kept(comment: bytes) -> str:
    """Return what stands before the grant in the journal's `marker` of a run, so that `wanted` is the same for both."""
    return "migbatch: cuda=index " if wanted(comment) == INDEX else ""
