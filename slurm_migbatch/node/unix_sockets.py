"""List root's listening unix sockets, from the kernel (sock_diag(7)).

No path is accessed: users choose the paths of their sockets, and the file system behind them may never answer (a FUSE
mount, a server that is down), which would block the caller. Users can also open very many sockets: what belongs to
others is skipped in the kernel's bytes, and the list ends by a deadline. Kernels before 5.3 do not report the owner
(UNIX_DIAG_UID); there a socket counts as root's if a process of root has it open.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH115, PTH208

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from slurm_migbatch.node.processes import user_of

if TYPE_CHECKING:
    import re

    from slurm_migbatch.node.deadline import Deadline

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG, in linux/netlink.h
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY, in linux/sock_diag.h
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3  # NLMSG_ERROR, NLMSG_DONE
_SHOW_NAME, _SHOW_UID = 0x1, 0x40  # UDIAG_SHOW_*, in linux/unix_diag.h
_NAME, _UID = 0, 7  # UNIX_DIAG_*
_LISTENING = 1 << 10  # TCP_LISTEN, in the kernel's net/tcp_states.h
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBHIIIII")  # unix_diag_req: family, protocol, pad, states, inode, show, cookie
_FIXED, _INODE = 16, 4  # bytes of a unix_diag_msg before its attributes, and before its inode
_ATTRIBUTE = struct.Struct("=HH")  # nlattr: length, type
_OWNER = _ATTRIBUTE.pack(_ATTRIBUTE.size + 4, _UID)
_ROOT = _OWNER + bytes(4)
_ANY = 0xFFFFFFFF
_BUFFER = 1 << 17
_ANSWER_S = 10.0


class UnixSocket(NamedTuple):
    """A listening unix socket of this network namespace: its path as it was bound, and its inode.

    `uid`: of its owner, 0; None if the kernel does not report it.
    """

    path: bytes
    uid: int | None
    inode: int = 0


def listening(path: re.Pattern[bytes], deadline: Deadline) -> list[UnixSocket]:
    """Return the listening sockets whose whole path matches, except those that the kernel reports as another user's.

    Raises OSError, and TooLate: users can open any number of sockets.
    """
    sockets: list[UnixSocket] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as link:
        link.settimeout(_ANSWER_S)
        request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _LISTENING, 0, _SHOW_NAME | _SHOW_UID, _ANY, _ANY)
        link.sendto(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request, (0, 0))
        while True:
            deadline.check("listing unix sockets")  # the kernel sends a few hundred at a time
            for message_type, body in _messages(link.recv(_BUFFER)):
                if message_type == _DONE:
                    return sockets
                if message_type == _ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise OSError(number, os.strerror(number))
                if (found := _read(body, path)) is not None:
                    sockets.append(found)


def _read(body: bytes, path: re.Pattern[bytes]) -> UnixSocket | None:
    """Return the socket of a message; None if its path does not match or it is another user's."""
    attributes = dict(_attributes(body[_FIXED:]))
    name = attributes.get(_NAME, b"").rstrip(b"\0")
    if path.fullmatch(name) is None:
        return None
    uid = attributes.get(_UID)
    owner_uid = struct.unpack("=I", uid)[0] if uid else None
    return None if owner_uid else UnixSocket(name, owner_uid, *struct.unpack_from("=I", body, _INODE))


def of_root(deadline: Deadline) -> frozenset[int]:
    """Return the inodes of the sockets that processes of root have open, as /proc names them. Raises TooLate."""
    inodes: set[int] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        deadline.check("reading the open files of root's processes")
        with suppress(OSError):  # it has ended
            if user_of(pid) == 0:
                inodes.update(_sockets_of(pid))
    return frozenset(inodes)


def _sockets_of(pid: str) -> Iterator[int]:
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(OSError):
                head, _, inode = os.readlink(entry.path).partition(":[")
                if head == "socket" and inode[:-1].isdigit():
                    yield int(inode[:-1])


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and body of each netlink message, except those about sockets of other users.

    Of those about sockets, the messages with root as owner or with no owner remain. The bytes of an abstract name may
    look like an owner, but only those of its own message: `_read` decides.
    """
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, message_type, *_ = _HEADER.unpack_from(data, offset)
        end = offset + length
        if message_type != _BY_FAMILY or data.find(_ROOT, offset, end) >= 0 or data.find(_OWNER, offset, end) < 0:
            yield message_type, data[offset + _HEADER.size : end]
        offset += _padded(max(length, _HEADER.size))


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and value of each attribute."""
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, attribute_type = _ATTRIBUTE.unpack_from(data, offset)
        yield attribute_type, data[offset + _ATTRIBUTE.size : offset + length]
        offset += _padded(max(length, _ATTRIBUTE.size))


def _padded(length: int) -> int:
    return length + 3 & ~3
