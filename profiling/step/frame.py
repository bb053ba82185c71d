"""The frame of the step: everything between the kernels that are compared, the same in both arms.

On a CUDA device Triton kernels (frame_kernels.py) and torch's matrix products; elsewhere, and as what the
kernels are checked against, torch. One token: every row dimension is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6
SPAN = 128
"""Keys that one program attends to."""


def _kernels() -> Any:
    from profiling.step import frame_kernels

    return frame_kernels


def conv_update(x: Tensor, state: Tensor, weight: Tensor, *, plain: bool = False) -> Tensor:
    """One token of a causal convolution of four taps a channel, and its silu.

    x: [1, C]; state: [3, C], the last three inputs, updated in place; weight: [4, C]. Returns [1, C].
    plain: in torch, as below.
    """
    if plain or not x.is_cuda:
        taps = torch.cat([state, x])
        total = (taps.float() * weight.float()).sum(0, keepdim=True)
        state.copy_(taps[1:].clone())
        return functional.silu(total).to(x.dtype)
    out, channels = torch.empty_like(x), x.shape[1]
    _kernels().step_conv[(-(-channels // 256),)](x, state, weight, out, channels, BLOCK=256, num_warps=2)
    return out


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, *, plain: bool = False) -> Tensor:
    """RMSNorm of every head of x [1, heads*D], times weight [D], times silu(z); z as x."""
    dim = weight.shape[0]
    if plain or not x.is_cuda:
        heads = x.float().unflatten(1, (-1, dim))
        normed = functional.rms_norm(heads, (dim,), eps=EPS) * weight.float()
        return (normed.flatten(1) * functional.silu(z.float())).to(x.dtype)
    out = torch.empty_like(x)
    _kernels().step_gated_norm[(x.shape[1] // dim,)](x, z, weight, out, EPS, DIM=dim, num_warps=1)
    return out


def route(logits: Tensor, top_k: int, *, plain: bool = False) -> tuple[Tensor, Tensor]:
    """The top_k largest of logits [1, E]: ids [top_k + 1] int32, of which the last is E, the shared expert
    that every token takes; and the softmax of the chosen among themselves [1, top_k] fp32."""
    experts = logits.shape[1]
    if plain or not logits.is_cuda:
        values, chosen = torch.topk(logits.float(), top_k)
        shared = chosen.new_full((1,), experts)
        return torch.cat([chosen.view(-1), shared]).to(torch.int32), torch.softmax(values, 1)
    ids = torch.empty(top_k + 1, dtype=torch.int32, device=logits.device)
    weights = torch.empty(1, top_k, device=logits.device)
    shape = {"EXPERTS": experts, "TOP": top_k, "PADDED": 1 << top_k.bit_length()}
    _kernels().step_route[(1,)](logits, ids, weights, **shape, num_warps=1)
    return ids, weights


def experts(x: Tensor, ids: Tensor, up: Tensor, down: Tensor, *, plain: bool = False) -> Tensor:
    """Gated experts on one token: ids [S], up [E, 2*F, H] (gates, then ups), down [E, H, F]. Returns [S,
    H], a row a slot."""
    hidden, width = down.shape[1:]
    if plain or not x.is_cuda:
        chosen = ids.long()
        gate, value = (up[chosen].float() @ x[0].float()).split(width, dim=1)
        inner = (functional.silu(gate) * value).to(x.dtype)
        return (down[chosen].float() @ inner.float().unsqueeze(2)).squeeze(2).to(x.dtype)
    slots = ids.shape[0]
    inner = x.new_empty(slots, width)
    out = x.new_empty(slots, hidden)
    shape = {"HIDDEN": hidden, "WIDTH": width}
    _kernels().step_expert_up[(slots, width // 4)](
        x, ids, up, inner, **shape, ROWS=4, BLOCK=1024, num_warps=4
    )
    block = 1 << (width - 1).bit_length()
    _kernels().step_expert_down[(slots, hidden // 16)](
        inner, ids, down, out, **shape, ROWS=16, BLOCK=block, num_warps=4
    )
    return out


def attend(
    row: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    angles: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    *,
    plain: bool = False,
) -> Tensor:
    """Gated attention of one token over a cache of one key head, its own entry included.

    row: [1, (2*heads + 2)*D], the projections q, gate, k, v; q_weight, k_weight: [D], of the heads'
    RMSNorms; angles: [R/2] fp32, what the first R dimensions are turned by; keys, values: [L, D], of which
    `position` is written. Returns [1, heads*D].
    """
    dim = keys.shape[1]
    heads = row.shape[1] // dim // 2 - 1
    if plain or not row.is_cuda:
        return _attend_plain(row, q_weight, k_weight, angles, keys, values, position, heads)
    q, out = row.new_empty(heads, dim), row.new_empty(1, heads * dim)
    splits = -(-(position + 1) // SPAN)
    padded = 1 << (splits - 1).bit_length()
    part = torch.empty(padded, heads, dim, device=row.device)
    top, total = torch.empty(2, padded, heads, device=row.device)
    kernels, shape = _kernels(), {"HEADS": heads, "DIM": dim}
    kernels.step_qk_norm_rope[(heads + 2,)](
        row, q_weight, k_weight, angles, q, keys, values, position, EPS,
        **shape, ROTARY=2 * angles.shape[0], num_warps=1,
    )  # fmt: skip
    kernels.step_attend[(padded,)](
        q, keys, values, position + 1, part, top, total, dim**-0.5,
        **shape, PADDED=max(16, heads), SPAN=SPAN, BLOCK=64, num_warps=4,
    )  # fmt: skip
    gate = row[:, heads * dim :]
    kernels.step_attend_join[(heads,)](part, top, total, gate, out, **shape, SPLITS=padded, num_warps=4)
    return out


def _attend_plain(
    row: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    angles: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    heads: int,
) -> Tensor:
    dim = keys.shape[1]
    q, gate, k, v = row[0].split([heads * dim, heads * dim, dim, dim])
    keys[position] = _turned(k.view(1, dim), k_weight, angles)[0]
    values[position] = v
    query = _turned(q.view(heads, dim), q_weight, angles).float()
    scores = torch.softmax(query @ keys[: position + 1].float().t() * dim**-0.5, dim=1)
    opened = torch.sigmoid(gate.float()).view(heads, dim)
    return (scores @ values[: position + 1].float() * opened).view(1, -1).to(row.dtype)


def _turned(x: Tensor, weight: Tensor, angles: Tensor) -> Tensor:
    """RMSNorm of each row, then its first 2*len(angles) dimensions turned, halves in pairs."""
    normed = functional.rms_norm(x.float(), (x.shape[1],), eps=EPS) * weight.float()
    half = angles.shape[0]
    first, second, rest = normed.split([half, half, x.shape[1] - 2 * half], dim=1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=1).to(x.dtype)
