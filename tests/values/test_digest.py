"""A Python in FIPS mode, as on Red Hat: OpenSSL's BLAKE2 alone, which takes no size, or none at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurm_migbatch.values.digest import digest_of

_FORBIDDEN = """
import hashlib, sys

def refuse(data=b"", **more):
    if more:
        raise TypeError("'digest_size' is an invalid keyword argument for openssl_blake2b()")
    raise ValueError("[digital envelope routines] unsupported")

def missing():
    del hashlib.blake2b, hashlib.blake2s, hashlib.md5

hashlib.blake2b = hashlib.blake2s = hashlib.md5 = refuse
if sys.argv[1] == "missing":
    missing()
from slurm_migbatch.elastic.sampler import Sampler
from slurm_migbatch.slurm.listing import SQUEUE_FIELDS, JobReader
from slurm_migbatch.submit.script import digest, recurring_key
import slurm_migbatch.daemon.main

values = {"JobID": "7", "UserID": "1", "State": "PENDING"}
listed = "".join(f"{values.get(name, '')}|" for name in SQUEUE_FIELDS) + chr(10)
(row,) = JobReader().read(listed, "|")
print(row.job_id, len(digest(b"srun a 1")), digest(b"srun a 1") == digest(b"srun a 2") != digest(b"srun b 1"))
print(len(recurring_key(1, "a", "p", "n", "d")), Sampler(None, 2).draw(3) == Sampler(None, 2).draw(3))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refused", "missing"])
def test_queue_and_recurring_jobs_are_recognised_without_blake2(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", _FORBIDDEN, how], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("7 20 True\n20 True\n", "")


def test_digest_of_a_script_is_that_of_earlier_releases() -> None:
    """The record names recurring jobs by it."""
    assert digest_of(b"x", 10).hex() == "82eb5f36d44e01d4c0a8"
