"""The compile targets, and which of them a device runs."""

from __future__ import annotations

import functools

import torch

TARGETS: tuple[str, ...] = ("sm_90a", "sm_100a", "sm_103a")

_BY_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


def target_of(device: torch.device) -> str | None:
    """The target whose code `device` runs, or None: the CPU, or a GPU that no kernel is built for."""
    if device.type != "cuda":
        return None
    return _target_of_index(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _target_of_index(index: int) -> str | None:
    return _BY_CAPABILITY.get(torch.cuda.get_device_capability(index))


def vector_bytes(target: str) -> int:
    """Bytes of the widest global-memory access of a target: 32 in the SM100 family, 16 on SM90."""
    if target not in TARGETS:
        raise ValueError(f"target: got {target!r}, allowed {', '.join(TARGETS)}")
    return 16 if target == "sm_90a" else 32
