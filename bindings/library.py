"""`torch.ops.flashnext`: every operator as `<name>` (fresh results) and `<name>.out` (written to given
tensors).

CPU and CUDA implementations are the dispatcher of `bindings.ops`; fake ones run the same contract on sizes
alone, so a tracer sees the same errors, shapes, dtypes and (contiguous) strides. Autograd is not implemented:
these are inference ops.

As in `bindings.ops`, kernels read `weight`, `norm_weight`, `inject_weight`, `w_down`, `A_log` and
`dt_bias` before they wait for their predecessor (programmatic dependent launch, PDL), so the kernel directly
before may not write one, nor may one that only operators of this package separate from it. A foreign kernel
that uses PDL but skips its own wait breaks the chain for these kernels too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bindings.dispatch import caller
from bindings.registry import OPS, Arguments, Op

NAMESPACE = "flashnext"

# a fragment: other packages of the project define operators in the same namespace
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

# inputs reach an implementation with the strides they were traced with; nothing here mutates or aliases
# behind the schema
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def _split(op: Op, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(tensors, scalars) of a dispatcher's call, which leaves trailing defaults out."""
    count = len(op.inputs)
    missing = count + len(op.scalars) - len(args)
    args = (*args, *op.defaults[len(op.defaults) - missing :]) if missing else args
    return args[:count], args[count:]


def _implementation(op: Op, out: bool) -> Callable[..., Any]:
    optional = sum(1 for p in op.signature.parameters.values() if p.annotation == "Tensor | None") - len(
        op.outs
    )
    forms = tuple(caller(op.name, out=out, absent=n, direct=False) for n in range(optional + 1))

    def implementation(*args: Any, **outs: Tensor) -> Any:
        tensors, scalars = _split(op, args)
        absent = 0
        while absent < optional and tensors[-1 - absent] is None:
            absent += 1
        tensors = tensors[: len(tensors) - absent]
        if not out:
            return forms[absent](tensors, scalars)
        forms[absent]((*tensors, *[outs[name] for name in op.outs]), scalars)
        return None

    return implementation


def _fake(op: Op, out: bool) -> Callable[..., Any]:
    def fake(*args: Any, **outs: Tensor) -> Any:
        tensors, scalars = _split(op, args)
        given = tuple(outs[name] for name in op.outs) if out else ()
        call = op.examine(Arguments(tensors, scalars, given), concrete=False)
        if out:
            return None
        results = tuple(torch.empty(o.shape, dtype=o.dtype, device=call.device) for o in call.outputs)
        return results if len(results) > 1 else results[0]

    return fake


def _define(op: Op) -> None:
    for schema, overload, out in zip(op.schemas(), ("", ".out"), (False, True), strict=True):
        LIBRARY.define(schema, tags=TAGS)
        implementation = _implementation(op, out)
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(op.name + overload, implementation, key)
        torch.library.register_fake(f"{NAMESPACE}::{op.name}{overload}", _fake(op, out), lib=LIBRARY)


for _op in OPS.values():
    _define(_op)
