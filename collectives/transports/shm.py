"""POSIX shared memory, for CPU processes of one host.

A segment is a file under /dev/shm only until every rank has mapped it; then the name goes, and the memory
lives as long as a process has it mapped. A process killed in between leaves a name. Its creator holds a file
lock while the name stands, and the operating system drops that lock with the process, so the next transport
of the same user finds and removes such names: a lock that it gets is a dead process's.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives.errors import CollectiveError
from collectives.rendezvous import Rendezvous
from collectives.transports.base import Segment, Transport

DIRECTORY = Path("/dev/shm")
_PREFIX = "flashnext"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class _Handle:
    path: str
    inode: int
    nbytes: int


class ShmTransport(Transport):
    """Shared memory between processes of one user on one host."""

    name = "shm"

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        sweep()

    @classmethod
    def obstacle(cls, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"serves cpu, not {device.type}"
        return None if os.access(DIRECTORY, os.W_OK | os.X_OK) else f"{DIRECTORY} cannot be written"

    @classmethod
    def place(cls) -> str | None:
        """One kernel, one mount of /dev/shm, one user."""
        device = DIRECTORY.stat().st_dev if DIRECTORY.exists() else None
        return f"{_BOOT_ID.read_text().strip()} {device} {os.geteuid()}"

    @classmethod
    def create(cls, device: torch.device, rendezvous: Rendezvous, timeout_s: float) -> Transport:
        return cls(device)

    def allocate(self, nbytes: int, label: str, slot_bytes: int | None) -> Segment:
        return _ShmSegment(nbytes, label)


class _ShmSegment(Segment):
    def __init__(self, nbytes: int, label: str):
        self._nbytes = nbytes
        self._label = "".join(c if c.isalnum() else "_" for c in label)[:32]
        self._named = _Named()
        self._all: list[np.ndarray[Any, Any]] = []
        weakref.finalize(self, self._named.remove)
        self._create(0)

    def _create(self, generation: int) -> None:
        descriptor = self._named.create(f"g{generation}-{self._label}", self._nbytes)
        self.local = torch.from_numpy(_mapped(descriptor, self._nbytes))

    def export(self, generation: int) -> object:
        self._named.remove()
        self._create(generation)
        path, descriptor = self._named.path, self._named.descriptor
        assert path is not None
        assert descriptor is not None
        return _Handle(str(path), os.fstat(descriptor).st_ino, self._nbytes)

    def map(self, handles: Sequence[object], rank: int) -> list[int]:
        own: np.ndarray[Any, Any] = self.local.numpy()
        self._all = [own if r == rank else _open(handle) for r, handle in enumerate(handles)]
        return [int(array.ctypes.data) for array in self._all]

    def all_mapped(self) -> None:
        self._named.remove()

    def view(self, rank: int) -> Tensor:
        return torch.from_numpy(self._all[rank])

    def unmap(self) -> None:
        # Unmapped when the last tensor over it is gone: a view that somebody kept must not become a fault.
        self._all = []

    def free(self, together: bool = False) -> None:
        self.unmap()
        self._named.remove()
        self.local = torch.empty(0, dtype=torch.uint8)


class _Named:
    """The name of one segment, while it has one; its lock says that its creator lives."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.descriptor: int | None = None

    def create(self, label: str, nbytes: int) -> int:
        """A new file of `nbytes` zeros; returns its descriptor."""
        while True:
            name = f"{_own_prefix()}{os.getpid()}-{secrets.token_hex(4)}-{label}"
            path = DIRECTORY / name
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self.descriptor, self.path = os.open(path, flags, 0o600), path
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            if os.fstat(self.descriptor).st_nlink:
                break
            self.remove()  # swept between its creation and the lock
        try:
            os.posix_fallocate(self.descriptor, 0, nbytes)  # a full /dev/shm fails here, not in a store later
        except OSError:
            self.remove()
            raise
        return self.descriptor

    def remove(self) -> None:
        """Removes the name, then lets go of the lock. May be called again."""
        path, descriptor, self.path, self.descriptor = self.path, self.descriptor, None, None
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        if descriptor is not None:
            os.close(descriptor)


def sweep() -> list[str]:
    """Removes the names that dead processes of this user left; returns them."""
    removed = []
    for path in DIRECTORY.glob(f"{_own_prefix()}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or no file of ours
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path.name)
        except (BlockingIOError, FileNotFoundError):
            pass  # its creator lives, or has removed it
        finally:
            os.close(descriptor)
    return removed


def _own_prefix() -> str:
    return f"{_PREFIX}-{os.geteuid()}-"


def _mapped(descriptor: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)


def _open(handle: object) -> np.ndarray[Any, Any]:
    assert isinstance(handle, _Handle)
    descriptor = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size) != (handle.inode, handle.nbytes):
            raise CollectiveError(f"{handle.path} is not the segment that its rank made")
        return _mapped(descriptor, handle.nbytes)
    finally:
        os.close(descriptor)
