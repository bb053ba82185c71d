"""Ranks that are virtual: all in one process, on one device. Their memory is torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from collectives.transports.base import Segment, Transport


class LocalTransport(Transport):
    """Plain tensors, passed between ranks as they are."""

    name = "local"

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)

    def allocate(self, nbytes: int, label: str, slot_bytes: int | None) -> Segment:
        return _LocalSegment(torch.zeros(nbytes, dtype=torch.uint8, device=self.device))


class _LocalSegment(Segment):
    def __init__(self, local: Tensor):
        self.local = local
        self._all: list[Tensor] = []

    def export(self, generation: int) -> object:
        return self.local

    def map(self, handles: Sequence[object], rank: int) -> list[int]:
        self._all = [cast(Tensor, handle) for handle in handles]  # kept alive for those who store to them
        return [t.data_ptr() for t in self._all]

    def view(self, rank: int) -> Tensor:
        return self._all[rank]

    def unmap(self) -> None:
        self._all = []

    def free(self, together: bool = False) -> None:
        self.local = self.local.new_empty(0)
