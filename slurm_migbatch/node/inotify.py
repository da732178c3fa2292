"""Watch which progress files are written (inotify), so that the agent does nothing while no job writes.

The directory is watched, not the files: no user's file is opened for it, and mounts over a file or any other
tricks of a user have no effect here. Any number of writes is merged into one event until it is read.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import struct

from slurm_migbatch.node.libc import last_error

_IN_MODIFY = 0x2
_IN_Q_OVERFLOW = 0x4000
_IN_ONLYDIR = 0x1000000
_EVENT = struct.Struct("iIII")
MOST_READS = 16
"""Most reads of 64 KiB by one call of `written`: twice the events that Linux queues by default."""
_NAME = re.compile(rb"([0-9]{1,10})\.([0-9]{1,5})\0*")


class WriteWatch:
    """Watch for writes in one directory, from its creation to `close`."""

    def __init__(self, directory: int) -> None:
        """Watch `directory`, a descriptor. Raises OSError, for example at the kernel's limit of watches."""
        libc = ctypes.CDLL(None, use_errno=True)
        self.handle = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self.handle < 0:
            raise last_error("inotify_init1")
        path = f"/proc/self/fd/{directory}".encode()
        if libc.inotify_add_watch(self.handle, path, ctypes.c_uint32(_IN_MODIFY | _IN_ONLYDIR)) < 0:
            error = last_error("inotify_add_watch")
            self.close()
            raise error

    def close(self) -> None:
        """Stop watching."""
        os.close(self.handle)

    def wait(self, seconds: float, wake: int) -> bool:
        """Wait until something was written or `wake` is readable; return whether something was written."""
        return self.handle in select.select([self.handle, wake], [], [], max(0.0, seconds))[0]

    def written(self) -> set[tuple[int, int]] | None:
        """Return job and restart of the files written since the last call; None if events were lost, or are left.

        Writers may add events faster than they are read: after MOST_READS no more are.
        """
        runs: set[tuple[int, int]] = set()
        overflowed = False
        for _ in range(MOST_READS):
            try:
                data = os.read(self.handle, 65536)
            except BlockingIOError:
                return None if overflowed else runs
            offset = 0
            while offset < len(data):
                _, mask, _, length = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size
                match = _NAME.fullmatch(data[offset : offset + length])
                offset += length
                overflowed = overflowed or bool(mask & _IN_Q_OVERFLOW)
                if match is not None:
                    runs.add((int(match[1]), int(match[2])))
        return None
