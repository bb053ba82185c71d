"""Which compiled kernel serves a call, and where it comes from.

Kernels are compiled and loaded by a provider, `(module, target, params) -> launch function`. By default that
is bindings.jit's; it is named here and imported at the first use, since bindings stands above this package.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cute_kernels.moe import config

MODULE = "cute_kernels.moe.finalize_all_reduce"

PROVIDER = "bindings.jit:get"
TARGET_OF = "bindings.targets:target_of"
FINALIZE = "bindings.reference:moe_finalize"
FINALIZE_OP = "bindings.ops:moe_finalize"
SHARED_GATE_OP = "bindings.ops:shared_gate"

Provider = Callable[[str, str, Mapping[str, Any]], Callable[..., Any]]

SHARED = ("gated", "plain", "none")
WEIGHT_DTYPES = ("fp32", "bf16")


def resolve(name: str) -> Callable[..., Any]:
    """The function of `module:attribute`, imported now."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


@dataclass(frozen=True)
class Form:
    """A kind of fused call, which has a kernel of its own.

    weight_dtype: of the expert weights, "fp32" or "bf16". shared: how the shared expert enters: "gated",
    "plain", "none". norm: with the RMSNorm epilogue. routing_complete: indices and weights are loaded before
    the kernel waits for its predecessor.
    """

    weight_dtype: str = "fp32"
    shared: str = "gated"
    norm: bool = False
    routing_complete: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("weight_dtype", WEIGHT_DTYPES), ("shared", SHARED)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Form: {name}: got {getattr(self, name)!r}, allowed {', '.join(allowed)}")

    def params(self, world_size: int, hidden: int, top_k: int) -> dict[str, Any]:
        """The kernel's compile-time parameters."""
        return {
            "world": world_size,
            "hidden": hidden,
            "top_k": top_k,
            "weight_dtype": self.weight_dtype,
            "shared": self.shared != "none",
            "gated": self.shared == "gated",
            "norm": self.norm,
            "dtype": "bf16",
            "prefetch": self.routing_complete,
        }


FORMS = tuple(Form(w, s, n) for w, s, n in itertools.product(WEIGHT_DTYPES, SHARED, (False, True)))
"""Every form but those that promise complete routing."""


@dataclass(frozen=True)
class Plain:
    """A kind of plain sum, of "bf16" or "fp16", with the RMSNorm epilogue or without."""

    dtype: str = "bf16"
    norm: bool = False

    def params(self, world_size: int, hidden: int, top_k: int) -> dict[str, Any]:
        """The kernel's compile-time parameters; of no top_k."""
        return {
            "world": world_size,
            "hidden": hidden,
            "top_k": 0,
            "weight_dtype": "none",
            "shared": False,
            "gated": False,
            "norm": self.norm,
            "dtype": self.dtype,
        }


def variants(
    target: str, hidden: int, top_k: int, own: Form, *, sample: bool = False
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(operator, module, parameters) of what an ahead-of-time build holds for a model.

    own: the model's form. sample: every number of ranks and every form, but not in every combination."""
    if hidden % 8 or hidden > config.MAX_HIDDEN or top_k > config.most_slots(hidden):
        return
    norms = (False, True) if config.norm_fits(target, hidden) else (False,)
    for world_size in config.WORLDS:
        for dtype, norm in itertools.product(("bf16", "fp16"), norms):
            if (
                not sample
                or (dtype == "bf16" and not norm)
                or (world_size == 4 and not (norm and dtype == "fp16"))
            ):
                yield "all_reduce", MODULE, Plain(dtype, norm).params(world_size, hidden, top_k)
        for weights, shared, norm, complete in itertools.product(WEIGHT_DTYPES, SHARED, norms, (False, True)):
            form = Form(weights, shared, norm, complete)
            same = (weights, shared) == (own.weight_dtype, own.shared)
            few = (same and not complete) or (world_size == 4 and not norm and (same or not complete))
            if few or not sample:
                yield "moe_finalize_all_reduce", MODULE, form.params(world_size, hidden, top_k)
