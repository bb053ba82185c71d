"""The operators' contracts as code: what a call must satisfy, and what it returns. The maths is in
reference.py.

A contract's name and annotated arguments are the operator's. It checks arguments in order, so a breach is
blamed on the argument that does not fit those before it. Symbols: T or B rows, C streams of H elements, W =
C*H, R low rank, P expert rows, K slots a token, N pool slots, Hk/Hv key/value heads of D elements.
"""

from __future__ import annotations

from torch import Tensor, bfloat16, float32, int32, int64

from bindings.checks import ACT, FP32, Checker
from bindings.reference import SPLITS
from bindings.registry import contract

_ACT_AXES = {"dtype": ACT}


@contract(
    outs=("out",),
    in_place=(("out", "x"),),
    axes=_ACT_AXES,
    sample=lambda m, T: {
        "x": ((T, m.width), m.dtype),
        "weight": ((m.width,), m.dtype),
        "group_size": m.hidden,
    },
)
def grouped_gemma_rmsnorm(
    c: Checker, x: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 2560
) -> None:
    T, W = c.tensor("x", x, ("T", "W"), ACT)
    c.tensor("weight", weight, ("W",), (x.dtype,))
    c.kernel_scalars = (c.real("eps", eps, at_least=0.0),)
    c.dims["G"] = c.divisor("group_size", group_size, "W", multiple_of=8)
    c.output("out", (T, W), x.dtype)


@contract(
    outs=("out",),
    axes=_ACT_AXES,
    sample=lambda m, T: {
        "normed": ((T, m.width), m.dtype),
        "inject_weight": ((m.streams, m.width), m.dtype),
    },
)
def hc_gate(c: Checker, normed: Tensor, inject_weight: Tensor) -> None:
    T, W = c.tensor("normed", normed, ("T", "W"), ACT)
    c.require(W % 64 == 0, "normed", f"shape ({T}, {W})", "(T, W) with W a multiple of 64")
    C, _ = c.tensor("inject_weight", inject_weight, ("C", "W"), (normed.dtype,))
    c.output("out", (T, SPLITS, C), float32)


def _apply(c: Checker, block: Tensor, residual: Tensor, partials: Tensor) -> tuple[int, int]:
    """The arguments that hc_apply and hc_apply_norm share; returns (T, W)."""
    T, H = c.tensor("block", block, ("T", "H"), ACT)
    _, W = c.tensor("residual", residual, ("T", "W"), (block.dtype,))
    c.require(W % H == 0, "residual", f"shape ({T}, {W})", f"(T, C*H) with T = {T}, H = {H}")
    c.dims["C"] = W // H
    c.tensor("partials", partials, ("T", SPLITS, "C"), FP32)
    return T, W


@contract(
    outs=("out",),
    in_place=(("out", "residual"),),
    axes=_ACT_AXES,
    sample=lambda m, T: {
        "block": ((T, m.hidden), m.dtype),
        "residual": ((T, m.width), m.dtype),
        "partials": ((T, SPLITS, m.streams), float32),
    },
)
def hc_apply(c: Checker, block: Tensor, residual: Tensor, partials: Tensor) -> None:
    T, W = _apply(c, block, residual, partials)
    c.output("out", (T, W), residual.dtype)


@contract(
    outs=("combined_out", "normed_out"),
    in_place=(("combined_out", "residual"),),
    axes=_ACT_AXES,
    sample=lambda m, T: {
        "block": ((T, m.hidden), m.dtype),
        "residual": ((T, m.width), m.dtype),
        "partials": ((T, SPLITS, m.streams), float32),
        "norm_weight": ((m.width,), m.dtype),
    },
)
def hc_apply_norm(
    c: Checker, block: Tensor, residual: Tensor, partials: Tensor, norm_weight: Tensor, eps: float = 1e-6
) -> None:
    T, W = _apply(c, block, residual, partials)
    c.tensor("norm_weight", norm_weight, ("W",), (residual.dtype,))
    c.kernel_scalars = (c.real("eps", eps, at_least=0.0),)
    c.output("combined_out", (T, W), residual.dtype)
    c.output("normed_out", (T, W), residual.dtype)


@contract(
    outs=("combined_out", "normed_out", "partials_out"),
    axes=_ACT_AXES,
    sample=lambda m, T: {
        "block": ((T, m.hidden), m.dtype),
        "residual": ((T, m.width), m.dtype),
        "partials": ((T, SPLITS, m.streams), float32),
        "norm_weight": ((m.width,), m.dtype),
        "inject_weight": ((m.streams, m.width), m.dtype),
    },
)
def hc_boundary(
    c: Checker,
    block: Tensor,
    residual: Tensor,
    partials: Tensor,
    norm_weight: Tensor,
    inject_weight: Tensor,
    eps: float = 1e-6,
) -> None:
    T, W = _apply(c, block, residual, partials)
    c.require(W % 64 == 0, "residual", f"shape ({T}, {W})", "(T, C*H) with C*H a multiple of 64")
    c.tensor("norm_weight", norm_weight, ("W",), (residual.dtype,))
    C, _ = c.tensor("inject_weight", inject_weight, ("C", "W"), (residual.dtype,))
    c.kernel_scalars = (c.real("eps", eps, at_least=0.0),)
    c.output("combined_out", (T, W), residual.dtype)
    c.output("normed_out", (T, W), residual.dtype)
    c.output("partials_out", (T, SPLITS, C), float32)


@contract(
    outs=("out",),
    axes=_ACT_AXES,
    sample=lambda m, T: {
        "normed": ((T, m.width), m.dtype),
        "w_down": ((m.low_rank, m.width), m.dtype),
        "w_up": ((m.width, m.low_rank), m.dtype),
        "streams": m.streams,
    },
)
def hc_mix(c: Checker, normed: Tensor, w_down: Tensor, w_up: Tensor, streams: int = 4) -> None:
    T, W = c.tensor("normed", normed, ("T", "W"), ACT)
    c.tensor("w_down", w_down, ("R", "W"), (normed.dtype,))
    c.tensor("w_up", w_up, ("W", "R"), (normed.dtype,))
    C = c.dims["C"] = c.divisor("streams", streams, "W")
    c.kernel_scalars = (C,)
    c.output("out", (T, W // C), normed.dtype)


@contract(
    outs=("out",),
    axes=_ACT_AXES,
    sample=lambda m, T: {"x": ((T, m.hidden), m.dtype), "weight": ((m.hidden,), m.dtype)},
)
def shared_gate(c: Checker, x: Tensor, weight: Tensor) -> None:
    T, _ = c.tensor("x", x, ("T", "H"), ACT)
    c.tensor("weight", weight, ("H",), (x.dtype,))
    c.output("out", (T,), float32)


@contract(
    outs=("out",),
    in_place=(("out", "shared_out"),),
    axes={"expert_weight_dtype": (float32, bfloat16), "shared": ("gated", "plain", "none")},
    sample=lambda m, T: {
        "expert_out": ((T * m.top_k, m.hidden), bfloat16),
        "permuted_idx": ((T * m.top_k,), int32),
        "expert_weights": ((T, m.top_k), m.expert_weight_dtype),
        "shared_out": None if m.shared == "none" else ((T, m.hidden), bfloat16),
        "shared_gate": ((T,), float32) if m.shared == "gated" else None,
    },
)
def moe_finalize(
    c: Checker,
    expert_out: Tensor,
    permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_out: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> None:
    _, H = c.tensor("expert_out", expert_out, ("P", "H"), (bfloat16,))
    (slots,) = c.tensor("permuted_idx", permuted_idx, ("T*K",), (int32,))
    T, K = c.tensor("expert_weights", expert_weights, ("T", "K"), (bfloat16, float32))
    c.require(
        slots == T * K, "permuted_idx", f"shape ({slots},)", f"(T*K,) with T = {T}, K = {K} of expert_weights"
    )
    if shared_out is not None:
        c.tensor("shared_out", shared_out, ("T", "H"), (bfloat16,))
    if shared_gate is not None:
        c.require(shared_out is not None, "shared_gate", "a tensor", "None where shared_out is None")
        c.tensor("shared_gate", shared_gate, ("T",), FP32)
    c.output("out", (T, H), bfloat16)


@contract(
    outs=("out",),
    mutates=("state",),
    axes={
        "dtype": ACT,
        "state_dtype": (float32, bfloat16),
        "index_dtype": (int32, int64),
        "dt_bias_dtype": (float32, None),
    },
    sample=lambda m, B: {
        "mixed_qkv": ((B, (2 * m.key_heads + m.value_heads) * m.head_dim), m.dtype),
        "a": ((B, m.value_heads), m.dtype),
        "b": ((B, m.value_heads), m.dtype),
        "A_log": ((m.value_heads,), float32),
        "dt_bias": ((m.value_heads,), m.dt_bias_dtype or m.dtype),
        "state": ((1, m.value_heads, m.head_dim, m.head_dim), m.state_dtype),
        "state_indices": ((B,), m.index_dtype),
    },
)
def gdn_packed_decode(
    c: Checker,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
) -> None:
    # read element by element, often views of a packed projection or a rank's slice of a weight: no vector
    # alignment
    B, width = c.tensor("mixed_qkv", mixed_qkv, ("B", "X"), ACT, dense_from=1)
    c.tensor("a", a, ("B", "Hv"), (mixed_qkv.dtype,), dense_from=1, align=None)
    c.tensor("b", b, ("B", "Hv"), (mixed_qkv.dtype,), dense_from=1, align=None)
    c.tensor("A_log", A_log, ("Hv",), FP32, align=None)
    c.tensor("dt_bias", dt_bias, ("Hv",), (float32, mixed_qkv.dtype), align=None)
    N, Hv, D, _ = c.tensor("state", state, ("N", "Hv", "D", "D"), (float32, bfloat16), dense_from=1)
    if c.concrete and N > 1 and state.stride(0) < Hv * D * D:
        c.fail("state", f"strides {state.stride()}", f"a slot stride of at least Hv*D*D = {Hv * D * D}")
    c.tensor("state_indices", state_indices, ("B",), (int32, int64), dense_from=1, align=None)
    keys = width - Hv * D
    if keys < 2 * D or keys % (2 * D) or Hv % (keys // (2 * D)):
        allowed = f"(B, 2*Hk*D + Hv*D) with Hv = {Hv}, D = {D} of state and Hk a divisor of Hv"
        c.fail("mixed_qkv", f"shape ({B}, {width})", allowed)
    c.dims["Hk"] = keys // (2 * D)
    c.kernel_scalars = (D**-0.5 if scale is None else c.real("scale", scale),)
    c.output("out", (B, 1, Hv, D), mixed_qkv.dtype)
