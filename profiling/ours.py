"""Our side of every comparison: the public calls for a case, as they are captured and as eager code makes
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import bindings
from bindings import dispatch, ops
from bindings.registry import OPS
from profiling.cases import Case

Call = Callable[[], Any]


def graph_call(case: Case) -> Call:
    """What is captured: the operator with its outputs given. A gdn call returns what the operator returns;
    its case's state is updated."""
    args, outs = case.args, case.outs
    if case.op != "hc_gate_apply_norm":
        call = getattr(ops, case.op)
        return lambda: call(**args, **outs)

    partials = case.extra["partials"]
    normed, weight, norm_weight, eps = (args[n] for n in ("normed", "inject_weight", "norm_weight", "eps"))
    block, residual = args["block"], args["residual"]

    def pair() -> Any:
        ops.hc_gate(normed, weight, out=partials)
        return ops.hc_apply_norm(block, residual, partials, norm_weight, eps, **outs)

    return pair


def separate_call(case: Case) -> Call:
    """The two launches whose work an hc_boundary does in one."""
    args: dict[str, Any] = dict(case.args)
    outs: dict[str, Any] = dict(case.outs)
    weight, partials = args.pop("inject_weight"), outs.pop("partials_out")

    def separate() -> Any:
        combined, normed = ops.hc_apply_norm(**args, **outs)
        return combined, normed, ops.hc_gate(normed, weight, out=partials)

    return separate


def tile_call(case: Case, tile: int) -> Call:
    """The GDN call with a value tile that is not the dispatcher's choice."""
    call = graph_call(case)

    def forced() -> Any:
        with dispatch.force_value_tile(tile):
            return call()

    return forced


def compiled_call(case: Case) -> Call:
    """The launch function alone, without validation or dispatch: what the ways to call it are measured
    against."""
    op = OPS[case.op]
    arguments = op.bind((), {**case.args, **case.outs})
    call = op.examine(arguments)
    launch = dispatch.launcher(op, dispatch.resolve(call, dispatch.selected()), call.device)
    values = (*arguments.inputs, *arguments.outs, *call.kernel_scalars)
    return lambda: launch(*values)


def eager_calls(case: Case) -> dict[str, Call]:
    """The ways to call an operator eagerly, by name: bindings and torch.ops, allocating and with outputs
    given. None for the gate and apply+norm, which is two operators."""
    if case.op == "hc_gate_apply_norm":
        return {}
    args, outs = tuple(case.args.values()), case.outs
    packet = getattr(torch.ops.flashnext, case.op)
    public, functional, into = getattr(ops, case.op), packet.default, packet.out
    return {
        "ops": lambda: public(*args),
        "ops, out=": lambda: public(*args, **outs),
        "torch.ops": lambda: functional(*args),
        "torch.ops .out": lambda: into(*args, **outs),
    }


def served_by(case: Case) -> str:
    """Which backend serves our call, in words; for the gate and apply+norm, the latter."""
    if case.op == "hc_gate_apply_norm":
        args = {n: case.args[n] for n in ("block", "residual", "norm_weight", "eps")}
        plan = bindings.explain("hc_apply_norm", **args, partials=case.extra["partials"])
    else:
        plan = bindings.explain(case.op, **case.args)
    return f"{plan.backend} {plan.target or ''}".strip()
