"""One rank's end of the protocol on a GPU: what the kernel is given besides a call's tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collectives.layout import Layout
from cute_kernels.moe import config

SETTLE_S = 0.002
"""Threads whose waits expire together write the record one after another; it is read again after this time
until it stands still."""


class Record:
    """Where kernels write down an expired wait: host memory, so that looking costs no synchronisation. One a
    communicator, as is the poison flag that makes every later kernel leave at once."""

    def __init__(self, world_size: int, device: torch.device):
        self.world_size = world_size
        self._host = torch.zeros(config.RECORD_MISSING + world_size, dtype=torch.int32).pin_memory()
        self._words = self._host.numpy()
        self.address: int = self._host.data_ptr()
        self.poison = torch.zeros(4, dtype=torch.int32, device=device)

    @property
    def expired(self) -> bool:
        """Whether a wait has expired since the last `clear`."""
        return bool(self._words[config.RECORD_STATE])

    def read(self) -> tuple[list[int], int]:
        """The missing ranks and the round, after `expired`."""
        seen: list[int] = []
        while seen != (seen := self._words.tolist()):
            time.sleep(SETTLE_S)
        missing = [i for i, word in enumerate(seen[config.RECORD_MISSING :]) if word]
        return missing, seen[config.RECORD_EPOCH] % 2**32

    def clear(self) -> None:
        """As new. With no kernel of the communicator at work."""
        self._words[:] = 0
        self.poison.zero_()


class DeviceChannel:
    """A symmetric buffer with its counters. local: this rank's memory, uint8. peers: int64 addresses of every
    rank's, on the device.

    early: dependents may start before a wait is over. Not where ranks share a GPU: what waits for this rank's
    kernel would hold the room that a peer's needs.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        local: Tensor,
        peers: Tensor,
        record: Record,
        target: str,
        timeout_s: float,
    ):
        self.layout, self.rank, self.target = layout, rank, target
        self._local, self._record = local, record
        self.rounds = torch.zeros(
            layout.max_tokens * config.parts(target, layout.hidden), dtype=torch.int32, device=local.device
        )
        self._fixed = (
            peers,
            self.rounds,
            record.poison,
            rank,
            layout.max_tokens,
            record.address,
            round(timeout_s * 1e9),
        )

    def launch(
        self,
        kernel: Callable[..., None],
        tensors: Sequence[Tensor | None],
        out: Tensor,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
    ) -> None:
        """Launches on the current stream of the device. tensors: those of a call in the kernel's order, None
        where absent; out: at most max_tokens rows."""
        kernel(*tensors, out, *self._fixed, eps, weight_offset)

    def load(self, kernel: Callable[..., None], tensors: Sequence[Tensor | None], out: Tensor) -> None:
        """Loads the kernel's module: a launch of no rows."""
        self.launch(kernel, tensors, out)

    def clear(self) -> None:
        """Empty slots, counters at 0: for a reset, with no kernel of any rank at work on this rank's
        buffer."""
        self._local.zero_()
        self.rounds.zero_()
