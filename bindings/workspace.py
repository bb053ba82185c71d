"""Workspaces of kernels whose CTAs hand values to each other through global memory.

A workspace starts as zeros and must never serve two launches at once. So each stream has its own, which its
eager calls take in turn, and each CUDA-graph capture its own for every stream that it captures: two graphs
may be replayed at once, and beside eager calls. One that a graph uses is never given to anything else, since
nothing says when the graph is gone.

Not told apart: executions of one graph at the same time (instantiated twice, or twice a child of another),
and streams behind one handle (the per-thread default stream; a handle used again while the work of the
destroyed stream runs).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

SPARES = 16
"""Workspaces made at a time, outside captures, so that captures find some."""

CaptureId = int


@functools.cache
def _capture_info() -> Callable[..., int] | None:
    """cuStreamGetCaptureInfo of the driver, which torch does not expose; None where it is missing."""
    try:
        function: Callable[..., int] = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    return function


def capture_id(stream: int) -> CaptureId | None:
    """The number of the capture that a stream takes part in, which no other capture of the process has; None
    where the driver does not tell."""
    query = _capture_info()
    if query is None:
        return None
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    error = query(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    return None if error or status.value != 1 else number.value


class Workspaces:
    """The workspaces of one size on one device."""

    def __init__(self, device: torch.device, words: int):
        self.device, self.words = device, words
        self.eager: dict[int, Tensor] = {}
        self.captured: dict[tuple[int, int], Tensor] = {}
        self.kept: list[Tensor] = []
        self.spare: list[Tensor] = []
        self.lock = threading.Lock()

    def of(self, stream: int, capturing: bool) -> Tensor:
        """The workspace, int64 [words], of a launch on a stream (a CUDA handle) of the device, which is the
        current one."""
        if not capturing:
            found = self.eager.get(stream)
            return self._eager(stream) if found is None or len(self.spare) < SPARES // 2 else found
        number = capture_id(stream)
        with self.lock:
            found = None if number is None else self.captured.get((number, stream))
            if found is None:
                found = self._take_in_capture()
                if number is None:
                    self.kept.append(found)
                else:
                    self.captured[number, stream] = found
            return found

    def _eager(self, stream: int) -> Tensor:
        """A stream's workspace; sees to the spare ones, so that captures find some however many there are."""
        with self.lock:
            if len(self.spare) < SPARES // 2:
                block = torch.zeros((SPARES, self.words), dtype=torch.int64, device=self.device)
                if self.device.type == "cuda":  # any stream may use them from here on
                    torch.cuda.current_stream(self.device).synchronize()
                self.spare += block.unbind()
            if stream not in self.eager:
                self.eager[stream] = self.spare.pop()
            return self.eager[stream]

    def _take_in_capture(self) -> Tensor:
        """A spare one; else memory of the graph, which each replay then sets to zero first."""
        if self.spare:
            return self.spare.pop()
        return torch.zeros(self.words, dtype=torch.int64, device=self.device)


_all: dict[tuple[torch.device, Hashable], Workspaces] = {}
_lock = threading.Lock()


def workspaces(device: torch.device, user: Hashable, words: int) -> Workspaces:
    """The workspaces of a size on a device, which has an index if it is a CUDA device. user: what they are
    for; different users share none."""
    key = (device, user)
    found = _all.get(key)
    if found is None:
        with _lock:
            found = _all.setdefault(key, Workspaces(device, words))
    return found
