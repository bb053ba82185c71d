"""Float64 oracle of every operator: the exact result before its last rounding.

It takes the operators' arguments (tensors on any device) and computes on the CPU in numpy, in float64, with
the contract's earlier roundings applied: the activation dtype's inside `hc_mix` and `moe_finalize`, and
fp32's where the contract fixes the order of an fp32 sum and with it every bit (`moe_finalize`'s fma chain,
the sum of gate partials). It shares no code with the reference that it judges, and is written row by row
where that one is vectorised. `tolerance.check` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bindings.tolerance import F64, Exact, rounded, spacing, to_numpy


def _sigmoid(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-x)))


def fma32(a: F64, b: F64, c: F64) -> F64:
    """a*b + c of fp32 values, rounded once to fp32, exactly.

    The product is exact in float64; the sum is rounded to odd there (if inexact, to the neighbour with an odd
    last bit), so that the second rounding sees on which side of a midpoint the exact value lies.
    """
    with np.errstate(invalid="ignore"):
        p = a * b
        s = np.asarray(p + c)
        t = s - p
        error = (p - (s - t)) + (c - t)
    even = (s.view(np.int64) & 1) == 0
    to_odd = np.isfinite(s) & np.isfinite(error) & (error != 0) & even
    s = np.where(to_odd, np.nextafter(s, np.copysign(np.inf, error)), s)
    return rounded(s, torch.float32)


def gate(partials: Tensor) -> F64:
    """The HC gate [T, C] of fp32 partials [T, S, C], which the contract adds in fp32 in order."""
    p = partials.detach().cpu().numpy()
    total = p[:, 0].copy()
    with np.errstate(invalid="ignore", over="ignore"):
        for s in range(1, p.shape[1]):
            total += p[:, s]
    assert total.dtype == np.float32
    return 2.0 * _sigmoid(total.astype(np.float64) / p.shape[2])


def _norm(x: F64, weight: F64, eps: float, group_size: int) -> F64:
    y = np.empty_like(x)
    for start in range(0, x.shape[1], group_size):
        group = slice(start, start + group_size)
        mean_square = (x[:, group] ** 2).sum(axis=1) / group_size
        with np.errstate(invalid="ignore"):
            y[:, group] = x[:, group] / np.sqrt(mean_square + eps)[:, None] * (1.0 + weight[group])
    return y


def grouped_gemma_rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int = 2560) -> Exact:
    """[T, W]."""
    return Exact(_norm(to_numpy(x), to_numpy(weight), eps, group_size))


def _gate_partials(x: F64, weight: F64) -> F64:
    part = x.shape[1] // 8
    value = np.empty((x.shape[0], 8, weight.shape[0]))
    with np.errstate(invalid="ignore"):
        for s in range(8):
            columns = slice(s * part, (s + 1) * part)
            value[:, s] = x[:, columns] @ weight[:, columns].T
    return value


def hc_gate(normed: Tensor, inject_weight: Tensor) -> Exact:
    """[T, 8, C]."""
    return Exact(_gate_partials(to_numpy(normed), to_numpy(inject_weight)))


def hc_apply(block: Tensor, residual: Tensor, partials: Tensor) -> Exact:
    """[T, C*H], with the terms' magnitudes."""
    a, added, held = gate(partials), to_numpy(block), to_numpy(residual)
    hidden = added.shape[1]
    value, terms = np.empty_like(held), np.empty_like(held)
    with np.errstate(invalid="ignore"):
        for c in range(a.shape[1]):
            stream = slice(c * hidden, (c + 1) * hidden)
            product = a[:, c, None] * added
            value[:, stream] = product + held[:, stream]
            terms[:, stream] = np.abs(product) + np.abs(held[:, stream])
    return Exact(value, terms)


def hc_apply_norm(
    block: Tensor,
    residual: Tensor,
    partials: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-6,
    combined: Tensor | None = None,
) -> tuple[Exact, Exact]:
    """(combined, normed), each [T, C*H]. The norm reads rounded values: those of `combined`, the result under
    test, if given (a combined value that may round either way changes what the norm reads), else the exact
    ones rounded."""
    exact = hc_apply(block, residual, partials)
    x = rounded(exact.value, residual.dtype) if combined is None else to_numpy(combined)
    return exact, Exact(_norm(x, to_numpy(norm_weight), eps, block.shape[1]))


def hc_boundary(
    block: Tensor,
    residual: Tensor,
    partials: Tensor,
    norm_weight: Tensor,
    inject_weight: Tensor,
    eps: float = 1e-6,
    combined: Tensor | None = None,
    normed: Tensor | None = None,
) -> tuple[Exact, Exact, Exact]:
    """(combined, normed, the next partials). `combined` as for hc_apply_norm; the gate reads rounded values
    too: those of `normed`, the result under test, if given, else the exact ones rounded."""
    exact, normal = hc_apply_norm(block, residual, partials, norm_weight, eps, combined)
    x = rounded(normal.value, residual.dtype) if normed is None else to_numpy(normed)
    return exact, normal, Exact(_gate_partials(x, to_numpy(inject_weight)))


def hc_mix(normed: Tensor, w_down: Tensor, w_up: Tensor, streams: int = 4) -> Exact:
    """[T, H]."""
    x, down, up = to_numpy(normed), to_numpy(w_down), to_numpy(w_up)
    with np.errstate(invalid="ignore", over="ignore"):
        z = (x @ down.T) / streams
        inner = z / (1.0 + np.exp(-z))
        t = rounded(inner, normed.dtype)
        m = _sigmoid(t @ up.T)
        step = spacing(inner, normed.dtype)
        # an fp32 sum is off by up to 2^-21 of itself: nearer to a tie than that, either neighbour is right
        tie = np.abs(step / 2 - np.abs(inner - t)) <= 2.0**-21 * np.abs(inner)
        moved = (np.where(tie, step, 0.0) @ np.abs(up).T) * m * (1.0 - m) * np.abs(x)

    def mean(y: F64) -> F64:
        return sum(np.split(y, streams, axis=1), np.zeros(())) / streams

    return Exact(mean(m * x), ties=np.nan_to_num(mean(moved), nan=0.0, posinf=0.0))


def shared_gate(x: Tensor, weight: Tensor) -> Exact:
    """[T]."""
    with np.errstate(invalid="ignore"):
        return Exact(_sigmoid(to_numpy(x) @ to_numpy(weight)))


def moe_finalize(
    expert_out: Tensor,
    permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_out: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Exact:
    """[T, H], with the terms' magnitudes."""
    experts, weights = to_numpy(expert_out), to_numpy(expert_weights)
    slots = permuted_idx.detach().cpu().numpy().reshape(weights.shape)
    value = np.zeros((weights.shape[0], experts.shape[1]))
    terms = np.zeros_like(value)
    for t, (row_slots, row_weights) in enumerate(zip(slots, weights, strict=True)):
        for slot, weight in zip(row_slots, row_weights, strict=True):
            if 0 <= slot < experts.shape[0]:
                value[t] = fma32(experts[slot], weight, value[t])
                terms[t] += np.abs(experts[slot] * weight)
    if shared_out is None:
        return Exact(value, terms)
    routed, shared = rounded(value, expert_out.dtype), to_numpy(shared_out)
    with np.errstate(invalid="ignore"):
        scaled = shared if shared_gate is None else to_numpy(shared_gate)[:, None] * shared
        return Exact(routed + scaled, np.abs(routed) + np.abs(scaled))


def gdn_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
) -> tuple[Exact, Exact]:
    """(out [B, 1, Hv, D], the whole state afterwards). `state` is left alone; a float64 one is taken too."""
    qkv, pool = to_numpy(mixed_qkv), to_numpy(state).copy()
    slots, value_heads, dim, _ = pool.shape
    key_heads = (qkv.shape[1] // dim - value_heads) // 2
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros((qkv.shape[0], 1, value_heads, dim))
    with np.errstate(invalid="ignore", over="ignore"):
        x = to_numpy(a) + to_numpy(dt_bias)
        decay = np.exp(-np.exp(to_numpy(A_log)) * np.where(x > 20, x, np.log1p(np.exp(x))))
        beta = _sigmoid(to_numpy(b))
        for row, slot in enumerate(state_indices.detach().cpu().tolist()):
            if not 0 <= slot < slots:
                continue
            heads = qkv[row].reshape(-1, dim)
            for h in range(value_heads):
                source = h * key_heads // value_heads
                q, k, v = heads[source], heads[key_heads + source], heads[2 * key_heads + h]
                q = q / np.sqrt(q @ q + 1e-6) * scale
                k = k / np.sqrt(k @ k + 1e-6)
                decayed = pool[slot, h] * decay[row, h]
                pool[slot, h] = decayed + np.outer((v - decayed @ k) * beta[row, h], k)
                out[row, 0, h] = pool[slot, h] @ q
    return Exact(out), Exact(pool)


ORACLES: dict[str, Callable[..., Exact | tuple[Exact, ...]]] = {
    "grouped_gemma_rmsnorm": grouped_gemma_rmsnorm,
    "hc_gate": hc_gate,
    "hc_apply": hc_apply,
    "hc_apply_norm": hc_apply_norm,
    "hc_boundary": hc_boundary,
    "hc_mix": hc_mix,
    "shared_gate": shared_gate,
    "moe_finalize": moe_finalize,
    "gdn_packed_decode": gdn_packed_decode,
}
_SEVERAL = {
    "hc_apply_norm": ("combined", "normed"),
    "hc_boundary": ("combined", "normed", "partials"),
    "gdn_packed_decode": ("", "state"),
}
RESULTS = {op: tuple(f"{op}.{part}".rstrip(".") for part in _SEVERAL.get(op, ("",))) for op in ORACLES}
"""Names of each operator's results, as `tolerance.RULES` knows them; a state updated in place is a result."""

FEEDS: dict[str, tuple[str, ...]] = {"hc_apply_norm": ("combined",), "hc_boundary": ("combined", "normed")}
"""By operator, the results that later results of the same call are computed from, rounded as they are: an
oracle takes them as arguments of these names."""


def fed(op: str, inputs: Mapping[str, Any], results: Mapping[str, Tensor]) -> dict[str, Any]:
    """The oracle's arguments for a call: its inputs, and those of its results that others are judged on."""
    return {**inputs, **{name: results[f"{op}.{name}"] for name in FEEDS.get(op, ())}}


def exact(op: str, inputs: Mapping[str, Any]) -> dict[str, Exact]:
    """The exact results of `op` on its arguments by name, by the names in `RESULTS`."""
    got = ORACLES[op](**inputs)
    results = (got,) if isinstance(got, Exact) else got
    return dict(zip(RESULTS[op], results, strict=True))
