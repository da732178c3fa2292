"""Define exit codes of the hooks. Slurm only distinguishes zero: a non-zero Prolog or Epilog drains the node.

So zero is the rule, and every other value is a deliberate decision, listed here for administrators.
"""

from __future__ import annotations

OK = 0
"""Done, or nothing to do, or the job was requeued; the node continues."""

UNSAFE = 10
"""A GPU is unreliable, and Slurm could not be told to drain the node with a reason; so the exit code does it."""

INSTALLATION = 11
"""The package, its configuration or its directories are missing, wrong or writable by others than root."""

CONTEXT = 12
"""Started from an unexpected place: not root, not by slurmd, or inside the job's own cgroup (PrologFlags=RunInJob)."""

JOURNAL = 13
"""The journal cannot be written, and the job could neither be requeued nor prevented from running; or it could not be
written for minutes, and Slurm could not be told to drain the node with that reason; so the exit code does it.
"""

INTERNAL = 14
"""A bug in this program, with OnError=drain in the configuration or after repeated failures to requeue the job."""

NO_SLICE = 15
"""TaskProlog only: the job was given no slice, so the task must not run. Fails the task, never the node."""
