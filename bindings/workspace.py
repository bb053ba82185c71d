"""Workspaces of kernels whose CTAs hand values to each other through global memory.

A workspace starts as zeros, except for one word (below), and must never serve two launches at once. So each
stream has its own, which its eager calls take in turn, and each CUDA-graph capture its own for every stream
that it captures: two graphs may be replayed at once, and beside eager calls. One that a graph uses is never
given to anything else, since nothing says when the graph is gone.

Not told apart: executions of one graph at the same time (instantiated twice, or twice a child of another).

A kernel whose wait expires says so in the record of its device, a word of host memory whose address lies in
the workspace: whichever launch it was, of a graph or of another bucket of rows, the next one that looks finds
it. What the workspaces hold then is of no use until `OnDevice.renew`.
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
def _stream_id() -> Callable[..., int] | None:
    """cuStreamGetId of the driver; None where it is missing."""
    try:
        function: Callable[..., int] = ctypes.CDLL("libcuda.so.1").cuStreamGetId
    except (OSError, AttributeError):
        return None
    return function


def stream_key(torch_id: int) -> int:
    """What tells a stream from all others of its device, before and after it. torch_id: as torch has it, an
    odd number or 0 for its own streams, which it never destroys, and for others the handle. Another stream
    may get the handle of a destroyed one, and the per-thread default streams share one: the driver counts
    streams (those get negative numbers here)."""
    query = None if torch_id & 1 or not torch_id else _stream_id()
    if query is None:
        return torch_id
    number = ctypes.c_uint64(0)
    return torch_id if query(ctypes.c_void_p(torch_id), ctypes.byref(number)) else -1 - number.value


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


class OnDevice:
    """What all workspaces of a device share: the record of an expired wait. lock: held from reading it to
    clearing it, so that of several threads that find it one renews, before any of them launches again."""

    def __init__(self, device: torch.device):
        self.device = device
        self.record = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.value = ctypes.c_int32.from_address(self.record.data_ptr())
        self.members: list[Workspaces] = []
        self.lock = threading.RLock()

    @property
    def expired(self) -> int:
        """What a kernel whose wait expired wrote into the record, 0 if none has since the last `renew`."""
        return self.value.value

    def renew(self) -> None:
        """Sets all workspaces of the device, those that graphs use too, to what they were when new, then the
        record to 0. With no kernel at work on them: what such a kernel still writes would be mixed with it.
        Not within a capture."""
        with self.lock:
            for one in tuple(self.members):
                one.renew()
            self.value.value = 0


class Workspaces:
    """The workspaces of one size on one device. record_word: the one that holds the address of the record, if
    one does."""

    def __init__(self, shared: OnDevice, words: int, *, record_word: int | None):
        self.shared, self.words, self.record_word = shared, words, record_word
        self.device, self._value = shared.device, shared.value
        self.eager: dict[int, Tensor] = {}
        self.captured: dict[tuple[int, int], Tensor] = {}
        self.kept: list[Tensor] = []
        self.spare: list[Tensor] = []
        self.blocks: list[Tensor] = []
        self.lock = threading.Lock()
        shared.members.append(self)

    @property
    def expired(self) -> int:
        """As `OnDevice.expired`."""
        return self._value.value

    def renew(self) -> None:
        """These alone, and not the record: for `OnDevice.renew`."""
        with self.lock:
            for block in self.blocks:
                self._clear(block)
            self._finish()

    def _empty(self, *shape: int) -> Tensor:
        """No inference tensor, whatever the mode of the call that needs it: any call may clear it."""
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=torch.int64, device=self.device)

    def _clear(self, workspaces: Tensor) -> None:
        workspaces.zero_()
        if self.record_word is not None:
            workspaces[..., self.record_word].fill_(self.shared.record.data_ptr())

    def _finish(self) -> None:
        if self.device.type == "cuda":  # any stream may use them from here on
            torch.cuda.current_stream(self.device).synchronize()

    def of(self, stream: int, capturing: bool) -> Tensor:
        """The workspace, int64 [words], of a launch on a stream of the device, which is the current one.
        stream: its `stream_key`, or its handle if it is captured."""
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
                block = self._empty(SPARES, self.words)
                self._clear(block)
                self._finish()
                self.blocks.append(block)
                self.spare += block.unbind()
            if stream not in self.eager:
                self.eager[stream] = self.spare.pop()
            return self.eager[stream]

    def _take_in_capture(self) -> Tensor:
        """A spare one; else memory of the graph, which each replay then clears first."""
        if self.spare:
            return self.spare.pop()
        own = self._empty(self.words)
        self._clear(own)
        return own


_devices: dict[torch.device, OnDevice] = {}
_all: dict[tuple[torch.device, Hashable], Workspaces] = {}
_lock = threading.Lock()


def on_device(device: torch.device) -> OnDevice | None:
    """What the workspaces of a device share; None if it has none so far."""
    return _devices.get(device)


def devices() -> tuple[torch.device, ...]:
    """The devices that have workspaces."""
    return tuple(_devices)


def workspaces(device: torch.device, user: Hashable, words: int, *, record_word: int | None) -> Workspaces:
    """The workspaces of a size on a device, which has an index if it is a CUDA device. user: what they are
    for; different users share none. record_word: as in `Workspaces`."""
    key = (device, user)
    found = _all.get(key)
    if found is None:
        with _lock:
            found = _all.get(key)
            if found is None:
                shared = _devices.get(device) or OnDevice(device)
                found = Workspaces(shared, words, record_word=record_word)
                _devices[device], _all[key] = shared, found
    return found
