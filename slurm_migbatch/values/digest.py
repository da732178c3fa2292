"""Digest texts to recognise them, also by a Python in FIPS mode, as on Red Hat: it has SHA-2, and no BLAKE2."""

from __future__ import annotations

import hashlib


def _has_blake2() -> bool:
    try:
        hashlib.blake2b(b"", digest_size=1)
    except (AttributeError, TypeError, ValueError):  # there is none, or OpenSSL's, or its use is refused
        return False
    return True


_BLAKE2 = _has_blake2()


def digest_of(text: bytes, size: int) -> bytes:
    """Return `size` bytes, at most 32, that identify a text: always the same on one host."""
    return hashlib.blake2b(text, digest_size=size).digest() if _BLAKE2 else hashlib.sha256(text).digest()[:size]
