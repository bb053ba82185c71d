"""Torch bindings of the kernels: validated operators, backend choice, warm-up, and the hyper-connection
state.

    from bindings import ops
    partials = ops.hc_gate(normed, inject_weight)

Importing needs neither a GPU nor a CUDA driver, and loads no compiler: that happens at a kernel's first call.
"""

from bindings import ops
from bindings.dispatch import backend
from bindings.errors import (
    BackendUnavailable,
    CacheError,
    CacheWarning,
    FlashnextWarning,
    HandoffTimeout,
    InvalidArgument,
    WarmupRequired,
)
from bindings.explanation import Explanation, explain
from bindings.mix import check
from bindings.preparation import WarmupConfig, WarmupReport, warmup
from bindings.registry import ModelConfig

__all__ = [
    "BackendUnavailable",
    "CacheError",
    "CacheWarning",
    "Explanation",
    "FlashnextWarning",
    "HandoffTimeout",
    "InvalidArgument",
    "ModelConfig",
    "WarmupConfig",
    "WarmupReport",
    "WarmupRequired",
    "backend",
    "check",
    "explain",
    "ops",
    "warmup",
]
