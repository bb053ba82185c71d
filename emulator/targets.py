"""Devices that are emulated: what the runtime would say of them."""

from __future__ import annotations

from dataclasses import dataclass

from emulator.errors import EmulatorError


@dataclass(frozen=True)
class Target:
    """A device. shared_limit: most dynamic and static shared bytes a CTA may have."""

    name: str
    capability: tuple[int, int]
    sms: int
    shared_limit: int = 232448

    def attributes(self) -> dict[int, int]:
        """cudaDeviceAttr -> value, as far as host code asks."""
        return {
            1: 1024,  # threads a block
            8: 49152,  # shared bytes a block without opting in
            10: 32,  # lanes
            12: 65536,  # registers a block
            16: self.sms,
            38: 50 << 20,  # L2 bytes
            39: 2048,  # threads an SM
            75: self.capability[0],
            76: self.capability[1],
            81: self.shared_limit + 1024,  # shared bytes an SM
            82: 65536,  # registers an SM
            95: 1,  # cooperative launch
            97: self.shared_limit,
            106: 32,  # blocks an SM
            111: 1024,  # reserved shared bytes a block
            120: 1,  # cluster launch
        }


TARGETS = {
    "sm_90a": Target("sm_90a", (9, 0), 132),
    "sm_100a": Target("sm_100a", (10, 0), 148),
    "sm_103a": Target("sm_103a", (10, 3), 148),
}


def target_of(name: str) -> Target:
    """Raises EmulatorError for a target that is not emulated."""
    if name not in TARGETS:
        raise EmulatorError(f"target: got {name!r}, allowed {', '.join(TARGETS)}")
    return TARGETS[name]
