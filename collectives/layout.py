"""The layout of a communicator's symmetric buffers: one truth for the kernel's callers and the host protocol.

    slots [2 phases][N source ranks][max_tokens rows][hidden] bf16

Round counters, the poison flag and the record of an expired wait are not symmetric: they lie elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

PHASES = 2
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Layout:
    """Sizes of one channel's buffer. hidden: a multiple of 8."""

    world_size: int
    max_tokens: int
    hidden: int

    @property
    def slot_bytes(self) -> int:
        """Bytes from one source rank's slot to the next."""
        return self.max_tokens * self.hidden * ELEMENT_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return PHASES * self.world_size * self.slot_bytes
