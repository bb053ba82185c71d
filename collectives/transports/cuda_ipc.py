"""CUDA IPC, for processes of one host: several GPUs that reach one another, or several processes on one GPU.

Memory is allocated by cudaMalloc for this alone: a handle exports a whole allocation, and torch's caching
allocator would hand out its neighbours. It comes in whole 2 MiB pages, so that nothing else lies on an
exported page. cuda-python loads at the first use, so that this module imports without it and without a
driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collectives.errors import CollectiveError
from collectives.rendezvous import Rendezvous
from collectives.transports.base import Segment, Transport, tensor_at

PAGE = 2 << 20
_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_PROCESS = uuid.uuid4().hex  # process ids repeat across namespaces


@dataclass(frozen=True)
class _Handle:
    process: str
    address: int
    exported: bytes
    nbytes: int


@dataclass
class _Memory:
    """What has to be given back to CUDA; apart from the segment, so that a finalizer can hold it."""

    index: int
    process: int
    address: int = 0
    opened: list[int] = field(default_factory=list)

    def close_opened(self) -> None:
        opened, self.opened = self.opened, []
        if opened and self.process == os.getpid():
            with _on(self.index) as runtime:
                for address in opened:
                    _done("cudaIpcCloseMemHandle", runtime.cudaIpcCloseMemHandle(address))

    def release(self) -> None:
        self.close_opened()
        address, self.address = self.address, 0
        if address and self.process == os.getpid():
            with _on(self.index) as runtime:
                _done("cudaFree", runtime.cudaFree(address))


class CudaIpcTransport(Transport):
    """Device memory of its own, opened by the other ranks' processes."""

    name = "cuda_ipc"

    def __init__(self, device: torch.device | str):
        given = torch.device(device)
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if given.index is None else given.index
        )

    @classmethod
    def obstacle(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"serves cuda, not {device.type}"
        if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
            return "the package cuda-python (cuda.bindings) is not installed"
        error, count = _runtime().cudaGetDeviceCount()
        if int(error):
            return f"CUDA does not start: {error.name}"
        if (device.index or 0) >= count:
            return f"there is no {device}, but {count} CUDA device(s)"
        return None

    @classmethod
    def place(cls) -> str | None:
        """One kernel, one IPC namespace."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/ipc')}"

    @classmethod
    def create(cls, device: torch.device, rendezvous: Rendezvous, timeout_s: float) -> Transport:
        return cls(device)

    def allocate(self, nbytes: int, label: str, slot_bytes: int | None) -> Segment:
        return _CudaIpcSegment(self.device, nbytes)


class _CudaIpcSegment(Segment):
    def __init__(self, device: torch.device, nbytes: int):
        self._nbytes, self._addresses = nbytes, [0]
        self._memory = _Memory(device.index, os.getpid())
        weakref.finalize(self, _quietly, self._memory.release)
        with _on(device.index) as runtime:
            size = -(-nbytes // PAGE) * PAGE
            (self._memory.address,) = _done(f"cudaMalloc of {size} bytes", runtime.cudaMalloc(size))
        self.local = tensor_at(self._memory.address, nbytes)

    def export(self, generation: int) -> object:
        with _on(self._memory.index) as runtime:
            call = runtime.cudaIpcGetMemHandle(self._memory.address)
            (handle,) = _done("cudaIpcGetMemHandle", call)
            # The field has no accessor in some versions of cuda-python.
            exported = ctypes.string_at(int(handle.getPtr()), _HANDLE_BYTES)
        return _Handle(_PROCESS, self._memory.address, exported, self._nbytes)

    def map(self, handles: Sequence[object], rank: int) -> list[int]:
        self._addresses = [self._open(handle) for handle in handles]
        return list(self._addresses)

    def _open(self, handle: object) -> int:
        assert isinstance(handle, _Handle)
        if handle.process == _PROCESS:  # CUDA refuses to open a process's own handle
            return handle.address
        with _on(self._memory.index) as runtime:
            described = runtime.cudaIpcMemHandle_t()
            ctypes.memmove(int(described.getPtr()), handle.exported, _HANDLE_BYTES)
            call = runtime.cudaIpcOpenMemHandle(described, _LAZY_PEER_ACCESS)
            (address,) = _done("cudaIpcOpenMemHandle", call)
        self._memory.opened.append(int(address))
        return int(address)

    def view(self, rank: int) -> Tensor:
        return tensor_at(self._addresses[rank], self._nbytes)

    def unmap(self) -> None:
        self._addresses = []
        self._memory.close_opened()

    def free(self, together: bool = False) -> None:
        self._memory.release()
        self.local = torch.empty(0, dtype=torch.uint8)


def _runtime() -> Any:
    from cuda.bindings import runtime

    return runtime


@contextmanager
def _on(index: int) -> Iterator[Any]:
    """The CUDA runtime, with `index` as this thread's device."""
    runtime = _runtime()
    (before,) = _done("cudaGetDevice", runtime.cudaGetDevice())
    _done("cudaSetDevice", runtime.cudaSetDevice(index))
    try:
        yield runtime
    finally:
        _done("cudaSetDevice", runtime.cudaSetDevice(before))


def _done(what: str, returned: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = returned
    if int(error):
        raise CollectiveError(f"{what}: {error.name}")
    return tuple(values)


def _quietly(release: Any) -> None:
    """For finalizers: the CUDA context may be gone, or lost to an error that was reported before."""
    with suppress(CollectiveError):
        release()
