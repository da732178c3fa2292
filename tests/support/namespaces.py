"""User namespaces, in which container runtimes of users work; some hosts do not allow them."""

from __future__ import annotations

import subprocess

import pytest

_TRY = ("setpriv", "--reuid=64001", "--regid=64001", "--clear-groups", "unshare", "--user", "--map-root-user", "true")


def need_user_namespaces() -> None:
    """Skip the test if users cannot create user namespaces."""
    if subprocess.run(_TRY, capture_output=True, check=False).returncode:
        pytest.skip("users cannot create user namespaces on this host")
