"""The push protocol on the host, over memory that processes share: the reference of the kernel's.

The same slots, markers, order of sums, counters and bound as the kernel; what a kernel's thread does for its
words, a process does here for all of its rows. Two things it takes from the host: an aligned 32-bit word is
written and read whole (numpy copies by words or more), and a store is not seen before an earlier one of the
same thread. x86 keeps that order; elsewhere the interpreter's own locks, taken between any two of these
statements, do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collectives.layout import PHASES, Layout

NEGATIVE_ZEROS = np.int32(-0x7FFF8000)
"""0x80008000, two bf16 or fp16 -0.0: what is sent for a word of two +0.0, which marks an empty slot."""

SPINS, NAP_S = 50, 50e-6

Words = NDArray[np.int32]


class Expired(Exception):  # noqa: N818
    """A wait ran out. missing: the ranks that had not arrived; epoch: the round."""

    def __init__(self, missing: list[int], epoch: int):
        super().__init__(missing, epoch)
        self.missing, self.epoch = missing, epoch


def payload(x: Tensor) -> Words:
    """[T, H] bf16 or fp16 as [T, H/2] words with the marker replaced."""
    words: Words = x.contiguous().view(torch.int32).numpy()
    return np.where(words == 0, NEGATIVE_ZEROS, words)


def rank_sum(words: Words, dtype: torch.dtype) -> Tensor:
    """[T, N, H/2] words to [T, H] bf16 or fp16: summed over N in order in fp32 from +0.0, one rounding."""
    sources = torch.from_numpy(words).view(dtype).float()
    total = torch.zeros(sources.shape[0], sources.shape[2])
    for i in range(sources.shape[1]):
        total = total + sources[:, i]
    return total.to(dtype)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (weight + weight_offset), rounded once to x's dtype; x [T, H], weight
    [H]."""
    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps).float()
    return (x.float() * scale * (weight.float() + weight_offset)).to(x.dtype)


class HostChannel:
    """One rank's end. view: the bytes of rank i's buffer as mapped here, a uint8 tensor.

    delay: called between push and wait; for tests."""

    def __init__(self, layout: Layout, rank: int, view: Callable[[int], Tensor], timeout_s: float):
        self.layout, self.rank, self.timeout_s = layout, rank, timeout_s
        self.rounds = np.zeros(layout.max_tokens, np.uint32)
        self.delay: Callable[[], None] | None = None
        self.map(view)

    def map(self, view: Callable[[int], Tensor]) -> None:
        """Takes the buffers as they are mapped now."""
        shape = (PHASES, self.layout.world_size, self.layout.max_tokens, self.layout.hidden // 2)
        self._slots: list[Words] = [
            view(i)[: self.layout.nbytes].view(torch.int32).numpy().reshape(shape)
            for i in range(self.layout.world_size)
        ]

    def clear(self) -> None:
        """Own slots empty, counters at 0: for a reset, with no peer at work."""
        self._slots[self.rank][...] = 0
        self.rounds[:] = 0

    def exchange(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x [T, H] bf16 or fp16, T at most max_tokens. Raises Expired."""
        rows = np.arange(x.shape[0])
        phase = (self.rounds[rows] & 1).astype(np.intp)
        sent = payload(x)
        for slots in self._slots:
            slots[phase, self.rank, rows] = sent
        if self.delay is not None:
            self.delay()
        own = phase[:, None], np.arange(self.layout.world_size)[None, :], rows[:, None]
        received = self._wait(own)
        result = rank_sum(received, x.dtype)
        self._slots[self.rank][own] = 0  # empty again before the next round's push says that we are done
        self.rounds[rows] += 1
        return result

    def _wait(self, own: tuple[NDArray[np.intp], ...]) -> Words:
        deadline, spins = time.monotonic() + self.timeout_s, 0
        while True:
            late = time.monotonic() > deadline  # read before the slots: what came in time counts
            received = self._slots[self.rank][own]
            empty = (received == 0).any(axis=2)
            if not empty.any():
                return received
            if late:
                row = int(np.flatnonzero(empty.any(axis=1))[0])
                raise Expired(np.flatnonzero(empty.any(axis=0)).tolist(), int(self.rounds[row]))
            spins += 1
            if spins > SPINS:
                time.sleep(NAP_S)
