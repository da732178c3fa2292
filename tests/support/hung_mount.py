"""A file system that never answers: FUSE without its server, as a user can create with allow_other.

Any access waits until it is unmounted, as with an NFS server that is down.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HEADER = struct.Struct("=IIQQIIII")  # fuse_in_header
_INIT = 26
_MNT_DETACH = 2


@contextmanager
def hung_mount(directory: Path) -> Iterator[Path]:
    """Mount a file system on `directory` that all users may enter and that answers only FUSE_INIT."""
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40755,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"hung", os.fsencode(directory), b"fuse", 0, options) != 0:
        raise OSError(ctypes.get_errno(), f"fuse cannot be mounted on {directory}")
    try:
        _, opcode, unique, *_ = _HEADER.unpack_from(os.read(device, 1 << 18))
        assert opcode == _INIT
        answer = struct.pack("=IIIIHHIIHHIIIIIII", 7, 31, 0, 0, 1, 1, 4096, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        os.write(device, struct.pack("=IiQ", 16 + len(answer), 0, unique) + answer)
        yield directory
    finally:
        os.close(device)  # waiting processes get an error
        libc.umount2(os.fsencode(directory), _MNT_DETACH)
