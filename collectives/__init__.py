"""Collectives of the decode kernels: symmetric memory, and one-shot all-reduces that push into it.

Importing loads neither torch nor CUDA: that happens at the first use of a name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.communicator import Communicator
    from collectives.decode_moe import DecodeMoE, DecodeMoEConfig
    from collectives.errors import (
        CollectiveError,
        CollectiveTimeout,
        CommunicatorPoisoned,
        RendezvousTimeout,
        SymmetricMismatch,
        TransportUnavailable,
    )
    from collectives.heap import LocalHeap, SymmetricBuffer, SymmetricHeap
    from collectives.launch import Form
    from collectives.rendezvous import Rendezvous, StoreRendezvous

__all__ = [
    "CollectiveError",
    "CollectiveTimeout",
    "Communicator",
    "CommunicatorPoisoned",
    "DecodeMoE",
    "DecodeMoEConfig",
    "Form",
    "LocalHeap",
    "Rendezvous",
    "RendezvousTimeout",
    "StoreRendezvous",
    "SymmetricBuffer",
    "SymmetricHeap",
    "SymmetricMismatch",
    "TransportUnavailable",
]

_MODULES = {
    "communicator": ("Communicator",),
    "decode_moe": ("DecodeMoE", "DecodeMoEConfig"),
    "launch": ("Form",),
    "errors": (
        "CollectiveError",
        "CollectiveTimeout",
        "CommunicatorPoisoned",
        "RendezvousTimeout",
        "SymmetricMismatch",
        "TransportUnavailable",
    ),
    "heap": ("LocalHeap", "SymmetricBuffer", "SymmetricHeap"),
    "rendezvous": ("Rendezvous", "StoreRendezvous"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
