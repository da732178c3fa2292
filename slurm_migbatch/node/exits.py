"""Exit codes of the hooks. Slurm reads only zero or not: a non-zero Prolog or Epilog drains the node.

So zero is the rule, and every other value is a decision that an administrator can look up here.
"""

from __future__ import annotations

OK = 0
"""Done, or nothing to do, or the job was sent back to the queue; the node goes on working."""

UNSAFE = 10
"""A GPU cannot be trusted, and Slurm could not be told to drain the node with a reason; so the exit code does it."""

INSTALLATION = 11
"""The package, its configuration or its directories are missing, wrong or writable by others than root."""

CONTEXT = 12
"""Started from an unexpected place: not root, not by slurmd, or inside the job's own cgroup (PrologFlags=RunInJob)."""

JOURNAL = 13
"""The journal cannot be written, and the job could neither be sent back nor kept from running; or it could not be
written for minutes, and Slurm could not be told to drain the node with that reason; so the exit code does it."""

INTERNAL = 14
"""A fault in this program, where the configuration says OnError=drain or sending the job back kept failing."""

NO_SLICE = 15
"""TaskProlog only: the job was given no slice, so the task must not run. Fails the task, never the node."""
