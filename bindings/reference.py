"""Torch reference of every operator: the numerical contract, readable.

It is the CPU implementation of the `flashnext` ops and the fallback on GPUs that have no kernel. Every
function is functional (`gdn_packed_decode` updates `state` in place), returns fresh tensors, takes any device
and any number of rows, none included. On a GPU it never waits for the device nor branches on what a tensor
holds, so a CUDA graph can capture it. Arguments are validated by the dispatcher, not here.

Arithmetic is fp32, rounded to the activation dtype where the contract rounds and nowhere else. An fp32 value
is the correctly rounded one where the contract leaves its computation open, so that neither the BLAS, TF32
nor the lane of a vector unit that an element falls into has a say, and a row's bits do not depend on its
neighbours:

* dot products and sums accumulate in float64 and round once to fp32 (the contract fixes no order for them);
* exp, log, sigmoid and the like are evaluated in float64 and round once to fp32;
* `fma` rounds once to fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPLITS = 8
"""Splits of `hc_gate`: partials are [T, SPLITS, C]."""

SOFTPLUS_LINEAR_ABOVE = 20.0
QK_NORM_EPS = 1e-6


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` rounded once to fp32; operands are fp32 or 16-bit and broadcast.

    A product of two fp32 values is exact in float64, so only the float64 sum and the final conversion round.
    The result differs from a hardware fma when the rounded float64 sum is the midpoint of two fp32 values and
    the exact sum is not: about one element in 2**29, then by one fp32 ulp. The slack of 2**-21 that results
    are compared with covers that, and a 16-bit rounding hides it for all but one in 2**15 of those elements.
    A separate fp32 multiply and add would differ in one element in four, often enough for the first of
    `moe_finalize`'s two roundings to come out a bf16 ulp away, which no slack covers.
    """
    return torch.addcmul(c.double(), a.double(), b.double()).float()


def dot(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of `x[..., M, K]` times rows of `weight[..., N, K]`: `[..., M, N]` fp32, rounded once."""
    return torch.matmul(x.double(), weight.double().transpose(-1, -2)).float()


def sigmoid(x: Tensor) -> Tensor:
    """The logistic function of fp32 values in fp32, rounded once."""
    return torch.sigmoid(x.double()).float()


def mean_square(x: Tensor) -> Tensor:
    """Mean of squares over the last dimension, which is kept; float64."""
    return x.double().square().mean(-1, keepdim=True)


def gate_from_partials(partials: Tensor) -> Tensor:
    """The HC gate `2 * sigmoid(sum_s partials[:, s] / C)`, summed in fp32 in order s = 0..S-1.

    partials: [T, S, C] fp32. Returns [T, C] fp32.
    """
    _, splits, streams = partials.shape
    logits = partials[:, 0]
    for s in range(1, splits):
        logits = logits + partials[:, s]
    return 2.0 * sigmoid(logits / streams)


def grouped_gemma_rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 2560) -> Tensor:
    """RMSNorm of each group of a row, scaled by `1 + weight`; one rounding.

    x: [T, W], weight: [W], both bf16 or fp16, W a multiple of group_size. Returns [T, W] of x's dtype.
    """
    rows, width = x.shape
    grouped = x.float().view(rows, width // group_size, group_size)
    scale = torch.rsqrt(mean_square(grouped) + eps).float()
    gain = 1.0 + weight.float().view(width // group_size, group_size)
    return (grouped * scale * gain).to(x.dtype).view(rows, width)


def hc_gate(normed: Tensor, inject_weight: Tensor) -> Tensor:
    """Partial gate logits: split s is the dot over the s-th contiguous eighth of the row.

    normed: [T, W], inject_weight: [C, W], both bf16 or fp16, W a multiple of 64. Returns [T, 8, C] fp32.
    """
    rows, width = normed.shape
    streams = inject_weight.shape[0]
    x = normed.view(rows, SPLITS, width // SPLITS).transpose(0, 1)
    weight = inject_weight.view(streams, SPLITS, width // SPLITS).transpose(0, 1)
    return dot(x, weight).transpose(0, 1).contiguous()


def hc_apply(block: Tensor, residual: Tensor, partials: Tensor) -> Tensor:
    """`fma(gate, block, residual)` for every stream; one rounding.

    block: [T, H], residual: [T, C*H], both bf16 or fp16, partials: [T, S, C] fp32. Returns [T, C*H] of
    residual's dtype.
    """
    rows, hidden = block.shape
    streams = partials.shape[2]
    gate = gate_from_partials(partials).view(rows, streams, 1)
    combined = fma(gate, block.view(rows, 1, hidden), residual.view(rows, streams, hidden))
    return combined.to(residual.dtype).view(rows, streams * hidden)


def hc_apply_norm(
    block: Tensor, residual: Tensor, partials: Tensor, norm_weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """`hc_apply`, and the grouped norm (a group is a stream) of its rounded result.

    block: [T, H], residual: [T, C*H], norm_weight: [C*H], all bf16 or fp16, partials: [T, S, C] fp32.
    Returns (combined, normed), each [T, C*H]: bit for bit what the two separate operators give, because it is
    the two separate operators.
    """
    combined = hc_apply(block, residual, partials)
    return combined, grouped_gemma_rmsnorm(combined, norm_weight, eps, group_size=block.shape[1])


def hc_boundary(
    block: Tensor,
    residual: Tensor,
    partials: Tensor,
    norm_weight: Tensor,
    inject_weight: Tensor,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """`hc_apply_norm`, and the next `hc_gate` of its normed result.

    block: [T, H], residual: [T, C*H], norm_weight: [C*H], inject_weight: [C, C*H], all bf16 or fp16, C*H a
    multiple of 64; partials: [T, S, C] fp32. Returns (combined, normed, the next partials): bit for bit what
    the separate operators give, because it is the separate operators.
    """
    combined, normed = hc_apply_norm(block, residual, partials, norm_weight, eps)
    return combined, normed, hc_gate(normed, inject_weight)


def hc_mix(normed: Tensor, w_down: Tensor, w_up: Tensor, streams: int = 4) -> Tensor:
    """Low-rank mixer of the streams: `t = silu(dot(normed, w_down) / C)`, rounded to the activation dtype,
    then the mean over streams of `sigmoid(dot(t, w_up)) * normed`, rounded once.

    normed: [T, C*H], w_down: [R, C*H], w_up: [C*H, R], all bf16 or fp16; streams is C, which no shape tells.
    Returns [T, H].
    """
    rows, width = normed.shape
    hidden = width // streams
    down = dot(normed, w_down) / streams
    inner = (down * sigmoid(down)).to(normed.dtype)
    mix = sigmoid(dot(inner, w_up)).view(rows, streams, hidden)
    return (mix * normed.float().view(rows, streams, hidden)).mean(1).to(normed.dtype)


def shared_gate(x: Tensor, weight: Tensor) -> Tensor:
    """`sigmoid(dot(x, weight))`, never rounded to 16 bits.

    x: [T, H], weight: [H], both bf16 or fp16. Returns [T] fp32.
    """
    return sigmoid(dot(x, weight.unsqueeze(0)).squeeze(1))


def moe_finalize(
    expert_out: Tensor,
    permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_out: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Weighted sum of each token's expert rows in slot order, rounded to bf16, plus the (gated) shared
    expert, rounded again.

    expert_out: [P, H] bf16, permuted_idx: [T*K] int32, expert_weights: [T, K], shared_out: [T, H] bf16,
    shared_gate: [T] fp32. A slot whose index is negative or at least P adds nothing, whatever its weight.
    Returns [T, H] bf16.
    """
    rows, top_k = expert_weights.shape
    experts, hidden = expert_out.shape
    acc = torch.zeros(rows, hidden, dtype=torch.float32, device=expert_out.device)
    slots = permuted_idx.view(rows, top_k)
    valid = (slots >= 0) & (slots < experts)
    safe = torch.where(valid, slots, 0)
    for k in range(top_k if experts else 0):
        # A select, not a product with 0: row 0, read in place of a dropped one, may hold NaN or Inf.
        term = fma(expert_out.index_select(0, safe[:, k]), expert_weights[:, k : k + 1], acc)
        acc = torch.where(valid[:, k : k + 1], term, acc)
    routed = acc.to(expert_out.dtype)
    if shared_out is None:
        return routed
    if shared_gate is None:
        return (routed.float() + shared_out.float()).to(expert_out.dtype)
    return fma(shared_gate.unsqueeze(1), shared_out, routed).to(expert_out.dtype)


def gdn_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """`exp(-exp(A_log) * softplus(a + dt_bias))` in fp32, linear above 20. Returns [B, Hv]."""
    x = (a.float() + dt_bias.float()).double()
    # where() evaluates both sides: exp(x) may overflow to Inf in the side that it drops, which is harmless.
    softplus = torch.where(x <= SOFTPLUS_LINEAR_ABOVE, torch.log1p(torch.exp(x)), x)
    return torch.exp(-torch.exp(A_log.double()) * softplus).float()


def gdn_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One gated-delta-rule step per row and value head, all in fp32 and unrounded.

    q, k: [B, Hk, D], v: [B, Hv, D], decay, beta: [B, Hv], state: [B, Hv, D, D]. Returns (o [B, Hv, D], the
    new state).
    """
    repeat = v.shape[1] // k.shape[1]
    q = (_unit(q) * scale).repeat_interleave(repeat, dim=1).unsqueeze(-2)
    k = _unit(k).repeat_interleave(repeat, dim=1).unsqueeze(-2)
    state = state * decay[..., None, None]
    delta = (v - dot(state, k).squeeze(-1)) * beta[..., None]
    state = state + delta.unsqueeze(-1) * k
    return dot(state, q).squeeze(-1), state


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    length = torch.sqrt(mean_square(x) * x.shape[-1] + QK_NORM_EPS).float()
    return x / length


def _live_rows(valid: Tensor) -> Tensor:
    """Indices of the rows that have a state; on a device that must not be waited for, see
    `_padded_live_rows`."""
    return torch.nonzero(valid).squeeze(1) if valid.device.type == "cpu" else _padded_live_rows(valid)


def _padded_live_rows(valid: Tensor) -> Tensor:
    """As many indices as there are rows: a row without a state stands in for one that has one.

    It then repeats that row's work, and the writes that collide are equal. With no valid row at all, every
    index is an invalid row's.
    """
    rows = torch.arange(valid.shape[0], device=valid.device)
    return torch.where(valid, rows, valid.int().argmax())


def gdn_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
) -> Tensor:
    """One decode token of the gated delta rule on packed q, k, v; `state` is updated in place.

    mixed_qkv: [B, 2*Hk*D + Hv*D], a, b: [B, Hv], A_log, dt_bias: [Hv], state: [N, Hv, D, D] fp32 or bf16,
    state_indices: [B] int32 or int64; scale defaults to D**-0.5. A row whose index is negative or at least N
    gives zeros and touches no state. Returns [B, 1, Hv, D] of mixed_qkv's dtype.
    """
    slots, value_heads, _, dim = state.shape
    rows = mixed_qkv.shape[0]
    out = torch.zeros(rows, 1, value_heads, dim, dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    if rows == 0 or slots == 0:
        return out
    key_heads = (mixed_qkv.shape[1] // dim - value_heads) // 2

    valid = (state_indices >= 0) & (state_indices < slots)
    live = _live_rows(valid)
    # all true, but for padded indices without any valid row: slot 0 then gets what it held
    has_state = valid[live]
    index = torch.where(has_state, state_indices[live], 0).long()

    q, k, v = (
        part.reshape(-1, part.shape[1] // dim, dim)
        for part in torch.split(mixed_qkv[live].float(), [key_heads * dim] * 2 + [value_heads * dim], dim=1)
    )
    decay = gdn_decay(a[live], A_log, dt_bias)
    beta = sigmoid(b[live].float())
    old = state[index]
    o, new = gdn_step(q, k, v, decay, beta, old.float(), dim**-0.5 if scale is None else scale)
    out[live, 0] = torch.where(has_state[:, None, None], o, 0.0).to(out.dtype)
    state[index] = torch.where(has_state[:, None, None, None], new.to(state.dtype), old)
    return out
