"""One rank alone, for profiling: what it stores to peer i lands in its own slot i, so its polls find all
slots full.

The instructions and the bytes are those of a real rank; peers and links are not there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.transports.base import Segment, Transport


class LoopbackTransport(Transport):
    """Rank i's buffer lies (i - rank) slots after this rank's: a store to slot [phase][rank] of it is one to
    slot [phase][i] of this rank's own. Only that slot of a peer's buffer may be stored to."""

    name = "loopback"

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)

    def allocate(self, nbytes: int, label: str, slot_bytes: int | None) -> Segment:
        if slot_bytes is None or slot_bytes < 1:
            raise ValueError(f"slot_bytes: got {slot_bytes}, allowed the bytes of one rank's slot")
        return _LoopbackSegment(torch.zeros(nbytes, dtype=torch.uint8, device=self.device), slot_bytes)


class _LoopbackSegment(Segment):
    def __init__(self, local: Tensor, slot_bytes: int):
        self.local, self._slot_bytes, self._rank = local, slot_bytes, 0

    def export(self, generation: int) -> object:
        return None

    def map(self, handles: Sequence[object], rank: int) -> list[int]:
        self._rank = rank
        return [self.local.data_ptr() + (i - rank) * self._slot_bytes for i in range(len(handles))]

    def view(self, rank: int) -> Tensor:
        if rank != self._rank:
            raise ValueError(f"rank: got {rank}, allowed {self._rank}: in loopback no other rank has memory")
        return self.local

    def unmap(self) -> None:
        pass

    def free(self, together: bool = False) -> None:
        self.local = self.local.new_empty(0)
