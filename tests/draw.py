"""Random arguments of each operator, and the kinds of data that tests/cases.py combines with them.

Everything is drawn on the CPU from a seed that is the case's name. What the contract says is not read holds
NaN: expert rows that no slot names, the weights of dropped slots, state slots that no row names, the inputs
of rows without a state.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")


class Draw:
    """Deterministic random tensors on the CPU."""

    def __init__(self, name: str) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def uniform(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = FP32) -> Tensor:
        """Uniform in [-scale, scale)."""
        return ((torch.rand(shape, generator=self.generator) * 2 - 1) * scale).to(dtype)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)

    def some(self, n: int, fraction: float) -> Tensor:
        """Indices of a fraction of n, at least one of any."""
        return self.permutation(n)[: max(1, int(n * fraction))] if n else torch.empty(0, dtype=torch.int64)

    def signs(self, n: int) -> Tensor:
        return torch.randint(0, 2, (n,), generator=self.generator) * 2 - 1


# --- arguments of each operator
# ------------------------------------------------------------------------------------


def norm(
    draw: Draw, T: int, dtype: torch.dtype, groups: int = 4, group_size: int = 2560, eps: float = 1e-6
) -> Inputs:
    W = groups * group_size
    inputs: Inputs = dict(
        x=draw.uniform(T, W, scale=3, dtype=dtype), weight=draw.uniform(W, scale=0.3, dtype=dtype)
    )
    return inputs | dict(eps=eps, group_size=group_size)


def gate(draw: Draw, T: int, dtype: torch.dtype, W: int = 10240, C: int = 4) -> Inputs:
    weight_scale = 0.05 * (10240 / W) ** 0.5
    return dict(
        normed=draw.uniform(T, W, scale=2, dtype=dtype),
        inject_weight=draw.uniform(C, W, scale=weight_scale, dtype=dtype),
    )


def apply(draw: Draw, T: int, dtype: torch.dtype, H: int = 2560, C: int = 4) -> Inputs:
    return dict(
        block=draw.uniform(T, H, scale=2, dtype=dtype),
        residual=draw.uniform(T, C * H, scale=3, dtype=dtype),
        partials=draw.uniform(T, 8, C, scale=1.5),
    )


def apply_norm(
    draw: Draw, T: int, dtype: torch.dtype, H: int = 2560, C: int = 4, eps: float = 1e-6
) -> Inputs:
    weight = draw.uniform(C * H, scale=0.3, dtype=dtype)
    return apply(draw, T, dtype, H, C) | dict(norm_weight=weight, eps=eps)


def boundary(draw: Draw, T: int, dtype: torch.dtype, H: int = 2560, C: int = 4, eps: float = 1e-6) -> Inputs:
    inject = draw.uniform(C, C * H, scale=0.05 * (10240 / (C * H)) ** 0.5, dtype=dtype)
    return apply_norm(draw, T, dtype, H, C, eps) | dict(inject_weight=inject)


def mix(draw: Draw, T: int, dtype: torch.dtype, H: int = 2560, C: int = 4, R: int = 320) -> Inputs:
    W = C * H
    inputs: Inputs = dict(
        normed=draw.uniform(T, W, scale=2, dtype=dtype),
        w_down=draw.uniform(R, W, scale=0.03 * (10240 / W) ** 0.5, dtype=dtype),
        w_up=draw.uniform(W, R, scale=0.2 * (320 / R) ** 0.5, dtype=dtype),
    )
    return inputs if C == 4 else inputs | dict(streams=C)


def shared(draw: Draw, T: int, dtype: torch.dtype, H: int = 2560) -> Inputs:
    weight = draw.uniform(H, scale=0.05 * (2560 / H) ** 0.5, dtype=dtype)
    return dict(x=draw.uniform(T, H, scale=2, dtype=dtype), weight=weight)


def finalize(
    draw: Draw,
    T: int,
    dtype: torch.dtype = BF16,
    H: int = 2560,
    K: int = 10,
    weight_dtype: torch.dtype = BF16,
    experts: str = "gated",
    drop: float = 1 / 7,
    P: int | None = None,
) -> Inputs:
    """experts: "gated", "ungated" or "alone" (no shared expert). drop: fraction of slots dropped, by indices
    below 0 and from P on in turns. P defaults to more rows than there are slots."""
    P = T * K + 5 if P is None else P
    slots = draw.permutation(max(P, T * K))[: T * K].to(torch.int32) % max(P, 1)
    weights = draw.uniform(T, K).abs()
    weights = (weights / weights.sum(-1, keepdim=True).clamp_min(1e-3)).to(weight_dtype)
    dropped = draw.permutation(T * K)[: int(T * K * drop) if P else T * K]
    outside = torch.tensor([-1, P, -(2**31), P + 12345, 2**31 - 1, -7], dtype=torch.int32)
    slots[dropped] = outside[torch.arange(len(dropped)) % len(outside)]
    weights.view(-1)[dropped] = NAN
    rows = draw.uniform(P, H, scale=2, dtype=dtype)
    unread = torch.ones(P, dtype=torch.bool)
    unread[slots[(slots >= 0) & (slots < P)].long()] = False
    rows[unread] = NAN
    inputs: Inputs = dict(expert_out=rows, permuted_idx=slots, expert_weights=weights)
    if experts != "alone":
        inputs["shared_out"] = draw.uniform(T, H, scale=2, dtype=dtype)
    if experts == "gated":
        inputs["shared_gate"] = draw.uniform(T).abs()
    return inputs


def gdn(
    draw: Draw,
    T: int,
    dtype: torch.dtype,
    Hk: int = 4,
    Hv: int = 12,
    D: int = 128,
    state_dtype: torch.dtype = FP32,
    bias_dtype: torch.dtype | None = FP32,
    index_dtype: torch.dtype = torch.int32,
    live: bool = True,
    qkv_gap: int = 0,
    head_gap: int = 0,
    slot_gap: int = 0,
    index_step: int = 1,
    scale: float | None = None,
) -> Inputs:
    """bias_dtype: None is the activations'. live: whether any row has a state; every third, from the second,
    has none anyway. *_gap: elements between rows (slots) beyond their own."""
    N = T + 3
    width = (2 * Hk + Hv) * D
    index = draw.permutation(N)[:T].to(index_dtype)
    outside = [-1, N, -5, N + 7, torch.iinfo(index_dtype).min, torch.iinfo(index_dtype).max]
    if index_dtype == torch.int64:
        outside[:2] = [-(2**32), 2**32 + 1]  # their low halves would be slots
    for i, row in enumerate(range(1, T, 3) if live else range(T)):
        index[row] = outside[i % len(outside)]
    held = (index >= 0) & (index < N)

    qkv = draw.uniform(T, width + qkv_gap, scale=2, dtype=dtype)[:, :width]
    qkv[~held] = NAN
    state = draw.uniform(N, Hv * D * D + slot_gap, scale=0.5, dtype=state_dtype)[:, : Hv * D * D]
    unread = torch.ones(N, dtype=torch.bool)
    unread[index[held].long()] = False
    state[unread] = NAN
    # a + dt_bias lies on both sides of the softplus threshold of 20
    spread = torch.empty(T * index_step, dtype=index_dtype)
    spread[::index_step] = index
    inputs: Inputs = dict(
        mixed_qkv=qkv,
        a=draw.uniform(T, Hv + head_gap, scale=3, dtype=dtype)[:, :Hv],
        b=draw.uniform(T, Hv + head_gap, scale=3, dtype=dtype)[:, :Hv],
        A_log=draw.uniform(Hv, scale=2.5) - 1.5,
        dt_bias=(draw.uniform(Hv, scale=13) + 9).to(dtype if bias_dtype is None else bias_dtype),
        state=state.unflatten(1, (Hv, D, D)),
        state_indices=spread[::index_step],
    )
    return inputs if scale is None else inputs | dict(scale=scale)


# --- kinds of data ----------------------------------------------------------------------------------

ACTIVATIONS = {
    "grouped_gemma_rmsnorm": ("x",),
    "hc_gate": ("normed",),
    "hc_apply": ("block", "residual"),
    "hc_apply_norm": ("block", "residual"),
    "hc_boundary": ("block", "residual"),
    "hc_mix": ("normed",),
    "shared_gate": ("x",),
    "moe_finalize": ("expert_out", "shared_out"),
    "gdn_packed_decode": ("mixed_qkv", "state"),
}
GATES = ("partials", "shared_gate", "a", "b")
WEIGHTS = ("weight", "inject_weight", "norm_weight", "w_down", "w_up", "A_log", "dt_bias")


def _named(op: str, inputs: Inputs, names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    return ((name, inputs[name]) for name in names if inputs.get(name) is not None)


def _outliers(draw: Draw, op: str, inputs: Inputs) -> None:
    """One element in a hundred is +-1e4."""
    for _, x in _named(op, inputs, ACTIVATIONS[op]):
        flat = x.reshape(-1)  # a copy where x is strided
        at = draw.some(flat.numel(), 0.01)
        flat[at] = torch.where(flat[at].isnan(), NAN, draw.signs(len(at)) * 1e4).to(x.dtype)
        x.copy_(flat.view(x.shape))
        if op == "shared_gate":
            # Terms of magnitude 1: a sum of huge ones that cancel is not 2e-6 exact in any fp32 order.
            columns = at % x.shape[1]
            inputs["weight"][columns] = draw.uniform(len(at), scale=1e-4, dtype=x.dtype)
    if op == "gdn_packed_decode":
        # exp(x) overflows fp32, softplus(x) must not, and the decay is neither 0 nor 1
        inputs["A_log"].fill_(-5.0)
        inputs["a"][0].fill_(100.0)


def _fill(value: float, draw: Draw, op: str, inputs: Inputs) -> None:
    for _, x in _named(op, inputs, ACTIVATIONS[op]):
        x.copy_(torch.where(x.isnan(), x, value))


def _first_rows(op: str, inputs: Inputs) -> dict[str, int]:
    """Row of each tensor that the first row of the result reads."""
    rows = {}
    if op == "moe_finalize":
        slots = inputs["permuted_idx"].view(inputs["expert_weights"].shape)[0]
        rows["expert_out"] = int(slots[(slots >= 0) & (slots < inputs["expert_out"].shape[0])][0])
    if op == "gdn_packed_decode":
        rows["state"] = int(inputs["state_indices"][0])
    return rows


def _poison(values: tuple[float, ...], names: tuple[str, ...], draw: Draw, op: str, inputs: Inputs) -> None:
    """`values` at random places of what the first row of the result reads: of the activations and of
    `names`."""
    rows = _first_rows(op, inputs)
    for name, x in _named(op, inputs, ACTIVATIONS[op] + names):
        row = x[rows.get(name, 0)]
        flat = row.reshape(-1).clone()
        for value, at in zip(values, draw.permutation(flat.numel()).tolist(), strict=False):
            flat[at] = value
        row.copy_(flat.view(row.shape))


def _overflow(draw: Draw, op: str, inputs: Inputs) -> None:
    """Results beyond the largest finite value of their dtype, of both signs, and others just below it."""
    dtype = inputs[ACTIVATIONS[op][0]].dtype
    top = torch.finfo(dtype).max
    if op == "grouped_gemma_rmsnorm":
        inputs["weight"].copy_(draw.uniform(*inputs["weight"].shape, scale=top, dtype=torch.float64))
    elif op == "gdn_packed_decode":
        values = inputs["state"].shape[1] * inputs["state"].shape[2]
        keys = (inputs["mixed_qkv"].shape[1] - values) // 2
        q, k, v = inputs["mixed_qkv"].split([keys, keys, values], dim=1)
        q.copy_(k)  # so that o is near v * beta * scale
        v.copy_(torch.where(v.isnan(), NAN, draw.uniform(*v.shape) * top))
    else:
        for _, x in _named(op, inputs, ACTIVATIONS[op]):
            x.copy_(torch.where(x.isnan(), NAN, draw.uniform(*x.shape).double() * top))


def _order(draw: Draw, op: str, inputs: Inputs) -> None:
    """Huge terms that cancel: what is left depends on the order of the sum, which the contract fixes."""
    if op == "moe_finalize":
        rows, slots = inputs["expert_out"], inputs["permuted_idx"].view(inputs["expert_weights"].shape).long()
        inputs["expert_weights"].fill_(1.0)
        rows[slots[:, 0]] = draw.signs(rows.shape[1]).to(rows.dtype) * 2.0**24
        rows[slots[:, -1]] = -rows[slots[:, 0]]
    else:
        huge = draw.signs(inputs["partials"][:, 0].numel()).view(inputs["partials"][:, 0].shape) * 2.0**24
        inputs["partials"][:, 1], inputs["partials"][:, 5] = huge, -huge


KINDS: dict[str, Callable[[Draw, str, Inputs], None]] = {
    "random": lambda draw, op, inputs: None,
    "outliers": _outliers,
    "zeros": partial(_fill, 0.0),
    "negative_zeros": partial(_fill, -0.0),
    "nan": partial(_poison, (NAN,), GATES),
    "nan_weight": partial(_poison, (NAN,), WEIGHTS),
    "inf": partial(_poison, (float("inf"), float("-inf")), GATES),
    "overflow": _overflow,
    "order": _order,
}
