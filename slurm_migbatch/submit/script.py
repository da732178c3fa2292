"""Extract from a batch script a digest, by which it is recognised, and the engine that it names.

The shim passes the first bytes of the script with a submission. They are replaced by these two before anything else
reads the request, and are stored nowhere. The text is the user's: processing takes a time proportional to its
length, and whatever it contains, it can only make the user's own jobs look alike or different.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from slurm_migbatch.values.digest import digest_of

MOST_BYTES: Final = 8192
"""Bytes of a script that the shim passes; the rest makes no difference."""
_KNOWN: Final = 256
"""Scripts whose digests are remembered: people submit one script many times over."""
# each is a plain alternation or class, which is searched in one pass for any text
_NUMBERS = re.compile(rb"[0-9][0-9.:/_-]*")
_DATES = re.compile(
    rb"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
    rb"|(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:tember)?"
    rb"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b"
)
_ENGINES: Final = {
    b"vllm": "vllm",
    b"sglang": "sglang",
    b"trtllm": "trtllm",
    b"tensorrt_llm": "trtllm",
    b"text-generation-launcher": "tgi",
    b"text-generation-inference": "tgi",
    b"text-generation-server": "tgi",
    b"lorax-launcher": "lorax",
    b"lmdeploy": "lmdeploy",
    b"lightllm": "lightllm",
    b"aphrodite": "aphrodite",
    b"mlc_llm": "mlc_llm",
    b"jax": "jax",
    b"flax": "jax",
    b"tensorflow": "tensorflow",
    b"keras": "tensorflow",
}
"""Programs that take a fixed share of the GPU's memory when they start, by the words that name them."""
_ENGINE = re.compile(rb"(?:" + b"|".join(map(re.escape, _ENGINES)) + rb")(?![a-z0-9])")
_GROWING: Final = {
    "jax": re.compile(rb"XLA_PYTHON_CLIENT_PREALLOCATE=[\"']?(?:false|0)|XLA_PYTHON_CLIENT_ALLOCATOR=[\"']?platform"),
    "tensorflow": re.compile(rb"TF_FORCE_GPU_ALLOW_GROWTH=[\"']?(?:true|1)|TF_GPU_ALLOCATOR=[\"']?cuda_malloc_async"),
}
"""Settings with which they take only what they need."""


def digest(script: bytes) -> str:
    """Return 20 hexadecimal digits of a script, equal for scripts that differ only in numbers, dates and comments.

    Options of sbatch (`#SBATCH`) are comments here: those that identify the job are in the request.
    """
    return digest_of(_DATES.sub(b"0", _NUMBERS.sub(b"0", _code(script))), 10).hex()


def engine(script: bytes) -> str:
    """Return the program in a script that takes a fixed share of its slice's memory; empty if none is known."""
    text = _code(script)
    lowered = text.lower()
    for match in _ENGINE.finditer(lowered):
        if not lowered[max(match.start() - 1, 0) : match.start()].isalnum():
            name = _ENGINES[match[0]]
            grows = _GROWING.get(name)
            return "" if grows is not None and grows.search(text) else name
    return ""


def _code(script: bytes) -> bytes:
    """Return a script's first bytes without comments, empty lines and blanks at the ends of lines."""
    lines = (line.strip() for line in script[:MOST_BYTES].split(b"\n"))
    return b"\n".join(line for line in lines if line and not line.startswith(b"#"))


def fold(name: str) -> str:
    """Return a job's name with each number and date replaced by 0."""
    return _DATES.sub(b"0", _NUMBERS.sub(b"0", name.encode("latin-1"))).decode("latin-1")


def condense(request: bytes) -> bytes:
    """Return a request with its `script` replaced by `digest` and `engine`; any other unchanged."""
    head, end, script = request.partition(b"\n\n")
    return head + _condensed(script[:MOST_BYTES]) + end if script else request


@lru_cache(_KNOWN)
def _condensed(script: bytes) -> bytes:
    program = engine(script)
    return (f"\ndigest={digest(script)}" + (f"\nengine={program}" if program else "")).encode("ascii")


def recurring_key(uid: int, account: str, partition: str, name: str, digest: str) -> str:
    """Return the name of a recurring job in the record: user, account, partition, name, work."""
    identity = "\0".join((str(uid), account, partition, fold(name), digest))
    return digest_of(identity.encode("latin-1", "replace"), 10).hex()
