"""Control who may open an instance: the capability devices `/dev/nvidia-caps/nvidia-cap<minor>`.

CUDA must open one device for the GPU instance and one for its compute instance. By default both are readable by
everyone, so that any user could use any slice. Here they belong to the job's user, mode 0400, while a job has the
slice, and to root, mode 0400, otherwise.

The driver states for each capability, in `/proc/driver/nvidia/capabilities/gpu<G>/mig/gi<I>[/ci<J>]/access`, its
minor, the mode the device should get, and whether `nvidia-modprobe`, a setuid helper that every start of CUDA calls,
may restore that mode (`DeviceFileModify: 1`). Writing `DeviceFileModify: 0` to the file disables that: see
NVIDIA's open kernel modules, kernel-open/nvidia/nv-caps.c (nv_cap_procfs_write collects at most 127 bytes and
nv_cap_procfs_release reads `DeviceFileModify: %d` at their beginning), and nvidia-modprobe,
modprobe-utils/nvidia-modprobe-utils.c (mknod_helper returns at once if modification is not allowed). Each new instance
starts again from the module parameter NVreg_ModifyDeviceFiles.

nvidia-modprobe reads any file that its `-f` option names, so if it is setuid a user can have it change these
devices anyway. `helper_is_setuid` detects that; `migbatch node init` says what to do about it.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH101, PTH102, PTH116, PTH123

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from slurm_migbatch.node import effects

MODE = 0o400
HELPERS = ("/usr/bin/nvidia-modprobe", "/usr/sbin/nvidia-modprobe", "/sbin/nvidia-modprobe", "/bin/nvidia-modprobe")


class CapsError(RuntimeError):
    """The capability devices of an instance cannot be set; the message says which and why."""


class CapsOpen(CapsError):
    """The devices have not been closed since the instance was created: it is not the one that it should be."""


class Access(NamedTuple):
    """The content of one `access` file."""

    minor: int
    mode: int
    modify: bool


class Caps:
    """The capability devices of one machine; `/proc` and `/dev` are elsewhere in test beds."""

    def __init__(self, proc_root: str = "/proc", dev_root: str = "/dev") -> None:
        self._proc = proc_root
        self._dev = dev_root

    def grant(self, gpu_minor: int, gi: int, ci: int, uid: int, *, known: bool = False) -> tuple[int, int]:
        """Make `uid` the only user of an instance's devices (0: none). Returns the two capability minors.

        `known`: they were closed before; raises CapsOpen if they were not.
        """
        base = f"{self._proc}/driver/nvidia/capabilities/gpu{gpu_minor}/mig/gi{gi}"
        minors = self._claim(f"{base}/access", known), self._claim(f"{base}/ci{ci}/access", known)
        self.assign(minors, uid)
        return minors

    def assign(self, minors: Iterable[int], uid: int) -> None:
        """Make `uid` the only user of the devices with these minors (0: none), creating missing ones."""
        major = self.major()
        directory = self._directory()
        try:
            for minor in minors:
                self._set(directory, minor, os.makedev(major, minor), uid)
        except OSError as error:
            raise CapsError(f"capability devices in {self._dev}/nvidia-caps: {error.strerror}") from error
        finally:
            os.close(directory)

    def minors(self, gpu_minor: int, gi: int, ci: int) -> tuple[int, int]:
        """Return the capability minors of an instance and of its compute instance. Raises CapsError."""
        base = f"{self._proc}/driver/nvidia/capabilities/gpu{gpu_minor}/mig/gi{gi}"
        return self.read(f"{base}/access").minor, self.read(f"{base}/ci{ci}/access").minor

    def owner(self, minor: int) -> tuple[int, int] | None:
        """Return the uid and permission bits of a capability's device; None if there is no device."""
        try:
            status = os.lstat(f"{self._dev}/nvidia-caps/nvidia-cap{minor}")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CapsError(f"nvidia-cap{minor}: {error.strerror}") from error
        return status.st_uid, stat.S_IMODE(status.st_mode)

    def owned_by(self, uid: int, gpu_minor: int | None) -> list[int]:
        """Return the minors of a user's devices of instances, on one GPU or on all. Raises CapsError.

        Devices to configure and to monitor MIG are none of them: an administrator may have given these to a user.
        """
        path = f"{self._proc}/driver/nvidia-caps/mig-minors"
        of_gpu = f"gpu{'' if gpu_minor is None else f'{gpu_minor}/'}"
        try:
            with open(path, encoding="ascii") as file:
                minors = [int(line.split()[1]) for line in file if line.startswith(of_gpu)]
        except OSError as error:
            raise CapsError(f"{path}: {error.strerror}") from error
        except (IndexError, ValueError) as error:
            raise CapsError(f"{path} has a format that this release does not support") from error
        return [minor for minor in minors if (self.owner(minor) or (0, 0))[0] == uid]

    def wrong(self, gpu_minor: int, gi: int, ci: int, uid: int) -> bool:
        """Return whether `grant` with the same values would change anything."""
        base = f"{self._proc}/driver/nvidia/capabilities/gpu{gpu_minor}/mig/gi{gi}"
        accesses = self.read(f"{base}/access"), self.read(f"{base}/ci{ci}/access")
        return any(access.modify or self.owner(access.minor) != (uid, MODE) for access in accesses)

    def never_closed(self, gpu_minor: int, gi: int, ci: int) -> bool:
        """Return whether everyone may have opened the instance since it was created. Raises CapsError."""
        base = f"{self._proc}/driver/nvidia/capabilities/gpu{gpu_minor}/mig/gi{gi}"
        return self.read(f"{base}/access").modify or self.read(f"{base}/ci{ci}/access").modify

    def read(self, path: str) -> Access:
        """Read one access file. Raises CapsError."""
        try:
            with open(path, encoding="ascii") as file:
                fields = dict(line.split(": ", 1) for line in file.read().splitlines() if ": " in line)
            return Access(
                int(fields["DeviceFileMinor"]), int(fields["DeviceFileMode"]), fields["DeviceFileModify"] != "0"
            )
        except OSError as error:
            raise CapsError(f"{path}: {error.strerror}") from error
        except (KeyError, ValueError) as error:
            raise CapsError(f"{path} has a format that this release does not support") from error

    def _claim(self, path: str, known: bool) -> int:
        access = self.read(path)
        if access.modify and known:
            raise CapsOpen(f"{path} says that everyone may open the device")
        if access.modify:
            # The kernel reads the first line; the rest keeps a plain file (test bed) complete. Same length, one write.
            text = f"DeviceFileModify: 0\nDeviceFileMinor: {access.minor}\nDeviceFileMode: {access.mode}\n"
            effects.point("access write")
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.write(handle, text.encode("ascii"))
                finally:
                    os.close(handle)
            except OSError as error:
                raise CapsError(f"{path} cannot be written: {error.strerror}") from error
        return access.minor

    def major(self) -> int:
        """Return the major number of the devices. Raises CapsError."""
        try:
            with open(f"{self._proc}/devices", encoding="ascii", errors="replace") as file:
                for line in file:
                    fields = line.split()
                    if len(fields) == 2 and fields[1] == "nvidia-caps":
                        return int(fields[0])
        except OSError as error:
            raise CapsError(f"{self._proc}/devices: {error.strerror}") from error
        raise CapsError(f"{self._proc}/devices lists no nvidia-caps: is the NVIDIA driver loaded?")

    def _directory(self) -> int:
        path = f"{self._dev}/nvidia-caps"
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            try:
                handle = os.open(path, flags)
            except FileNotFoundError:
                effects.point("mkdir")
                try:
                    os.mkdir(path, 0o755)
                    os.chmod(path, 0o755)  # noqa: S103 (users look up their own device in it)
                except FileExistsError:
                    pass
                handle = os.open(path, flags)
        except OSError as error:
            raise CapsError(f"{path}: {error.strerror}") from error
        status = os.fstat(handle)
        if status.st_uid != 0 or status.st_mode & 0o022:
            os.close(handle)
            raise CapsError(f"{path} must belong to root and be writable by nobody else")
        return handle

    def _set(self, directory: int, minor: int, device: int, uid: int) -> None:
        """Give a capability device to a user, and make it again if another file has its name."""
        name = f"nvidia-cap{minor}"
        try:
            handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except FileNotFoundError:
            handle = self._make(directory, name, device)
        try:
            status = os.fstat(handle)
            if not stat.S_ISCHR(status.st_mode) or status.st_rdev != device or status.st_nlink != 1:
                if stat.S_ISCHR(status.st_mode) and status.st_rdev == device:
                    # It has a second hard link, which must not give access once the name here is removed.
                    effects.point("chown")
                    os.chown(f"/proc/self/fd/{handle}", 0, 0)
                    effects.point("chmod")
                    os.chmod(f"/proc/self/fd/{handle}", 0)
                os.close(handle)
                handle = -1
                effects.point("unlink")
                os.unlink(name, dir_fd=directory)
                handle = self._make(directory, name, device)
                status = os.fstat(handle)
            proc_path = f"/proc/self/fd/{handle}"
            if status.st_gid != 0 or status.st_uid not in (0, uid):
                effects.point("chown")
                os.chown(proc_path, 0, 0)
                status = os.fstat(handle)  # read again: until now its owner could change the mode
            if stat.S_IMODE(status.st_mode) != MODE:
                effects.point("chmod")
                os.chmod(proc_path, MODE)
            if uid != 0 and (status.st_uid != uid or status.st_gid != 0):
                effects.point("chown")
                os.chown(proc_path, uid, 0)
        finally:
            if handle >= 0:
                os.close(handle)

    @staticmethod
    def _make(directory: int, name: str, device: int) -> int:
        effects.point("mknod")
        with suppress(FileExistsError):  # nvidia-modprobe was faster; its device is checked like any other
            os.mknod(name, stat.S_IFCHR | MODE, device, dir_fd=directory)
        return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)


def helper_is_setuid(paths: Iterable[str] = HELPERS) -> str:
    """Return the path of a setuid nvidia-modprobe, or an empty string."""
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            continue
        if status.st_mode & stat.S_ISUID and status.st_uid == 0:
            return path
    return ""
