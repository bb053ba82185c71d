"""What a launch did, counted."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = (
    "instructions",
    "load_bytes",
    "store_bytes",
    "load_sectors",
    "store_sectors",
    "shared_waves",
    "shared_accesses",
    "barrier_waits",
    "tma_load_bytes",
    "tma_store_bytes",
    "matrix_flops",
)
"""Names of the counters, in the order of emu_counter in csrc/machine.h."""


@dataclass(frozen=True)
class Counters:
    """Of one launch. Warp instructions; global bytes by lanes, and 32-byte sectors that each warp
    instruction touches, summed; shared-memory wavefronts and the least there could be (their difference is
    bank conflicts); waits at barriers that did not pass at once; bytes moved by bulk and tensor copies;
    operations of matrix instructions."""

    kernel: str
    instructions: int
    load_bytes: int
    store_bytes: int
    load_sectors: int
    store_sectors: int
    shared_waves: int
    shared_accesses: int
    barrier_waits: int
    tma_load_bytes: int
    tma_store_bytes: int
    matrix_flops: int

    @property
    def bank_conflicts(self) -> int:
        return self.shared_waves - self.shared_accesses

    @property
    def read_bytes(self) -> int:
        """All bytes read from global memory."""
        return self.load_bytes + self.tma_load_bytes

    @property
    def written_bytes(self) -> int:
        """All bytes written to global memory."""
        return self.store_bytes + self.tma_store_bytes
