"""torch, eager: each operator as one would write it in a model, with torch's own kernels and no compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from profiling.cases import Case, call_results
from profiling.peers import Peer

PACKAGE = "torch"


def grouped_gemma_rmsnorm(x: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
    normed = functional.rms_norm(x.float().unflatten(-1, (-1, group_size)), (group_size,), eps=eps)
    return (normed.flatten(-2) * (1.0 + weight.float())).to(x.dtype)


def gate_logits(normed: Tensor, inject_weight: Tensor) -> Tensor:
    """[T, C]: nothing here needs the sum in parts."""
    return functional.linear(normed.float(), inject_weight.float())


def combine(block: Tensor, residual: Tensor, logits: Tensor) -> Tensor:
    streams = logits.shape[-1]
    gate = 2.0 * torch.sigmoid(logits / streams)
    held = residual.float().unflatten(-1, (streams, -1))
    return torch.addcmul(held, gate.unsqueeze(-1), block.float().unsqueeze(-2)).flatten(-2).to(residual.dtype)


def hc_apply(block: Tensor, residual: Tensor, partials: Tensor) -> Tensor:
    return combine(block, residual, partials.sum(1))


def hc_apply_norm(
    block: Tensor, residual: Tensor, partials: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    combined = hc_apply(block, residual, partials)
    return combined, grouped_gemma_rmsnorm(combined, norm_weight, eps, block.shape[-1])


def hc_gate_apply_norm(
    normed: Tensor, inject_weight: Tensor, block: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    combined = combine(block, residual, gate_logits(normed, inject_weight))
    return combined, grouped_gemma_rmsnorm(combined, norm_weight, eps, block.shape[-1])


def hc_boundary(
    block: Tensor,
    residual: Tensor,
    partials: Tensor,
    norm_weight: Tensor,
    inject_weight: Tensor,
    eps: float,
) -> Mapping[str, Tensor]:
    combined, normed = hc_apply_norm(block, residual, partials, norm_weight, eps)
    gate = {"hc_boundary.partials.sum": gate_logits(normed, inject_weight)}
    return {"hc_boundary.combined": combined, "hc_boundary.normed": normed, **gate}


def hc_mix(normed: Tensor, w_down: Tensor, w_up: Tensor, streams: int) -> Tensor:
    inner = functional.silu(functional.linear(normed, w_down) / streams)
    mixed = torch.sigmoid(functional.linear(inner, w_up)) * normed
    return mixed.unflatten(-1, (streams, -1)).mean(-2)


def shared_gate(x: Tensor, weight: Tensor) -> Tensor:
    return torch.sigmoid((x.float() * weight.float()).sum(-1))


def moe_finalize(
    expert_out: Tensor, permuted_idx: Tensor, expert_weights: Tensor, shared_out: Tensor, shared_gate: Tensor
) -> Tensor:
    kept = (permuted_idx >= 0) & (permuted_idx < expert_out.shape[0])
    rows = expert_out.index_select(0, torch.where(kept, permuted_idx, 0)).float()
    weights = torch.where(kept, expert_weights.flatten(), 0.0).unsqueeze(-1)
    routed = (rows * weights).unflatten(0, (expert_weights.shape[0], -1)).sum(1)
    return torch.addcmul(
        routed.to(expert_out.dtype).float(), shared_gate.unsqueeze(-1), shared_out.float()
    ).to(expert_out.dtype)


def gdn_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
) -> Tensor:
    heads, dim = state.shape[1:3]
    keys = (mixed_qkv.shape[1] - heads * dim) // 2
    q, k, v = (
        part.unflatten(-1, (-1, dim)) for part in mixed_qkv.float().split([keys, keys, heads * dim], -1)
    )
    repeat = heads // (keys // dim)
    q = (q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * dim**-0.5).repeat_interleave(repeat, 1)
    k = (k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeat, 1)
    decay = torch.exp(-A_log.exp() * functional.softplus(a.float() + dt_bias))
    index = state_indices.long()
    held = state.index_select(0, index).float() * decay[..., None, None]
    delta = (v - (held * k.unsqueeze(-2)).sum(-1)) * torch.sigmoid(b.float()).unsqueeze(-1)
    held = held + delta.unsqueeze(-1) * k.unsqueeze(-2)
    state.index_copy_(0, index, held.to(state.dtype))
    return (held * q.unsqueeze(-2)).sum(-1).unsqueeze(1).to(mixed_qkv.dtype)


def _gate_sum(normed: Tensor, inject_weight: Tensor) -> Mapping[str, Tensor]:
    return {"hc_gate.sum": gate_logits(normed, inject_weight)}


def results(case: Case, returned: Any) -> Mapping[str, Tensor]:
    """What a function here returned, by name."""
    return returned if isinstance(returned, dict) else call_results(case, returned)


def _peer(op: str, function: Callable[..., Any], allowance: float) -> Peer:
    def prepare(case: Case) -> Callable[[], Mapping[str, Tensor]]:
        args = case.args
        return lambda: results(case, function(**args))

    return Peer("torch eager", op, prepare, allowance=allowance)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "grouped_gemma_rmsnorm": grouped_gemma_rmsnorm,
    "hc_gate": _gate_sum,
    "hc_apply": hc_apply,
    "hc_apply_norm": hc_apply_norm,
    "hc_gate_apply_norm": hc_gate_apply_norm,
    "hc_boundary": hc_boundary,
    "hc_mix": hc_mix,
    "shared_gate": shared_gate,
    "moe_finalize": moe_finalize,
    "gdn_packed_decode": gdn_packed_decode,
}
"""One for every piece of work."""

ALLOWANCES = {
    "grouped_gemma_rmsnorm": 2.0,
    "hc_gate": 4.0,
    "hc_apply": 3.0,
    "hc_apply_norm": 3.0,
    "hc_gate_apply_norm": 3.0,
    "hc_boundary": 4.0,
    "hc_mix": 32.0,
    "shared_gate": 4.0,
    "moe_finalize": 4.0,
    "gdn_packed_decode": 4.0,
}
"""Sums in another order cost up to a few ulp; hc_mix rounds to 16 bits at every step, as modules do."""


def peers() -> list[Peer]:
    """One for every piece of work."""
    return [_peer(op, function, ALLOWANCES[op]) for op, function in FUNCTIONS.items()]
