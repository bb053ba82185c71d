"""sglang's published hyper-connection kernels: gate, apply, apply+norm, the split combine, the grouped norm.

They are written for the model's shapes and bf16. Their gate partials are of other eighths of a row than the
contract's (only the sum over the splits is comparable), and their apply+norm takes at most four rows. They
build with nvcc at the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from profiling.cases import MODEL, Case
from profiling.peers import Peer, at_most

PACKAGE = "sglang (hyper-connection kernels)"

APPLY_NORM_ROWS = 4

Prepared = Callable[[], Mapping[str, Tensor]]


def peers() -> list[Peer]:
    from sglang.kernels.ops.elementwise.hc_combine import hc_combine_split
    from sglang.kernels.ops.elementwise.hc_combine_decode import (
        hc_combine_apply,
        hc_combine_apply_norm,
        hc_combine_gate,
    )
    from sglang.kernels.ops.layernorm.grouped_gemma_rmsnorm import grouped_gemma_rmsnorm

    streams, hidden = MODEL.streams, MODEL.hidden

    def gate(case: Case) -> Prepared:
        normed, weight = case.args["normed"], case.args["inject_weight"]
        return lambda: {"hc_gate.sum": hc_combine_gate(normed, weight)}

    def apply(case: Case) -> Prepared:
        block, residual, partials = (case.args[n] for n in ("block", "residual", "partials"))
        return lambda: {"hc_apply": hc_combine_apply(block, residual, partials)}

    def apply_norm(case: Case) -> Prepared:
        names = ("block", "residual", "partials", "norm_weight", "eps")
        block, residual, partials, weight, eps = (case.args[n] for n in names)

        def call() -> Mapping[str, Tensor]:
            return _pair(hc_combine_apply_norm(block, residual, partials, weight, eps))

        return call

    def unfused(case: Case) -> Prepared:
        names = ("normed", "inject_weight", "block", "residual", "norm_weight", "eps")
        normed, weight, block, residual, norm_weight, eps = (case.args[n] for n in names)
        combined, normed_out = case.outs["combined_out"], case.outs["normed_out"]

        def call() -> Mapping[str, Tensor]:
            hc_combine_split(block, residual, normed, weight, streams, hidden, combined)
            grouped_gemma_rmsnorm(combined, norm_weight, hidden, eps, normed_out)
            return _pair((combined, normed_out))

        return call

    def fused(case: Case) -> Prepared:
        names = ("normed", "inject_weight", "block", "residual", "norm_weight", "eps")
        normed, weight, block, residual, norm_weight, eps = (case.args[n] for n in names)

        def call() -> Mapping[str, Tensor]:
            partials = hc_combine_gate(normed, weight)
            return _pair(hc_combine_apply_norm(block, residual, partials, norm_weight, eps))

        return call

    def boundary(case: Case) -> Prepared:
        names = ("block", "residual", "partials", "norm_weight", "inject_weight", "eps")
        block, residual, partials, norm_weight, weight, eps = (case.args[n] for n in names)

        def call() -> Mapping[str, Tensor]:
            combined, normed = hc_combine_apply_norm(block, residual, partials, norm_weight, eps)
            gate = {"hc_boundary.partials.sum": hc_combine_gate(normed, weight)}
            return {"hc_boundary.combined": combined, "hc_boundary.normed": normed, **gate}

        return call

    def norm(case: Case) -> Prepared:
        x, weight, eps, size = (case.args[n] for n in ("x", "weight", "eps", "group_size"))
        out = case.outs["out"]
        return lambda: {"grouped_gemma_rmsnorm": grouped_gemma_rmsnorm(x, weight, size, eps, out)}

    few = at_most(APPLY_NORM_ROWS)
    return [
        Peer("sglang hc_combine_gate", "hc_gate", gate),
        Peer("sglang hc_combine_apply", "hc_apply", apply),
        Peer("sglang hc_combine_apply_norm", "hc_apply_norm", apply_norm, few),
        Peer("sglang hc_combine_split + norm", "hc_gate_apply_norm", unfused),
        Peer("sglang gate + apply_norm", "hc_gate_apply_norm", fused, few),
        Peer("sglang apply_norm + gate", "hc_boundary", boundary, few),
        Peer("sglang grouped norm", "grouped_gemma_rmsnorm", norm),
    ]


def _pair(tensors: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
    return dict(zip(("hc_apply_norm.combined", "hc_apply_norm.normed"), tensors, strict=True))
