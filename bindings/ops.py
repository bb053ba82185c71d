"""The operators as functions. Shapes, dtypes and maths are those of the contracts; every call is validated.

Common to all: activations and weights are bf16 or fp16 (one of the two a call); tensors live on one device,
are contiguous and start at a multiple of 16 bytes unless said otherwise; T (or B) rows may be 0, and then
nothing is launched. Results are fresh tensors, or are written to `out`, which is returned; `out` may overlap
no input except where an update in place is allowed. They are inference operators: results carry no gradient.
On CUDA devices a call follows the current stream of the tensors' device and can be captured in a CUDA graph
once it was warmed up.

Raises InvalidArgument (before anything is allocated, launched or written), BackendUnavailable if a forced
backend cannot serve the call, WarmupRequired inside a graph capture that a first call would break.
`bindings.explain` tells what serves a call.

`weight`, `norm_weight`, `inject_weight`, `w_down`, `A_log` and `dt_bias` are read before a kernel waits for
its predecessor (programmatic dependent launch, PDL): such a parameter may not be written by the kernel
directly before the operator that reads it, nor by one that only operators of this package separate from it.
Any ordinary kernel in between, an event wait or a synchronisation makes it safe. All other inputs may come
from the kernel directly before. A foreign kernel that uses PDL but skips its own wait breaks the chain for
these kernels too.

The same operators are `torch.ops.flashnext.<name>` and `.out`, which torch.compile and other tracers see.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from bindings import library as library  # registers torch.ops.flashnext
from bindings.checks import integer, real
from bindings.dispatch import caller

__all__ = [
    "gdn_packed_decode",
    "grouped_gemma_rmsnorm",
    "hc_apply",
    "hc_apply_norm",
    "hc_boundary",
    "hc_gate",
    "hc_mix",
    "moe_finalize",
    "shared_gate",
]

_ops = torch.ops.flashnext

_norm, _norm_out = caller("grouped_gemma_rmsnorm"), caller("grouped_gemma_rmsnorm", out=True)
_gate, _gate_out = caller("hc_gate"), caller("hc_gate", out=True)
_apply, _apply_out = caller("hc_apply"), caller("hc_apply", out=True)
_apply_norm, _apply_norm_out = caller("hc_apply_norm"), caller("hc_apply_norm", out=True)
_boundary, _boundary_out = caller("hc_boundary"), caller("hc_boundary", out=True)
_mix, _mix_out = caller("hc_mix"), caller("hc_mix", out=True)
_shared, _shared_out = caller("shared_gate"), caller("shared_gate", out=True)
_finalize = tuple(caller("moe_finalize", absent=n) for n in range(3))
_finalize_out = tuple(caller("moe_finalize", absent=n, out=True) for n in range(3))
_gdn, _gdn_out = caller("gdn_packed_decode"), caller("gdn_packed_decode", out=True)


def grouped_gemma_rmsnorm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 2560, *, out: Tensor | None = None
) -> Tensor:
    """RMSNorm of each group of a row, times `1 + weight`; one rounding.

    x: [T, W], weight: [W]; eps: finite, not negative; group_size: a multiple of 8 that divides W. Returns [T,
    W] of x's dtype. out may be x itself.
    """
    if is_compiling():
        if out is None:
            return _ops.grouped_gemma_rmsnorm.default(x, weight, eps, group_size)
        _ops.grouped_gemma_rmsnorm.out(x, weight, eps, group_size, out=out)
        return out
    if type(eps) is not float:
        eps = real("grouped_gemma_rmsnorm", "eps", eps)
    if type(group_size) is not int:
        group_size = integer("grouped_gemma_rmsnorm", "group_size", group_size)
    if out is None:
        return _norm((x, weight), (eps, group_size))
    _norm_out((x, weight, out), (eps, group_size))
    return out


def hc_gate(normed: Tensor, inject_weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Partial gate logits of hyper-connections: split s of 8 is the dot over the s-th contiguous eighth of
    the row.

    normed: [T, W] with W a multiple of 64, inject_weight: [C, W]. Returns [T, 8, C] fp32. The same inputs
    give the same bits.
    """
    if is_compiling():
        if out is None:
            return _ops.hc_gate.default(normed, inject_weight)
        _ops.hc_gate.out(normed, inject_weight, out=out)
        return out
    if out is None:
        return _gate((normed, inject_weight))
    _gate_out((normed, inject_weight, out))
    return out


def hc_apply(block: Tensor, residual: Tensor, partials: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Adds a block's output to every residual stream through its gate: `fma(gate, block, residual)`, one
    rounding.

    block: [T, H], residual: [T, C*H], partials: [T, 8, C] fp32 of `hc_gate`. Returns [T, C*H]. out may be
    residual itself.
    """
    if is_compiling():
        if out is None:
            return _ops.hc_apply.default(block, residual, partials)
        _ops.hc_apply.out(block, residual, partials, out=out)
        return out
    if out is None:
        return _apply((block, residual, partials))
    _apply_out((block, residual, partials, out))
    return out


def hc_apply_norm(
    block: Tensor,
    residual: Tensor,
    partials: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-6,
    *,
    combined_out: Tensor | None = None,
    normed_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`hc_apply`, and `grouped_gemma_rmsnorm` (a group is a stream) of its rounded result: (combined,
    normed), bit for bit.

    block: [T, H], residual: [T, C*H], partials: [T, 8, C] fp32, norm_weight: [C*H]; eps: finite, not
    negative. Both results are [T, C*H]. Outputs are given both or none; combined_out may be residual itself.
    """
    if is_compiling():
        if combined_out is None and normed_out is None:
            return _ops.hc_apply_norm.default(block, residual, partials, norm_weight, eps)
        _ops.hc_apply_norm.out(
            block, residual, partials, norm_weight, eps, combined_out=combined_out, normed_out=normed_out
        )
        return combined_out, normed_out  # type: ignore[return-value]  # None was refused
    if type(eps) is not float:
        eps = real("hc_apply_norm", "eps", eps)
    if combined_out is None and normed_out is None:
        return _apply_norm((block, residual, partials, norm_weight), (eps,))
    _apply_norm_out((block, residual, partials, norm_weight, combined_out, normed_out), (eps,))
    return combined_out, normed_out  # type: ignore[return-value]  # None was refused


def hc_boundary(
    block: Tensor,
    residual: Tensor,
    partials: Tensor,
    norm_weight: Tensor,
    inject_weight: Tensor,
    eps: float = 1e-6,
    *,
    combined_out: Tensor | None = None,
    normed_out: Tensor | None = None,
    partials_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`hc_apply_norm`, and the next boundary's `hc_gate` of its normed result: (combined, normed, the next
    partials), bit for bit.

    block: [T, H], residual: [T, C*H] with C*H a multiple of 64, partials: [T, 8, C] fp32, norm_weight:
    [C*H], inject_weight: [C, C*H], both of the connection that reads next; eps: finite, not negative. The
    results are [T, C*H], [T, C*H] and [T, 8, C] fp32. Outputs are given all or none.
    """
    inputs = (block, residual, partials, norm_weight, inject_weight)
    if is_compiling():
        if combined_out is None and normed_out is None and partials_out is None:
            return _ops.hc_boundary.default(*inputs, eps)
        _ops.hc_boundary.out(
            *inputs, eps, combined_out=combined_out, normed_out=normed_out, partials_out=partials_out
        )
        return combined_out, normed_out, partials_out  # type: ignore[return-value]  # None was refused
    if type(eps) is not float:
        eps = real("hc_boundary", "eps", eps)
    if combined_out is None and normed_out is None and partials_out is None:
        return _boundary(inputs, (eps,))
    _boundary_out((*inputs, combined_out, normed_out, partials_out), (eps,))
    return combined_out, normed_out, partials_out  # type: ignore[return-value]  # None was refused


def hc_mix(
    normed: Tensor, w_down: Tensor, w_up: Tensor, streams: int = 4, *, out: Tensor | None = None
) -> Tensor:
    """Mixes the streams of a normed residual: `t = silu(dot(normed, w_down) / C)`, rounded, then the mean
    over streams of `sigmoid(dot(t, w_up)) * normed`, rounded.

    normed: [T, C*H], w_down: [R, C*H], w_up: [C*H, R]; streams: C, which no shape tells. Returns [T, H].
    Up to 32 rows one cooperative launch, whose CTAs wait for each other and must all be resident; where the
    device does not grant that, two launches of the same bits; for more rows, and shapes that have no kernel,
    GEMMs. Raises HandoffTimeout, and launches nothing, if CTAs of an
    earlier launch on the device waited in vain (`bindings.check`).
    """
    if is_compiling():
        if out is None:
            return _ops.hc_mix.default(normed, w_down, w_up, streams)
        _ops.hc_mix.out(normed, w_down, w_up, streams, out=out)
        return out
    if type(streams) is not int:
        streams = integer("hc_mix", "streams", streams)
    if out is None:
        return _mix((normed, w_down, w_up), (streams,))
    _mix_out((normed, w_down, w_up, out), (streams,))
    return out


def shared_gate(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The shared expert's gate `sigmoid(dot(x, weight))`. x: [T, H], weight: [H]. Returns [T] fp32, never
    rounded to 16 bits."""
    if is_compiling():
        if out is None:
            return _ops.shared_gate.default(x, weight)
        _ops.shared_gate.out(x, weight, out=out)
        return out
    if out is None:
        return _shared((x, weight))
    _shared_out((x, weight, out))
    return out


def moe_finalize(
    expert_out: Tensor,
    permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_out: Tensor | None = None,
    shared_gate: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Weighted sum of each token's expert rows in slot order, rounded, plus the (gated) shared expert,
    rounded.

    expert_out: [P, H] bf16, permuted_idx: [T*K] int32 (a slot whose index is < 0 or >= P adds nothing),
    expert_weights: [T, K] bf16 or fp32, shared_out: [T, H] bf16, shared_gate: [T] fp32, only with shared_out.
    Returns [T, H] bf16. out may be shared_out itself.
    """
    if is_compiling():
        if out is None:
            return _ops.moe_finalize.default(
                expert_out, permuted_idx, expert_weights, shared_out, shared_gate
            )
        _ops.moe_finalize.out(expert_out, permuted_idx, expert_weights, shared_out, shared_gate, out=out)
        return out
    tensors: tuple[Tensor | None, ...]
    if shared_gate is not None:
        tensors, absent = (expert_out, permuted_idx, expert_weights, shared_out, shared_gate), 0
    elif shared_out is not None:
        tensors, absent = (expert_out, permuted_idx, expert_weights, shared_out), 1
    else:
        tensors, absent = (expert_out, permuted_idx, expert_weights), 2
    if out is None:
        return _finalize[absent](tensors)
    _finalize_out[absent]((*tensors, out))
    return out


def gdn_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """One decode token of the gated delta rule on packed q, k and v; `state` is updated in place.

    mixed_qkv: [B, 2*Hk*D + Hv*D], a, b: [B, Hv], any row stride, contiguous last dimension; A_log: [Hv] fp32,
    dt_bias: [Hv] fp32 or as mixed_qkv; state: [N, Hv, D, D] fp32 or bf16, any slot stride, dense slots;
    state_indices: [B] int32 or int64, any stride: a row whose index is < 0 or >= N gives zeros and touches no
    state, and no two rows may name one slot; scale: D**-0.5 if None. a, b, A_log, dt_bias and state_indices
    need only their element's alignment. Returns [B, 1, Hv, D] of mixed_qkv's dtype.
    """
    if is_compiling():
        inputs = (mixed_qkv, a, b, A_log, dt_bias, state, state_indices)
        if out is None:
            return _ops.gdn_packed_decode.default(*inputs, scale)
        _ops.gdn_packed_decode.out(*inputs, scale, out=out)
        return out
    if scale is not None and type(scale) is not float:
        scale = real("gdn_packed_decode", "scale", scale)
    if out is None:
        return _gdn((mixed_qkv, a, b, A_log, dt_bias, state, state_indices), (scale,))
    _gdn_out((mixed_qkv, a, b, A_log, dt_bias, state, state_indices, out), (scale,))
    return out
