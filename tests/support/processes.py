"""Run the same function in several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys

#: children begin when all have been forked; the parent has done all imports before
_FORK = """
import os, sys, traceback
read, write = os.pipe()
children = []
for number in range({count}):
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        try:
            work(number, *sys.argv[1:])
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    children.append(child)
os.close(write)
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


def at_once(count: int, program: str, *arguments: str) -> list[str]:
    """Run `work(number, *arguments)` in `count` processes at once; return the lines that they wrote.

    Args:
        count: the processes, numbered from 0.
        program: the code that defines `work`; each process is forked after it has run.
        arguments: the further arguments of `work`.

    Raises:
        AssertionError: one has failed; the text is what all wrote to stderr.
    """
    argv = [sys.executable, "-c", program + _FORK.format(count=count), *arguments]
    # each process writes its lines at once, so that they do not mix
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
