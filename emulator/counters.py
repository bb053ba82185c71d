"""What a launch did, counted."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    "unique_load_sectors",
    "unique_store_sectors",
)
"""Names of the counters, in the order of emu_counter in csrc/machine.h."""


@dataclass(frozen=True)
class Traffic:
    """Of one launch and one tensor: bytes by lanes and copies (one to several CTAs counts once), and
    different 32-byte sectors."""

    read_bytes: int
    read_sectors: int
    written_bytes: int
    written_sectors: int


@dataclass(frozen=True)
class Counters:
    """Of one launch. Warp instructions; global bytes by lanes, and 32-byte sectors that each warp
    instruction touches, summed; shared-memory wavefronts and the least there could be (their difference is
    bank conflicts); waits at barriers that did not pass at once; bytes moved by bulk and tensor copies;
    operations of matrix instructions; different sectors read and written by all of these together (atomics
    and reductions write), and the same by tensor."""

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
    unique_load_sectors: int
    unique_store_sectors: int
    tensors: dict[str, Traffic] = field(default_factory=dict)

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
